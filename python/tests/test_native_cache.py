# SPDX-License-Identifier: Apache-2.0
"""Blocks are published, found, pulled and evicted; every byte of every block is compared, and what is in doubt is a miss."""

import ctypes
import os
import time
import uuid
from pathlib import Path

import kvbm_cxl
import numpy
import pools
import pytest
from pools import CELL_BYTES, chain, flip, namespace, payload

NS = namespace()


def published(cache, keys, len_bytes=5000, ns=NS):
    for key in keys:
        assert cache.publish(ns, key, payload(key, len_bytes)) == "stored"


def pulled(cache, key, len_bytes=5000, ns=NS):
    into = bytearray(len_bytes)
    result = cache.pull(ns, key, into)
    assert result and result.hit and result.reason is None and result.len_bytes == len_bytes
    return bytes(into)


def arrays(count, parts=3, part_bytes=1501):
    """Memory of a paged KV cache: parts with a block in each row."""
    return [numpy.zeros((count, part_bytes), numpy.uint8) for _ in range(parts)]


def fill(places, ids, keys):
    """Puts the bytes of each block where they belong."""
    for place, key in zip(ids, keys, strict=True):
        data = payload(key, sum(part.shape[1] for part in places))
        for part in places:
            part[place], data = numpy.frombuffer(data[: part.shape[1]], numpy.uint8), data[part.shape[1] :]


def block(places, place):
    return b"".join(part[place].tobytes() for part in places)


@pytest.mark.usefixtures("coherence")
def test_blocks_come_back_as_they_were(cache):
    keys = chain(40)
    sizes = [1, 63, 64, 65, 4096, 5000, CELL_BYTES - 1, CELL_BYTES]
    for number, key in enumerate(keys):
        assert cache.publish(NS, key, payload(key, sizes[number % 8]), parent=keys[number - 1] if number else None) == "stored"
    for number, key in enumerate(keys):
        assert pulled(cache, key, sizes[number % 8]) == payload(key, sizes[number % 8])
    assert cache.publish(NS, keys[3], b"another") == "exists"
    assert pulled(cache, keys[3], 65) == payload(keys[3], 65)


def test_a_block_has_one_namespace(cache):
    [key] = chain(1)
    others = [namespace("other"), namespace(tp_rank=1, tp_size=2), namespace(tenant_salt=b"x"), namespace(adapters=["lora"])]
    others.append(namespace(extra={"a": "b"}))
    assert len({NS, *others, namespace()}) == 6
    published(cache, [key])
    for ns in others:
        result = cache.pull(ns, key, bytearray(5000))
        assert not result and result.reason == "absent" and cache.lookup(ns, key) is None
    assert kvbm_cxl.Namespace.from_bytes(bytes(NS)) == NS and str(NS) == bytes(NS).hex()


def test_pieces_are_gathered_and_scattered(cache):
    [key] = chain(1)
    data = payload(key, 9000)
    assert cache.publish(NS, key, [data[:1], bytearray(data[1:4000]), memoryview(data)[4000:], b""]) == "stored"
    first, second = bytearray(4500), numpy.zeros(4500, numpy.uint8)
    assert cache.pull(NS, key, (first, second)) and bytes(first) + second.tobytes() == data
    room = bytearray(b"\xee" * 9100)
    assert cache.pull(NS, key, room).len_bytes == 9000
    assert bytes(room) == data + b"\xee" * 100, "what lies behind the block stays as it is"
    with pytest.raises(kvbm_cxl.InvalidError, match="8999 bytes, the block more"):
        cache.pull(NS, key, [bytearray(4500), bytearray(4499)])


@pytest.mark.usefixtures("coherence")
def test_many_blocks_at_once(cache):
    """More than a batch, in another order than they lie in, into other places than they came from."""
    keys, ids = chain(150), [(number * 7) % 160 for number in range(150)]
    source, target = arrays(160), arrays(200)
    fill(source, ids, keys)
    layout, events = kvbm_cxl.BlockLayout.of_tensors(source), cache.subscribe()
    assert (layout.block_bytes, len(layout), layout.device) == (4503, 160, "cpu")
    assert cache.publish_blocks(NS, keys, layout, ids, parents=[None, *keys[:-1]]) == ["stored"] * 150
    assert [(event.key, event.parent) for event in events.poll()] == list(zip(keys, [None, *keys[:-1]], strict=True))
    assert cache.publish_blocks(NS, keys[:3], layout, ids[:3]) == ["exists"] * 3
    absent = chain(10, seed=1)
    wanted = [key for pair in zip(keys[:10], absent, strict=True) for key in pair] + keys[10:]
    into = list(range(len(wanted) - 1, -1, -1))
    answers = cache.pull_blocks(NS, wanted, kvbm_cxl.BlockLayout.of_tensors(target), into)
    assert answers == [None, "absent"] * 10 + [None] * 140
    for key, place, answer in zip(wanted, into, answers, strict=True):
        if answer is None:
            assert block(target, place) == payload(key, 4503)
    assert not any(block(target, place).strip(b"\0") for place in range(160, 200)), "other blocks stay as they are"
    counted = cache.metrics()
    assert (counted["cxl_cache_pull_total"], counted["cxl_cache_misses_total"]["absent"]) == (150, 10)
    assert (counted["cxl_cache_publish_total"], counted["cxl_cache_publish_bytes_total"]) == (150, 150 * 4503)


