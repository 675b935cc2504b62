# SPDX-License-Identifier: Apache-2.0
"""What is closed, collected or forked does no harm, whatever else goes on; and calls let other threads run."""

import gc
import itertools
import os
import signal
import sys
import threading
import time

import kvbm_cxl
import numpy
import pytest
from pools import PATIENT_MS, chain, namespace, opened, payload

NS = namespace()
KEY = chain(1)[0]


def calls_of(pool, cache):
    """Every call that needs an open cache or pool."""
    layout = kvbm_cxl.BlockLayout.of_tensors([bytearray(64)])
    return {
        "publish": lambda: cache.publish(NS, KEY, b"x"),
        "pull": lambda: cache.pull(NS, KEY, bytearray(9)),
        "lookup": lambda: cache.lookup(NS, KEY),
        "lookup_chain": lambda: cache.lookup_chain(NS, [KEY]),
        "has": lambda: cache.has(NS, [KEY]),
        "pin_chain": lambda: cache.pin_chain(NS, [KEY]),
        "publish_blocks": lambda: cache.publish_blocks(NS, [KEY], layout, [0]),
        "pull_blocks": lambda: cache.pull_blocks(NS, [KEY], layout, [0]),
        "evict": lambda: cache.evict(NS, KEY),
        "clear": lambda: cache.clear(NS),
        "clear_all": lambda: cache.clear_all(),
        "evict_all": lambda: cache.evict_all(NS, [KEY]),
        "pin_all": lambda: cache.pin_all(NS, [KEY]),
        "publish_all": lambda: cache.publish_all(NS, [KEY], [b"x"]),
        "pull_all": lambda: cache.pull_all(NS, [KEY], [bytearray(9)]),
        "usage": lambda: cache.usage(),
        "pinned": lambda: cache.pinned(),
        "metrics": lambda: cache.metrics(),
        "prometheus": lambda: cache.prometheus(),
        "subscribe": lambda: cache.subscribe(),
        "pool.cache": lambda: pool.cache(),
        "pool.allocate": lambda: pool.allocate(64),
        "pool.find": lambda: pool.find("name"),
        "pool.map_ahead": lambda: pool.map_ahead(),
        "pool.prometheus": lambda: pool.prometheus(),
        "pool.slot": lambda: pool.slot,
        "pool.incarnation": lambda: pool.incarnation,
    }


def test_nothing_works_on_a_closed_pool(spec):
    pool = opened(spec)
    cache = pool.cache()
    cache.publish(NS, KEY, b"x")
    pins, events = cache.pin_chain(NS, [KEY]), cache.subscribe()
    pool.close()
    for name, call in calls_of(pool, cache).items():
        with pytest.raises(kvbm_cxl.ClosedError, match="is closed") as caught:
            call()
        assert caught.value.kind == "closed", name
    assert len(pins) == 0
    pins.release()
    with pytest.raises(kvbm_cxl.ClosedError):
        events.poll(10)
    assert list(events) == []
    pool.close()
    cache.close()
    assert pool.spec and pool.uuid and pool.cell_bytes


def test_a_cache_is_opened_again(pool):
    first = pool.cache()
    assert first.publish(NS, KEY, b"abc") == "stored"
    with pytest.raises(kvbm_cxl.ExistsError, match="open already"):
        pool.cache()
    first.close()
    with pool.cache() as second:
        assert second.has(NS, [KEY]) == [True], "blocks outlive the handle that published them"
    with pytest.raises(kvbm_cxl.ClosedError):
        first.lookup(NS, KEY)


@pytest.mark.parametrize("order", list(itertools.permutations(range(5)))[::7], ids=lambda order: "".join(map(str, order)))
def test_objects_are_collected_in_any_order(spec, order):
    pool = opened(spec)
    cache = pool.cache()
    cache.publish(NS, KEY, b"x")
    held = [pool, cache, cache.pin_chain(NS, [KEY]), cache.subscribe(), pool.allocate(4096)]
    view, incarnation = memoryview(held[4]), pool.incarnation
    del pool, cache
    for place in order:
        held[place] = None
        gc.collect()
        view[0] = 7
    del view
    gc.collect()
    # It left in good order: the next to join is another incarnation, and the block can be evicted.
    with opened(spec) as pool, pool.cache() as cache:
        assert pool.slot == 0 and pool.incarnation > incarnation and cache.pinned() == 0 and cache.clear_all() == 1


