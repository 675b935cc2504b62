# SPDX-License-Identifier: Apache-2.0
"""The worker's side by itself: memory of its own in place of vLLM's KV cache, a real pool, every block different."""

import threading
import time
from types import SimpleNamespace

import kvbm_cxl
import pytest
import torch
from kvbm_cxl.options import ConfigError
from kvbm_cxl.vllm_integration import attachment, loader, movers, pool_access, saver, worker
from kvbm_cxl.vllm_integration.config import ConnectorConfig
from kvbm_cxl.vllm_integration.groups import Group, Kind, Shape
from kvbm_cxl.vllm_integration.metadata import Blocks, StepMetadata, WorkerReport
from kvbm_cxl.vllm_integration.movers import CopyTimeout
from vllm.v1.kv_cache_interface import FullAttentionSpec

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 2, 12, 2, 16, 32
NAMESPACE = {"model": "m", "dtype": "d", "layer_count": LAYERS, "kv_head_count": HEADS, "head_size": CONTENT // 2, "block_tokens": TOKENS}


class Bench:
    """A worker's side over memory that is filled with random numbers. A step that completes a prompt waits for its copies."""

    vllm_config = None

    def __init__(self, pool: str, monkeypatch, *, replicas: int = 1, rank: int = 0, seed: int = 0, elsewhere: int = 0, **options) -> None:
        """`elsewhere`: so many groups come first of which this stage of the pipeline has no layer."""
        options = {"audit": False, **options}
        fields = {**NAMESPACE, "layout": "l"}
        monkeypatch.setattr(attachment, "namespace_fields", lambda *given: {elsewhere: [fields for _ in given[-1].numbers]})
        monkeypatch.setattr(attachment.Attacher, "_ranks", lambda _: (replicas, rank))
        config = ConnectorConfig.read({"pool": pool, "publish_behind": False, **options})
        spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=CONTENT // 2, dtype=torch.float32)
        group = SimpleNamespace(layer_names=[f"layers.{layer}" for layer in range(LAYERS)], kv_cache_spec=spec)
        groups = [Group(at, (), TOKENS, Kind.FULL) for at in range(elsewhere)]
        shape = Shape((*groups, Group(elsewhere, tuple(group.layer_names), TOKENS, Kind.FULL)), TOKENS, TOKENS)
        monkeypatch.setattr(attachment, "shape_of", lambda *_: shape)
        kv_cache_config = SimpleNamespace(kv_cache_groups=[group] * (elsewhere + 1), num_blocks=BLOCKS, kv_tp_replicas=replicas)
        self.access = pool_access.acquire(config)
        self.side = worker.WorkerSide(self.vllm_config, kv_cache_config, config, self.access)
        self.memory = self._memory((LAYERS, BLOCKS, HEADS, TOKENS, CONTENT), torch.Generator().manual_seed(seed))
        self.step = 0
        try:
            self.side.attach({name: self.memory[layer] for layer, name in enumerate(group.layer_names)})
        except ConfigError:
            self.close()
            raise

    def _memory(self, shape, random) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    def orders(self, **orders) -> StepMetadata:
        self.step += 1
        return StepMetadata(self.step, **orders)

    def run(self, *, finished=(), **orders) -> tuple[set[str], set[str], set[int], WorkerReport]:
        """A step as vLLM runs it: what is saved, what is loaded, blocks that failed, and the report."""
        step = self.orders(**orders)
        self.side.before_overwrite(step)
        self.side.start_loads(step)
        self.side.save(step)
        saved, loaded = self.side.take_finished(set(finished))
        return saved, loaded, self.side.loader.take_failed_blocks(), self.side.report()

    def load(self, name: str, keys, block_ids) -> tuple[set[int], WorkerReport]:
        """Loads and waits; the blocks that failed, and the report that says so."""
        return self.settle(name, *self.run(loads=[Blocks(name, keys, block_ids)])[1:])

    def settle(self, name: str, loaded=(), failed=frozenset(), report=WorkerReport(0)) -> tuple[set[int], WorkerReport]:
        """Waits for a load."""
        deadline = time.monotonic() + 180
        while name not in loaded:
            assert not failed and not report.failed_loads, "failures are told with the end of their load"
            assert time.monotonic() < deadline
            _, loaded, failed, report = self.run(idle=True)
        return failed, report

    def counts(self) -> dict[str, int]:
        stats = self.side.take_stats()
        return stats.data["counters"] if stats else {}

    def close(self) -> None:
        self.side.close()
        self.access.release()


@pytest.fixture
def path(make_pool) -> str:
    return make_pool(size="64M", cells="256:1%,64K:60%")


@pytest.fixture
def bench(path, monkeypatch):
    benches = []

    def make(**options) -> Bench:
        benches.append(Bench(path, monkeypatch, **options))
        return benches[-1]

    yield make
    for each in benches:
        each.close()


KEYS = [kvbm_cxl.chain_key(None, [number]) for number in range(BLOCKS)]


def test_blocks_come_back_where_they_are_wanted(bench):
    here, there = bench(seed=1), bench(seed=2)
    assert here.side.handshake().namespaces == there.side.handshake().namespaces
    here.run(saves=[Blocks("a", KEYS[:4], [7, 2, 9, 0])], complete={"a"})
    untouched = there.memory.clone()
    failed, report = there.load("b", KEYS[:4], [1, 11, 5, 3])
    assert not failed and not report.failed_loads and not report.corrupt
    for source, target in zip((7, 2, 9, 0), (1, 11, 5, 3)):
        assert torch.equal(there.memory[:, target], here.memory[:, source])
    rest = [block for block in range(BLOCKS) if block not in (1, 11, 5, 3)]
    assert torch.equal(there.memory[:, rest], untouched[:, rest])
    block_bytes = LAYERS * HEADS * TOKENS * CONTENT * 4
    assert here.counts() == {"published_blocks/stored": 4, "bytes/published": 4 * block_bytes}
    assert there.counts() == {"pulled_blocks/hit": 4, "bytes/pulled": 4 * block_bytes, "loads/complete": 1}


def test_what_the_pool_has_is_not_copied_again(bench):
    here = bench()
    here.run(saves=[Blocks("a", KEYS[:4], [0, 1, 2, 3])], complete={"a"})
    here.counts()
    here.run(saves=[Blocks("b", KEYS[2:6], [2, 3, 4, 5])], complete={"b"})
    counted = here.counts()
    assert counted["published_blocks/exists"] == 2 and counted["published_blocks/stored"] == 2
    assert counted["bytes/published"] == 2 * here.side.handshake().cell_bytes


def test_a_report_before_the_step_s_saves_does_not_count_them(bench):
    """With speculative decoding vLLM asks for the report first, and for the saves behind the draft model."""
    here = bench()
    step = here.orders(saves=[Blocks("a", KEYS[:2], [0, 1])])
    here.side.before_overwrite(step)
    here.side.start_loads(step)
    here.side.take_finished(set())
    assert here.side.report().saved_step == 0
    here.side.save(step)
    here.side.saver.saves.wait({"a"})
    assert here.side.report().saved_step == 1


def test_a_gpu_is_opened_at_the_start_or_refused(bench, monkeypatch):
    monkeypatch.setenv("CXL_CUDA_LIBRARY", "none")
    here = bench()
    with pytest.raises(ConfigError, match="GPU 0 .*CUDA driver"):
        attachment.open_gpu(here.access, 0)
    opened = []
    reach = SimpleNamespace(registered_bytes=1, dma="cached")
    stub = SimpleNamespace(open_gpu=lambda device: opened.append(device) or reach, close=lambda: None)
    monkeypatch.setattr(here.access, "call", lambda operation: operation(stub))
    attachment.open_gpu(here.access, 3)
    # A pool that was lost is registered when it is open again.
    monkeypatch.undo()
    monkeypatch.setattr(pool_access, "_open", lambda *_: pool_access._Opened(stub, stub))
    before = here.access._opened
    here.access._reopen()
    assert opened == [3, 0, 3] and here.access._opened.cache is stub
    before.close()


def test_a_stage_without_layers_of_a_group_leaves_its_blocks_to_others(bench):
    here, there = bench(seed=1, elsewhere=1), bench(seed=2, elsewhere=1)
    greeting = here.side.handshake()
    assert greeting.namespaces[0] == () and [len(each) for each in greeting.namespaces[1]] == [16] and greeting.cell_bytes
    blocks = [Blocks("a", KEYS[:4], [0, 1, 2, 3]), Blocks("a", KEYS[4:6], [5, 6], group=1)]
    here.run(saves=blocks, complete={"a"})
    assert here.counts()["published_blocks/stored"] == 2
    before = there.memory.clone()
    there.settle("a", *there.run(loads=blocks)[1:])
    assert torch.equal(there.memory[:, [5, 6]], here.memory[:, [5, 6]])
    rest = [block for block in range(BLOCKS) if block not in (5, 6)]
    assert torch.equal(there.memory[:, rest], before[:, rest])
    # A request of which it has nothing to load is loaded, too.
    there.load("b", KEYS[:4], [0, 1, 2, 3])


def test_a_step_that_computes_nothing_copies_itself(bench, monkeypatch):
    """No thread has to be woken, and the engine learns of the end in the same step. Of several loads and pieces it takes one."""
    monkeypatch.setattr(loader, "_JOB_BYTES", 2 * 8192)
    here, there = bench(seed=1), bench(seed=2)
    here.run(saves=[Blocks("a", KEYS[:6], [0, 1, 2, 3, 4, 5])], complete={"a"})
    threads = {}
    pull = there.side.loader.pull

    def noted(attached, blocks, after):
        threads[blocks.block_ids[0]] = threading.current_thread() is threading.main_thread()
        return pull(attached, blocks, after)

    monkeypatch.setattr(there.side.loader, "pull", noted)
    _, loaded, failed, _ = there.run(loads=[Blocks("b", KEYS[:2], [10, 11])], idle=True)
    assert loaded == {"b"} and not failed and threads == {10: True}
    assert torch.equal(there.memory[:, 10:12], here.memory[:, 0:2])
    there.load("c", KEYS[:2], [8, 9])
    assert threads[8] is False, "a step that computes leaves it to threads"
    loads = [Blocks("d", KEYS[:2], [0, 1]), Blocks("e", KEYS[2:6], [2, 3, 4, 5])]
    loaded = there.run(loads=loads, idle=True)[1]
    deadline = time.monotonic() + 180
    while loaded != {"d", "e"}:
        assert time.monotonic() < deadline
        loaded |= there.run(idle=True)[1]
    assert {first: threads[first] for first in (0, 2, 4)} == {0: False, 2: True, 4: False}
    assert torch.equal(there.memory[:, :6], here.memory[:, :6])


def test_the_end_of_a_load_and_its_notice_are_timed_apart(bench):
    here, there = bench(seed=1), bench(seed=2)
    here.run(saves=[Blocks("a", KEYS[:4], [0, 1, 2, 3])], complete={"a"})
    there.side.start_loads(there.orders(loads=[Blocks("b", KEYS[:4], [4, 5, 6, 7])]))
    deadline = time.monotonic() + 180
    while not there.side.loader.loads._done:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(0.2)
    assert there.side.take_finished(set())[1] == {"b"}
    times = there.side.take_stats().data["times"]
    assert len(times["pull_seconds"]) == len(times["noticed_seconds"]) == 1
    assert times["noticed_seconds"][0] >= 0.2 and times["pull_seconds"][0] > 0
    there.side.start_loads(there.orders(loads=[Blocks("c", KEYS[:4], [0, 1, 2, 3])], idle=True))
    assert there.side.take_finished(set())[1] == {"c"}
    times = there.side.take_stats().data["times"]
    assert times["noticed_seconds"][0] < 0.2, "its time began with this load's end"


def test_missing_blocks_fail_and_the_others_are_filled(bench):
    here, there = bench(seed=1), bench(seed=2)
    here.run(saves=[Blocks("a", [KEYS[0], KEYS[2]], [0, 2])], complete={"a"})
    failed, report = there.load("b", KEYS[:3], [5, 6, 7])
    assert failed == {6} and report.failed_loads == {"b"}
    assert torch.equal(there.memory[:, 5], here.memory[:, 0]) and torch.equal(there.memory[:, 7], here.memory[:, 2])
    counted = there.counts()
    assert counted["pulled_blocks/absent"] == 1 and counted["pulled_blocks/hit"] == 2 and counted["loads/failed"] == 1
    assert there.side.loader.take_failed_blocks() == set() and there.run(idle=True)[3].failed_loads == set(), "told once"


def test_a_pool_that_fails_is_a_load_that_fails_and_a_save_that_is_counted(bench, monkeypatch):
    here = bench()

    def lost(_):
        raise pool_access.PoolLost("p")

    monkeypatch.setattr(here.access, "call", lost)
    here.run(saves=[Blocks("a", KEYS[:2], [0, 1])], complete={"a"})
    failed, report = here.load("b", KEYS[:2], [3, 4])
    assert failed == {3, 4} and report.failed_loads == {"b"}
    assert here.counts() == {"published_blocks/lost": 2, "pulled_blocks/lost": 2, "loads/failed": 1}


def test_damage_is_told(bench, monkeypatch):
    here = bench()
    call = here.access.call
    wrong = SimpleNamespace(pull_blocks=lambda ns, keys, layout, ids, after: [None, "checksum", "changed", "checksum"])
    monkeypatch.setattr(here.access, "call", lambda operation: operation(wrong))
    failed, report = here.load("a", KEYS[:4], [1, 2, 3, 4])
    assert failed == {2, 3, 4} and report.corrupt == {KEYS[1], KEYS[3]}, "lookups would find these two again and again"
    monkeypatch.setattr(here.access, "call", call)


class Slow:
    """Holds up the publishing of a worker's side, or another call of its mover."""

    def __init__(self, bench: Bench, monkeypatch, name: str = "publish") -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        mover = type(bench.side.attachment.own[0].mover)
        call = getattr(mover, name)

        def slow(*arguments):
            self.begun.set()
            assert self.go_on.wait(30)
            return call(*arguments)

        monkeypatch.setattr(mover, name, slow)

    def holds_up(self, call, within_s: float) -> None:
        """`call` does not return before the publishing goes on, and does then. The publishing goes on from here."""
        waiting = threading.Thread(target=call)
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        self.go_on.set()
        waiting.join(within_s)
        assert not waiting.is_alive()


def test_a_step_that_completes_a_prompt_waits_for_all_its_blocks(bench, monkeypatch):
    here = bench()
    slow = Slow(here, monkeypatch)
    report = here.run(saves=[Blocks("a", KEYS[:2], [0, 1])])[3]
    assert report.saved_step == 0, "an earlier chunk is published beside the next one"
    done = []
    step = threading.Thread(target=lambda: done.append(here.run(saves=[Blocks("a", KEYS[2:4], [2, 3])], complete={"a"})))
    step.start()
    assert slow.begun.wait(30)
    step.join(0.1)
    assert step.is_alive()
    slow.go_on.set()
    step.join(30)
    assert done[0][3].saved_step == 2
    assert here.access.call(lambda cache: cache.has(here.side.attachment.own[0].namespaces[0], KEYS[:4])) == [True] * 4


def test_a_request_that_shares_blocks_waits_for_their_publisher(bench, monkeypatch):
    here = bench()
    slow = Slow(here, monkeypatch)
    here.run(saves=[Blocks("a", KEYS[:2], [0, 1])])
    assert slow.begun.wait(30)
    step = threading.Thread(target=lambda: here.run(saves=[Blocks("b", KEYS[:2], [0, 1])], complete={"b"}))
    step.start()
    step.join(0.1)
    assert step.is_alive()
    slow.go_on.set()
    step.join(30)
    assert not step.is_alive() and here.counts()["published_blocks/stored"] == 2


def test_blocks_of_a_preempted_request_are_not_overwritten_while_they_are_read(bench, monkeypatch):
    here = bench(workers=1)
    slow = Slow(here, monkeypatch)
    here.run(saves=[Blocks("a", KEYS[:2], [0, 1])])
    assert slow.begun.wait(30)
    slow.holds_up(lambda: here.side.before_overwrite(here.orders(preempted={"a"})), within_s=30)


def test_a_tail_is_not_written_on_while_it_is_read(bench, monkeypatch):
    """The next step puts a generated token into the same block."""
    here = bench()
    slow = Slow(here, monkeypatch)
    here.run(saves=[Blocks("a", KEYS[:1], [0]), Blocks("a", KEYS[1:2], [1], KEYS[0], tail_tokens=5), Blocks("b", KEYS[2:3], [2])])
    slow.holds_up(lambda: here.side.before_overwrite(here.orders(grows={"a"})), within_s=30)
    here.side.before_overwrite(here.orders())


def test_saves_end_before_the_engine_s_memory_goes(bench, monkeypatch):
    here = bench()
    slow = Slow(here, monkeypatch)
    here.run(saves=[Blocks("a", KEYS[:4], [0, 1, 2, 3])])
    assert slow.begun.wait(30)
    slow.holds_up(here.side.end_copies, within_s=30)
    assert not here.side.saver.saves.is_busy("a")


def test_released_requests_are_told_when_their_saves_are_over(bench, monkeypatch):
    here = bench()
    slow = Slow(here, monkeypatch)
    here.run(saves=[Blocks("a", KEYS[:2], [0, 1])])
    saved, _, _, _ = here.run(release={"a", "never saved"}, finished={"a"}, idle=True)
    assert saved == {"never saved"}
    slow.go_on.set()
    deadline = time.monotonic() + 180
    while not saved & {"a"}:
        assert time.monotonic() < deadline
        saved = here.run(idle=True)[0]
    assert here.run(idle=True)[0] == set(), "told once"


def test_a_copy_that_never_ends_stops_the_engine(bench, monkeypatch, waits):
    waits(copy_ms=50)
    here = bench()
    slow = Slow(here, monkeypatch)
    with pytest.raises(CopyTimeout, match="50 ms"):
        here.run(saves=[Blocks("a", KEYS[:1], [0])], complete={"a"})
    slow.go_on.set()


def test_a_cancelled_load_is_reported(bench, monkeypatch):
    """vLLM frees the blocks of an aborted request when its load is over, and not before."""
    monkeypatch.setattr(loader, "_JOB_BYTES", 1)
    here = bench(workers=1)
    begun, go_on = threading.Event(), threading.Event()
    pull = here.side.loader.pull

    def slow(*arguments):
        begun.set()
        assert go_on.wait(30)
        return pull(*arguments)

    monkeypatch.setattr(here.side.loader, "pull", slow)
    here.run(loads=[Blocks("a", KEYS[:5], [0, 1, 2, 3, 4])])
    assert begun.wait(30)
    assert here.run(finished={"a"})[1] == set()
    go_on.set()
    deadline = time.monotonic() + 180
    loaded = set()
    while not loaded:
        assert time.monotonic() < deadline
        loaded = here.run(idle=True)[1]
    counted = here.counts()
    assert loaded == {"a"} and counted["loads/cancelled"] == 1 and counted["pulled_blocks/absent"] == 1


def test_long_chains_go_in_pieces(bench, monkeypatch):
    here, there = bench(seed=1), bench(seed=2)
    for module in (saver, loader):
        monkeypatch.setattr(module, "_JOB_BYTES", 3 * here.side.handshake().cell_bytes)
    parents = []
    mover = type(here.side.attachment.own[0].mover)
    publish = mover.publish

    def noted(self, batch, *rest):
        parents.append((batch.keys, batch.parents))
        return publish(self, batch, *rest)

    monkeypatch.setattr(mover, "publish", noted)
    here.run(saves=[Blocks("a", KEYS[:8], list(range(8)), parent=KEYS[9])], complete={"a"})
    assert sorted((len(keys), chain[0]) for keys, chain in parents) == sorted([(3, KEYS[9]), (3, KEYS[2]), (2, KEYS[5])])
    assert all(chain[1:] == keys[:-1] for keys, chain in parents)
    assert there.load("b", KEYS[:8], list(range(4, 12)))[0] == set()
    assert torch.equal(there.memory[:, 4:12], here.memory[:, :8])


def test_a_block_about_to_go_is_tried_again(bench, monkeypatch):
    here = bench()
    answers = iter((["reserved", "busy", "busy"], ["exists", "busy"], ["reserved"]))
    asked, copied = [], []

    def reserve_blocks(ns, keys, layout, parents):
        asked.append((keys, parents))
        outcomes = next(answers)

        def publish(layout, ids, after):
            copied.append(ids)
            return ["stored" if outcome == "reserved" else outcome for outcome in outcomes]

        return SimpleNamespace(outcomes=outcomes, publish=publish)

    monkeypatch.setattr(here.access, "call", lambda operation: operation(SimpleNamespace(reserve_blocks=reserve_blocks)))
    here.run(saves=[Blocks("a", KEYS[:3], [5, 6, 7], parent=None)], complete={"a"})
    assert asked == [(KEYS[:3], [None, *KEYS[:2]]), (KEYS[1:3], KEYS[:2]), ([KEYS[2]], [KEYS[1]])]
    assert copied == [[5, 6, 7], [6, 7], [7]]
    counted = here.counts()
    assert counted["published_blocks/stored"] == 2 and counted["published_blocks/exists"] == 1
    monkeypatch.undo()


def test_of_ranks_with_the_same_heads_one_publishes(bench):
    second = bench(replicas=2, rank=1)
    second.run(saves=[Blocks("a", KEYS[:2], [0, 1])], complete={"a"})
    assert second.counts() == {}
    first = bench(replicas=2, rank=2)
    first.run(saves=[Blocks("a", KEYS[:2], [0, 1])], complete={"a"})
    assert first.counts()["published_blocks/stored"] == 2


def test_reports_of_several_workers(bench):
    both = WorkerReport(4, {"a"}, {b"x"}, {b"k": 1, b"l": 1}).aggregate(WorkerReport(3, {"b"}, {b"y"}, {b"k": 1}))
    assert both == WorkerReport(3, {"a", "b"}, {b"x", b"y"}, {b"k": 2, b"l": 1})


def test_a_pool_with_too_small_cells_is_refused(make_pool, monkeypatch):
    with pytest.raises(ConfigError, match=r"takes 8192 bytes.*cells .* \[4096\].*--cells 64K:75%"):
        Bench(make_pool(size="64M", cells="4K:75%"), monkeypatch)
    assert not pool_access._registry


@pytest.mark.parametrize(("cells", "unused"), [("8K:75%", None), ("16K:75%", None), ("16448:75%", 51), ("256:1%,64K:60%", 88)])
def test_cells_that_a_block_fills_less_than_half_are_named_with_the_right_size(make_pool, monkeypatch, caplog, cells, unused):
    Bench(make_pool(size="64M", cells=cells), monkeypatch).close()
    said = [record.getMessage() for record in caplog.records if "stays unused" in record.getMessage()]
    assert len(said) == (unused is not None), said
    if said:
        assert "blocks of [8192] bytes" in said[0] and f": {unused} %" in said[0] and "--cells 8192:SHARE" in said[0]


def test_memory_that_cannot_be_copied_from_is_refused(bench, monkeypatch):
    """At start, instead of by every block."""
    here = bench()

    def refuses(_):
        raise kvbm_cxl.InvalidError("no engine for it")

    monkeypatch.setattr(here.access, "call", refuses)
    with pytest.raises(ConfigError, match="cannot copy from and to the KV cache .on cpu.: no engine for it"):
        here.side.attach({f"layers.{layer}": here.memory[layer] for layer in range(LAYERS)})
    monkeypatch.undo()


def test_memory_of_other_devices_is_refused():
    with pytest.raises(ConfigError, match="CPUs and CUDA"):
        movers.check_device(torch.device("xpu"))
    assert movers.check_device(torch.device("cuda", 1)) == "cuda:1"
