# SPDX-License-Identifier: Apache-2.0
"""A watch tells which blocks of a namespace came and went, whoever published them."""

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


def test_what_is_too_long_or_closed_is_refused(cache):
    with pytest.raises(kvbm_cxl.InvalidError):
        cache.watch(NS, CELL_BYTES + 1)
    watch = cache.watch(NS, 1)
    cache.close()
    with pytest.raises(kvbm_cxl.ClosedError):
        watch.look()