def test_pins_keep_their_cache_open(pool):
    cache = pool.cache()
    cache.publish(NS, KEY, b"x")
    pins = cache.pin_chain(NS, [KEY])
    del cache
    gc.collect()
    assert len(pins) == 1
    with pytest.raises(kvbm_cxl.ExistsError):
        pool.cache()
    del pins
    gc.collect()
    with pool.cache() as cache:
        assert cache.clear_all() == 1


def test_pins_are_counted_while_their_release_waits(spec, peer):
    """It may wait for a process of this host that is stopped in the middle of its own: that holds up no other thread here."""
    keys = chain(3)
    with opened(spec, join_timeout_ms=2000) as pool, pool.cache() as cache:
        assert [cache.publish(NS, key, b"x") for key in keys] == ["stored"] * 3
        others = [peer() for _ in range(3)]
        assert [other("pin_and_release", "tiny", 0, 3) for other in others] == ["begun"] * 3
        release_s, deadline = 0, time.monotonic() + 200
        while release_s < 0.5:
            assert time.monotonic() < deadline, "no other process was ever stopped in the middle of a release"
            pins = cache.pin_chain(NS, keys)
            for other in others:
                other.process.send_signal(signal.SIGSTOP)
            thread, begun, longest_s = threading.Thread(target=pins.release), time.monotonic(), 0
            thread.start()
            while thread.is_alive():
                before = time.monotonic()
                len(pins)
                longest_s = max(longest_s, time.monotonic() - before)
            release_s = time.monotonic() - begun
            for other in others:
                other.process.send_signal(signal.SIGCONT)
        for other in others:
            other.kill()
        assert longest_s < release_s / 2 and len(pins) == 0


