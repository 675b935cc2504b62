# SPDX-License-Identifier: Apache-2.0
"""The second level: blocks that were evicted come back with the right bytes or not at all, and nothing waits for a store."""

import contextlib
import shutil
import threading
import time
from types import SimpleNamespace

import kvbm_cxl
import pytest
from kvbm_cxl.l2 import DamagedObject, Demoter, Level2, LocalStore, open_store
from kvbm_cxl.l2 import level as level_module
from kvbm_cxl.l2.objects import HEADER_BYTES, BlockName, payload_of
from pools import Peer, chain, namespace, opened, payload
from second_level import LEN, NS, PATIENCE_S, data_of, level_of, name_of, pool_of_one_chunk, publish_slowly, pulled, stored, until


@pytest.fixture
def spec(tmp_path_factory, monkeypatch):
    """A pool of one chunk: 112 blocks."""
    return pool_of_one_chunk(tmp_path_factory.mktemp("pool"), monkeypatch)


@contextlib.contextmanager
def pool_that_is_another_hosts(folder, monkeypatch):
    """The cache of a host in a pool of 336 cells, in chunks of 7, all of which another host has."""
    monkeypatch.setenv("CXL_STATE_DIR", str(folder / "state-test"))
    monkeypatch.setenv("CXL_MACHINE_ID", "test")
    spec = f"{folder}/pool-of-three,size=48M"
    kvbm_cxl.format_pool(spec, cells="64K:21M")
    peer = Peer(spec, folder, machine="two")
    try:
        peer.send("publish", "other", 7, 400, LEN)
        assert peer.answer(PATIENCE_S).count("stored") == 400
        with opened(spec) as pool, pool.cache() as cache:
            yield cache
    finally:
        peer.end()


class Stuck(LocalStore):
    """A folder whose file system does not answer while it is stuck."""

    def __init__(self, folder):
        super().__init__(folder)
        self.answers = threading.Event()
        self.answers.set()

    def read(self, path):
        self.answers.wait()
        return super().read(path)

    def write(self, path, parts):
        self.answers.wait()
        super().write(path, parts)


def test_an_object_is_its_block_or_damaged():
    key, other = chain(2)
    data = data_of(other, key)
    parent, found = payload_of(data, name_of(other))
    assert (parent, bytes(found)) == (key, payload(other, LEN))
    assert payload_of(data_of(key), name_of(key))[0] is None

    def damage(changed, name=name_of(other)):
        with pytest.raises(DamagedObject) as caught:
            payload_of(changed, name)
        return caught.value.damage

    for cut in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, len(data) - 1):
        assert damage(data[:cut]) == "truncated"
    assert damage(data + b"\0") == "truncated"
    assert damage(data, name_of(key)) == "foreign"
    assert damage(data, BlockName(bytes(namespace("other")), other)) == "foreign"
    for place in range(HEADER_BYTES):
        assert damage(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]) == "header"
    for place in (HEADER_BYTES, HEADER_BYTES + LEN // 2, len(data) - 1):
        assert damage(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]) == "checksum"
    assert BlockName.of_path(name_of(key).path) == name_of(key)
    assert BlockName.of_path("a/b.kv") is None and BlockName.of_path(name_of(key).path.replace("/", "/ff", 1)) is None