def test_layouts_by_address(cache):
    """Two layers that lie between each other in one allocation."""
    keys, memory = chain(8), bytearray(8 * 1000)
    start = numpy.frombuffer(memory, numpy.uint8).ctypes.data
    layout = kvbm_cxl.BlockLayout([(start + 600, 1000, 300), (start, 1000, 500)], 8, owner=memory)
    assert layout.block_bytes == 800 and layout.owner is memory
    for place, key in enumerate(keys):
        data = payload(key, 800)
        memory[place * 1000 + 600 : place * 1000 + 900], memory[place * 1000 : place * 1000 + 500] = data[:300], data[300:]
    assert cache.publish_blocks(NS, keys, layout, range(8)) == ["stored"] * 8
    assert [pulled(cache, key, 800) for key in keys] == [payload(key, 800) for key in keys]
    # Through a view with strides, backwards.
    memory[:] = bytes(len(memory))
    assert cache.pull_blocks(NS, keys, layout, range(7, -1, -1)) == [None] * 8
    assert memory[7600:7900] + memory[7000:7500] == payload(keys[0], 800)


def test_a_block_of_another_length_is_a_miss(cache):
    keys = chain(3)
    published(cache, keys[:1], 4503)
    published(cache, keys[1:2], 4502)
    published(cache, keys[2:], 4504)
    target = arrays(3)
    assert cache.pull_blocks(NS, keys, kvbm_cxl.BlockLayout.of_tensors(target), range(3)) == [None, "length", "length"]
    assert cache.metrics()["cxl_cache_misses_total"]["length"] == 2


def test_lookups(cache):
    keys = chain(10)
    published(cache, keys[:4] + keys[6:])
    assert cache.lookup_chain(NS, keys) == 4 and cache.lookup_chain(NS, []) == 0
    assert cache.has(NS, keys) == [True] * 4 + [False] * 2 + [True] * 4
    info = cache.lookup(NS, keys[0])
    assert info.len_bytes == 5000 and info.owner == 0 and info == cache.lookup(NS, keys[0]) and cache.lookup(NS, keys[4]) is None
    assert cache.lookup_chain(NS, iter(keys)) == 4, "any iterable"


def test_a_flipped_bit_is_a_miss(cache, tmp_path):
    keys = chain(3)
    source = arrays(3)
    fill(source, range(3), keys)
    assert cache.publish_blocks(NS, keys, kvbm_cxl.BlockLayout.of_tensors(source), range(3)) == ["stored"] * 3
    flip(tmp_path / "pool", payload(keys[1], 4503))
    result = cache.pull(NS, keys[1], bytearray(4503))
    assert not result and result.reason == "checksum"
    target = arrays(3)
    assert cache.pull_blocks(NS, keys, kvbm_cxl.BlockLayout.of_tensors(target), range(3)) == [None, "checksum", None]
    assert [block(target, place) for place in (0, 2)] == [payload(keys[0], 4503), payload(keys[2], 4503)]
    assert cache.metrics()["cxl_cache_misses_total"]["checksum"] == 2


def test_blocks_with_and_without_checksum_in_one_batch(pool, tmp_path):
    keys = chain(6)
    with pool.cache(checksums=False) as cache:
        published(cache, keys[::2], 4503)
    with pool.cache(checksums=True) as cache:
        published(cache, keys[1::2], 4503)
        target = arrays(6)
        layout = kvbm_cxl.BlockLayout.of_tensors(target)
        assert cache.pull_blocks(NS, keys, layout, range(6)) == [None] * 6
        assert [block(target, place) for place in range(6)] == [payload(key, 4503) for key in keys]
        flip(tmp_path / "pool", payload(keys[3], 4503))
        assert cache.pull_blocks(NS, keys, layout, range(6)) == [None, None, None, "checksum", None, None]


