# SPDX-License-Identifier: Apache-2.0
"""The worker's side over memory of a GPU whose driver is faked: copies come behind the work of streams, layer by layer or whole."""

import threading
import time
from types import SimpleNamespace

import fake_gpu
import pytest
import torch
from kvbm_cxl.vllm_integration import devices, support
from kvbm_cxl.vllm_integration.config import ConfigError, ConnectorConfig
from kvbm_cxl.vllm_integration.connector import CxlConnector
from kvbm_cxl.vllm_integration.jobs import CopyTimeout
from kvbm_cxl.vllm_integration.metadata import Blocks
from test_worker_side import BLOCKS, CONTENT, HEADS, KEYS, LAYERS, TOKENS, Bench
from vllm.config import ParallelConfig, VllmConfig

PAGE_BYTES = HEADS * TOKENS * CONTENT * 4
NAMES = [f"layers.{layer}" for layer in range(LAYERS)]
BY_LAYER = {"checksums": False, "save_layers": True}


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

    def reserved(self, keys) -> None:
        """Waits until these have cells, and every host sees them coming."""
        jobs = [job for _, job in self.side._layer_saves._jobs]
        _eventually(lambda: all(job._queued for job in jobs), lambda: [(job._error, job._reservations) for job in jobs])
        assert self.presence(keys) == ["coming"] * len(keys)

    def presence(self, keys) -> list[str]:
        return self.access.call(lambda cache: cache.presence(self.side._attached.namespace, keys))

    def saved(self, name: str) -> None:
        """Waits for the copies of a request."""
        self.side._saves.wait({name})


