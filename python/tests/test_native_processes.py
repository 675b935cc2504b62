# SPDX-License-Identifier: Apache-2.0
"""Two processes on one pool, of one host and of two: a publisher may be killed at any time, and no reader ever gets a wrong byte."""

import random
import shutil
import time

import kvbm_cxl
import numpy
import pools
import pytest
from pools import chain, namespace, opened, payload

NS = namespace()
# The emulator makes each process a host without coherence with others, so one host cannot be of two processes there.
HOSTS = [("native", None), ("native", "another"), ("emulated:seed=7,noise=4", "another")]


@pytest.fixture(params=HOSTS, ids=["native-one-host", "native-two-hosts", "emulated-two-hosts"])
def machine(request, monkeypatch):
    """Where the other process runs, and how memory behaves."""
    coherence, machine = request.param
    monkeypatch.setenv("CXL_COHERENCE", coherence)
    return machine


def test_what_a_killed_publisher_said_is_there(machine, pool, cache, peer):
    """Blocks are pulled from the pool, not from who published them."""
    publisher, keys = peer(machine), chain(60, 1)
    assert publisher("publish", "tiny", 1, 60, 5000) == ["stored"] * 60
    assert (pool.slot == publisher("slot")) == (machine is None)
    publisher.kill()
    target = numpy.zeros((60, 5000), numpy.uint8)
    assert cache.pull_blocks(NS, keys, kvbm_cxl.BlockLayout.of_tensors([target]), range(60)) == [None] * 60
    assert [row.tobytes() for row in target] == [payload(key, 5000) for key in keys]
    assert cache.metrics()["cxl_cache_pull_total"] == 60 and cache.metrics()["cxl_cache_publish_total"] == 0


@pytest.mark.parametrize("seed", range(2))
def test_killed_in_the_middle_of_publishing(machine, cache, peer, seed):
    publisher, chance = peer(machine), random.Random(seed)
    publisher.send("stream", "tiny", seed, 20_000)
    for _ in range(chance.randrange(2, 8)):
        said = publisher.answer()
    for _ in range(chance.randrange(20_000)):
        pass
    publisher.kill()
    said = max([said, *publisher.drain()])
    keys = chain(said + 64, seed)
    into, hits = bytearray(20_000), 0
    for place, key in enumerate(keys):
        if cache.pull(NS, key, into):
            assert bytes(into) == payload(key, 20_000)
            hits += 1
        else:
            # What the publisher did not come to say may be there or not.
            assert place >= said
    assert hits >= said


def test_pins_hold_against_another_host(machine, spec, cache, peer):
    """The owner fills the pool several times over; what is pinned elsewhere stays, the rest goes."""
    owner, [cells], keys = peer(machine), kvbm_cxl.pool_info(spec)["cells"], chain(40, 1)
    assert owner("publish", "tiny", 1, 40, 5000) == ["stored"] * 40
    with cache.pin_chain(NS, keys[:15]) as pins:
        assert len(pins) == 15
        assert set(owner("publish", "other", 2, 2 * cells["count"], 100)) == {"stored"}
        assert cache.has(NS, keys) == [True] * 15 + [False] * 25
        for key in keys[:15]:
            into = bytearray(5000)
            assert cache.pull(NS, key, into) and bytes(into) == payload(key, 5000)
    assert cache.pinned() == 0
    assert owner("right", "tiny", 1, 40, 5000) == 15


def test_blocks_go_both_ways(machine, cache, peer):
    other, keys = peer(machine), chain(30, 3)
    for key in keys[:15]:
        assert cache.publish(NS, key, payload(key, 3000)) == "stored"
    assert other("publish", "tiny", 3, 30, 3000) == ["exists"] * 15 + ["stored"] * 15
    assert other("right", "tiny", 3, 30, 3000) == 30
    assert cache.lookup_chain(NS, keys) == 30
    assert other("pin", "tiny", 3, 30) == 30
    assert cache.clear_all() == 0, "the other process has pinned all of them"
    assert other("release") == 0 and cache.clear_all() == 15


