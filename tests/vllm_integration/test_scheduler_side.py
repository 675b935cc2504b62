# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side by itself, on a real pool, with requests of vLLM's."""

import time
from types import SimpleNamespace

import kvbm_cxl
import pytest
from kvbm_cxl.vllm_integration import handover, pool_access
from kvbm_cxl.vllm_integration.config import ConnectorConfig
from kvbm_cxl.vllm_integration.groups import Shape
from kvbm_cxl.vllm_integration.keys import group_keys, tail_key
from kvbm_cxl.vllm_integration.metadata import WorkerHandshake, WorkerReport
from kvbm_cxl.vllm_integration.scheduler import SchedulerSide
from requests_of_vllm import BLOCK_TOKENS, Scheduled, allocation, request, tokens


def _namespace(rank: int) -> kvbm_cxl.Namespace:
    return kvbm_cxl.Namespace(
        model="m", dtype="d", layer_count=1, kv_head_count=1, head_size=8, block_tokens=BLOCK_TOKENS, layout="l", tp_rank=rank, tp_size=3
    )


class Bench:
    """A scheduler's side with a pool of its own."""

    def __init__(self, pool: str, *, ranks: int = 1, producer: bool = True, consumer: bool = True, **options) -> None:
        self.config = ConnectorConfig.read({"pool": pool, **options})
        self.access = pool_access.acquire(self.config)
        self.side = SchedulerSide(self.config, self.access, Shape.plain(BLOCK_TOKENS), producer, consumer)
        self.namespaces = [_namespace(rank) for rank in range(ranks)]
        self.side.handshake({(0, rank): WorkerHandshake(((bytes(namespace),),), 4096) for rank, namespace in enumerate(self.namespaces)})

    def publish(self, asked, blocks: int, *, tail: bool = False, ranks: int | None = None) -> None:
        keys = group_keys(asked, 0, blocks) + ([tail_key(asked, BLOCK_TOKENS)] if tail else [])
        for namespace in self.namespaces[:ranks]:
            for key in keys:
                self.access.call(lambda cache: cache.publish(namespace, key, key * 16))

    @property
    def pinned(self) -> int:
        return self.access.call(lambda cache: cache.pinned())

    def admit(self, asked, blocks: list[int] | None = None):
        """Looks a request up and admits it, as vLLM does for one that fits; the load that was ordered."""
        external, beside = self.side.match(asked, 0)
        self.side.note_allocation(asked, allocation(blocks or list(range(100, 100 + 64))), external)
        return external, beside, self.side.step(Scheduled())

    def finish_load(self, *names: str, failed: bool = False, saved_step: int = 0) -> None:
        report = WorkerReport(saved_step, set(names) if failed else set())
        self.side.report(SimpleNamespace(kv_connector_worker_meta=report, finished_recving=set(names), finished_sending=None))

    def counts(self) -> dict[str, int]:
        stats = self.side.take_stats()
        return stats.data["counters"] if stats else {}


@pytest.fixture
def bench(make_pool):
    benches = []

    def make(**options) -> Bench:
        benches.append(Bench(make_pool(size="64M", cells="64K:75%"), **options))
        return benches[-1]

    yield make
    for each in benches:
        each.side.close()
        assert each.pinned == each.side.lookups.pinned == 0, "nothing stays pinned, nor counted as such"
        each.access.release()


def test_nothing_is_promised_of_an_empty_pool(bench):
    here = bench()
    assert here.side.match(request("a", tokens(100)), 0) == (0, False)
    assert here.counts() == {"lookups/none": 1} and here.pinned == 0


@pytest.mark.parametrize(("published", "tail", "found"), ((6, True, 100), (6, False, 96), (3, True, 48), (1, False, 16), (0, True, 0)))
def test_the_longest_prefix_is_promised(bench, published, tail, found):
    here, asked = bench(producer=False), request("a", tokens(100))
    here.publish(asked, published, tail=tail)
    assert here.side.match(asked, 0) == (found, found > 0)
    assert here.pinned == (published + (tail and published == 6))
    here.side.step(Scheduled())
    assert here.pinned == 0, "a promise that vLLM did not take up is unpinned when the step is scheduled"
    assert here.side.match(asked, 0) == (found, found > 0), "and may be asked for again"


