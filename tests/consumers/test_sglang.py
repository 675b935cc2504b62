# SPDX-License-Identifier: Apache-2.0
"""The storage backend under SGLang's own factory, host pools and failure injector: two hosts, kills, full and lost pools, hybrid pools.

No engine of SGLang runs here: it needs a GPU. What it does with the answers is not tested.
"""

from pathlib import Path
from types import SimpleNamespace

import kvbm_cxl
import pytest
import sglang_modules
from kvbm_cxl.consumers.names import key_of
from kvbm_cxl.options import ConfigError
from kvbm_cxl.vllm_integration import pool_access
from peers import MORTAL, damage, fsck, payload, until

if not sglang_modules.is_there():
    pytest.skip("SGLang's modules are not installed: `make setup-sglang`", allow_module_level=True)
pytest.importorskip("torch", reason="torch is not installed: `make setup-serve`")
from subject_sglang import PAGE_BYTES, PAGE_TOKENS, PAGES, POLICIES, VARIATIONS, Subject, host_pool  # noqa: E402

NAMES = [f"page {number}" for number in range(16)]


def test_another_host_loads_what_a_killed_engine_stored(pool, peer):
    first = peer("sglang", pool, machine="a")
    assert first("store", NAMES) == [True] * 16
    second = peer("sglang", pool, machine="b")
    assert second("found", NAMES + ["none"]) == 16 and second("found", ["none"] + NAMES) == 0
    first.kill()
    assert second("load", NAMES + ["none"]) == [True] * 16 + [False]
    again = peer("sglang", pool, machine="a")
    assert again("load", NAMES) == [True] * 16 and again("store", NAMES) == [True] * 16
    assert again("status")["counts"]["store"] == {"exists": 16}


def test_an_engine_killed_in_mid_store_leaves_whole_pages_or_none(pool, peer):
    second = peer("sglang", pool, machine="b", environment=MORTAL)
    served = 0
    for round in range(3):
        names = [f"{round}/{number}" for number in range(PAGES)]
        assert second("found", names) == 0
        first = peer("sglang", pool, machine="a", environment=MORTAL)
        assert first("found", names) == 0
        first.send("store", names)
        until(lambda: second("found", names) > 8 * round, "the first pages of the store")
        first.kill()
        served += sum(second("load", names))
        until(lambda: all(second("store", names)), "a store behind the death")
        assert second("load", names) == [True] * PAGES
    assert served >= 3
    second.kill()
    assert fsck(pool) | {"notes": 0} == {"errors": 0, "warnings": 0, "notes": 0}


@pytest.mark.parametrize("variation", VARIATIONS.values(), ids=VARIATIONS)
def test_what_shapes_the_bytes_tells_pages_apart(pool, make_subject, variation):
    subject, other = make_subject(pool), make_subject(pool, **variation)
    assert subject.store(NAMES[:4]) == [True] * 4
    assert other.found(NAMES[:4]) == 0 and other.load(NAMES[:4]) == [False] * 4
    assert other.store(NAMES[:4]) == other.load(NAMES[:4]) == subject.load(NAMES[:4]) == [True] * 4


def test_every_layout_of_a_page_has_a_name_of_its_own(pool, make_subject):
    made = [make_subject(pool, **variation) for variation in [{}, *VARIATIONS.values()]]
    assert len({one.storage._pools["kv"].namespace for one in made}) == len(made)


def test_a_shard_of_decode_contexts_is_shared_by_its_replicas_alone(pool, make_subject):
    """SGLang divides the tokens of a page over decode contexts for models whose KV cache is the same on all ranks."""
    told = {"is_mla_model": True, "tp_size": 4, "logical_page_size": 4 * PAGE_TOKENS}
    shards = [(0, 1, 0), (0, 2, 0), (1, 2, 1), (2, 4, 2), (3, 4, 3)]
    for number, (rank, size, shard) in enumerate(shards):
        one = make_subject(pool, **told, tp_rank=rank, dcp_size=size, dcp_rank=shard)
        assert one.found(NAMES[:4]) == 0 and one.load(NAMES[:4]) == [False] * 4
        assert one.store(NAMES[:4]) == one.load(NAMES[:4]) == [True] * 4, number
    replica = make_subject(pool, **told, tp_rank=3, dcp_size=2, dcp_rank=1)
    assert replica.found(NAMES[:4]) == 4 and replica.load(NAMES[:4]) == [True] * 4


