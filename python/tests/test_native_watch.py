# SPDX-License-Identifier: Apache-2.0
"""A watch tells which blocks of a namespace came and went, of all hosts."""


import kvbm_cxl
import pools
import pytest
from pools import CELL_BYTES, chain, namespace, payload

NS, COMPANION = namespace(), namespace("companion")


def publish(cache, ns, *keys):
    for key in keys:
        assert cache.publish(ns, key, payload(key, 1000)) == "stored"


def looked(watch):
    changes = watch.look()
    return set(changes.added), set(changes.removed), set(changes.alone)


def test_blocks_of_other_processes_come_and_go(cache, spec):
    first, second, third = chain(3)
    watch = cache.watch(NS, 1000, companions=[COMPANION])
    with pools.opened(spec) as another, another.cache() as other:
        publish(other, NS, first, second)
        publish(cache, COMPANION, second, third)
        assert looked(watch) == ({second}, set(), set())
        assert looked(watch) == (set(), set(), {first}), "both are processes of one host"
        publish(cache, COMPANION, first)
        publish(cache, NS, third)
        assert looked(watch) == ({first, third}, set(), set())
        assert other.evict(NS, second)
        assert looked(watch) == (set(), {second}, set())
        assert looked(other.watch(NS, 1)) == ({first, third}, set(), set())
    assert repr(watch.look()) == "Changes(added=0, removed=0, alone=0)"


def test_blocks_of_another_host_come_and_go_with_it(spec, peer):
    """Of all sizes: stored, evicted at this host's request, gone while their host is being found dead, and taken over."""
    kvbm_cxl.format_pool(spec, cells=f"4K:20%,{CELL_BYTES}:50%", force=True)
    small, large = set(chain(4, 1)), set(chain(3, 2))
    with kvbm_cxl.Pool(spec, suspect_ms=3000) as pool, pool.cache() as cache:
        watch, one_size = cache.watch(NS), cache.watch(NS, 3000)
        other = peer("another")
        assert other("publish", "tiny", 1, 4, 3000) == ["stored"] * 4 and other("publish", "tiny", 2, 3, 30_000) == ["stored"] * 3
        assert other("publish", "of another", 3, 2, 3000) == ["stored"] * 2
        assert pool.slot != other("slot")
        assert looked(watch) == (small | large, set(), set()) and looked(one_size) == (small, set(), set())
        assert cache.evict_all(NS, chain(1, 1)) == [False], "a request to its owner"
        told = {"there": small | large}

        def sums_up(wanted):
            added, removed, _ = looked(watch)
            assert added.isdisjoint(told["there"]) and removed <= told["there"]
            told["there"] = (told["there"] | added) - removed
            return told["there"] == wanted

        left = (small | large) - set(chain(1, 1))
        pools.until(lambda: sums_up(left), "the eviction")
        other.kill()
        # None of them is served until the host is known to be dead, and all are again once this one has taken them over.
        pools.until(lambda: cache.usage().ready == 8, "the blocks of the dead host to be taken over")
        pools.until(lambda: sums_up(left), "the blocks to be there again")
        assert cache.has(NS, sorted(left)) == [True] * 6 and looked(one_size)[1] == set(chain(1, 1))


def test_what_is_too_long_or_closed_is_refused(cache):
    with pytest.raises(kvbm_cxl.InvalidError):
        cache.watch(NS, 1 << 32)
    assert cache.watch(NS, CELL_BYTES + 1).look().added == [], "no cell holds such blocks"
    watch = cache.watch(NS, 1)
    cache.close()
    with pytest.raises(kvbm_cxl.ClosedError):
        watch.look()