def test_only_what_vllm_does_not_have_is_promised(bench):
    here, asked = bench(producer=False), request("a", tokens(100))
    here.publish(asked, 6, tail=True)
    assert here.side.match(asked, 32) == (68, True)
    here.side.note_allocation(asked, allocation(list(range(7))), 68)
    (load,) = here.side.step(Scheduled()).loads
    assert load.keys == [*group_keys(asked, 2, 6), tail_key(asked, BLOCK_TOKENS)]
    assert load.block_ids == [2, 3, 4, 5, 6] and load.tail_tokens == 4 and load.parent == group_keys(asked, 1, 2)[0]
    assert here.pinned == 5, "pinned until the load is over"
    here.finish_load("a")
    assert here.pinned == 0
    assert here.counts() == {"lookups/full": 1, "prompt_tokens/pulled": 68, "prompt_tokens/reused": 32}


def test_only_a_tail_is_missing(bench):
    here, asked = bench(producer=False), request("a", tokens(100))
    here.publish(asked, 6, tail=True)
    assert here.side.match(asked, 96) == (4, True)
    assert here.side.match(request("b", tokens(96)), 96) == (0, False)


def test_vllm_may_take_less_than_it_is_offered(bench):
    here, asked = bench(producer=False), request("a", tokens(100))
    here.publish(asked, 6, tail=True)
    assert here.side.match(asked, 0) == (100, True)
    here.side.note_allocation(asked, allocation(list(range(7))), 96)
    (load,) = here.side.step(Scheduled()).loads
    assert load.keys == group_keys(asked, 0, 6) and load.tail_tokens == 0 and load.block_ids == list(range(6))


def test_every_rank_must_have_a_block(bench):
    here, asked = bench(ranks=3, producer=False), request("a", tokens(100))
    here.publish(asked, 6, tail=True)
    assert here.side.match(asked, 0) == (100, True) and here.pinned == 21
    other = request("b", tokens(100, 1))
    here.publish(other, 2, ranks=3)
    here.publish(other, 6, ranks=1)
    assert here.side.match(other, 0) == (32, True)
    third = request("c", tokens(100, 2))
    here.publish(third, 6, ranks=2)
    assert here.side.match(third, 0) == (0, False), "a rank has none of it"


def test_ranks_with_the_same_heads_are_looked_up_once(bench):
    here = bench()
    one = WorkerHandshake(((bytes(here.namespaces[0]),),), 4096)
    here.side.handshake({(0, 0): one, (0, 1): one})
    assert here.side.workers == 1


def test_nothing_is_found_before_the_workers_are_known(bench):
    here, asked = bench(), request("a", tokens(100))
    here.publish(asked, 6)
    here.side.handshake({})
    assert here.side.match(asked, 0) == (0, False)


def test_a_prompt_of_one_token_is_not_loaded(bench):
    """vLLM computes the last token anyway, and would ask for it again and again."""
    here, asked = bench(producer=False), request("a", tokens(1))
    here.publish(asked, 0, tail=True)
    assert here.side.match(asked, 0) == (0, False)
    two = request("b", tokens(2))
    here.publish(two, 0, tail=True)
    assert here.side.match(two, 0) == (2, True)


def test_requests_that_must_not_be_cached(bench):
    here, ids = bench(), tokens(100)
    here.publish(request("a", ids), 6, tail=True)
    with_logprobs = request("b", ids, sampling={"prompt_logprobs": 1})
    assert with_logprobs.skip_reading_prefix_cache
    assert here.side.match(with_logprobs, 0) == (0, False)
    assert here.counts()["lookups/skipped"] == 1


def test_short_hits_are_computed(bench):
    here, asked = bench(min_load_tokens=33), request("a", tokens(100))
    here.publish(asked, 2)
    assert here.side.match(asked, 0) == (0, False)
    here.publish(asked, 3)
    assert here.side.match(asked, 0) == (48, True)