def test_ranks_with_the_same_bytes_share_them(pool, make_subject):
    """Of models whose KV cache is the same on all ranks; not what is sharded beside it."""
    beside = ("mamba", "draft", "indexer")
    first, second = (make_subject(pool, is_mla_model=True, tp_rank=rank, tp_size=2, sidecars=beside) for rank in (0, 1))
    assert first.store(NAMES) == [True] * 16 and second.load(NAMES) == [True] * 16
    for pool_name in beside:
        assert first.store_beside(pool_name, NAMES) == first.load_beside(pool_name, NAMES) == [True] * 16
    assert second.load_beside("indexer", NAMES) == [True] * 16
    assert second.load_beside("mamba", NAMES) == second.load_beside("draft", NAMES) == [False] * 16
    # An engine of more ranks, too.
    third = make_subject(pool, is_mla_model=True, tp_rank=3, tp_size=4)
    assert third.load(NAMES) == [True] * 16


def test_pools_beside_each_other_say_where_a_prefix_may_end(pool, make_subject):
    subject = make_subject(pool, sidecars=("indexer", "mamba"))
    assert subject.prefix(NAMES, indexer="all") == [0, {}, []]
    subject.store(NAMES[:8])
    subject.store_beside("indexer", NAMES[:6])
    subject.store_beside("mamba", [NAMES[1], NAMES[2], NAMES[4], NAMES[5], NAMES[7]])
    assert subject.prefix(NAMES) == [8, {"kv": 8}, list(range(1, 9))]
    assert subject.prefix(NAMES, indexer="all") == [6, {"kv": 8, "indexer": 6}, list(range(1, 7))]
    assert subject.prefix(NAMES, mamba="trailing 1") == [8, {"kv": 8, "mamba": 8}, [2, 3, 5, 6, 8]]
    assert subject.prefix(NAMES, mamba="trailing 2") == [6, {"kv": 8, "mamba": 6}, [3, 6]]
    assert subject.prefix(NAMES, indexer="all", mamba="trailing 1") == [6, {"kv": 8, "indexer": 6, "mamba": 8}, [2, 3, 5, 6]]
    # What holds back nothing is told nothing of.
    assert subject.prefix(NAMES, mamba="groups") == [8, {"kv": 8}, list(range(1, 9))]
    assert subject.load_beside("indexer", NAMES[:8]) == [True] * 6 + [False] * 2
    assert subject.load_beside("mamba", NAMES[:3]) == [False, True, True] and "groups" in POLICIES


def test_a_pool_that_only_counts_is_where_the_others_are(pool, make_subject):
    subject = make_subject(pool, sidecars=("indexer",))
    subject.storage.register_mem_pool_host(SimpleNamespace(kv_buffer=None, page_size=16, dtype=None, layout="page_first"))
    subject.store_beside("indexer", NAMES[:5])
    assert subject.prefix(NAMES, indexer="all") == [5, {"kv": 16, "indexer": 5}, [1, 2, 3, 4, 5]]
    indices = subject._indices(4)
    assert subject.storage.batch_set_v1(NAMES[:4], indices) == subject.storage.batch_get_v1(NAMES[:4], indices) == [True] * 4