def test_a_full_pool_evicts_what_is_not_pinned(cache):
    [info] = kvbm_cxl.pool_info(path_of_pool())["cells"]
    assert info["cell_bytes"] == CELL_BYTES
    held, others = chain(20), chain(info["count"], seed=1)
    published(cache, held)
    events = cache.subscribe(capacity=4 * info["count"])
    with cache.pin_chain(NS, held) as pins:
        assert len(pins) == cache.pinned() == 20
        for key in others:
            assert cache.publish(NS, key, payload(key, 5000)) == "stored"
        assert cache.lookup_chain(NS, held) == 20
        assert [pulled(cache, key) for key in held] == [payload(key, 5000) for key in held]
    assert cache.pinned() == 0 == len(pins)
    first = told = [event for event in events.poll() if event.kind == "evicted"]
    missing = {key for key, is_there in zip(others, cache.has(NS, others), strict=True) if not is_there}
    # The background evictor goes on, and tells of a block after it took it out.
    deadline = time.monotonic() + 180
    while not missing <= {event.key for event in told} and time.monotonic() < deadline:
        told = told + [event for event in events.poll(100) if event.kind == "evicted"]
    gone = {event.key for event in told}
    assert len(gone) >= 20 and missing <= gone <= set(others)
    assert {event.key for event in first} <= missing, "what was told of is gone"
    assert cache.metrics()["cxl_cache_evictions_total"]["capacity"] >= len(told)


def path_of_pool():
    """The pool that the environment of the test made."""
    return str(Path(os.environ["CXL_STATE_DIR"]).parent / "pool")


def test_a_pool_full_of_pins_refuses(cache):
    [info] = kvbm_cxl.pool_info(path_of_pool())["cells"]
    keys, more = chain(info["count"]), chain(3, seed=1)
    source = numpy.zeros((len(keys), 100), numpy.uint8)
    fill([source], range(len(keys)), keys)
    layout = kvbm_cxl.BlockLayout.of_tensors([source])
    assert set(cache.publish_blocks(NS, keys, layout, range(len(keys)))) == {"stored"}
    pins = cache.pin_chain(NS, keys)
    assert len(pins) == len(keys)
    with pytest.raises(kvbm_cxl.FullError, match="no cell is free") as caught:
        cache.publish(NS, more[0], b"x" * 100)
    assert caught.value.kind == "no_cell"
    assert cache.publish_blocks(NS, [keys[0], *more], layout, range(4)) == ["exists", "no_cell", "no_cell", "no_cell"]
    pins.release()
    assert cache.publish_blocks(NS, more, layout, range(3)) == ["stored"] * 3


def test_quotas(pool):
    keys = chain(4)
    with pool.cache(quotas={NS: 2 * CELL_BYTES}) as cache:
        published(cache, keys[:2])
        with cache.pin_chain(NS, keys[:2]), pytest.raises(kvbm_cxl.FullError) as caught:
            cache.publish(NS, keys[2], b"x")
        assert caught.value.kind == "over_quota"
        published(cache, keys[2:])
        assert cache.has(NS, keys).count(True) == 2, "it took the cells of its own older blocks"
        published(cache, keys, ns=namespace("other"))


def test_a_quota_of_each_namespace(pool):
    keys = chain(5)
    with pool.cache(quotas=3 * CELL_BYTES) as cache:
        for ns in (NS, namespace("other")):
            published(cache, keys, ns=ns)
            assert cache.has(ns, keys).count(True) == 3, "it took the cells of its own older blocks"
        assert cache.has(NS, keys).count(True) == 3
    for wrong in ("1G", -1, 1.5, {b"name": 1}, {"name": 1}, [1]):
        with pytest.raises((TypeError, OverflowError)):
            pool.cache(quotas=wrong)


def test_evict_and_clear(cache):
    keys, other = chain(5), namespace("other")
    published(cache, keys)
    published(cache, keys[:2], ns=other)
    with cache.pin_chain(NS, keys[:1]):
        assert cache.evict(NS, keys[1]) is True and cache.evict(NS, keys[0]) is False
    assert cache.has(NS, keys) == [True, False, True, True, True]
    assert (cache.clear(NS), cache.has(NS, keys), cache.has(other, keys[:2])) == (4, [False] * 5, [True, True])
    assert cache.clear_all() == 2 and cache.usage().ready == 0
    usage = cache.usage()
    assert usage.free == usage.owned > 0 and usage.quarantined == 0


