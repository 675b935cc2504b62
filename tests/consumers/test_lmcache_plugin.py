# SPDX-License-Identifier: Apache-2.0
"""LMCache's storage plugin: engines on two hosts, killed engines, full and lost pools, and everything that must be a miss."""

import gc
import logging

import kvbm_cxl
import pytest
from kvbm_cxl.vllm_integration import pool_access
from peers import MORTAL, damage, payload, until

pytest.importorskip("lmcache", reason="LMCache is not installed: `make setup-lmcache`")
from subject_lmcache_plugin import CHUNK_BYTES, VARIATIONS, Subject  # noqa: E402

NAMES = [f"chunk {number}" for number in range(40)]
HITS = [64] * len(NAMES)


@pytest.fixture(autouse=True)
def all_memory_is_given_back():
    """LMCache frees an object that is forgotten with a reference, and complains."""
    handler, complaints = logging.Handler(), []
    handler.emit = lambda record: "garbage collected" in record.getMessage() and complaints.append(record.getMessage())
    logger = logging.getLogger("lmcache.v1.memory_management")
    logger.addHandler(handler)
    yield
    gc.collect()
    logger.removeHandler(handler)
    assert not complaints


def test_another_host_loads_what_a_killed_engine_stored(pool, peer):
    first = peer("lmcache_plugin", pool, machine="a")
    assert first("store", NAMES) == [True] * 40
    second = peer("lmcache_plugin", pool, machine="b")
    assert second("found", NAMES + ["none"]) == 40
    first.kill()
    assert second("load", NAMES + ["none"]) == HITS + [0]
    # And the host of the killed one is warm again, by the asynchronous way too.
    again = peer("lmcache_plugin", pool, machine="a")
    assert again("load_async", NAMES + ["none"]) == [40, 40, HITS]
    assert again("load", NAMES) == HITS and again("status")["counts"]["load"] == {"hit": 80, "absent": 1}


def test_an_engine_killed_in_mid_store_leaves_whole_chunks_or_none(pool, peer):
    second = peer("lmcache_plugin", pool, machine="b", environment=MORTAL)
    assert second("found", ["x"]) == 0
    served = 0
    for round in range(3):
        names = [f"{round}/{name}" for name in NAMES * 3]
        first = peer("lmcache_plugin", pool, machine="a", environment=MORTAL)
        assert first("found", names[:1]) == 0
        first.send("begin_store", names)
        until(lambda: second("found", names[: 16 - 8 * round or 1]), "the first chunks of the store")
        first.kill()
        served += sum(map(bool, second("load", names)))
        until(lambda: all(second("store", names)) and all(second("load", names)), "a store behind the death")
    assert served >= 3


@pytest.mark.parametrize("variation", VARIATIONS.values(), ids=VARIATIONS)
def test_what_shapes_the_bytes_tells_chunks_apart(pool, make_subject, variation):
    subject, other = make_subject(pool), make_subject(pool, **variation)
    assert all(subject.store(NAMES[:4]))
    assert other.found(NAMES[:4]) == 0 and other.load(NAMES[:4]) == [0] * 4
    assert all(other.store(NAMES[:4]))
    assert other.load(NAMES[:4]) == [other.tokens] * 4 and subject.load(NAMES[:4]) == [64] * 4


def test_replicas_of_one_partition_meet(pool, make_subject):
    ours, same, other, shared = (make_subject(pool, options={"cxl.replica": name}) for name in ("A", "A", "B", ""))
    assert all(ours.store(NAMES[:4])) and same.load(NAMES[:4]) == [64] * 4
    assert other.found(NAMES[:4]) == shared.found(NAMES[:4]) == 0
    # What one partition clears, another one keeps.
    assert all(other.store(NAMES[:4]))
    ours.manager.clear(["cxl"])
    assert same.found(NAMES[:4]) == 0 and other.load(NAMES[:4]) == [64] * 4