@pytest.mark.parametrize("length", (100, 7))
def test_a_tail_is_looked_up_where_another_engine_published_it(bench, length):
    """It may be there of another engine's hand-over; an engine that decodes what it computes takes whole blocks."""
    full, expected = length // BLOCK_TOKENS * BLOCK_TOKENS, handover.Expected(length, str(_namespace(0))).to_params()
    for roles, params, found in (
        ({}, None, full),
        ({}, handover.prefill_params(), full),
        ({"consumer": False}, None, full),
        ({}, expected, length),
        ({"producer": False}, None, length),
    ):
        here, asked = bench(**roles), request("a", tokens(length), params)
        here.publish(asked, length // BLOCK_TOKENS, tail=True)
        assert here.side.match(asked, 0)[0] == found, (roles, params)


@pytest.mark.parametrize("length", (100, 7))
def test_a_tail_is_published_for_a_hand_over_alone(bench, waits, length):
    waits(handover_ms=0)
    expected = handover.Expected(length, str(_namespace(0))).to_params()
    for roles, params, tails in (({}, None, 0), ({}, expected, 0), ({}, handover.prefill_params(), 1), ({"consumer": False}, None, 1)):
        here, asked = bench(**roles), request("a", tokens(length), params)
        _begin(here, asked)
        saves = _run(here, asked, length).saves
        assert sum(len(save.keys) for save in saves if not save.tail_tokens) == length // BLOCK_TOKENS
        assert [save.keys for save in saves if save.tail_tokens] == [[tail_key(asked, BLOCK_TOKENS)]] * tails, (roles, params)
        promised = handover.expected_of(here.side.finish(asked)[1])
        assert (promised.tokens if promised else 0) == length * tails


def test_pins_are_bounded(bench):
    here = bench(max_pinned_blocks=10, producer=False)
    first, second = (request(name, tokens(100, seed)) for seed, name in enumerate("ab"))
    here.publish(first, 6, tail=True)
    here.publish(second, 6, tail=True)
    here.admit(first)
    assert here.side.match(second, 0) == (None, False), "asked again when the load of the first is over"
    assert here.pinned == 7 and here.counts()["lookups/deferred"] == 1
    here.finish_load("a")
    assert here.side.match(second, 0) == (100, True)


def test_a_request_beyond_the_bound_has_its_turn_alone(bench):
    here, asked = bench(max_pinned_blocks=3, producer=False), request("a", tokens(100))
    here.publish(asked, 6, tail=True)
    assert here.side.match(asked, 0) == (100, True)


def test_a_prefix_that_is_being_loaded_is_waited_for(bench):
    """vLLM has the blocks itself then: they are pulled once, and lie in its memory once."""
    here = bench(producer=False)
    prefix = tokens(64)
    first, second = (request(name, prefix + tokens(40, seed)) for seed, name in enumerate("ab", 1))
    for asked in (first, second):
        here.publish(asked, 6, tail=True)
    here.admit(first)
    assert here.side.match(second, 0) == (None, False) and here.pinned == 7
    assert here.side.match(second, 16) == (None, False), "the next one is on its way as well"
    assert here.side.match(second, 64) == (40, True), "these are of this engine alone"
    assert here.side.match(request("c", tokens(100, 9)), 0) == (0, False)
    here.finish_load("a")
    assert here.counts()["lookups/deferred"] == 2 and not here.side.lookups.loading
    assert here.side.match(second, 64) == (40, True)


def test_a_waiting_request_goes_on_when_the_load_does_not_come(bench):
    here = bench(producer=False)
    asked = [request(name, tokens(100)) for name in "abc"]
    here.publish(asked[0], 6, tail=True)
    here.admit(asked[0])
    assert here.side.match(asked[1], 0) == (None, False)
    here.side.finish(asked[0])
    assert here.side.match(asked[1], 0) == (100, True)
    here.side.note_allocation(asked[1], allocation(list(range(7))), 100)
    assert here.side.match(asked[2], 0) == (None, False)
    assert here.side.match(asked[2], 96) == (4, True), "no other request shares a tail"
    here.finish_load("b", failed=True)
    assert here.side.match(asked[2], 0) == (100, True) and not here.side.lookups.loading


def test_a_failed_load_is_not_tried_again(bench):
    """With its first block bad vLLM asks anew, and the block is bad still."""
    here, asked = bench(), request("a", tokens(100))
    here.publish(asked, 6, tail=True)
    here.admit(asked)
    here.finish_load("a", failed=True)
    assert here.side.match(asked, 0) == (0, False) and here.pinned == 0


def test_a_damaged_block_is_looked_past_until_it_is_gone(bench):
    """A reader has it pinned, so that its owner cannot evict it yet."""
    here, asked = bench(producer=False), request("a", tokens(100))
    here.publish(asked, 6, tail=True)
    bad = group_keys(asked, 2, 3)
    pins = here.access.call(lambda cache: cache.pin_chain(here.namespaces[0], bad))
    report = WorkerReport(0, {"a"}, set(bad))
    here.side.report(SimpleNamespace(kv_connector_worker_meta=report, finished_recving=set(), finished_sending=None))
    assert here.side.match(request("b", tokens(100)), 0) == (32, True)
    here.side.step(Scheduled())
    pins.release()
    # Looking it up asks for its eviction again, by a thread: that may wait for locks.
    deadline = time.monotonic() + 180
    while here.side.corrupt:
        assert time.monotonic() < deadline and here.side.match(request("c", tokens(100)), 0) == (32, True)
        here.side.step(Scheduled())
        time.sleep(0.001)
    here.access.call(lambda cache: cache.publish(here.namespaces[0], bad[0], b"right"))
    assert here.side.match(request("e", tokens(100)), 0) == (100, True)


def test_an_aborted_request_is_unpinned(bench):
    here, asked = bench(producer=False), request("a", tokens(100))
    here.publish(asked, 6, tail=True)
    here.admit(asked)
    assert here.pinned == 7
    assert here.side.finish(asked) == (False, None), "vLLM keeps the blocks of a load by itself"
    assert here.pinned == 0
    here.finish_load("a")


def _run(here, asked, new_tokens: int, *, blocks=None, preempted=()):
    """A step that computes `new_tokens` more of a request."""
    name, count = asked.request_id, -(-(asked.num_computed_tokens + new_tokens) // BLOCK_TOKENS)
    table, computed = {name: blocks or list(range(10, 10 + count))}, {name: asked.num_computed_tokens}
    orders = here.side.step(Scheduled({name: new_tokens}, table, set(preempted), computed))
    asked.num_computed_tokens += new_tokens
    return orders


def _begin(here, asked):
    here.side.match(asked, 0)
    here.side.note_allocation(asked, allocation([]), 0)


@pytest.mark.parametrize("behind", (False, True))
def test_blocks_are_saved_as_chunks_complete_them(bench, behind):
    here, asked = bench(consumer=False, publish_behind=behind), request("a", tokens(100))
    _begin(here, asked)
    (save,) = _run(here, asked, 40).saves
    assert (save.keys, save.block_ids, save.parent) == (group_keys(asked, 0, 2), [10, 11], None)
    (save,) = _run(here, asked, 40).saves
    assert (save.keys, save.block_ids, save.parent) == (group_keys(asked, 2, 5), [12, 13, 14], group_keys(asked, 1, 2)[0])
    orders = _run(here, asked, 20)
    full, tail = orders.saves
    assert (full.keys, full.block_ids) == (group_keys(asked, 5, 6), [15])
    assert (tail.keys, tail.block_ids, tail.tail_tokens) == ([tail_key(asked, BLOCK_TOKENS)], [16], 4)
    assert tail.parent == group_keys(asked, 5, 6)[0] and orders.complete == {"a"}
    delay, params = here.side.finish(asked)
    assert delay == behind, "without publish_behind the last step waited for them"
    told = handover.expected_of(params)
    assert (told.tokens, told.namespace) == (100, str(here.namespaces[0])) and told.facts["pool"] == here.access.pool.uuid


def test_a_prompt_of_whole_blocks_is_complete_without_a_tail(bench):
    here, asked = bench(consumer=False), request("a", tokens(96))
    _begin(here, asked)
    orders = _run(here, asked, 96)
    (save,) = orders.saves
    assert save.keys == group_keys(asked, 0, 6) and orders.complete == {"a"}


def test_a_prompt_shorter_than_a_block_is_a_tail(bench):
    here, asked = bench(consumer=False), request("a", tokens(7))
    _begin(here, asked)
    (save,) = _run(here, asked, 7).saves
    assert save.keys == [tail_key(asked, BLOCK_TOKENS)] and save.block_ids == [10] and save.parent is None


def test_what_vllm_had_itself_is_offered_to_the_pool_once(bench):
    """The pool may have lost it since the other request published it."""
    here, asked = bench(consumer=False), request("a", tokens(100))
    here.side.match(asked, 64)
    here.side.note_allocation(asked, allocation([]), 0)
    asked.num_computed_tokens = 64
    saves = _run(here, asked, 36, blocks=list(range(7))).saves
    assert [key for save in saves for key in save.keys] == [*group_keys(asked, 0, 6), tail_key(asked, BLOCK_TOKENS)]
    asked.append_output_token_ids([1])
    assert not _run(here, asked, 1, blocks=list(range(7))).saves


@pytest.mark.parametrize("generated", (True, False))
def test_generated_blocks_are_saved_if_wanted(bench, generated):
    here, asked = bench(publish_generated=generated), request("a", tokens(30))
    _begin(here, asked)
    _run(here, asked, 30)
    saved = []
    for token in range(20):
        asked.append_output_token_ids([token])
        saved += [key for save in _run(here, asked, 1).saves for key in save.keys]
    # Of 50 tokens the last has no KV yet: 49 do, which is 3 blocks.
    assert saved == (group_keys(asked, 1, 3) if generated else [])


def test_a_consumer_saves_nothing(bench):
    here, asked = bench(producer=False), request("a", tokens(100))
    _begin(here, asked)
    orders = _run(here, asked, 100)
    assert not orders.saves and not orders.complete and here.side.finish(asked) == (False, None)


@pytest.mark.parametrize("behind", (False, True))
def test_both_waits_only_for_whom_another_worker_waits(bench, behind):
    here = bench(publish_behind=behind)
    alone, handed_over = request("a", tokens(100)), request("b", tokens(100, 1), handover.prefill_params())
    for asked in (alone, handed_over):
        _begin(here, asked)
    assert _run(here, alone, 100).complete == set() and _run(here, handed_over, 100).complete == {"b"}
    assert here.side.finish(handed_over)[0] is behind and here.side.finish(handed_over) == (False, None)
    assert here.side.finish(alone) == (True, None), "its blocks are being copied"
    orders = here.side.step(Scheduled())
    assert orders.release == {"a", *({"b"} if behind else ())} and orders.idle and here.side.step(Scheduled()).release == set()


def test_blocks_are_free_at_once_when_their_copies_are_over(bench):
    here, asked = bench(), request("a", tokens(100))
    _begin(here, asked)
    step = _run(here, asked, 100).step
    here.finish_load(saved_step=step)
    assert here.side.finish(asked) == (False, None)


def test_a_preempted_request_is_not_waited_for_twice(bench):
    """The workers end its saves before the step that may overwrite its blocks."""
    here, asked = bench(), request("a", tokens(100))
    _begin(here, asked)
    _run(here, asked, 100)
    asked.num_computed_tokens = 0
    assert here.side.step(Scheduled(preempted_req_ids={"a"})).preempted == {"a"}
    assert here.side.finish(asked) == (False, None)


def test_a_preempted_request_comes_back_by_way_of_the_pool(bench):
    """With what it generated; blocks that were saved are not offered again."""
    here, asked = bench(), request("a", tokens(40))
    _begin(here, asked)
    _run(here, asked, 40)
    asked.append_output_token_ids(tokens(30, 1))
    _run(here, asked, 29)
    here.publish(asked, 4)
    asked.num_computed_tokens = 0
    here.side.step(Scheduled(preempted_req_ids={"a"}))
    # Its prompt's tail lies under a full block now, handed over or not.
    here.side._track(asked).expected = handover.Expected(40, str(here.namespaces[0]))
    external, beside, orders = here.admit(asked)
    assert (external, beside) == (64, True) and orders.loads[0].keys == group_keys(asked, 0, 4)
    here.finish_load("a")
    asked.num_computed_tokens = 64
    assert not _run(here, asked, 6).saves


def test_decode_waits_a_little_for_what_prefill_announced(bench, waits):
    """Blocks that a third host was publishing when prefill found them "exists"."""
    waits(handover_ms=400)
    here = bench()
    asked = request("a", tokens(100), handover.Expected(100, str(here.namespaces[0])).to_params())
    here.publish(asked, 4)
    assert here.side.match(asked, 0) == (None, False) and here.pinned == 0
    here.publish(asked, 6, tail=True)
    assert here.admit(asked)[0] == 100
    assert here.counts()["handovers/complete"] == 1
    late = request("b", tokens(100, 1), handover.Expected(100, str(here.namespaces[0])).to_params())
    here.publish(late, 4)
    deadline = time.monotonic() + 180
    while (answer := here.side.match(late, 0)) == (None, False):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert answer == (64, True), "and then takes what there is"
    here.side.note_allocation(late, allocation(list(range(7))), 64)
    assert here.counts()["handovers/short"] == 1
    here.finish_load("a", "b")


def test_prefill_of_another_kind_is_named(bench, caplog):
    here = bench()
    for name in "ab":
        asked = request(name, tokens(100), handover.Expected(100, "cd" * 16).to_params())
        assert here.side.match(asked, 0) == (0, False), "it does not wait for what it cannot read"
    assert here.counts()["handovers/foreign"] == 2
    warnings = [record.getMessage() for record in caplog.records if "computes prompts itself" in record.getMessage()]
    assert len(warnings) == 1 and "cd" * 16 in warnings[0] and str(here.namespaces[0]) in warnings[0]


def test_a_lost_pool_is_a_miss(bench):
    here, asked = bench(), request("a", tokens(100))
    here.publish(asked, 6)
    opened, here.access._opened = here.access._opened, None
    here.access._retry_at = time.monotonic() + 600
    assert here.side.match(asked, 0) == (0, False)
    assert here.counts()["lookups/error"] == 1
    here.access._opened = opened
    assert here.side.match(asked, 0) == (96, True)
