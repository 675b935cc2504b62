# SPDX-License-Identifier: Apache-2.0
"""LMCache's L2 adapter: two servers on two hosts, killed servers, full and lost pools, and everything that must be a miss."""

import hashlib

import kvbm_cxl
import pytest
from kvbm_cxl.vllm_integration import pool_access
from peers import MORTAL, until

pytest.importorskip("lmcache", reason="LMCache is not installed: `make setup-lmcache`")
from subject_lmcache import BLOCK_BYTES, VARIATIONS, Subject  # noqa: E402

NAMES = [f"chunk {number}" for number in range(40)]


def test_another_host_loads_what_a_killed_server_stored(pool, peer):
    first = peer("lmcache", pool, machine="a")
    assert first("store", NAMES) == [True, 40 * BLOCK_BYTES]
    second = peer("lmcache", pool, machine="b")
    assert second("found", NAMES) == [True] * 40
    first.kill()
    assert second("load", NAMES) == [True] * 40
    # And the host of the killed one is warm again.
    again = peer("lmcache", pool, machine="a")
    assert again("lock", NAMES + ["none"]) == [True] * 40 + [False]
    assert again("load", NAMES + ["none"]) == [True] * 40 + [False]


def test_a_server_killed_in_mid_store_leaves_whole_objects_or_none(pool, peer):
    second = peer("lmcache", pool, machine="b", environment=MORTAL)
    assert second("found", ["x"]) == [False]
    served = 0
    for round in range(4):
        names = [f"{round}/{name}" for name in NAMES * 3]
        first = peer("lmcache", pool, machine="a", environment=MORTAL)
        assert first("found", names[:1]) == [False]
        first.send("begin_store", names)
        # Sooner in each round.
        until(lambda: second("found", [names[24 - 8 * round]]) == [True], "the first blocks of the store")
        first.kill()
        hits = second("load", names)
        served += sum(hits)
        # What the killed one had locked is free once it is found dead, and nothing is in the way of a new store.
        until(lambda: second("store", names)[0] and second("load", names) == [True] * len(names), "a store behind the death")
    assert served >= 4


@pytest.mark.parametrize("variation", VARIATIONS.values(), ids=VARIATIONS)
def test_what_shapes_the_bytes_tells_objects_apart(pool, make_subject, variation):
    subject, other = make_subject(pool), make_subject(pool, **variation)
    assert subject.store(NAMES[:4])[0]
    assert other.found(NAMES[:4]) == other.load(NAMES[:4]) == [False] * 4
    assert other.store(NAMES[:4]) == [True, 4 * other.len_bytes()]
    assert other.load(NAMES[:4]) == subject.load(NAMES[:4]) == [True] * 4


def test_what_a_serializer_made_is_found(pool):
    """Of any length, and by a server that was just started."""
    first = Subject(pool, flat=20_000)
    assert first.store(NAMES[:4]) == [True, 4 * 19_000] and first.load(NAMES[:4]) == [True] * 4
    first.close()
    second = Subject(pool, flat=20_000)
    assert second.found(NAMES[:4]) == [True] * 4 and second.load(NAMES[:4]) == [True] * 4
    # A server without the serializer finds them once at most: then it knows which kind of objects it has.
    plain = Subject(pool)
    plain.store(["x"])
    assert plain.found(NAMES[:4]) == plain.load(NAMES[:4]) == [False] * 4
    plain.close()
    second.close()


def test_evictions_of_the_pool_are_told(make_pool):
    subject = Subject(make_pool(size="16M", cells="64K:50%"))
    names = [f"many {number}" for number in range(400)]
    for first in range(0, 400, 20):
        assert subject.store(names[first : first + 20]) == [True, 20 * BLOCK_BYTES], "older ones make room"
    found = subject.found(names)
    assert 20 <= sum(found) < 400 and found[-1]

    def is_told():
        status = subject.status()
        return status["stored_object_count"] == sum(found) and status["usage"] == sum(found) * BLOCK_BYTES

    until(is_told, "the evictions to be told")
    assert subject.status()["told"]["stored"] == 400 and subject.status()["told"]["deleted"] == 400 - sum(found)
    assert subject.listed(7) == [hashlib.sha256(name.encode()).hexdigest() for name, is_there in zip(names, found) if is_there]
    subject.close()


def test_a_pool_full_of_locked_objects_refuses(make_pool):
    subject = Subject(make_pool(size="16M", cells="64K:50%"))
    names = [f"many {number}" for number in range(400)]
    stored = 0
    for name in names:
        ok, count = subject.store([name])
        assert ok, "an object without room is skipped, and is no failure"
        if not count:
            break
        stored += 1
        assert subject.lock([name]) == [True]
    assert 20 < stored < 400 and subject.status()["counts"]["store"]["no_cell"] == 1
    assert subject.load(names[:stored]) == [True] * stored and subject.found([names[stored]]) == [False]
    subject.unlock(names[:stored])
    until(lambda: subject.store(["later"])[1], "room after the locks went")
    assert subject.load(["later"]) == [True]
    # An object that no cell holds is skipped as well.
    large = Subject(subject.adapter._access.spec, tokens=4096)
    assert large.store(["large"]) == [True, 0] and large.status()["counts"]["store"] == {"too_large": 1}
    large.close()
    subject.close()


def test_locks_nest_and_end_with_the_server(pool, peer, subject):
    first = peer("lmcache", pool, machine="a")
    assert first("store", NAMES[:2])[0] and subject.lock(NAMES[:2]) == [True] * 2 and subject.lock(NAMES[:1]) == [True]
    assert subject.adapter._blocks.pin_count() == 2
    subject.unlock(NAMES[:2])
    until(lambda: subject.adapter._blocks.pin_count() == 1, "one lock of the two to go")
    first("delete", NAMES[:2])
    until(lambda: subject.found(NAMES[:2]) == [True, False], "the unlocked object to go")
    subject.unlock(NAMES[:1])
    subject.unlock(NAMES[:1])
    until(lambda: first("delete", NAMES[:1]) is None and subject.found(NAMES[:1]) == [False], "the object to go with its last lock")
    locking = peer("lmcache", pool, machine="b")
    assert first("store", NAMES[:1])[0] and locking("lock", NAMES[:1]) == [True]
    locking.kill()


def test_deletion_is_told_and_frees(subject):
    assert subject.store(NAMES)[0] and subject.status()["usage"] == 40 * BLOCK_BYTES
    subject.delete(NAMES[:10] + ["none"])
    assert subject.found(NAMES) == [False] * 10 + [True] * 30
    assert subject.status()["told"]["deleted"] == 10 and subject.status()["usage"] == 30 * BLOCK_BYTES


def test_a_lost_pool_is_a_cache_without_hits(pool, subject, monkeypatch):
    monkeypatch.setattr(pool_access, "_RETRY_LAST_S", 0.5)
    assert subject.store(NAMES[:5])[0] and subject.lock(NAMES[:1]) == [True]
    kvbm_cxl.format_pool(pool, cells="64K:75%", evict_hosts=True)
    until(lambda: not subject.store(["x"])[0] or not subject.status()["is_healthy"], "the loss to be noticed")
    assert subject.found(NAMES[:5]) == subject.load(NAMES[:5]) == [False] * 5
    subject.unlock(NAMES[:1])
    until(lambda: subject.status()["usage"] == 0 and subject.status()["stored_object_count"] == 0, "what was lost to be told")
    until(lambda: subject.store(NAMES[:5]) == [True, 5 * BLOCK_BYTES], "the new pool")
    assert subject.load(NAMES[:5]) == [True] * 5 and subject.status()["is_healthy"]