def test_the_interface_as_storage_managers_use_it(subject):
    """Chunks that are there already, chunks that are not full, the caller that is told, and references that come back."""
    assert subject.put(NAMES[:3]) == [["stored"] * 3, NAMES[:3]]
    assert subject.put(NAMES[:4]) == [["exists"] * 3 + ["stored"], NAMES[:4]]
    assert subject.store(["part"], tokens=10) == [True] and subject.load(["part", *NAMES[:2]]) == [10, 64, 64]
    assert subject.manager.contains(subject.key("part")) == "cxl" and subject.manager.contains(subject.key("none")) is None
    assert subject.backend.get_blocking(subject.key("none")) is None
    one = subject.backend.get_blocking(subject.key(NAMES[0]))
    assert bytes(one.byte_array) == payload(NAMES[0], CHUNK_BYTES)
    one.ref_count_down()
    # What is found beyond a gap is of no use to the engine.
    assert subject.load_async([NAMES[0], "none", NAMES[1]]) == [1, 1, [64]]
    assert subject.status()["held"] == 0 and subject.used_bytes() == 0


def test_a_caller_that_fails_stops_nothing(subject, caplog):
    (one,) = [subject._memory(name, None) for name in NAMES[:1]]

    def told(key):
        raise RuntimeError("the caller's own")

    (task,) = subject.backend.batched_submit_put_task([subject.key(NAMES[0])], [one], on_complete_callback=told)
    assert task.result(120) == ["stored"]
    one.ref_count_down()
    assert all(subject.store(NAMES)) and subject.load(NAMES) == HITS and "the caller's own" in caplog.text


def test_what_is_no_chunk_is_not_stored(subject, make_subject, pool):
    """An object of another layout under a chunk's key, as encoders and compressors have them."""
    other = make_subject(pool, dtype="bfloat16", layers=4, tokens=32)
    key, one = subject.key("other"), other._memory("other", None)
    (task,) = subject.backend.batched_submit_put_task([key], [one])
    one.ref_count_down()
    assert task.result(120) == ["other_layout"] and subject.load(["other"]) == [0]


def test_pins_nest_and_hold(pool, subject, peer):
    first = peer("lmcache_plugin", pool, machine="a")
    assert all(first("store", NAMES[:3]))
    assert subject.lock([*NAMES[:2], "none", NAMES[2]]) == 2 and subject.lock(NAMES[:1]) == 1
    assert subject.status()["pinned"] == subject.status()["held"] == 2
    subject.unlock(NAMES[:2])
    assert subject.status()["held"] == 1
    assert first("remove", NAMES[:3]) == 2
    assert subject.found(NAMES[:3]) == 1 and subject.load(NAMES[:3]) == [64, 0, 0]
    assert subject.remove(NAMES[:1], False) == 0 and subject.remove(NAMES[:1]) == 0
    until(lambda: first("remove", NAMES[:1]) or subject.found(NAMES[:1]) == 0, "the chunk to go with its last pin")
    assert not subject.backend.unpin(subject.key(NAMES[0])) and not subject.backend.pin(subject.key(NAMES[0]))


def test_a_full_pool_skips_chunks(make_pool):
    subject = Subject(make_pool(size="16M", cells="64K:50%"))
    names = [f"many {number}" for number in range(400)]
    for number, name in enumerate(names):
        if not all(subject.store([name])):
            break
        assert subject.lock([name]) == 1
    assert 20 < number < 399 and subject.status()["counts"]["store"] == {"stored": number, "no_cell": 1}
    assert subject.load(names[: number + 1]) == [64] * number + [0]
    subject.unlock(names[:number])
    until(lambda: all(subject.store(["later"])), "room after the pins went")
    assert subject.load(["later"]) == [64]
    # A chunk that no cell holds is skipped as well.
    large = Subject(subject.backend._access.spec, layers=200)
    assert large.store(["large"]) == [False] and large.status()["counts"]["store"] == {"too_large": 1}
    large.close()
    subject.close()


def test_chunks_for_which_lmcache_has_no_memory_are_not_loaded(pool, make_subject):
    small = make_subject(pool, memory_gb=0.001)
    for name in NAMES:
        assert all(small.store([name]))
    # As if requests had the rest: a leading part is loaded, nothing waits for ever, and all memory comes back.
    loaded = small.load(NAMES)
    count = sum(map(bool, loaded))
    assert 5 < count < 40 and loaded == [64] * count + [0] * (40 - count)
    assert small.used_bytes() == 0 and small.load(NAMES[:4]) == [64] * 4


