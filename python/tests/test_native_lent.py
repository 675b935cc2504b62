# SPDX-License-Identifier: Apache-2.0
"""Lent blocks from Python: published where they lie, right or a miss for every reader, and back when the process wants to write."""

import gc
import os
import threading
import time

import kvbm_cxl
import numpy
import pytest
from lending import BLOCK_BYTES, BLOCKS, fill, parts_at, region_of, version_of, written
from pools import chain, namespace, opened, payload

NS = namespace("lent")
KEYS = chain(BLOCKS)


def lend(region, keys, block_ids):
    return region.offer(NS, keys, block_ids).lend()


def pulled(cache, key):
    """The bytes of a block, or why it is a miss."""
    into = bytearray(BLOCK_BYTES)
    result = cache.pull(NS, key, into)
    return bytes(into) if result else result.reason


@pytest.fixture
def region(cache):
    region, blocks = region_of(cache)
    for block in range(BLOCKS):
        fill(blocks, block, payload(KEYS[block], BLOCK_BYTES))
    return region


def test_a_lent_block_is_pulled_from_where_it_lies_until_it_is_taken_back(coherence, cache, peer):
    other = peer("another")
    region, blocks = region_of(cache)
    assert (region.block_count, region.block_bytes, region.lent()) == (BLOCKS, BLOCK_BYTES, 0)
    for block in range(BLOCKS):
        fill(blocks, block, payload(KEYS[block], BLOCK_BYTES))
    outcomes = region.offer(NS, KEYS, range(BLOCKS), parents=[None, *KEYS[:-1]]).lend()
    assert outcomes == ["lent"] * BLOCKS and region.lent() == BLOCKS
    assert other("right", "lent", 0, BLOCKS, BLOCK_BYTES) == BLOCKS
    counted = cache.metrics()
    assert counted["cxl_cache_lent_total"] == BLOCKS and counted["cxl_cache_lent_bytes_total"] == BLOCKS * BLOCK_BYTES
    assert lend(region, KEYS[:2], [0, 1]) == ["exists"] * 2
    # Only those that were lent count.
    assert region.take_back([3, 5]) == 2 and region.take_back([3, 5, 5]) == 0 and region.lent() == BLOCKS - 2
    fill(blocks, 3, bytes(BLOCK_BYTES))
    assert other("right", "lent", 0, BLOCKS, BLOCK_BYTES) == BLOCKS - 2
    fill(blocks, 3, payload(KEYS[3], BLOCK_BYTES))
    deadline = time.monotonic() + 240
    while lend(region, [KEYS[3]], [3]) != ["lent"]:  # The stale reference may be pinned by the peer's last pull.
        assert time.monotonic() < deadline
    assert other("right", "lent", 0, BLOCKS, BLOCK_BYTES) == BLOCKS - 1


def test_stale_references_go_by_themselves(cache, region):
    """A block that is found and cannot be loaded costs its reader a load."""
    assert lend(region, KEYS[:2], [0, 1]) == ["lent"] * 2
    assert region.take_back([0]) == 1
    deadline = time.monotonic() + 240
    while cache.has(NS, KEYS[:2]) != [False, True]:
        assert time.monotonic() < deadline


def test_taking_back_wins(cache, region):
    offer = region.offer(NS, KEYS[:3], [0, 1, 2])
    assert region.take_back([1]) == 0, "it was promised, not lent"
    assert offer.lend() == ["lent", "taken_back", "lent"]
    assert not cache.has(NS, [KEYS[1]])[0] and region.lent() == 2
    with pytest.raises(kvbm_cxl.InvalidError, match="lent before"):
        offer.lend()
    # Taken back and promised anew: the older promise is over.
    first = region.offer(NS, [KEYS[4]], [4])
    region.take_back([4])
    second = region.offer(NS, [KEYS[5]], [4])
    assert first.lend() == ["taken_back"] and second.lend() == ["lent"]