def test_sglangs_failure_injector_around_it(pool, make_subject, monkeypatch):
    """Calls that fail at random: what is said to be there is right, or is not there."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.002")
    subject = make_subject(pool, sidecars=("indexer",))
    assert "FailureInjector" in type(subject.storage).__name__
    stored = loaded = 0
    for round in range(60):
        names = [f"{round}/{number}" for number in range(4)]
        ok = subject.store(names)
        subject.store_beside("indexer", names)
        pages, reaches, ends = subject.prefix(names, indexer="all")
        assert pages == max(ends or [0]) and set(reaches.values()) <= {4}
        hits = subject.load(names)
        subject.load_beside("indexer", names)
        assert not all(hits) or all(ok) or not any(ok)
        stored, loaded = stored + all(ok), loaded + all(hits)
    assert 10 < loaded < stored < 60


def test_pages_by_way_of_tensors(pool, make_subject):
    """As SGLang does without "interface_v1"."""
    subject, other = make_subject(pool, interface_v1=0), make_subject(pool)
    host, keys = subject.host, [subject._key(name) for name in NAMES[:4]]
    for page, name in enumerate(NAMES[:4]):
        subject._fill(host, page, payload(name, PAGE_BYTES))
    data = [host.get_data_page(page * subject.page_tokens) for page in range(4)]
    assert subject.found(NAMES[:4]) == 0 and subject.storage.batch_set(keys, data) and subject.found(NAMES[:5]) == 4
    targets = [host.get_dummy_flat_data_page() for _ in range(5)]
    loaded = subject.storage.batch_get([*keys, subject._key("none")], targets)
    assert [one is None for one in loaded] == [False] * 4 + [True]
    for page, (name, one) in enumerate(zip(NAMES, loaded[:4]), 8):
        host.set_from_flat_data_page(page * subject.page_tokens, one)
        assert subject._data(host, page) == payload(name, PAGE_BYTES)
    assert subject.storage.exists(keys[0]) and not subject.storage.exists("none")
    assert other.found(NAMES[:4]) == 0, "they lie in another order"
    assert subject.storage.clear() and subject.found(NAMES[:4]) == 0


def test_damage_is_a_miss_and_goes(pool, make_subject):
    subject = make_subject(pool, layout="layer_first")
    assert subject.store(NAMES[:4]) == [True] * 4
    piece = memoryview(subject.storage._pools["kv"].pages(["x"], subject._indices(1, 2))[0][1]).cast("B")
    damage(pool, bytes(piece))
    assert subject.found(NAMES[:4]) == 4 and subject.load(NAMES[:4]) == [True, True, False, True]
    assert subject.found(NAMES[:4]) == 2 and subject.status()["counts"]["load"]["checksum"] == 1


def test_indices_that_are_not_those_of_the_keys_are_refused(subject):
    keys = [subject._key(name) for name in NAMES[:4]]
    assert subject.storage.batch_set_v1(keys, subject._indices(3)) == [False] * 4
    assert subject.storage.batch_get_v1(keys, subject._indices(5)) == [False] * 4
    assert subject.storage.batch_set_v1([], subject._indices(0)) == []


def test_a_full_pool_evicts_and_a_pinned_one_refuses(make_pool, make_subject):
    subject = make_subject(make_pool(size="16M", cells="8K:50%"))
    pages, last = [[f"{first}/{number}" for number in range(PAGES)] for first in range(60)], None
    for names in pages:
        assert subject.store(names) == [True] * PAGES, "older ones make room"
        last = names
    assert subject.load(last) == [True] * PAGES and subject.found(pages[0]) == 0
    blocks, pool = subject.storage._blocks, subject.storage._pools["kv"]
    pins, refused = [], False
    for first in range(100):
        names = [f"pinned {first}/{number}" for number in range(PAGES)]
        refused |= not all(subject.store(names))
        pins += blocks.pin(pool.namespace, [key_of(subject._key(name)) for name in names])
    assert refused and subject.status()["counts"]["store"]["no_cell"] > 0
    for pin in filter(None, pins):
        pin.release()
    until(lambda: subject.store(["later"]) == [True], "room after the pins went")


def test_clear_takes_this_kind_of_pages_alone(pool, make_subject):
    subject, other = make_subject(pool), make_subject(pool, model_name="other")
    assert all(subject.store(NAMES)) and all(other.store(NAMES))
    assert subject.storage.clear() and subject.found(NAMES) == 0 and other.found(NAMES) == 16


def test_an_engine_goes_on_without_its_pool(make_pool, make_subject, monkeypatch):
    monkeypatch.setattr(pool_access, "_RETRY_LAST_S", 0.5)
    path = make_pool()
    Path(path).unlink()
    subject = make_subject(path)
    assert subject.store(NAMES) == subject.load(NAMES) == [False] * 16 and subject.found(NAMES) == 0
    assert not subject.status()["is_healthy"] and not subject.storage.clear()
    kvbm_cxl.format_pool(f"{path},size=64M", cells="64K:75%")
    until(lambda: all(subject.store(NAMES)), "the pool to be opened")
    assert subject.load(NAMES) == [True] * 16 and subject.status()["is_healthy"]
    # Formatted anew under it.
    kvbm_cxl.format_pool(path, cells="64K:75%", evict_hosts=True)
    names = iter(f"after {number}" for number in range(10**6))
    until(lambda: not subject.store([next(names)])[0] or not subject.status()["is_healthy"], "the loss to be noticed")
    assert subject.load(NAMES) == [False] * 16
    until(lambda: all(subject.store(NAMES)), "the new pool")
    assert subject.load(NAMES) == [True] * 16


def test_options_and_layouts_are_checked(pool, make_subject):
    with pytest.raises(ConfigError, match="no option 'pol'; it has cache, checksums, namespace, pool$"):
        make_subject(pool, options={"pol": 1})
    with pytest.raises(ConfigError, match="CXL_POOL"):
        make_subject("")
    subject, strange = make_subject(pool), host_pool()

    def refuses(indices):
        raise ValueError("requires page_first layout")

    strange.get_page_buffer_meta = refuses
    with pytest.raises(ConfigError, match="--hicache-mem-layout"):
        subject.storage.register_mem_host_pool_v2(strange, "mamba")