def test_evicted_blocks_come_back(cache, tmp_path):
    keys = chain(300)
    level = level_of(LocalStore(str(tmp_path)))
    demoter = Demoter(lambda work: work(cache), level, period_s=0.005)
    publish_slowly(cache, level, keys)
    gone = [key for key in keys if not cache.has(NS, [key])[0]]
    assert len(gone) > 150 and pulled(cache, gone[0]) is None
    # No block was lost, and every one that went is the next of its chain again.
    assert level.leading([bytes(NS)], gone) == len(gone)
    used = cache.metrics()["cxl_cache_pins_total"]
    promotion = level.promote(lambda work: work(cache), [bytes(NS)], keys[:40])
    assert promotion.wait(PATIENCE_S) and promotion.blocks == 40 and cache.lookup_chain(NS, keys[:40]) == 40
    assert all(pulled(cache, key) == payload(key, LEN) for key in keys[:40])
    # Copies took no pins: those of the pulls are all there are.
    assert cache.metrics()["cxl_cache_pins_total"] - used == 40
    counts = level.counts()
    assert counts["promoted"] == 40 and counts["promoted_bytes"] == 40 * LEN and counts["demoted"] >= len(gone)
    demoter.close()
    level.close()
    assert level.promote(lambda work: work(cache), [bytes(NS)], keys) is None and not level.demote(name_of(keys[0]), None, bytearray(1))


def test_nothing_is_copied_while_cells_are_free(cache, tmp_path):
    level = level_of(LocalStore(str(tmp_path)))
    demoter = Demoter(lambda work: work(cache), level)
    (key,) = chain(1)
    cache.publish(NS, key, payload(key, LEN))
    assert cache.usage().free > 0
    demoter.round()
    assert "demoted" not in level.counts() and level.counts()["queued_bytes"] == 0
    demoter.close()
    level.close()


def test_a_restart_finds_what_was_kept(cache, tmp_path):
    keys = chain(20)
    store = stored(tmp_path, keys)
    (tmp_path / "not_ours").write_bytes(b"x" * 500)
    level = level_of(store)
    assert level.counts()["objects"] == 20 and level.counts()["object_bytes"] == 20 * (LEN + HEADER_BYTES)
    promotion = level.promote(lambda work: work(cache), [bytes(NS)], keys)
    assert promotion.wait(PATIENCE_S) and promotion.blocks == 20
    assert all(pulled(cache, key) == payload(key, LEN) for key in keys)
    # What another host writes is found at the next look, and what it deletes is gone.
    more = chain(3, seed=1)
    stored(tmp_path, more)
    until("it is found", lambda: level.leading([bytes(NS)], more) == 3)
    store.delete(name_of(more[1]).path)
    until("it is gone", lambda: level.leading([bytes(NS)], more) == 1)
    level.close()


@pytest.mark.parametrize("how", ["flipped", "truncated", "emptied", "swapped", "gone"])
def test_a_damaged_object_ends_the_chain(cache, tmp_path, how):
    keys = chain(20)
    level = level_of(stored(tmp_path, keys), refresh_s=60)
    path = tmp_path / name_of(keys[11]).path
    data = path.read_bytes()
    flipped = data[:9000] + bytes([data[9000] ^ 4]) + data[9001:]
    new = {"flipped": flipped, "truncated": data[:-1], "emptied": b"", "swapped": data_of(keys[12])}
    path.unlink() if how == "gone" else path.write_bytes(new[how])
    promotion = level.promote(lambda work: work(cache), [bytes(NS)], keys)
    assert promotion.wait(PATIENCE_S) and promotion.blocks == 11
    reason = {"flipped": "checksum", "swapped": "foreign", "gone": "absent"}.get(how, "truncated")
    assert level.counts()[f"missed_{reason}"] == 1 and not path.exists()
    assert cache.has(NS, [keys[11]]) == [False] and level.leading([bytes(NS)], keys) == 11
    assert all(pulled(cache, key) in (None, payload(key, LEN)) for key in keys)
    # It is kept again the next time.
    assert level.demote(name_of(keys[11]), keys[10], bytearray(payload(keys[11], LEN)))
    until("it is written", lambda: level.leading([bytes(NS)], keys) == 20)
    assert level.promote(lambda work: work(cache), [bytes(NS)], keys).wait(PATIENCE_S)
    assert pulled(cache, keys[11]) == payload(keys[11], LEN)
    level.close()