def test_nothing_is_pulled_into_what_readers_were_promised(cache, region):
    for key in KEYS[:3]:
        cache.publish(NS, key, payload(key, BLOCK_BYTES))
    assert region.pull_blocks(NS, [KEYS[0], KEYS[9], KEYS[1]], [4, 5, 6]) == [None, "absent", None]
    assert lend(region, [KEYS[7]], [7]) == ["lent"]
    offer = region.offer(NS, [KEYS[8]], [8])
    for keys, blocks in (([KEYS[0]], [7]), (KEYS[:2], [6, 8]), (KEYS[:2], [9, 9])):
        with pytest.raises(kvbm_cxl.InvalidError, match="take it back"):
            region.pull_blocks(NS, keys, blocks)
    assert pulled(cache, KEYS[7]) == payload(KEYS[7], BLOCK_BYTES) and offer.lend() == ["lent"]
    assert region.take_back([7]) == 1 and region.pull_blocks(NS, KEYS[:1], [7]) == [None]
    # What was pulled is lent on.
    assert lend(region, [KEYS[11]], [4]) == ["lent"] and pulled(cache, KEYS[11]) == payload(KEYS[0], BLOCK_BYTES)


def test_copies_stay_when_the_block_is_written(cache, region):
    assert region.publish_blocks(NS, KEYS[:2], [0, 1], parents=[None, KEYS[0]]) == ["stored"] * 2
    fill(numpy.frombuffer(region.memory, numpy.uint8), 0, bytes(BLOCK_BYTES))
    assert pulled(cache, KEYS[0]) == payload(KEYS[0], BLOCK_BYTES) and region.lent() == 0
    assert region.publish_blocks(NS, KEYS[:1], [0]) == ["exists"]


def test_what_cannot_be_meant_is_refused(cache, region):
    layout = kvbm_cxl.BlockLayout([(region.memory.address, 100, 100)], 10)
    refused = {
        "twice": lambda: region.set_layout(kvbm_cxl.BlockLayout(parts_at(region.memory.address), BLOCKS)),
        "a block that is not there": lambda: region.offer(NS, KEYS[:1], [BLOCKS]),
        "a negative block": lambda: region.take_back([-1]),
        "too few blocks": lambda: region.offer(NS, KEYS[:2], [1]),
        "too few to pull": lambda: region.pull_blocks(NS, KEYS[:2], [1]),
        "too few to copy": lambda: region.publish_blocks(NS, KEYS[:2], [1]),
        "one twice": lambda: region.offer(NS, KEYS[:2], [1, 1]),
        "no blocks": lambda: cache.lent_region(4096, 0),
        "no bytes": lambda: cache.lent_region(0, 4),
        "no parts": lambda: cache.lent_region(4096, 4, parts=0),
        "more than the pool": lambda: cache.lent_region(1 << 40, 4),
        "to pull by address": lambda: cache.pull_blocks(NS, KEYS[:1], layout, [1]),
        "freed while blocks can be lent": lambda: (gc.collect(), region.memory.free()),
    }
    for name, call in refused.items():
        with pytest.raises(kvbm_cxl.InvalidError):
            call()
            pytest.fail(name)
    assert region.lent() == 0 and lend(region, KEYS[:1], [1]) == ["lent"]
    with pytest.raises(kvbm_cxl.InvalidError, match="lent already"):
        region.offer(NS, KEYS[1:2], [1])
    fresh = cache.lent_region(BLOCKS * BLOCK_BYTES, BLOCKS, parts=1)
    for bad in (
        kvbm_cxl.BlockLayout(parts_at(fresh.memory.address), BLOCKS),
        kvbm_cxl.BlockLayout([(fresh.memory.address, 1000, 1000)], BLOCKS - 1),
        kvbm_cxl.BlockLayout([(fresh.memory.address - 64, 1000, 1000)], BLOCKS),
        kvbm_cxl.BlockLayout([(fresh.memory.address + fresh.memory.len_bytes - 1000, 1000, 1000)], BLOCKS),
        kvbm_cxl.BlockLayout.of_tensors([numpy.zeros((BLOCKS, 100), numpy.uint8)]),
    ):
        with pytest.raises(kvbm_cxl.InvalidError):
            fresh.set_layout(bad)
    with pytest.raises(kvbm_cxl.InvalidError, match="not told yet"):
        fresh.offer(NS, KEYS[:1], [0])