def test_a_damaged_chunk_is_a_miss(pool, subject):
    assert all(subject.store(NAMES[:3]))
    damage(pool, payload(NAMES[1], CHUNK_BYTES))
    assert subject.load(NAMES[:3]) == [64, 0, 64] and subject.status()["counts"]["load"] == {"hit": 2, "checksum": 1}
    assert all(subject.store(NAMES[:3])) and subject.load(NAMES[:3]) == [64] * 3 and subject.used_bytes() == 0


def test_a_lost_pool_is_a_cache_without_hits(pool, subject, monkeypatch):
    monkeypatch.setattr(pool_access, "_RETRY_LAST_S", 0.5)
    assert all(subject.store(NAMES[:5])) and subject.lock(NAMES[:1]) == 1
    kvbm_cxl.format_pool(pool, cells="64K:75%", evict_hosts=True)
    until(lambda: not all(subject.store(["x"])) or not subject.status()["is_healthy"], "the loss to be noticed")
    assert subject.found(NAMES[:5]) == 0 and subject.load(NAMES[:5]) == [0] * 5 and subject.load_async(NAMES[:5])[0] == 0
    subject.unlock(NAMES[:1])
    assert subject.remove(NAMES[:5]) == 0
    until(lambda: all(subject.store(NAMES[:5])), "the new pool")
    assert subject.load(NAMES[:5]) == [64] * 5 and subject.status()["is_healthy"] and subject.used_bytes() == 0


def test_a_pool_that_is_not_there_yet(pool, make_subject, monkeypatch, tmp_path):
    monkeypatch.setattr(pool_access, "_RETRY_LAST_S", 0.5)
    path = tmp_path / "later"
    subject = make_subject(str(path))
    assert subject.store(NAMES[:2]) == [False, False] and subject.load(NAMES[:2]) == [0, 0] and subject.found(NAMES[:2]) == 0
    kvbm_cxl.format_pool(f"{path},size=64M", cells="64K:75%")
    until(lambda: all(subject.store(NAMES[:2])), "the pool to be opened")
    assert subject.load(NAMES[:2]) == [64, 64]


@pytest.mark.parametrize("options", [{"cxl.threads": 0}, {"cxl.other": 1}, {"cxl.cache": {"other": 1}}], ids=str)
def test_options_that_are_wrong_leave_the_plugin_out(pool, options):
    """LMCache logs why, and goes on without it."""
    subject = Subject(pool, options=options)
    assert subject.backend is None and "LocalCPUBackend" in subject.manager.storage_backends
    subject.manager.close()


def test_layers_one_by_one_are_refused(pool, make_subject):
    subject = make_subject(pool)
    config, metadata = subject.config, subject.metadata
    config.use_layerwise = True
    from kvbm_cxl.lmcache import CxlStorageBackend

    with pytest.raises(ValueError, match="use_layerwise"):
        CxlStorageBackend("cpu", config, metadata)


def test_the_end_waits_for_stores_and_takes_no_more(pool, make_subject):
    subject = Subject(pool)
    subject.begin_store(NAMES)
    backend = subject.backend
    backend.close()
    backend.close()
    one = subject._memory("late", None)
    assert backend.batched_submit_put_task([subject.key("late")], [one]) is None and backend.batched_get_blocking([subject.key("x")] * 3)
    one.ref_count_down()
    assert subject.used_bytes() == 0
    subject.close()
    assert make_subject(pool).load(NAMES) == HITS


def test_chunks_from_the_pool_come_to_memory(pool, make_subject):
    """With LMCache's own cache in memory in front of the pool, as it is by default."""
    first, second = make_subject(pool), make_subject(pool, hot=True)
    assert all(first.store(NAMES))
    assert second.manager.batched_contains([second.key(name) for name in NAMES])[1].keys() == {"cxl"}
    assert second.load(NAMES) == HITS
    assert second.manager.batched_contains([second.key(name) for name in NAMES])[1].keys() == {"LocalCPUBackend"}