def in_child(work):
    """Runs something in a fork of this process; what it returned."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, repr(work()).encode())
        except BaseException as error:  # noqa: BLE001
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    assert os.waitpid(child, 0) == (child, 0)
    return said


def test_a_fork_is_refused_and_harms_no_other(spec):
    pool = opened(spec)
    cache = pool.cache()
    cache.publish(NS, KEY, payload(KEY, 5000))
    pins, events, memory = cache.pin_chain(NS, [KEY]), cache.subscribe(), pool.allocate(64)
    held = {"pool": pool, "cache": cache, "pins": pins, "events": events, "memory": memory}

    def child():
        kinds = set()
        for call in [*calls_of(pool, cache).values(), events.poll, memory.flush, memory.free, cache.close, pool.close]:
            try:
                call()
                kinds.add("worked")
            except kvbm_cxl.ForkedError as error:
                kinds.add(error.kind)
        held["pins"].release()
        count = len(pins)
        held.clear()
        gc.collect()
        with opened(spec) as own, own.cache() as own_cache:
            return kinds, count, own_cache.has(NS, [KEY])

    assert in_child(child) == repr(({"forked"}, 0, [True]))
    assert len(pins) == 1 and cache.pinned() == 1 and bytes(memory) is not None
    into = bytearray(5000)
    assert cache.pull(NS, KEY, into) and bytes(into) == payload(KEY, 5000)
    pins.release()
    assert cache.clear_all() == 1
    del memory
    pool.close()


@pytest.mark.parametrize("what", ["cache", "pool"])
def test_closing_while_threads_use_it(spec, what):
    pool = opened(spec)
    cache = pool.cache()
    keys = chain(40)
    source = numpy.frombuffer(b"".join(payload(key, 5000) for key in keys), numpy.uint8).reshape(40, 5000)
    assert set(cache.publish_blocks(NS, keys, kvbm_cxl.BlockLayout.of_tensors([source]), range(40))) == {"stored"}
    rounds, outcomes = [0] * 4, [None] * 4

    def use(number):
        target = numpy.zeros((40, 5000), numpy.uint8)
        layout = kvbm_cxl.BlockLayout.of_tensors([target])
        try:
            while True:
                with cache.pin_chain(NS, keys):
                    # Closing releases the pins, which is no reason for wrong bytes.
                    assert cache.pull_blocks(NS, keys, layout, range(40)) == [None] * 40
                assert (target == source).all()
                rounds[number] += 1
        except BaseException as error:  # noqa: BLE001
            outcomes[number] = error

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 240
    while min(rounds) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    (pool if what == "pool" else cache).close()
    for thread in threads:
        thread.join(timeout=60)
    assert min(rounds) >= 3 and all(isinstance(outcome, kvbm_cxl.ClosedError) for outcome in outcomes), outcomes
    pool.close()


def test_calls_let_other_threads_run(spec):
    """With a switch interval without end another thread runs only where a call lets it."""
    keys, counter, stopped = chain(8), [0], threading.Event()

    def count():
        while not stopped.is_set():
            counter[0] += 1
            time.sleep(0)

    with opened(spec) as pool, pool.cache() as cache:
        array = numpy.frombuffer(b"".join(payload(key, 60_000) for key in keys), numpy.uint8).reshape(8, 60_000).copy()
        layout = kvbm_cxl.BlockLayout.of_tensors([array])
        into, number = bytearray(60_000), itertools.count(1)
        calls = {name: call for name, call in calls_of(pool, cache).items() if name not in ("pool.cache", "pool.find")}
        calls |= {
            "publish": lambda: cache.publish(NS, kvbm_cxl.chain_key(KEY, [next(number)]), into),
            "publish_blocks": lambda: cache.publish_blocks(namespace(str(next(number))), keys, layout, range(8)),
            "pull": lambda: cache.pull(NS, keys[0], into),
            "pull_blocks": lambda: cache.pull_blocks(NS, keys, layout, range(8)),
            "events": lambda: cache.subscribe().poll(1),
        }
        cache.publish_blocks(NS, keys, layout, range(8))
        thread, interval = threading.Thread(target=count), sys.getswitchinterval()
        thread.start()
        stuck = []
        try:
            sys.setswitchinterval(1000)
            for name, call in calls.items():
                deadline = time.monotonic() + 180
                while True:
                    before = counter[0]
                    call()
                    if counter[0] > before:
                        break
                    if time.monotonic() > deadline:
                        stuck.append(name)
                        break
        finally:
            sys.setswitchinterval(interval)
            stopped.set()
            thread.join(timeout=30)
        assert not stuck


def test_threads_in_parallel(pool):
    """Eight threads publish, pull and evict the same blocks; whatever is a hit has the right bytes."""
    keys, wrong, done = chain(30), [], []
    with pool.cache() as cache:

        def work(seed):
            into = bytearray(3000)
            for step in range(150):
                key = keys[(seed * 7 + step * 11) % 30]
                try:
                    if step % 10 == 9:
                        cache.evict(NS, key)
                    elif cache.pull(NS, key, into):
                        if bytes(into) != payload(key, 3000):
                            wrong.append(key)
                    else:
                        cache.publish(NS, key, payload(key, 3000))
                except BaseException as error:  # noqa: BLE001
                    wrong.append(error)
            done.append(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert not wrong and sorted(done) == list(range(8))
        counted = cache.metrics()
        assert counted["cxl_cache_pull_total"] > 0 and counted["cxl_cache_publish_total"] >= 30


def test_two_pools_in_one_process(spec):
    """A scheduler and a worker in one process, as an engine without processes of its own has them."""
    with opened(spec) as one, opened(spec) as other, one.cache() as first, other.cache() as second:
        assert one.slot == other.slot and one.uuid == other.uuid
        assert first.publish(NS, KEY, payload(KEY, 5000)) == "stored"
        into = bytearray(5000)
        assert second.pull(NS, KEY, into) and bytes(into) == payload(KEY, 5000)
        with second.pin_chain(NS, [KEY]):
            assert first.evict(NS, KEY) is False
        assert (first.pinned(), second.pinned()) == (0, 0)


def test_the_environment_names_the_pool(spec, monkeypatch):
    with pytest.raises(kvbm_cxl.InvalidError, match="CXL_POOL is not set"):
        kvbm_cxl.Pool()
    monkeypatch.setenv("CXL_POOL", spec)
    with kvbm_cxl.Pool(suspect_ms=PATIENT_MS) as pool:
        assert pool.coherence == "software" and pool.uuid == kvbm_cxl.pool_info()["uuid"] and pool.incarnation >= 1