def test_a_closed_cache_has_taken_everything_back(spec, pool):
    cache = pool.cache()
    region, blocks = region_of(cache)
    fill(blocks, 0, payload(KEYS[0], BLOCK_BYTES))
    offer = region.offer(NS, KEYS[1:2], [1])
    assert lend(region, KEYS[:1], [0]) == ["lent"]
    cache.close()
    assert region.take_back(range(BLOCKS)) == 0 == region.lent()
    fill(blocks, 0, bytes(BLOCK_BYTES))
    for call in (lambda: region.offer(NS, KEYS[:1], [0]), offer.lend, lambda: region.pull_blocks(NS, KEYS[:1], [0])):
        with pytest.raises(kvbm_cxl.ClosedError):
            call()
    with opened(spec) as second, second.cache() as cache:
        assert pulled(cache, KEYS[0]) in ("taken_back", "absent")
    blocks[:] = 7
    pool.close()
    assert blocks.min() == 7, "the memory is this process's still"


def test_memory_goes_back_when_it_is_unused(cache, pool):
    """As long as the program has a view of it, no other process gets it, whatever became of the region."""
    most = 0
    for size in range(1 << 20, 48 << 20, 1 << 20):
        try:
            cache.lent_region(size, 4)
            most = size
        except kvbm_cxl.FullError:
            break
    assert most > 4 << 20
    region = cache.lent_region(most, 4)
    view = memoryview(region.memory)
    region.set_layout(kvbm_cxl.BlockLayout([(region.memory.address, BLOCK_BYTES, BLOCK_BYTES)], 4))
    assert region.offer(NS, KEYS[:1], [0]).lend() == ["lent"]
    del region
    assert pulled(cache, KEYS[0]) in ("taken_back", "absent")
    view[:] = bytes(most)
    with pytest.raises(kvbm_cxl.FullError):
        cache.lent_region(most, 4)
    view.release()
    again = cache.lent_region(most, 4)
    memory = again.memory
    del again
    memory.free()
    cache.lent_region(most, 4)


def test_a_fork_may_not_touch_it(region):
    offer = region.offer(NS, KEYS[:1], [0])
    child = os.fork()
    if child == 0:
        failures = 0
        for call in (lambda: region.take_back([0]), lambda: region.lent(), offer.lend, lambda: region.offer(NS, KEYS[:1], [1])):
            try:
                call()
            except kvbm_cxl.ForkedError:
                failures += 1
        os._exit(failures)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert offer.lend() == ["lent"]


@pytest.mark.parametrize("checksums", (True, False))
def test_blocks_that_are_written_all_the_time_are_right_or_a_miss(coherence, pool, peer, checksums):
    """The peer writes a version of a block, lends it, takes it back, and so on; a reader gets all of one version, or nothing."""
    other = peer("another")
    other.send("rewrite", checksums)
    hits, seen, misses, deadline = 0, set(), 0, time.monotonic() + 240
    with pool.cache(checksums=checksums) as cache:
        while hits < 60 or len(seen) < 10 or misses < 3:
            assert time.monotonic() < deadline, (hits, seen, misses)
            found = pulled(cache, written(hits % BLOCKS))
            if isinstance(found, bytes):
                hits += 1
                seen.add(version_of(hits - 1, found))
            else:
                misses += 1
                assert found != "checksum"
    other.kill()


def test_threads_share_a_region(cache, region):
    """Each lends, takes back and pulls its own blocks."""
    failures = []

    def work(number):
        try:
            mine = range(number * 3, number * 3 + 3)
            keys = [KEYS[block] for block in mine]
            for _ in range(60):
                assert set(lend(region, keys, mine)) <= {"lent", "busy", "exists"}
                for key in keys:
                    assert pulled(cache, key) in (payload(key, BLOCK_BYTES), "absent", "taken_back", "changed")
                region.take_back(mine)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures and region.lent() == 0


def test_what_a_killed_process_lent_is_served_until_its_memory_is_reaped(cache, peer):
    """A later process of its machine gives the memory back, and until then every hit is right."""
    other = peer()
    assert other("lend", "lent", 0) == ["lent"] * BLOCKS
    other.kill()
    assert [pulled(cache, key) for key in KEYS] == [payload(key, BLOCK_BYTES) for key in KEYS]
    region, _ = region_of(cache)
    deadline = time.monotonic() + 240
    while any(pulled(cache, key) not in ("taken_back", "absent") for key in KEYS):
        assert time.monotonic() < deadline, "its memory was not given back"
        time.sleep(0.05)
    assert lend(region, KEYS[:1], [0]) in (["lent"], ["exists"], ["busy"])