def test_a_store_that_does_not_answer_keeps_nothing_waiting(cache, tmp_path):
    keys = chain(250)
    store = Stuck(str(tmp_path / "l2"))
    level = level_of(store, slow_s=0.2, queue_bytes=10 * LEN, threads=2)
    old = chain(5, seed=2)
    stored(tmp_path / "l2", old)
    until("they are found", lambda: level.leading([bytes(NS)], old) == 5)
    store.answers.clear()
    promotion = level.promote(lambda work: work(cache), [bytes(NS)], old)
    demoter = Demoter(lambda work: work(cache), level, period_s=0.005)
    for key in keys:
        assert cache.publish(NS, key, payload(key, LEN)) == "stored"
    # The queue has its bound, lookups find nothing there, and what comes is dropped.
    until("blocks are dropped", lambda: level.counts().get("dropped_unfit", 0) + level.counts().get("dropped_full", 0) > 10)
    assert level.counts()["queued_bytes"] <= 10 * LEN
    until("it counts as slow", lambda: level.leading([bytes(NS)], old) == 0)
    assert level.promote(lambda work: work(cache), [bytes(NS)], old) is None and not promotion.has_ended
    store.answers.set()
    # It answers again: what was late is there, and it is used again after its pause.
    assert promotion.wait(PATIENCE_S)
    until("it is used again", lambda: level.leading([bytes(NS)], old) == 5)
    demoter.close()
    level.close()


def test_a_block_on_its_way_is_not_taken_twice_and_the_queue_has_its_bound(tmp_path):
    keys = chain(4)
    store = Stuck(str(tmp_path))
    level = level_of(store, threads=1, queue_bytes=2 * LEN, refresh_s=60, slow_s=PATIENCE_S)
    store.answers.clear()
    first, second = (bytearray(payload(key, LEN)) for key in keys[:2])
    assert level.demote(name_of(keys[0]), None, first) and not level.demote(name_of(keys[0]), None, first)
    assert not level.wants(name_of(keys[0]), LEN) and level.wants(name_of(keys[1]), LEN)
    assert level.demote(name_of(keys[1]), None, second) and not level.wants(name_of(keys[1]), LEN)
    assert not level.demote(name_of(keys[2]), None, bytearray(1)) and level.counts()["dropped_full"] == 1
    store.answers.set()
    until("both are written", lambda: level.counts().get("demoted", 0) == 2)
    until("the queue is empty", lambda: level.counts()["queued_bytes"] == 0)
    assert not level.wants(name_of(keys[0]), LEN), "the store has it"
    assert level.counts()["dropped_full"] == 1 and level.wants(name_of(keys[2]), 2 * LEN)
    # One that could not be written is wanted again.
    store.write = lambda *_: (_ for _ in ()).throw(OSError("no room"))
    assert level.demote(name_of(keys[3]), None, bytearray(payload(keys[3], LEN)))
    until("it fails", lambda: level.counts().get("errors", 0) == 1 and level.counts()["queued_bytes"] == 0)
    assert level.wants(name_of(keys[3]), LEN)
    level.close()


def test_chains_that_wait_do_not_call_a_store_that_fails(cache, tmp_path):
    """Three calls fail, and the chains behind them are given up without one."""
    calls, may_fail = [], threading.Event()

    class Failing(LocalStore):
        def read(self, path):
            calls.append(path)
            may_fail.wait(PATIENCE_S)
            raise OSError("no answer")

    chains = [chain(2, seed=seed) for seed in range(6)]
    for keys in chains:
        stored(tmp_path, keys)
    level = level_of(Failing(str(tmp_path)), threads=1, refresh_s=60, slow_s=PATIENCE_S)
    promotions = [level.promote(lambda work: work(cache), [bytes(NS)], keys) for keys in chains]
    may_fail.set()
    assert all(promotion.wait(PATIENCE_S) and promotion.blocks == 0 for promotion in promotions)
    assert len(calls) == 3 and level.counts()["errors"] == 3 and level.counts()["missed_unfit"] == 3
    assert not level.demote(name_of(chain(1, seed=9)[0]), None, bytearray(LEN)) and level.counts()["dropped_unfit"] == 1
    # What failed is not looked for again before the store is listed.
    until("the pause is over", lambda: level.leading([bytes(NS)], chains[5]) == 2)
    assert level.leading([bytes(NS)], chains[0]) == 0
    level.close()