def test_many_blocks_from_and_to_anywhere(cache):
    """Of any lengths, in pieces, in memory of every kind, ctypes arrays included, which name no strides."""
    keys = chain(80)
    data = [payload(key, 1 + 701 * number) for number, key in enumerate(keys)]
    arrays = [(ctypes.c_ubyte * len(block)).from_buffer_copy(block) for block in data]
    pieces = [[array, b""] if number % 2 else [block[:9], memoryview(block)[9:]] for number, (array, block) in enumerate(zip(arrays, data))]
    assert cache.publish_all(NS, keys, pieces, parents=[None, *keys[:-1]]) == ["stored"] * 80
    assert cache.publish_all(NS, keys[:2], data[:2]) == ["exists"] * 2
    into = [(ctypes.c_ubyte * (len(block) + number % 3))() for number, block in enumerate(data)]
    pulled = cache.pull_all(NS, [*keys[:-1], chain(1, seed=1)[0]], into)
    assert [(found.hit, found.len_bytes) for found in pulled[:-1]] == [(True, len(block)) for block in data[:-1]]
    assert all(bytes(array)[: len(block)] == block for array, block in zip(into[:-1], data[:-1]))
    assert (pulled[-1].hit, pulled[-1].reason) == (False, "absent")
    # A block that does not fit is a miss, and the others come all the same.
    short, long = bytearray(len(data[5]) - 1), bytearray(len(data[6]))
    assert [found.reason for found in cache.pull_all(NS, keys[5:7], [short, long])] == ["length", None] and long == data[6]
    assert cache.publish_all(NS, [], []) == cache.pull_all(NS, [], []) == []


def test_a_layout_of_memory_without_strides(cache):
    """Blocks in an array of ctypes, whose dimensions say how far apart they lie."""
    keys, kind = chain(6), ((ctypes.c_uint32 * 50) * 4) * 8
    array, into = kind(), kind()
    data = [payload(key, 800) for key in keys]
    for place, block in enumerate(data):
        ctypes.memmove(array[place + 1], block, 800)
    layout = kvbm_cxl.BlockLayout.of_tensors([array])
    assert cache.publish_blocks(NS, keys, layout, range(1, 7)) == ["stored"] * 6
    assert cache.pull_blocks(NS, keys, kvbm_cxl.BlockLayout.of_tensors([into]), range(7, 1, -1)) == [None] * 6
    assert [bytes(into[place]) for place in range(8)] == [bytes(800)] * 2 + data[::-1]


def test_pins_without_a_chain(cache):
    keys = chain(130)
    published(cache, keys[::2])
    pins = cache.pin_all(NS, keys)
    assert [pin is not None and len(pin) == 1 for pin in pins] == [place % 2 == 0 for place in range(130)]
    assert cache.pinned() == 65 and cache.evict_all(NS, keys) == [place % 2 == 1 for place in range(130)]
    for pin in pins[:64:2]:
        pin.release()
    assert cache.pinned() == 33
    assert cache.evict_all(NS, keys[::2]) == [True] * 32 + [False] * 33, "those whose pins went are evicted, and no others"
    assert cache.has(NS, keys[::2]) == [False] * 32 + [True] * 33


def test_events_in_order(cache):
    keys = chain(3)
    events = cache.subscribe()
    cache.publish(NS, keys[0], b"a" * 10)
    cache.publish(NS, keys[1], b"b" * 20, parent=keys[0])
    cache.evict(NS, keys[0])
    cache.clear(NS)
    told = events.poll(1000)
    # What was asked for is told as removed or cleared, block by block or for the whole namespace.
    assert [(event.kind, event.key, event.parent, event.len_bytes) for event in told[:2]] == [
        ("stored", keys[0], None, 10),
        ("stored", keys[1], keys[0], 20),
    ]
    assert told[2].kind == "removed" and told[2].key == keys[0] and told[2].namespace == NS
    assert {event.kind for event in told[3:]} <= {"removed", "cleared"} and len(told) > 3
    assert [event.sequence for event in told] == list(range(len(told)))
    assert events.poll() == []


def test_a_slow_listener_is_told_what_it_lost(cache):
    events = cache.subscribe(capacity=4)
    published(cache, chain(10))
    lost, *rest = events.poll()
    assert lost.kind == "lost" and lost.lost == 6 and [event.sequence for event in rest] == [6, 7, 8, 9]


