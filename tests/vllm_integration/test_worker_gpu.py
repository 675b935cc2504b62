# SPDX-License-Identifier: Apache-2.0
"""The worker's side over memory of a GPU whose driver is faked: copies follow the work of streams."""

import threading
import time
from types import SimpleNamespace

import fake_gpu
import kvbm_cxl
import pytest
import torch
from kvbm_cxl.vllm_integration import loader, saver
from kvbm_cxl.vllm_integration.metadata import Blocks
from kvbm_cxl.vllm_integration.movers import CopyTimeout
from test_worker_side import BLOCKS, CONTENT, HEADS, KEYS, LAYERS, TOKENS, Bench

PAGE_BYTES = HEADS * TOKENS * CONTENT * 4


class GpuTensor:
    """What the connector asks of a layer's tensor."""

    shape, device, dtype = (BLOCKS, HEADS, TOKENS, CONTENT), torch.device("cuda", 0), torch.float32

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address

    def dim(self) -> int:
        return len(self.shape)

    def element_size(self) -> int:
        return 4

    def stride(self, dim=None):
        strides = (HEADS * TOKENS * CONTENT, TOKENS * CONTENT, CONTENT, 1)
        return strides if dim is None else strides[dim]


class GpuBench(Bench):
    """A worker's side whose KV cache lies on the GPU. Nothing of it is computed until `compute`."""

    def __init__(self, gpu, stream, path, monkeypatch, *, seed=0, **options) -> None:
        self.gpu, self.seed, self.stream = gpu, seed, stream
        super().__init__(path, monkeypatch, seed=seed, **options)

    def _memory(self, shape, random) -> list[GpuTensor]:
        return [GpuTensor(self.gpu.allocate(bytes(BLOCKS * PAGE_BYTES))) for _ in range(LAYERS)]

    def page(self, layer: int, block: int, version: int = 0) -> bytes:
        """What a step computes for a layer of a block."""
        random = torch.Generator().manual_seed(1 + self.seed * 1000 + version * 100 + layer * BLOCKS + block)
        return torch.randint(0, 256, (PAGE_BYTES,), generator=random, dtype=torch.uint8).numpy().tobytes()

    def compute(self, layer: int, blocks, version: int = 0) -> None:
        """Gives the stream the work that computes a layer."""
        for block in blocks:
            self.gpu.kernel(self.stream, self.memory[layer].address + block * PAGE_BYTES, self.page(layer, block, version))

    def content(self, layer: int, block: int) -> bytes:
        return self.gpu.read(self.memory[layer].address + block * PAGE_BYTES, PAGE_BYTES)

    def begin(self, **orders):
        """The part of a step before its computation."""
        step = self.orders(**orders)
        self.side.before_overwrite(step)
        self.side.start_loads(step)
        return step

    def presence(self, keys) -> list[str]:
        return self.access.call(lambda cache: cache.presence(self.side.attachment.own[0].namespaces[0], keys))

    def saved(self, name: str) -> None:
        """Waits for the copies of a request."""
        self.side.saver.saves.wait({name})


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    return fake_gpu.compiled(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def make(driver, make_pool, monkeypatch):
    """Makes worker's sides on one GPU and one pool."""
    monkeypatch.setenv("CXL_CUDA_LIBRARY", str(driver))
    gpu, path, benches = fake_gpu.Gpu(driver), make_pool(size="64M", cells="256:1%,64K:60%"), []
    stream = gpu.stream()
    for module in (loader, saver):
        monkeypatch.setattr(module, "mark", lambda _: gpu.event(stream))

    def make_bench(**options) -> GpuBench:
        benches.append(GpuBench(gpu, stream, path, monkeypatch, **options))
        return benches[-1]

    yield make_bench
    for name in ("is_stuck", "copy_error"):
        gpu.set(name, 0)
    for each in benches:
        each.close()
    gpu.close()


def _compare(there: GpuBench, here: GpuBench, moved: dict[int, int], version: int = 0) -> None:
    """Blocks of `here` lie where they were loaded, every byte, when all work has ended."""
    there.gpu.library.fake_finish()
    for source, target in moved.items():
        for layer in range(LAYERS):
            assert there.content(layer, target) == here.page(layer, source, version), (layer, source)


@pytest.mark.parametrize("options", ({"checksums": True}, {"checksums": False}), ids=("checksums", "without"))
def test_copies_come_behind_the_work_of_the_step(make, options):
    here, there = make(seed=1, **options), make(seed=2, **options)
    places = [7, 2, 9, 0]
    # What lay there before must not be published.
    for layer in range(LAYERS):
        here.compute(layer, places, version=1)
    here.gpu.set("is_stuck", 1)
    step = here.begin(saves=[Blocks("a", KEYS[:4], places)])
    for layer in range(LAYERS):
        here.compute(layer, places)
    here.side.save(step)
    assert here.side.report().saved_step == 0 and "there" not in here.presence(KEYS[:4])
    here.gpu.set("is_stuck", 0)
    here.saved("a")
    assert here.side.report().saved_step == 1 and here.presence(KEYS[:4]) == ["there"] * 4
    # A step that was queued before the load still writes to the blocks that are loaded.
    there.gpu.set("is_stuck", 1)
    threading.Timer(0.2, there.gpu.set, ("is_stuck", 0)).start()
    for layer in range(LAYERS):
        there.compute(layer, [1, 11, 5, 3])
    failed, report = there.load("b", KEYS[:4], [1, 11, 5, 3])
    assert not failed and not report.failed_loads and not report.corrupt
    _compare(there, here, {7: 1, 2: 11, 9: 5, 0: 3})


def test_the_answer_leaves_before_the_copies_and_after_the_cells(make):
    here = make(publish_behind=True, checksums=False)
    here.gpu.set("is_stuck", 1)
    step = here.begin(saves=[Blocks("a", KEYS[:2], [0, 1])], complete={"a"})
    for layer in range(LAYERS):
        here.compute(layer, [0, 1])
    here.side.save(step)
    assert here.presence(KEYS[:2]) == ["coming"] * 2
    held = threading.Thread(target=here.side.before_overwrite, args=[here.orders(taken=[1])])
    held.start()
    held.join(0.2)
    assert held.is_alive(), "the step waits for the copies that read its blocks"
    here.gpu.set("is_stuck", 0)
    held.join(180)
    assert not held.is_alive() and here.presence(KEYS[:2]) == ["there"] * 2


def test_a_copy_that_fails_is_an_outcome_and_the_next_goes_on(make):
    here = make(checksums=False)
    here.gpu.set("copy_error", 719)
    here.run(saves=[Blocks("a", KEYS[:2], [0, 1])], complete={"a"})
    here.gpu.set("copy_error", 0)
    assert here.counts()["published_blocks/gpu"] == 2 and "there" not in here.presence(KEYS[:2])
    here.run(saves=[Blocks("b", KEYS[2:4], [2, 3])], complete={"b"})
    assert here.presence(KEYS[2:4]) == ["there"] * 2


@pytest.mark.parametrize("ends", (True, False))
def test_a_load_that_is_late_gives_no_block_away(make, monkeypatch, waits, ends):
    """The GPU may still write to its blocks."""
    waits(copy_ms=180_000 if ends else 300)
    here, settled = make(checksums=False), threading.Event()
    here.run(saves=[Blocks("a", KEYS[:2], [0, 1])], complete={"a"})

    def late(*_):
        raise kvbm_cxl.TimeoutError_("a copy of GPU 0 timed out")

    # What a copy that takes longer than the ten seconds of the engine looks like.
    monkeypatch.setattr(type(here.side.attachment.own[0].mover), "pull", late)
    cache = SimpleNamespace(is_settled=lambda timeout_ms: settled.wait(timeout_ms / 1000))
    monkeypatch.setattr(here.access, "call", lambda work: work(cache))
    here.run(loads=[Blocks("b", KEYS[:2], [4, 5])])
    if ends:
        time.sleep(0.5)
        assert here.run()[1] == set(), "its end is not told before that of the copy"
        settled.set()
        failed, _ = here.settle("b")
        assert failed == {4, 5}
    else:
        with pytest.raises(CopyTimeout, match="may still write to 2 blocks"):
            here.settle("b")
