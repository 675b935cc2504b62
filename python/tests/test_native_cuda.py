# SPDX-License-Identifier: Apache-2.0
"""Blocks that lie on a GPU, over a driver that is faked (kvbm_cxl/pool/tests/cuda/fake.c)."""

import contextlib
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import fake_gpu
import kvbm_cxl
import pools
import pytest
from kvbm_cxl import BlockLayout
from kvbm_cxl.errors import ClosedError, DeviceError, InvalidError, NotFoundError, TimeoutError_
from pools import chain, namespace, payload

NS = namespace()
COUNT, PARTS, PART_BYTES = 6, 3, 1501
BLOCK_BYTES = PARTS * PART_BYTES


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    return fake_gpu.compiled(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def gpu(driver, monkeypatch):
    monkeypatch.setenv("CXL_CUDA_LIBRARY", str(driver))
    gpu = fake_gpu.Gpu(driver)
    yield gpu
    gpu.set("is_stuck", 0)
    gpu.close()


@pytest.fixture
def cache(gpu, pool, request):
    """One that is opened with the driver in the environment; parameters are those of its configuration."""
    before = gpu.get("copies")
    with pool.cache(**getattr(request, "param", {})) as cache:
        cache_gpu = SimpleNamespace(gpu=gpu, cache=cache, copies=lambda: gpu.get("copies") - before)
        yield cache_gpu
    # What the engine had of the driver it has given back.
    assert (gpu.get("registered"), gpu.get("pinned"), gpu.get("contexts")) == (0, 0, 1)


def layout(addresses, device="cuda"):
    return BlockLayout([(address, PART_BYTES, PART_BYTES) for address in addresses], COUNT, device=device)


def parts(keys, ids):
    """The parts of a paged KV cache with the blocks of keys in their places."""
    found = [bytearray(payload(b"part%d" % part, COUNT * PART_BYTES)) for part in range(PARTS)]
    for key, place in zip(keys, ids, strict=True):
        data = payload(key, BLOCK_BYTES)
        for part in range(PARTS):
            found[part][place * PART_BYTES : (place + 1) * PART_BYTES] = data[part * PART_BYTES : (part + 1) * PART_BYTES]
    return [bytes(part) for part in found]


@pytest.mark.usefixtures("coherence")
@pytest.mark.parametrize("cache", [{"checksums": True}, {"checksums": False}], indirect=True, ids=["checksums", "without"])
def test_blocks_of_a_gpu_come_back_in_other_places(cache):
    gpu, keys, ids = cache.gpu, chain(COUNT), [3, 0, 5, 1, 4, 2]
    addresses = [gpu.allocate(part) for part in parts(keys, range(COUNT))]
    assert cache.cache.publish_blocks(NS, keys, layout(addresses), range(COUNT)) == ["stored"] * COUNT
    assert cache.copies() > 0
    for key in keys:
        into = bytearray(BLOCK_BYTES)
        assert cache.cache.pull(NS, key, into)
        assert into == payload(key, BLOCK_BYTES)
    empty = parts([], [])
    targets = [gpu.allocate(part) for part in empty]
    assert cache.cache.pull_blocks(NS, keys[:4] + chain(1, seed=9), layout(targets, "cuda:0"), ids[:5]) == [None] * 4 + ["absent"]
    expected = parts(keys[:4], ids[:4])
    assert [gpu.read(address, COUNT * PART_BYTES) for address in targets] == expected
    assert cache.cache.is_settled()


def test_a_copy_comes_after_what_a_stream_was_given(cache):
    gpu, keys = cache.gpu, chain(COUNT)
    addresses = [gpu.allocate(part) for part in parts([], [])]
    stream = gpu.stream()
    for address, part in zip(addresses, parts(keys, range(COUNT)), strict=True):
        gpu.kernel(stream, address, part)
    places = layout(addresses)
    assert cache.cache.publish_blocks(NS, keys[:3], places, range(3), after=stream) == ["stored"] * 3
    assert cache.cache.publish_blocks(NS, keys[3:], places, range(3, 6), after=gpu.event(stream)) == ["stored"] * 3
    into = bytearray(BLOCK_BYTES)
    for key in keys:
        assert cache.cache.pull(NS, key, into)
        assert into == payload(key, BLOCK_BYTES)
    for after, reason in [(7, "no stream"), (SimpleNamespace(cuda_event=0), "never recorded")]:
        with pytest.raises(InvalidError, match=reason):
            cache.cache.pull_blocks(NS, keys[:1], places, [0], after=after)
    with pytest.raises(InvalidError, match="host's memory"):
        cache.cache.pull_blocks(NS, keys[:1], BlockLayout.of_tensors([bytearray(10)]), [0], after=stream)


def test_a_changed_byte_is_a_miss(cache, spec):
    gpu, keys = cache.gpu, chain(2)
    addresses = [gpu.allocate(part) for part in parts(keys, range(2))]
    assert cache.cache.publish_blocks(NS, keys, layout(addresses), range(2)) == ["stored"] * 2
    pools.flip(spec.split(",")[0], payload(keys[1], BLOCK_BYTES))
    assert cache.cache.pull_blocks(NS, keys, layout(addresses), range(2)) == [None, "checksum"]


def test_a_gpu_that_does_not_answer_is_an_error(gpu, pool):
    keys = chain(1)
    addresses = [gpu.allocate(part) for part in parts(keys, [0])]
    with pool.cache() as cache:
        assert cache.publish_blocks(NS, keys, layout(addresses), [0]) == ["stored"]
        gpu.set("is_stuck", 1)
        with pytest.raises(TimeoutError_, match="GPU 0"):
            cache.pull_blocks(NS, keys, layout(addresses), [0])
        assert not cache.is_settled(timeout_ms=10)
        gpu.set("is_stuck", 0)
        assert cache.is_settled(timeout_ms=5000)
        gpu.library.fake_fail(b"cuMemcpyAsync", 0, 100, 999)
        with pytest.raises(DeviceError, match="999") as failed:
            cache.pull_blocks(NS, keys, layout(addresses), [0])
        assert failed.value.kind == "gpu"
        gpu.library.fake_forgive()
        assert cache.pull_blocks(NS, keys, layout(addresses), [0]) == [None]


def _page_has(cache, line):
    """The counters are taken over with the next round of the service."""
    deadline = time.monotonic() + 60
    while line not in cache.prometheus().splitlines():
        assert time.monotonic() < deadline, cache.prometheus()
        time.sleep(0.01)


def test_the_pool_is_registered_before_the_first_block(gpu, pool):
    with pool.cache(dma="uncached") as cache:
        reach = cache.open_gpu(0)
        assert (reach.device, reach.refusal, reach.dma) == (0, None, "uncached") and reach.registered_bytes > 32 << 20
        assert gpu.get("registered") > 0 and repr(reach).startswith("GpuReach(device=0, registered_bytes=")
        with pytest.raises(NotFoundError, match="GPU 7"):
            cache.open_gpu(7)
        _page_has(cache, f"cxl_gpu_registered_bytes {reach.registered_bytes}")
    assert gpu.get("registered") == 0
    with pool.cache(register_bytes=0) as cache:
        assert (cache.open_gpu(0).registered_bytes, cache.open_gpu(0).dma) == (0, "cached")
    with pool.cache(register_bytes=1) as cache:
        assert 0 < cache.open_gpu(0).registered_bytes <= 256 << 20


def test_a_pool_that_is_not_registered_says_what_to_change(gpu, pool):
    gpu.library.fake_fail(b"cuMemHostRegister_v2", 0, 1000, 2)
    with pool.cache() as cache:
        reach = cache.open_gpu(0)
        assert reach.registered_bytes == 0 and "memlock" in reach.refusal
    gpu.library.fake_forgive()
    for wrong in ({"dma": "sometimes"}, {"dma": ""}):
        with pytest.raises(InvalidError, match="want cached or uncached"):
            pool.cache(**wrong)


def test_without_a_driver_blocks_of_a_gpu_are_refused(pool, monkeypatch):
    monkeypatch.setenv("CXL_CUDA_LIBRARY", "none")
    with pool.cache() as cache:
        with pytest.raises(NotFoundError, match="CUDA driver"):
            cache.publish_blocks(NS, chain(1), layout([4096]), [0])
        # Everything else goes on.
        assert cache.publish(NS, chain(1)[0], b"host") == "stored"


def test_tensors_tell_their_gpu():
    def tensor(address, index):
        part = SimpleNamespace(nbytes=100, data_ptr=lambda: address, is_contiguous=lambda: True)
        whole = {"nbytes": 400, "shape": (4, 100), "stride": lambda _: 100, "element_size": lambda: 1, "data_ptr": lambda: address}
        whole["device"] = SimpleNamespace(type="cuda", index=index)
        fields = {name: staticmethod(it) if callable(it) else it for name, it in whole.items()}
        return type("Tensor", (), {**fields, "__getitem__": lambda *_: part})()

    assert BlockLayout.of_tensors([tensor(4096, 1), tensor(8192, 1)]).device == "cuda:1"
    with pytest.raises(InvalidError, match="one device"):
        BlockLayout.of_tensors([tensor(4096, 0), tensor(8192, 1)])
    for device in ["cuda:", "cuda:x", "cuda:-1", "gpu"]:
        with pytest.raises(InvalidError, match="no device"):
            BlockLayout([(4096, 100, 100)], 1, device=device)
    assert kvbm_cxl.BlockLayout([(4096, 100, 100)], 1, device="cuda:3").device == "cuda:3"


@pytest.fixture(params=[{"checksums": True}, {"checksums": False}], ids=["checksums", "without"])
def queueing(gpu, pool, request):
    """A cache that gives its GPU what is queued; with checksums, which this driver has no kernels for, a call waits."""
    with pool.cache(**request.param) as cache:
        cache.open_gpu(0)
        yield SimpleNamespace(gpu=gpu, cache=cache, waits=request.param["checksums"])


def test_queued_blocks_go_in_the_order_of_the_streams(queueing):
    gpu, cache, keys = queueing.gpu, queueing.cache, chain(COUNT)
    addresses, stream = [gpu.allocate(part) for part in parts([], [])], gpu.stream()
    for address, part in zip(addresses, parts(keys, range(COUNT)), strict=True):
        gpu.kernel(stream, address, part)
    gpu.set("is_stuck", not queueing.waits)
    published = cache.queue_publish(NS, keys, layout(addresses), range(COUNT), stream=stream)
    assert published.done() == queueing.waits
    if not queueing.waits:
        _page_has(cache, f"cxl_gpu_queued_bytes {COUNT * BLOCK_BYTES}")
        assert repr(published) == "Queued(publish, under way)" and not any(cache.has(NS, keys))
        with pytest.raises(TimeoutError_, match="queued"):
            published.wait(timeout_ms=5)
        published.hold(stream)
        for address in addresses:
            gpu.kernel(stream, address, b"x" * 100)
        gpu.set("is_stuck", 0)
    assert published.wait() == ["stored"] * COUNT and published.done() and repr(published) == "Queued(publish, ended)"
    assert cache.queue_publish(NS, keys[:2], layout(addresses), range(2), stream=stream.cuda_stream).wait() == ["exists"] * 2
    into = bytearray(BLOCK_BYTES)
    for key in keys:
        assert cache.pull(NS, key, into)
        assert into == payload(key, BLOCK_BYTES)

    targets, other = [gpu.allocate(part) for part in parts([], [])], gpu.stream()
    pulled = cache.queue_pull(NS, keys[:4] + chain(1, seed=9), layout(targets), range(5), stream=other)
    # Work that is given to the stream at once finds the blocks.
    gpu.kernel(other, targets[0], b"y" * 100)
    gpu.library.fake_finish()
    assert pulled.wait() == [None] * 4 + ["absent"]
    expected = parts(keys[:4], range(4))
    expected[0] = b"y" * 100 + expected[0][100:]
    assert [gpu.read(address, COUNT * PART_BYTES) for address in targets] == expected


def _threads():
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


def test_the_cache_commits_what_a_program_has_let_go_of(gpu, pool):
    keys = chain(2)
    with pool.cache(checksums=False) as cache:
        cache.open_gpu(0)
        addresses = [gpu.allocate(part) for part in parts(keys, range(2))]
        assert "cxl-cache-gpu" not in _threads(), "a process that queues nothing has no thread for it"
        gpu.set("is_stuck", 1)
        cache.queue_publish(NS, keys, layout(addresses), range(2), stream=0)
        assert "cxl-cache-gpu" in _threads()
        gpu.set("is_stuck", 0)
        deadline = time.monotonic() + 60
        while not all(cache.has(NS, keys)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    gpu.library.fake_finish()


def test_closing_commits_nothing_of_what_is_queued(gpu, pool):
    keys = chain(4)
    addresses = [gpu.allocate(part) for part in parts(keys, range(4))]
    with pool.cache(checksums=False) as cache:
        cache.open_gpu(0)
        assert cache.publish_blocks(NS, keys[:2], layout(addresses), range(2)) == ["stored"] * 2
        gpu.set("is_stuck", 1)
        stream = gpu.stream()
        published = cache.queue_publish(NS, keys[2:], layout(addresses), range(2, 4), stream=stream)
        pulled = cache.queue_pull(NS, keys[:2], layout(addresses), range(2), stream=stream)
        threading.Timer(0.1, gpu.set, ("is_stuck", 0)).start()
    with pytest.raises(ClosedError):
        published.wait()
    assert pulled.wait() == [None] * 2
    with pool.cache(checksums=False) as cache:
        assert cache.has(NS, keys) == [True, True, False, False] and cache.pinned() == 0
        assert cache.publish(NS, keys[3], payload(keys[3], 100)) == "stored"
    gpu.library.fake_finish()


def test_what_cannot_be_queued_is_refused(gpu, pool):
    keys = chain(COUNT)
    addresses, stream = [gpu.allocate(part) for part in parts(keys, range(COUNT))], gpu.stream()
    places = layout(addresses)
    with pool.cache(checksums=False) as cache:
        cache.open_gpu(0)
        with pytest.raises(InvalidError, match="host's memory"):
            cache.queue_publish(NS, keys[:1], BlockLayout.of_tensors([bytearray(10)]), [0], stream=stream)
        for wrong in ("a stream", SimpleNamespace(), -1):
            with pytest.raises(InvalidError, match="no stream"):
                cache.queue_pull(NS, keys[:1], places, [0], stream=wrong)
        with pytest.raises(InvalidError, match="twice"):
            cache.queue_pull(NS, keys[:2], places, [0, 0], stream=stream)
        assert cache.publish_blocks(NS, keys[:1], places, [0]) == ["stored"]
        gpu.set("copy_error", 719)
        failed = cache.queue_publish(NS, keys[1:2], places, [1], stream=stream)
        with pytest.raises(DeviceError) as raised:
            failed.wait()
        assert raised.value.kind == "gpu"
        gpu.set("copy_error", 0)
        assert cache.queue_publish(NS, keys[1:2], places, [1], stream=stream).wait() == ["stored"]
    gpu.library.fake_finish()


@pytest.mark.parametrize("machine", [None, "another"], ids=["one-host", "two-hosts"])
def test_what_a_killed_process_had_queued_is_given_back(driver, spec, peer, machine):
    keys = chain(COUNT)
    with kvbm_cxl.Pool(spec, suspect_ms=3000) as pool, pool.cache(checksums=False) as cache:
        other = peer(machine, CXL_CUDA_LIBRARY=str(driver))
        assert other("queue", str(driver), COUNT) == [["stored"] * 2, 2]
        assert cache.presence(NS, keys) == ["there"] * 2 + ["coming"] * (COUNT - 2)
        # Its pins keep the blocks, for all hosts.
        assert cache.evict_all(NS, keys[:2]) == [False] * 2
        other.kill()
        deadline = time.monotonic() + 120
        into = bytearray(BLOCK_BYTES)
        # Neither its pins nor its cells are in the way: the pulled blocks go, and the others can be published by this process.
        left, wanted = keys[:2], keys[2:]
        while left or wanted:
            assert time.monotonic() < deadline, (left, wanted)
            assert not any(cache.has(NS, wanted)), "committed by a process that died before its copies ended"
            # A host that died may have a lock until it is taken for dead.
            with contextlib.suppress(TimeoutError_):
                if left and (cache.evict(NS, left[0]) or not cache.has(NS, left[:1])[0]):
                    del left[0]
                if wanted and cache.publish(NS, wanted[0], payload(wanted[0], BLOCK_BYTES)) == "stored":
                    assert cache.pull(NS, wanted[0], into)
                    assert into == payload(wanted.pop(0), BLOCK_BYTES)
            time.sleep(0.05)