def _eventually(condition, tell=lambda: "") -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline, tell()
        time.sleep(0.001)


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    return fake_gpu.compiled(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def make(driver, make_pool, monkeypatch):
    """Makes worker's sides on one GPU and one pool."""
    monkeypatch.setenv("CXL_CUDA_LIBRARY", str(driver))
    gpu, path, benches = fake_gpu.Gpu(driver), make_pool(size="64M", cells="256:1%,64K:60%"), []
    stream = gpu.stream()
    monkeypatch.setattr(devices, "stream", lambda _: stream)
    monkeypatch.setattr(devices, "mark", lambda _: gpu.event(stream))

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


@pytest.mark.parametrize("options", ({"checksums": True}, {"checksums": False}, BY_LAYER), ids=("checksums", "without", "by layer"))
def test_copies_come_behind_the_work_of_the_step(make, options):
    here, there = make(seed=1, **options), make(seed=2, **options)
    places = [7, 2, 9, 0]
    # What lay there before must not be published.
    for layer in range(LAYERS):
        here.compute(layer, places, version=1)
    here.gpu.set("is_stuck", 1)
    step = here.begin(saves=[Blocks("a", KEYS[:4], places)])
    for layer, name in enumerate(NAMES):
        here.compute(layer, places)
        here.side.layer_computed(name)
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


def test_layers_are_copied_while_the_next_are_computed(make):
    here = make(**BY_LAYER)
    before = here.gpu.get("batches")
    step = here.begin(saves=[Blocks("a", KEYS[:3], [4, 5, 6])])
    here.reserved(KEYS[:3])
    for layer, name in enumerate(NAMES):
        here.compute(layer, [4, 5, 6])
        here.side.layer_computed(name)
        assert here.gpu.get("batches") == before + layer + 1, "the layer's part of all blocks, at once"
    assert here.presence(KEYS[:3]) == ["coming"] * 3, "not before the step has ended"
    here.side.save(step)
    here.saved("a")
    counts = here.counts()
    assert counts["saved_layers/within"] == LAYERS and "saved_layers/behind" not in counts
    assert counts["published_blocks/stored"] == 3 and counts["bytes/published"] == 3 * LAYERS * PAGE_BYTES
    there = make(seed=3, **BY_LAYER)
    assert not there.load("b", KEYS[:3], [0, 1, 2])[0]
    _compare(there, here, {4: 0, 5: 1, 6: 2})


@pytest.mark.parametrize("hooks", ([], NAMES[::-1], NAMES[1:], ["other"]), ids=("none", "reversed", "second", "unknown"))
def test_layers_that_come_otherwise_are_queued_behind_the_step(make, hooks):
    here, there = make(**BY_LAYER), make(seed=2, **BY_LAYER)
    step = here.begin(saves=[Blocks("a", KEYS[:2], [0, 1]), Blocks("a", KEYS[2:3], [3], KEYS[1], tail_tokens=5)])
    here.reserved(KEYS[:3])
    for name in hooks:
        if name in NAMES:
            here.compute(NAMES.index(name), [0, 1, 3])
        here.side.layer_computed(name)
    for layer, name in enumerate(NAMES):
        if name not in hooks:
            here.compute(layer, [0, 1, 3])
    here.side.save(step)
    here.saved("a")
    counts = here.counts()
    within = 2 * LAYERS if hooks == NAMES[::-1] else 0
    assert counts.get("saved_layers/within", 0) == within and counts.get("saved_layers/behind", 0) == 2 * LAYERS - within
    assert not there.load("b", KEYS[:3], [5, 6, 7])[0]
    _compare(there, here, {0: 5, 1: 6, 3: 7})


def test_the_answer_leaves_before_the_copies_and_after_the_cells(make):
    here = make(publish_behind=True, **BY_LAYER)
    here.gpu.set("is_stuck", 1)
    step = here.begin(saves=[Blocks("a", KEYS[:2], [0, 1])], complete={"a"})
    for layer, name in enumerate(NAMES):
        here.compute(layer, [0, 1])
        here.side.layer_computed(name)
    here.side.save(step)
    assert here.presence(KEYS[:2]) == ["coming"] * 2
    held = threading.Thread(target=here.side.before_overwrite, args=[here.orders(taken=[1])])
    held.start()
    held.join(0.2)
    assert held.is_alive(), "the step waits for the copies that read its blocks"
    here.gpu.set("is_stuck", 0)
    held.join(180)
    assert not held.is_alive() and here.presence(KEYS[:2]) == ["there"] * 2


def test_without_room_blocks_are_published_whole(make, monkeypatch):
    monkeypatch.setenv("CXL_CUDA_QUEUED_BYTES", "8192")
    here, there = make(**BY_LAYER), make(seed=2, **BY_LAYER)
    step = here.begin(saves=[Blocks("a", KEYS[:4], [0, 1, 2, 3])])
    for layer, name in enumerate(NAMES):
        here.compute(layer, [0, 1, 2, 3])
        here.side.layer_computed(name)
    here.side.save(step)
    here.saved("a")
    counts = here.counts()
    assert counts["published_blocks/stored"] == 4 and not any(name.startswith("saved_layers") for name in counts)
    assert not there.load("b", KEYS[:4], [5, 6, 7, 8])[0]
    _compare(there, here, {0: 5, 1: 6, 2: 7, 3: 8})


def test_the_step_does_not_wait_for_room(make):
    """What is taken on layer by layer cannot end before the step does."""
    here = make(max_inflight_bytes=LAYERS * PAGE_BYTES, **BY_LAYER)
    step = here.begin(saves=[Blocks("a", KEYS[:1], [0]), Blocks("b", KEYS[1:3], [1, 2])])
    here.reserved(KEYS[:1])
    for layer, name in enumerate(NAMES):
        here.compute(layer, [0, 1, 2])
        here.side.layer_computed(name)
    here.side.save(step)
    here.saved("a")
    here.saved("b")
    counts = here.counts()
    assert counts["published_blocks/stored"] == 3 and counts["saved_layers/within"] == LAYERS


def test_blocks_of_an_adapter_that_was_replaced_meanwhile_are_dropped(make, monkeypatch):
    here, loaded = make(**BY_LAYER), [True]
    monkeypatch.setattr(here.side._adapters, "is_loaded", lambda *_: loaded[0])
    step = here.begin(saves=[Blocks("a", KEYS[:2], [0, 1], adapter=(1, b"digest"))])
    here.reserved(KEYS[:2])
    here.side.layer_computed(NAMES[0])
    loaded[0] = False
    here.side.save(step)
    here.saved("a")
    _eventually(lambda: here.presence(KEYS[:2]) == ["absent"] * 2)
    assert here.counts()["published_blocks/other_adapter"] == 2


def test_a_copy_that_fails_is_an_outcome_and_the_next_goes_on(make):
    here = make(**BY_LAYER)
    step = here.begin(saves=[Blocks("a", KEYS[:2], [0, 1])])
    here.reserved(KEYS[:2])
    here.side.layer_computed(NAMES[0])
    here.gpu.set("copy_error", 719)
    here.side.layer_computed(NAMES[1])
    here.side.save(step)
    here.saved("a")
    here.gpu.set("copy_error", 0)
    assert here.counts()["published_blocks/gpu"] == 2 and "there" not in here.presence(KEYS[:2])
    here.run(saves=[Blocks("b", KEYS[2:4], [2, 3])], complete={"b"})
    assert here.presence(KEYS[2:4]) == ["there"] * 2


def test_a_step_that_never_ends_publishes_nothing(make):
    here = make(**BY_LAYER)
    here.begin(saves=[Blocks("a", KEYS[:2], [0, 1])])
    here.reserved(KEYS[:2])
    here.side.layer_computed(NAMES[0])
    here.side.close()
    _eventually(lambda: here.presence(KEYS[:2]) == ["absent"] * 2)


def test_a_step_that_did_not_end_says_nothing_of_the_layers_of_the_next(make):
    here, there = make(**BY_LAYER), make(seed=2, **BY_LAYER)
    here.begin(saves=[Blocks("a", KEYS[:2], [0, 1])])
    here.reserved(KEYS[:2])
    for name in NAMES:
        here.side.layer_computed(name)
    step = here.begin(saves=[Blocks("b", KEYS[2:4], [2, 3])])
    here.reserved(KEYS[2:4])
    for layer, name in enumerate(NAMES):
        assert "saved_layers/behind" not in here.counts(), "nothing is queued before it is computed"
        here.side.layer_computed("other")
        here.compute(layer, [2, 3])
        here.side.layer_computed(name)
    here.side.save(step)
    here.saved("b")
    _eventually(lambda: here.presence(KEYS[:4]) == ["absent"] * 2 + ["there"] * 2)
    assert not there.load("b", KEYS[2:4], [5, 6])[0]
    _compare(there, here, {2: 5, 3: 6})


@pytest.mark.parametrize("ends", (True, False))
def test_a_load_that_is_late_gives_no_block_away(make, monkeypatch, ends):
    """The GPU may still write to its blocks."""
    monkeypatch.setenv("CXL_CUDA_TIMEOUT_MS", "100")
    here = make(checksums=False, copy_timeout_ms=180_000 if ends else 300)
    here.run(saves=[Blocks("a", KEYS[:2], [0, 1])], complete={"a"})
    here.gpu.set("is_stuck", 1)
    here.run(loads=[Blocks("b", KEYS[:2], [4, 5])])
    if ends:
        time.sleep(0.5)
        assert here.run()[1] == set(), "its end is not told before that of the copy"
        here.gpu.set("is_stuck", 0)
        failed, _ = here.settle("b")
        assert failed == {4, 5}
    else:
        with pytest.raises(CopyTimeout, match="may still write to 2 blocks"):
            here.settle("b")


def test_layers_by_themselves_are_for_gpus_without_checksums():
    config = {"pool": "/p", "save_layers": True}
    with pytest.raises(ConfigError, match="save_layers .* set checksums to false"):
        ConnectorConfig.read(config)
    assert ConnectorConfig.read({**config, "checksums": False}).save_layers
    assert CxlConnector.requires_piecewise_for_cudagraph({"save_layers": True}) and not CxlConnector.requires_piecewise_for_cudagraph({})


def test_engines_that_compute_a_layer_in_parts_are_refused():
    """The first call of a layer's hook says nothing of its other tokens then."""

    def engine(use_ubatching=False, speculative_config=None):
        return SimpleNamespace(parallel_config=SimpleNamespace(use_ubatching=use_ubatching), speculative_config=speculative_config)

    support.check_save_layers(engine())
    for wrong, said in ((engine(use_ubatching=True), "microbatches"), (engine(speculative_config=object()), "speculative")):
        with pytest.raises(ConfigError, match=f"{said}.* leave save_layers out"):
            support.check_save_layers(wrong)
    # What vLLM itself has.
    assert isinstance(ParallelConfig().use_ubatching, bool) and "speculative_config" in VllmConfig.__dataclass_fields__


def test_the_hook_of_a_layer_reaches_the_worker():
    seen = []
    CxlConnector.save_kv_layer(SimpleNamespace(_worker=SimpleNamespace(layer_computed=seen.append)), "layers.3", None, None)
    assert seen == ["layers.3"]