def test_blocks_of_another_process_are_evicted_by_name(machine, cache, peer):
    """Those that were asked for and are not pinned, of one namespace; a request can be lost, so the caller asks again."""
    other, keys = peer(machine), chain(6, 4)
    elsewhere = namespace("other")
    assert cache.publish_all(elsewhere, keys, [payload(key, 3000) for key in keys]) == ["stored"] * 6
    assert other("publish", "tiny", 4, 5, 3000) == ["stored"] * 5 and cache.publish(NS, keys[5], payload(keys[5], 3000)) == "stored"
    deadline, wanted = time.monotonic() + 240, [keys[1], keys[3], keys[5]]
    with cache.pin_chain(NS, keys[:2]):
        while cache.evict_all(NS, wanted) != [False, True, True]:
            assert time.monotonic() < deadline, "the owner evicts what it is asked to"
            time.sleep(0.02)
        assert cache.has(NS, keys) == [True, True, True, False, True, False] and cache.has(elsewhere, keys) == [True] * 6


def test_memory_is_found_by_its_name(machine, pool, peer):
    text = "a word that both of them know " * 40
    other = peer(machine)
    offset = other("store", "greeting", text)
    memory = pool.find("greeting")
    assert (memory.offset, memory.name, len(memory)) == (offset, "greeting", len(text))
    memory.flush()
    assert bytes(memory).decode() == text
    mine = pool.allocate(100, name="answer")
    memoryview(mine)[:5] = b"hello"
    mine.flush()
    assert other("load", "answer").startswith("hello")
    other.end()
    memory.flush()
    assert bytes(memory).decode() == text, "what has a name outlives the process that made it"
    for name in ("greeting", "answer"):
        pool.find(name).free()
        with pytest.raises(kvbm_cxl.NotFoundError):
            pool.find(name)


def test_counters_are_of_the_life_that_a_host_has_now(spec, peer, tmp_path, monkeypatch):
    """A machine that was started anew, and has no cache yet, tells of nothing: what it counted before is not shown as if it were now."""
    with opened(spec) as pool:
        first = peer("other")
        first("publish", "tiny", 0, 3, 1000)
        slot, incarnation = first("slot"), first("incarnation")
        sample = f'cxl_pool_host_published_blocks_total{{pool="{pool.uuid}",slot="{slot}"}} 3\n'
        deadline = time.monotonic() + 240
        while sample not in pool.prometheus():
            assert time.monotonic() < deadline, "a host tells of what it counted"
            time.sleep(0.02)
        first.kill()
        shutil.rmtree(tmp_path / "state-other")
        monkeypatch.setenv("CXL_MACHINE_ID", "other")
        monkeypatch.setenv("CXL_STATE_DIR", str(tmp_path / "state-other"))
        with opened(spec) as again:
            assert again.slot == slot and again.incarnation > incarnation
            assert sample not in pool.prometheus()


def test_unnamed_memory_is_given_back(spec):
    """More of it than the pool has, one after the other."""
    with opened(spec) as pool:
        for number in range(30):
            memory = pool.allocate(4 << 20)
            numpy.frombuffer(memory, numpy.uint8)[:] = number
        del memory
        held = []
        with pytest.raises(kvbm_cxl.FullError):
            while True:
                held.append(pool.allocate(4 << 20))
        assert held
        held.clear()
        assert len(pool.allocate(4 << 20)) == 4 << 20


def test_memory_outlives_its_closed_pool(spec):
    pool = opened(spec)
    memory = pool.allocate(4096)
    pool.close()
    with opened(spec) as other:
        assert other.slot == pools.opened(spec).slot
        memoryview(memory)[:] = b"\x5a" * 4096
        taken = [other.allocate(4096) for _ in range(100)]
        assert memory.offset not in {each.offset for each in taken}
    assert bytes(memory) == b"\x5a" * 4096