def test_closing_leaves_a_call_that_does_not_return(cache, tmp_path):
    keys = chain(9)
    store = Stuck(str(tmp_path))
    level = level_of(store, threads=1)
    store.answers.clear()
    for key in keys:
        assert level.demote(name_of(key), None, bytearray(payload(key, LEN)))
    began = time.monotonic()
    level.close()
    assert time.monotonic() - began < 30 and level.counts()["dropped_closed"] >= 8
    store.answers.set()


def test_a_store_that_is_gone_is_a_miss(cache, tmp_path, caplog):
    keys = chain(20)
    folder = tmp_path / "l2"
    level = level_of(stored(folder, keys), refresh_s=60)
    shutil.rmtree(folder)
    promotion = level.promote(lambda work: work(cache), [bytes(NS)], keys)
    assert promotion.wait(PATIENCE_S) and promotion.blocks == 0 and level.counts()["missed_absent"] == 1
    for key in chain(6, seed=5):
        level.demote(name_of(key), None, bytearray(payload(key, LEN)))
    until("writing failed", lambda: level.counts().get("errors", 0) >= 3)
    # Nothing is written where the file system was, and it is let alone.
    assert not folder.exists() and level.leading([bytes(NS)], keys[1:]) == 0
    assert "the file system of the second level is gone" in caplog.text
    assert cache.publish(NS, keys[0], payload(keys[0], LEN)) == "stored"
    level.close()


def test_a_host_without_cells_waits_for_some(tmp_path, monkeypatch):
    """All chunks are another host's when the chain comes back, and one of them is given away meanwhile."""
    monkeypatch.setattr(level_module, "_ROOM_S", PATIENCE_S)
    with pool_that_is_another_hosts(tmp_path, monkeypatch) as cache:
        keys = chain(5)
        level = level_of(stored(tmp_path / "l2", keys))
        promotion = level.promote(lambda work: work(cache), [bytes(NS)], keys)
        assert promotion.wait(PATIENCE_S) and promotion.blocks == 5, level.counts()
        assert [pulled(cache, key) for key in keys] == [payload(key, LEN) for key in keys]
        assert level.counts()["promoted"] == 5 and "dropped_no_room" not in level.counts()
        level.close()


def test_where_there_is_no_room_for_long_one_chain_alone_waits(tmp_path):
    tries = []

    def publish_all(ns, keys, blocks, parents):
        tries.append(len(keys))
        return ["no_cell"] * len(keys)

    full = SimpleNamespace(has=lambda ns, keys: [False] * len(keys), publish_all=publish_all, lookup_chain=lambda ns, keys: 0)
    keys = chain(5)
    level = level_of(stored(tmp_path / "l2", keys))
    for chains in (1, 2, 3):
        before = len(tries)
        promotion = level.promote(lambda work: work(full), [bytes(NS)], keys)
        assert promotion.wait(PATIENCE_S) and promotion.blocks == 0
        assert level.counts()["dropped_no_room"] == 5 * chains
        assert len(tries) - before > 1 if chains == 1 else len(tries) - before == 1
    level.close()


