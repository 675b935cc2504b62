# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side for several KV cache groups, on a real pool: what is published, found, pinned and loaded of each."""

from types import SimpleNamespace

import kvbm_cxl
import pytest
from kvbm_cxl.vllm_integration import handover, pool_access
from kvbm_cxl.vllm_integration.config import ConnectorConfig
from kvbm_cxl.vllm_integration.groups import Group, Kind, Shape
from kvbm_cxl.vllm_integration.metadata import WorkerHandshake
from kvbm_cxl.vllm_integration.scheduler import SchedulerSide
from requests_of_vllm import BLOCK_TOKENS, Scheduled, request, tokens
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput

# A window of 40 tokens: behind a prefix, the blocks of its last 39.
FULL = Group(0, ("full",), BLOCK_TOKENS, Kind.FULL)
WINDOWED = Shape((FULL, Group(1, ("window",), BLOCK_TOKENS, Kind.WINDOW, 40)), BLOCK_TOKENS, BLOCK_TOKENS)
WINDOWS = Shape(tuple(Group(at, (f"window {at}",), BLOCK_TOKENS, Kind.WINDOW, 40) for at in range(2)), BLOCK_TOKENS, BLOCK_TOKENS)
RECURRENT = Shape((FULL, Group(1, ("state",), BLOCK_TOKENS, Kind.STATE)), BLOCK_TOKENS, BLOCK_TOKENS)
_FIELDS = {"dtype": "d", "layer_count": 1, "kv_head_count": 1, "head_size": 8, "block_tokens": BLOCK_TOKENS, "layout": "l", "tp_size": 2}


def _namespace(rank: int, group: int) -> kvbm_cxl.Namespace:
    return kvbm_cxl.Namespace(model=f"m{group}", tp_rank=rank, **_FIELDS)


