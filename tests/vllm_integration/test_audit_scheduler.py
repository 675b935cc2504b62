# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of the audit: which hits are computed all the same, what workers are to compare, and an engine that is isolated."""

from types import SimpleNamespace

import pytest
from kvbm_cxl.vllm_integration import audited_hits
from kvbm_cxl.vllm_integration.audited_hits import AuditedHits
from kvbm_cxl.vllm_integration.groups import Shape
from kvbm_cxl.vllm_integration.handover import Expected, prefill_params
from kvbm_cxl.vllm_integration.keys import group_keys
from kvbm_cxl.vllm_integration.metadata import WorkerHandshake, WorkerReport
from kvbm_cxl.vllm_integration.stats import Tally
from kvbm_cxl.vllm_integration.request_state import PinnedLookup, RequestState
from kvbm_cxl.vllm_integration.weights import Era
from requests_of_vllm import BLOCK_TOKENS, Scheduled, request, tokens
from test_hybrid_side import RECURRENT, WINDOWED
from test_hybrid_side import Bench as HybridBench
from test_scheduler_side import Bench


class Audited(Bench):
    """A scheduler's side whose workers compare."""

    def __init__(self, pool: str, **options) -> None:
        super().__init__(pool, **options)
        self.side.handshake({(0, 0): WorkerHandshake(((bytes(self.namespaces[0]),),), 4096, b"w" * 16, audits=True)})

    def compute(self, asked, begin: int, end: int) -> object:
        """A step that computes these tokens of a request, whose blocks are 100 and so on."""
        asked.num_computed_tokens = begin
        name = asked.request_id
        blocks = {name: list(range(100, 100 + -(-end // BLOCK_TOKENS)))}
        return self.side.step(Scheduled({name: end - begin}, blocks, computed={name: begin}, first={name}))

    def report(self, **fields) -> None:
        report = WorkerReport(0, **fields)
        self.side.report(SimpleNamespace(kv_connector_worker_meta=report, finished_recving=set(), finished_sending=None))


@pytest.fixture
def bench(make_pool):
    benches = []

    def make(**options) -> Audited:
        benches.append(Audited(make_pool(size="64M", cells="64K:75%"), **options))
        return benches[-1]

    yield make
    for each in benches:
        each.side.close()
        assert each.pinned == each.side.lookups.pinned == 0
        each.access.release()


def _limits(hits: AuditedHits, count: int, lookup: PinnedLookup, shape: Shape = Shape.plain(BLOCK_TOKENS)) -> list[int]:
    """Which of so many requests are computed in part, the first is 1."""
    asked = [RequestState(request(f"r{number}", tokens(2))) for number in range(count)]
    return [number for number, each in enumerate(asked, 1) if hits.limit(each, lookup, shape) is not None]


def test_the_first_hit_and_ever_fewer_up_to_a_share():
    found = _limits(AuditedHits(is_on=True), 1100, PinnedLookup(0, 100, 0, []))
    assert found == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024]


def test_a_request_is_chosen_once():
    hits, lookup, shape = AuditedHits(is_on=True), PinnedLookup(0, 100, 4, []), Shape.plain(BLOCK_TOKENS)
    first, *_, third = asked = [RequestState(request(name, tokens(2))) for name in "abc"]
    assert [hits.limit(each, lookup, shape) for each in asked] == [0, 0, None]
    assert [hits.limit(each, lookup, shape) for each in (third, first, third)] == [None, 0, None], "asked again in later steps"


def test_of_hand_overs_only_a_share_is_computed():
    """Decode computes no token of the first ones, and they do not count among the other hits."""
    hits, lookup, shape = AuditedHits(is_on=True), PinnedLookup(0, 100, 4, []), Shape.plain(BLOCK_TOKENS)
    asked = [RequestState(request(f"r{number}", tokens(2)), expected=Expected(100, "there")) for number in range(600)]
    assert [number for number, each in enumerate(asked, 1) if hits.limit(each, lookup, shape) is not None] == [256, 512]
    assert _limits(hits, 9, lookup) == [1, 2, 4, 8]


def test_what_holds_no_block_and_engines_that_do_not_compare():
    hits, lookup = AuditedHits(is_on=True), PinnedLookup(96, 100, 4, [])
    assert _limits(hits, 3, lookup) == [] and _limits(hits, 1, PinnedLookup(96, 112, 0, [])) == [1], "and does not count"
    assert _limits(AuditedHits(), 3, PinnedLookup(0, 100, 0, [])) == []


def test_of_a_long_hit_only_the_end_is_computed(monkeypatch):
    hits, shape = AuditedHits(is_on=True), Shape.plain(BLOCK_TOKENS)
    assert hits.limit(RequestState(request("long", tokens(2))), PinnedLookup(0, 10_000, 0, []), shape) == 10_000 - 2048
    monkeypatch.setattr(audited_hits, "_COMPUTED_TOKENS", 40)
    assert hits.limit(RequestState(request("a", tokens(2))), PinnedLookup(16, 100, 4, []), shape) == 56
    hits = AuditedHits(is_on=True)
    assert hits.limit(RequestState(request("b", tokens(2))), PinnedLookup(64, 100, 4, []), shape) == 64


def test_the_first_request_is_computed_and_compared(bench):
    here, asked = bench(), request("a", tokens(100))
    here.publish(asked, 6, tail=True)
    assert here.side.match(asked, 0) == (0, False) and here.pinned == 0
    orders = here.compute(asked, 0, 100)
    assert orders.audited == {"a"}
    (full,) = orders.saves
    assert (full.keys, full.found, full.only_audited) == (group_keys(asked, 0, 6), 0, False)
    assert here.side.match(request("b", tokens(100)), 0) == (0, False), "the second one, too"
    assert here.side.match(request("c", tokens(100)), 0) == (96, True)


def test_the_beginning_of_a_long_prompt_is_loaded(bench, monkeypatch):
    monkeypatch.setattr(audited_hits, "_COMPUTED_TOKENS", 40)
    here, asked = bench(), request("a", tokens(100))
    here.publish(asked, 6, tail=True)
    external, beside, orders = here.admit(asked)
    assert (external, beside) == (48, True) and here.pinned == 3
    (load,) = orders.loads
    assert load.keys == group_keys(asked, 0, 3) and load.tail_tokens == 0
    here.finish_load("a")
    orders = here.compute(asked, 48, 100)
    (full,) = orders.saves
    assert full.keys == group_keys(asked, 0, 6) and full.found == 3, "what was loaded is no proof"


@pytest.mark.parametrize(("computed", "found"), ((0, 0), (16, 1), (17, 2), (99, 6)))
def test_blocks_that_were_there_are_named(bench, computed, found):
    """Also one of which a single token is computed again."""
    here, asked = bench(), request("a", tokens(96))
    here.side.match(asked, 0)
    (full,) = here.compute(asked, min(computed, 95), 96).saves
    assert full.found == found


def test_a_preempted_request_begins_again(bench):
    here, asked = bench(), request("a", tokens(96))
    here.side.match(asked, 0)
    here.compute(asked, 32, 48)
    here.side.step(Scheduled(preempted_req_ids={"a"}))
    (full,) = here.compute(asked, 64, 96).saves
    assert full.keys == group_keys(asked, 3, 6) and full.found == 1


@pytest.mark.parametrize(("every", "pulled"), ((1, 0), (2, 100)))
def test_what_a_hand_over_promised_was_found(bench, monkeypatch, every, pulled):
    """Also where it is computed: decode does not say that it misses something."""
    monkeypatch.setattr(audited_hits, "_EVERY", every)
    here = bench(producer=False)
    prefill = Bench(here.config.pool, consumer=False)
    first = request("p", tokens(100), prefill_params())
    prefill.publish(first, 6, tail=True)
    prefill.side.match(first, 0)
    prefill.side.step(Scheduled({"p": 100}, {"p": list(range(7))}))
    _, answer = prefill.side.finish(first)
    prefill.side.close()
    prefill.access.release()
    assert answer["kvbm_cxl"]["tokens"] == 100
    external, _, _ = here.admit(request("a", tokens(100), answer))
    assert external == pulled and here.counts()["handovers/complete"] == 1


def test_an_engine_that_only_reads_compares_and_publishes_nothing(bench):
    here, asked = bench(producer=False), request("a", tokens(100))
    here.publish(asked, 6, tail=True)
    assert here.side.match(asked, 0) == (0, False)
    orders = here.compute(asked, 0, 64)
    (blocks,) = orders.saves
    assert blocks.only_audited and blocks.keys == group_keys(asked, 0, 4) and orders.audited == {"a"} and orders.taken
    (blocks,) = here.compute(asked, 64, 100).saves
    assert blocks.keys == group_keys(asked, 4, 6) and not blocks.tail_tokens
    keeps, _ = here.side.finish(asked)
    assert keeps, "vLLM keeps the blocks until they are compared"
    assert here.side.step(Scheduled()).release == {"a"}
    here.finish_load(saved_step=3)
    other = request("b", tokens(32, 5))
    here.side.match(other, 0)
    assert not here.compute(other, 0, 32).taken, "nothing is read any more"


def test_a_reader_orders_nothing_for_requests_that_are_not_audited(bench):
    here, asked = bench(producer=False), request("a", tokens(100))
    assert here.side.match(asked, 0) == (0, False)
    orders = here.compute(asked, 0, 100)
    assert not orders.saves and not orders.audited and not orders.taken


@pytest.mark.parametrize("shape", (WINDOWED, RECURRENT))
def test_groups_of_other_kinds(make_pool, monkeypatch, shape):
    """What the shorter prefix needs of each group is found again, or nothing is loaded."""
    monkeypatch.setattr(audited_hits, "_COMPUTED_TOKENS", 70)
    here, asked = HybridBench(make_pool(size="64M", cells="64K:75%"), shape), request("a", tokens(170))
    here.run(asked, 0, 170, offered=[(1, 209, 160), (1, 203, 64)] if shape is RECURRENT else ())
    here.side.lookups.audited.is_on = True
    external, _ = here.side.match(request("b", tokens(170)), 0)
    assert external == 64, "states and windows are published every 64 tokens"
    here.side.step(Scheduled())
    assert here.pinned() == 0
    here.side.close()
    here.access.release()


# Isolation


def test_an_isolated_engine_finds_nothing_and_its_keys_are_its_own(bench):
    here, asked = bench(), request("a", tokens(100))
    here.publish(asked, 6)
    here.side.match(request("x", tokens(100)), 0)
    here.side.match(request("y", tokens(100)), 0)
    assert here.side.match(asked, 0) == (96, True)
    assert not here.side.step(Scheduled()).is_isolated
    here.report(has_differed=True)
    assert here.side.step(Scheduled()).is_isolated
    assert here.side.match(request("b", tokens(100)), 0) == (0, False)
    gauges = here.side.take_stats().data["gauges"]
    assert gauges["isolated"] == 1
    # What the workers say of their weights later does not end it.
    here.side.weights_may_change("a test")
    inquiry = here.side.step(Scheduled()).inquiry
    here.report(inquiry=inquiry, weights={0: b"w" * 16}, has_differed=True)
    assert here.side.match(request("c", tokens(100)), 0) == (0, False) and here.side.step(Scheduled()).is_isolated


def test_requests_that_have_begun_publish_nothing_more(bench):
    here, asked = bench(), request("a", tokens(100))
    here.side.match(asked, 0)
    assert here.compute(asked, 0, 48).saves
    here.report(has_differed=True)
    assert not here.compute(asked, 48, 100).saves
    fresh = request("b", tokens(100, 3))
    here.side.match(fresh, 0)
    assert not here.compute(fresh, 0, 100).saves, "vLLM's own prefix cache may hold what was pulled"
    here.side.local_cache_was_reset()
    last = request("c", tokens(100, 3))
    here.side.match(last, 0)
    (full,) = here.compute(last, 0, 100).saves
    assert full.keys != group_keys(fresh, 0, 6)


def test_two_isolated_engines_share_nothing():
    eras = [Era(Tally()) for _ in range(2)]
    for era in eras:
        era.handshake([b"w" * 16])
        assert era.isolate() and not era.isolate() and era.is_known
    assert eras[0].name and eras[0].name != eras[1].name


def test_any_worker_of_several_isolates_the_engine():
    told = WorkerReport(1).aggregate(WorkerReport(1, has_differed=True)).aggregate(WorkerReport(1))
    assert told.has_differed and not WorkerReport(1).aggregate(WorkerReport(1)).has_differed