def test_memory_is_mapped_ahead(spec):
    """That of shared memory, which has all of it from the start."""
    name = f"/dev/shm/kvbm-cxl-test-{uuid.uuid4().hex[:12]}"
    with pools.opened(spec) as elsewhere:
        assert elsewhere.map_ahead() in (0, 48 << 20), "a file that may lie on a disk"
    try:
        kvbm_cxl.format_pool(f"{name},size=32M", cells="64K:50%")
        with pools.opened(name) as pool, pool.cache() as cache:
            assert pool.map_ahead(timeout_ms=0) == 0
            assert 0 < pool.map_ahead() <= 32 << 20
            published(cache, chain(3))
            assert all(pulled(cache, key) == payload(key, 5000) for key in chain(3))
    finally:
        os.unlink(name)


def test_metrics_are_those_of_the_text(cache, pool):
    published(cache, chain(3))
    counted, text = cache.metrics(), cache.prometheus()
    assert counted["cxl_cache_publish_total"] == 3 and "cxl_cache_publish_total 3\n" in text
    assert counted["cxl_cache_publish_seconds_count"] == 3 and counted["cxl_cache_block_bytes_sum"] == 15_000
    assert all(name in text for name in counted)
    page = (pools.ROOT / "docs" / "operating" / "metrics.md").read_text().replace("{", "`")
    assert all(f"`{name}`" in page for name in counted if not name.endswith(("_count", "_sum")))
    deadline = time.monotonic() + 240
    while f'cxl_pool_host_published_blocks_total{{pool="{pool.uuid}",slot="0"}} 3\n' not in (text := pool.prometheus()):
        assert time.monotonic() < deadline, "the upkeep tells the pool of it about twice a second"
        time.sleep(0.05)
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert len(families) > 20 and all(f"`{name}`" in page for name in families)


def test_keys_are_chained():
    first = kvbm_cxl.chain_key(None, [1, 2, 3])
    assert len(first) == 16 and first == kvbm_cxl.chain_key(None, (1, 2, 3)) == kvbm_cxl.chain_key(None, numpy.array([1, 2, 3]))
    different = [kvbm_cxl.chain_key(first, [1, 2, 3]), kvbm_cxl.chain_key(None, [1, 2]), kvbm_cxl.chain_key(None, [1, 2, 3], b"x")]
    assert len({first, *different}) == 4
    assert pools.chain(3)[2] == kvbm_cxl.chain_key(kvbm_cxl.chain_key(kvbm_cxl.chain_key(None, [0, 0]), [0, 1]), [0, 2])


def test_reserved_blocks_are_seen_coming(cache, second_cache):
    keys, places = chain(5), arrays(5)
    layout = kvbm_cxl.BlockLayout.of_tensors(places)
    fill(places, range(5), keys)
    assert cache.publish(NS, keys[0], block(places, 0)) == "stored"
    with cache.reserve_blocks(NS, keys[:3], layout) as reserved, cache.reserve_blocks(NS, keys[3:4], layout) as given_up:
        assert reserved.outcomes == ["exists", "reserved", "reserved"] and given_up.outcomes == ["reserved"]
        assert second_cache.presence(NS, keys) == ["there", "coming", "coming", "coming", "absent"]
        assert second_cache.publish(NS, keys[1], b"another") == "exists" and second_cache.has(NS, keys) == [True] + [False] * 4
        given_up.release()
        assert given_up.publish(layout, [3]) == ["given_up"]
        assert reserved.publish(layout, [0, 1, 2]) == ["exists", "stored", "stored"]
        assert reserved.publish(layout, [0, 1, 2]) == ["exists", "given_up", "given_up"]
    assert second_cache.presence(NS, keys) == ["there"] * 3 + ["absent"] * 2
    for place in range(3):
        assert pulled(second_cache, keys[place], layout.block_bytes) == block(places, place)


def test_reservations_are_given_up_when_they_are_dropped_or_the_cache_is_closed(cache, second_cache):
    keys, layout = chain(2), kvbm_cxl.BlockLayout.of_tensors(arrays(2))
    with pytest.raises(kvbm_cxl.InvalidError, match="bytes"):
        cache.reserve_blocks(NS, keys[:1], layout).publish(kvbm_cxl.BlockLayout.of_tensors(arrays(2, parts=1)), [0])
    assert second_cache.presence(NS, keys) == ["absent"] * 2
    kept = cache.reserve_blocks(NS, keys, layout)
    assert second_cache.presence(NS, keys) == ["coming"] * 2
    cache.close()
    assert second_cache.presence(NS, keys) == ["absent"] * 2
    with pytest.raises(kvbm_cxl.CxlError):
        kept.publish(layout, [0, 1])