class Bench:
    """The scheduler's sides of prefill and decode, and what carries out their orders: blocks hold their keys."""

    def __init__(self, pool: str, shape: Shape, ranks: int = 2, **options) -> None:
        self.config = ConnectorConfig.read({"pool": pool, "window_every_tokens": 64, **options})
        self.access, self.shape = pool_access.acquire(self.config), shape
        self.side = SchedulerSide(self.config, self.access, shape, True, False)
        self.decode = SchedulerSide(self.config, self.access, shape, False, True)
        self.namespaces = [[_namespace(rank, group) for rank in range(ranks)] for group in range(2)]
        workers = ((bytes(full), bytes(other)) for full, other in zip(*self.namespaces))
        self.greet({(0, rank): WorkerHandshake(((full,), (other,)), 4096) for rank, (full, other) in enumerate(workers)})

    def greet(self, workers: dict[tuple[int, int], WorkerHandshake]) -> None:
        for side in (self.side, self.decode):
            side.handshake(workers)

    def run(self, asked, begin: int, end: int, ids=None, offered=(), computed: int = 0):
        """A step that computes the tokens `begin` to `end`; what was published, by group: block ids. vLLM has `computed` tokens itself."""
        blocks = -(-asked.num_tokens // BLOCK_TOKENS)
        table = ids or ([*range(100, 100 + blocks)], [*range(200, 200 + blocks)])
        asked.num_computed_tokens = begin
        self.side.match(asked, computed)
        states = {asked.request_id: list(offered)} if offered else {}
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens, output.total_num_scheduled_tokens = {asked.request_id: end - begin}, end - begin
        output.kv_connector_block_state = KVConnectorBlockState({asked.request_id}, lambda _: table, states)
        orders = self.side.step(output)
        saved = {0: [], 1: []}
        for blocks in orders.saves:
            saved[blocks.group] += blocks.block_ids
            for namespace in self.namespaces[blocks.group]:
                for key in blocks.keys:
                    self.access.call(lambda cache: cache.publish(namespace, key, key * 16))
        return saved, orders

    def pinned(self) -> int:
        return self.access.call(lambda cache: cache.pinned())

    def evict(self, group: int, key: bytes, rank: int = 0) -> None:
        assert self.access.call(lambda cache: cache.evict(self.namespaces[group][rank], key))

    def admit(self, asked, computed: int = 0, finish: bool = True):
        external, _ = self.decode.match(asked, computed)
        blocks = -(-(computed + external) // BLOCK_TOKENS)
        table = ([*range(300, 300 + blocks)], [*range(400, 400 + blocks)])
        self.decode.note_allocation(asked, SimpleNamespace(get_block_ids=lambda: table), external)
        loads = self.decode.step(Scheduled()).loads
        if finish:
            self.decode.report(SimpleNamespace(kv_connector_worker_meta=None, finished_recving={asked.request_id}, finished_sending=None))
        return external, {blocks.group: (blocks.block_ids, blocks.tail_tokens) for blocks in loads}


@pytest.fixture
def bench(make_pool):
    made = []

    def make(shape: Shape, **options) -> Bench:
        made.append(Bench(make_pool(size="64M", cells="64K:75%"), shape, **options))
        return made[-1]

    yield make
    for each in made:
        each.side.close()
        each.decode.close()
        assert each.pinned() == each.side.lookups.pinned == each.decode.lookups.pinned == 0
        each.access.release()


def test_of_a_window_its_last_blocks_are_published_and_loaded(bench):
    here, prompt = bench(WINDOWED), tokens(300)
    asked = request("a", prompt)
    first, _ = here.run(asked, 0, 150)
    second, orders = here.run(asked, 150, 300)
    assert first[0] + second[0] == [*range(100, 119)], "full attention: every block, the tail's last"
    # Behind 64, 128, 192, 256 and 288 tokens and the prompt: all blocks of the last 39 tokens each.
    assert first[1] == [200 + at for at in (1, 2, 3, 5, 6, 7)]
    assert second[1] == [200 + at for at in (9, 10, 11, 13, 14, 15, 16, 17, 18)]
    external, loads = here.admit(request("b", prompt), finish=False)
    assert external == 299, "the last token is computed again, and its window begins before that of the next"
    assert loads == {0: ([*range(300, 319)], 12), 1: ([416, 417, 418], 12)}
    assert here.pinned() == 2 * (19 + 3)


def test_a_shorter_prompt_finds_the_window_of_its_own_end(bench):
    here, prompt = bench(WINDOWED), tokens(300)
    asked = request("a", prompt)
    here.run(asked, 0, 300)
    other = request("b", [*prompt[:140], *tokens(60, seed=9)])
    external, loads = here.admit(other)
    assert external == 128 and loads == {0: ([*range(300, 308)], 0), 1: ([405, 406, 407], 0)}
    # What vLLM has itself is not loaded again.
    later = request("c", prompt)
    external, loads = here.admit(later, computed=256)
    assert external == 43 and loads == {0: ([316, 317, 318], 12), 1: ([416, 417, 418], 12)}


@pytest.mark.parametrize("rank", (0, 1))
def test_a_block_of_a_window_that_is_gone_shortens_the_prefix(bench, rank):
    here, prompt = bench(WINDOWED), tokens(300)
    asked = request("a", prompt)
    here.run(asked, 0, 300)
    tracked = here.side._track(request("k", prompt))
    here.evict(1, here.side.names.keys(tracked, 17, 18, 1)[0], rank)
    external, loads = here.admit(request("b", prompt))
    assert external == 272 and loads[1] == ([414, 415, 416], 0)
    here.evict(0, here.side.names.keys(tracked, 5, 6, 0)[0], rank)
    external, loads = here.admit(request("c", prompt))
    assert external == 64 and loads == {0: ([*range(300, 304)], 0), 1: ([401, 402, 403], 0)}


def test_blocks_that_vllm_has_let_go_of_are_not_published(bench):
    here = bench(WINDOWED)
    asked = request("a", tokens(300))
    # Its own cache had the first 160 tokens: of the window only what lies behind.
    ids = ([*range(100, 119)], [0] * 8 + [*range(208, 219)])
    saved, _ = here.run(asked, 160, 300, ids)
    assert saved[0] == [*range(100, 119)] and 0 not in saved[1] and saved[1] == [*range(209, 212), *range(213, 219)]


def test_states_are_published_from_the_blocks_that_vllm_names(bench):
    here, prompt = bench(RECURRENT), tokens(100)
    asked = request("a", prompt)
    saved, orders = here.run(asked, 0, 100, offered=[(1, 777, 96)])
    assert saved == {0: [*range(100, 106)], 1: [777]}
    assert [blocks.is_state for blocks in orders.saves] == [False, True], "the next step may overwrite it"
    external, loads = here.admit(request("b", prompt))
    assert external == 96 and loads == {0: ([*range(300, 306)], 0), 1: ([405], 0)}
    # No state at any other place: nothing to go on from.
    assert here.admit(request("c", [*prompt[:80], *tokens(30, seed=5)])) == (0, {})
    # Nor from a state that holds the last token already.
    assert here.admit(request("d", prompt[:96])) == (0, {})
    # A state that is not at the end of a block of all groups, or of tokens that are not known yet, has no name.
    assert here.run(request("e", tokens(100, seed=7)), 0, 100, offered=[(1, 778, 90), (1, 779, 112)])[0][1] == []


def _boundary(side, prompt, computed: int = 0, known: int = 0) -> int:
    """Where vLLM keeps a state of a prompt that is looked up; `known`: where it does by itself."""
    asked = request("looks", prompt)
    asked.shared_prefix_boundary = known
    side.match(asked, computed)
    side.step(Scheduled())
    side.finish(asked)
    return asked.shared_prefix_boundary


def test_a_state_is_kept_where_the_pool_has_a_prefix_without_it(bench):
    here, prompt = bench(RECURRENT), tokens(100)
    here.run(request("a", prompt), 0, 100, offered=[(1, 777, 96)])
    other = [*prompt[:80], *tokens(30, seed=5)]
    assert _boundary(here.side, other) == 80
    assert _boundary(here.side, other, known=96) == 96 and _boundary(here.side, other, known=48) == 80
    assert _boundary(here.side, prompt) == 0, "the state at its end is there"
    assert _boundary(here.side, prompt, computed=96) == 0, "vLLM continues from its own"
    # At the end of a prompt's last whole block vLLM keeps the state by itself; a prefix ends before the last token.
    assert _boundary(here.side, prompt[:96]) == 80
    assert _boundary(here.decode, other) == 0, "it would publish nothing of it"
    # With the state at 80 the prefix is found, and nothing is missing any more; of a prompt that shares more, more is.
    here.run(request("b", other), 0, 80, offered=[(1, 778, 80)])
    assert here.admit(request("c", other))[0] == 80 and _boundary(here.side, other) == 0
    here.run(request("d", other), 80, 110, offered=[])
    longer = [*other[:96], *tokens(30, seed=6)]
    assert here.admit(request("e", longer))[0] == 80 and _boundary(here.side, longer) == 96
    assert _boundary(here.side, longer, computed=80) == 96


def test_no_state_is_asked_for_that_may_not_be_published(bench):
    here, prompt = bench(RECURRENT), tokens(100)
    here.run(request("a", prompt), 0, 100)
    other = [*prompt[:80], *tokens(30, seed=5)]
    assert _boundary(here.side, other) == 80
    asked = request("of earlier weights", other)
    here.side._track(asked).stale = True
    here.side.match(asked, 0)
    assert asked.shared_prefix_boundary == 0
    here.side.names.era.suspect("a call")
    assert _boundary(here.side, other) == 0


def test_a_window_is_published_where_the_pool_has_a_prefix_without_it(bench):
    here, prompt = bench(WINDOWED, window_every_tokens=1 << 20), tokens(300)
    here.run(request("a", prompt), 0, 300)
    prompts = [[*prompt[:200], *tokens(100, seed=seed)] for seed in (5, 6, 7)]
    assert here.admit(request("b", prompts[0]))[0] == 0
    assert _boundary(here.side, prompts[0]) == 0, "vLLM has windows without being asked"
    saved, _ = here.run(request("c", prompts[0]), 0, 300)
    # What a prefix of 192 tokens needs, and that of the prompt's own end.
    assert saved[1] == [200 + at for at in (9, 10, 11, 15, 16, 17, 18)]
    assert here.admit(request("d", prompts[1]))[0] == 192
    saved, _ = here.run(request("e", prompts[2]), 0, 300)
    assert saved[1] == [200 + at for at in (15, 16, 17, 18)], "nothing is missing any more"


@pytest.mark.parametrize("shape", (WINDOWED, WINDOWS), ids=("and-full-attention", "alone"))
def test_a_window_is_published_where_vllm_has_a_prefix_itself(bench, shape):
    """The second prompt that begins so is one of the same engine: the third may be another one's."""
    here, prompt = bench(shape, window_every_tokens=1 << 20), tokens(300)
    here.run(request("a", prompt), 0, 300)
    second = request("b", [*prompt[:200], *tokens(100, seed=5)])
    # Before the window that follows the prefix vLLM has let go of its blocks.
    let_go = [0] * 9 + [*range(209, 219)]
    ids = (let_go if shape is WINDOWS else [*range(100, 119)], let_go)
    saved, _ = here.run(second, 192, 300, ids, computed=192)
    assert saved[1] == [200 + at for at in (9, 10, 11, 15, 16, 17, 18)]
    assert here.admit(request("c", [*prompt[:200], *tokens(100, seed=6)]))[0] == 192


def test_of_a_pipeline_each_group_is_asked_of_the_stages_that_have_layers_of_it(bench):
    here, prompt = bench(WINDOWED, ranks=1), tokens(300)
    (full,), (window,) = here.namespaces
    stages = (WorkerHandshake(((bytes(full),), ()), 4096), WorkerHandshake(((), (bytes(window),)), 4096))
    here.greet({(stage, 0): greeting for stage, greeting in enumerate(stages)})
    assert [list(map(bytes, group)) for group in here.side.names.by_group] == [[bytes(full)], [bytes(window)]]
    here.run(request("a", prompt), 0, 300)
    assert here.admit(request("b", prompt))[0] == 299
    here.evict(1, here.side.names.keys(here.side._track(request("k", prompt)), 17, 18, 1)[0])
    assert here.admit(request("c", prompt))[0] == 272
    # A group that no stage has would be found everywhere.
    here.greet({(0, 0): stages[0]})
    assert here.decode.names.by_group == [] and here.admit(request("d", prompt)) == (0, {})


def test_prefill_promises_decode_what_it_can_find(bench):
    for shape, found in ((WINDOWED, 99), (RECURRENT, 96)):
        here = bench(shape)
        asked = request("a", tokens(100), handover.prefill_params())
        here.run(asked, 0, 100, offered=[(1, 777, 96)] if shape is RECURRENT else ())
        _, params = here.side.finish(asked)
        assert handover.expected_of(params).tokens == found
        assert here.side.match(request("b", tokens(100), params), 0) == (found, True)