def test_the_store_has_its_bound(cache, tmp_path):
    keys = chain(30)
    level = level_of(LocalStore(str(tmp_path)), max_bytes=10 * (LEN + HEADER_BYTES), threads=1)
    for key in keys[:10]:
        level.demote(name_of(key), None, bytearray(payload(key, LEN)))
    until("ten are there", lambda: level.counts()["objects"] == 10)
    assert level.promote(lambda work: work(cache), [bytes(NS)], keys[:2]).wait(PATIENCE_S)
    for key in keys[10:15]:
        level.demote(name_of(key), None, bytearray(payload(key, LEN)))
    until("fifteen were written", lambda: level.counts()["demoted"] == 15)
    # Those that were promoted are younger than the others.
    there = [key for key in keys if (tmp_path / name_of(key).path).exists()]
    assert there == [*keys[:2], *keys[7:15]] and level.counts()["trimmed"] == 5
    assert not level.demote(name_of(keys[20]), None, bytearray(11 * LEN)) and level.counts()["dropped_large"] == 1
    level.close()


def test_numbers_that_cannot_be_are_refused(tmp_path):
    for wrong in ({"max_bytes": 0}, {"max_bytes": 1, "threads": 0}, {"max_bytes": 1, "queue_bytes": -1}):
        with pytest.raises(kvbm_cxl.InvalidError, match="second level"):
            Level2(LocalStore(str(tmp_path)), **wrong)


@pytest.mark.parametrize("after_s", [0.05, 0.3, 1.0, 2.0])
def test_a_kill_while_blocks_are_demoted_leaves_whole_ones(spec, tmp_path, after_s):
    folder = tmp_path / "l2"
    peer = Peer(spec, tmp_path, machine="one")
    peer.send("demote_stream", "tiny", 3, LEN, str(folder))
    until("it writes", lambda: any(folder.glob("*/*/*.kv")))
    time.sleep(after_s)
    peer.kill()
    objects = list(folder.glob("*/*/*.kv"))
    keys = {name_of(key).path: key for key in chain(4096, 3)}
    for path in objects:
        key = keys[path.relative_to(folder).as_posix()]
        assert bytes(payload_of(path.read_bytes(), name_of(key))[1]) == payload(key, LEN)
    level = level_of(LocalStore(str(folder)))
    assert level.counts()["objects"] == len(objects) > 0
    level.close()


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.05, 0.2])
def test_a_kill_while_blocks_are_promoted_leaves_right_ones(spec, cache, tmp_path, after_s):
    folder, keys = tmp_path / "l2", chain(60, 4)
    stored(folder, keys)
    peer = Peer(spec, tmp_path, machine="two")
    peer.send("promote", "tiny", 4, 60, str(folder))
    time.sleep(after_s)
    peer.kill()
    assert all(pulled(cache, key) in (None, payload(key, LEN)) for key in keys)
    # Who lives brings the rest, but for what the dead one was writing.
    level = level_of(LocalStore(str(folder)))
    level.promote(lambda work: work(cache), [bytes(NS)], keys).wait(PATIENCE_S)
    found = [pulled(cache, key) for key in keys]
    assert all(block in (None, payload(key, LEN)) for key, block in zip(keys, found))
    level.close()


def test_a_url_is_for_fsspec(cache, tmp_path):
    try:
        import fsspec
    except ImportError:
        with pytest.raises(ValueError, match=r"kvbm-cxl\[l2\]"):
            open_store("memory://l2")
        return
    keys = chain(12)
    for url in ("memory://kvbm-cxl-l2", f"file://{tmp_path}/new/l2"):
        store = open_store(url)
        level = level_of(store)
        for place, key in enumerate(keys):
            level.demote(name_of(key), keys[place - 1] if place else None, bytearray(payload(key, LEN)))
        until("they are written", lambda: level.leading([bytes(NS)], keys) == 12)
        level.close()
        again = level_of(open_store(url))
        assert again.counts()["objects"] == 12
        for key in keys:
            cache.evict(NS, key)
        promotion = again.promote(lambda work: work(cache), [bytes(NS)], keys)
        assert promotion.wait(PATIENCE_S) and promotion.blocks == 12
        assert all(pulled(cache, key) == payload(key, LEN) for key in keys)
        store.delete(name_of(keys[3]).path)
        store.delete(name_of(keys[3]).path)
        until("it is gone", lambda: again.leading([bytes(NS)], keys) == 3)
        again.close()
