# SPDX-License-Identifier: Apache-2.0
"""Weights that change in memory: what a fingerprint sees, what the scheduler's side makes of it, and what of an engine is watched."""

import logging
from types import SimpleNamespace

import pytest
import torch
from kvbm_cxl.vllm_integration import weights
from kvbm_cxl.vllm_integration.engine_watch import watch_calls, watch_resets
from kvbm_cxl.vllm_integration.stats import Tally
from kvbm_cxl.vllm_integration.weights import UNKNOWN, Era, WeightsInMemory, fingerprint

START, OTHER, THIRD = (bytes([number]) * 16 for number in (1, 2, 3))


def _model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(300, 500) for _ in range(20)]
    model = torch.nn.Sequential(*layers).to(torch.bfloat16)
    model.register_buffer("scale", torch.ones(3))
    return model


def test_equal_weights_have_one_fingerprint_and_others_another():
    assert fingerprint(_model()) == fingerprint(_model()) != fingerprint(_model(1))


def test_every_tensor_is_seen():
    model = _model()
    seen = {fingerprint(model)}
    for tensor in model.state_dict().values():
        tensor.view(-1)[-1] += 1
        seen.add(fingerprint(model))
    assert len(seen) == 1 + 41


def test_one_number_of_a_large_tensor_is_seen():
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(3)))
    seen, random = {fingerprint(model)}, torch.Generator().manual_seed(1)
    for tensor in model.state_dict().values():
        numbers = tensor.view(-1)
        numbers[torch.randint(numbers.numel(), (1,), generator=random)] += 1e-3
        seen.add(fingerprint(model))
    assert len(seen) == 7


def test_the_order_of_dimensions_and_pieces_of_storage_do_not_matter():
    base = torch.arange(40_000, dtype=torch.float32)
    for view in (base.view(200, 200).t(), base[30_000:30_300], base.view(200, 200)[:, 3:50], base[:1].expand(7)):
        model = torch.nn.Module()
        model.register_parameter("w", torch.nn.Parameter(view, requires_grad=False))
        before = fingerprint(model)
        first = view.reshape(-1)[:1].item()
        view.view(-1)[0].fill_(-1) if view.is_contiguous() else view[0, 0].fill_(-1) if view.dim() == 2 else view[:1].fill_(-1)
        assert fingerprint(model) != before
        base.copy_(torch.arange(40_000, dtype=torch.float32))
        assert view.reshape(-1)[0].item() == first and fingerprint(model) == before


def test_weights_that_cannot_be_looked_at_have_none(caplog):
    tally = Tally()
    assert WeightsInMemory(None, tally).look() == UNKNOWN
    model = torch.nn.Linear(3, 3, device="meta")
    assert WeightsInMemory(SimpleNamespace(get_model=lambda: model), tally).look() == UNKNOWN
    assert "no fingerprint of the weights" in caplog.text and len(tally.take().data["times"]["fingerprint_seconds"]) == 2


def test_a_worker_answers_each_inquiry_once():
    model = _model()
    looked = []
    seen = WeightsInMemory(SimpleNamespace(get_model=lambda: looked.append(1) or model), Tally())
    first = seen.look()
    assert not seen.has_answered(0) and not seen.has_answered(1)
    assert not seen.answer(0) and not seen.answer(1) and seen.latest == first and seen.has_answered(1) and len(looked) == 2
    model[0].weight.data.add_(1)
    assert not seen.answer(1) and seen.latest == first, "the same inquiry, in the next step"
    assert seen.answer(2) and seen.latest != first and not seen.has_answered(3)


def test_a_worker_that_cannot_look_says_so_each_time():
    seen = WeightsInMemory(None, Tally())
    assert seen.look() == UNKNOWN and seen.answer(1) and seen.answer(2)


def _era(ranks: int = 1) -> Era:
    era = Era(Tally())
    era.handshake([START] * ranks)
    return era


def _answer(era: Era, *fingerprints: bytes) -> bool:
    return era.answers(era.step(computes=False), dict(enumerate(fingerprints)))


def test_equal_weights_keep_their_names():
    era = _era()
    assert era.is_known and era.publishes and era.name == b"" and era.step(computes=True) == 0
    era.suspect("a test")
    assert not era.is_known and not era.publishes
    assert not _answer(era, START) and era.is_known and era.publishes and era.name == b""
    assert era.tally.take().data["counters"] == {"weights/unchanged": 1}


def test_other_weights_have_other_names_and_the_first_ones_come_back():
    era = _era()
    era.suspect("a test")
    assert _answer(era, OTHER)
    other = era.name
    assert other and era.publishes
    elsewhere = _era()
    elsewhere.suspect("a test")
    assert _answer(elsewhere, OTHER) and elsewhere.name == other, "two engines with the same weights share blocks"
    era.suspect("a test")
    assert _answer(era, THIRD) and era.name not in (b"", other)
    era.suspect("a test")
    assert _answer(era, START) and era.name == b""


def test_every_rank_is_waited_for_and_counts():
    era = _era(ranks=2)
    era.suspect("a test")
    assert not _answer(era, START) and not era.is_known
    assert _answer(era, START, OTHER) and era.name
    era.suspect("a test")
    assert _answer(era, OTHER, START) and era.name, "the same two fingerprints, of the other ranks"


def test_ranks_answer_in_any_order():
    era = _era()
    era.handshake([START, OTHER])
    era.suspect("a test")
    inquiry = era.step(computes=False)
    assert not era.answers(inquiry, {1: OTHER}) and not era.answers(inquiry, {0: START})
    assert era.is_known and era.name == b"", "the fingerprints of the start"


def test_answers_to_two_inquiries_do_not_make_one():
    era = _era(ranks=2)
    era.suspect("a test")
    assert not _answer(era, START)
    era.suspect("another")
    assert not era.answers(era.step(computes=False), {1: START}) and not era.is_known, "what rank 0 said was about the first one"


def test_one_rank_without_a_fingerprint_is_enough():
    for start, now in (([START, UNKNOWN], [START, START]), ([START, START], [START, UNKNOWN])):
        era = Era(Tally())
        era.handshake(start)
        era.suspect("a test")
        assert _answer(era, *now) and era.name


def test_nothing_is_asked_before_the_workers_are_known():
    era = Era(Tally())
    era.suspect("a test")
    assert era.is_known and era.step(computes=False) == 0


def test_an_answer_to_an_earlier_inquiry_is_none():
    era = _era()
    era.suspect("a test")
    early = era.step(computes=False)
    era.suspect("another")
    assert not era.answers(early, {0: START}) and not era.is_known
    assert _answer(era, OTHER)


def test_without_a_fingerprint_nothing_is_shared(caplog):
    names = set()
    for start, now in ((START, UNKNOWN), (UNKNOWN, START), (UNKNOWN, UNKNOWN)) * 2:
        era = Era(Tally())
        era.handshake([start])
        era.suspect("a test")
        assert _answer(era, now)
        names.add(era.name)
    assert len(names) == 6 and b"" not in names and "it shares no blocks" in caplog.text


def test_workers_that_do_not_answer_hold_nothing_up(monkeypatch):
    era = _era()
    era.suspect("a test")
    asked = era.step(computes=False)
    assert asked and not era.is_known
    monkeypatch.setattr(weights, "_PATIENCE_S", 0.0)
    assert era.is_known and era.name
    assert era.answers(asked, {0: START}) and era.name == b"", "a late answer counts all the same"
    assert not era.answers(asked, {0: OTHER}), "once"


def test_nothing_is_published_upon_blocks_of_other_weights_that_vllm_keeps():
    era = _era()
    era.step(computes=True)
    era.suspect("a call")
    assert _answer(era, OTHER) and era.is_known and not era.publishes
    era.suspect("a reset that failed")
    _answer(era, OTHER)
    assert not era.publishes
    era.local_reset()
    era.suspect("a reset")
    _answer(era, OTHER)
    assert era.publishes
    # Reset before the weights change, as with a pause: there is nothing of before.
    era.step(computes=True)
    era.local_reset()
    era.suspect("a call")
    assert _answer(era, THIRD) and era.publishes


class Watcher:
    def __init__(self) -> None:
        self.seen = []

    def weights_may_change(self, why: str) -> None:
        self.seen.append(why)

    def adapters_may_change(self) -> None:
        self.seen.append("adapters")

    def local_cache_was_reset(self) -> None:
        self.seen.append("local")


def test_calls_to_the_workers_are_watched():
    calls, watcher = [], Watcher()

    def collective_rpc(method, *positional, **named):
        calls.append((method, positional, named))
        if method == "fails":
            raise ValueError(method)
        return [len(calls)]

    executor = SimpleNamespace(collective_rpc=collective_rpc)
    assert watch_calls(SimpleNamespace(model_executor=executor), watcher)
    for method in ("execute_model", "sample_tokens", "check_health", "list_loras"):
        executor.collective_rpc(method)
    assert not watcher.seen
    assert executor.collective_rpc("reload_weights", None, (1,), kwargs={"a": 2}) == [5]
    assert calls[-1] == ("reload_weights", (None, (1,)), {"kwargs": {"a": 2}})
    for method in ("update_weights", "wake_up", "a_method_of_an_rl_framework", print):
        executor.collective_rpc(method)
    with pytest.raises(ValueError, match="fails"):
        executor.collective_rpc("fails")
    assert len(watcher.seen) == 6 and all("on the workers" in why for why in watcher.seen)
    executor.collective_rpc("add_lora")
    assert watcher.seen[6:] == ["adapters"]


def test_an_engine_without_a_way_to_see_calls_says_so(caplog):
    assert not watch_calls(None, Watcher()) and "cannot see calls" in caplog.text


def test_resets_are_watched():
    results, watcher = [True, False], Watcher()
    manager = SimpleNamespace(reset_prefix_cache=lambda: results.pop(0))
    watch_resets(manager, watcher)
    assert manager.reset_prefix_cache() and [why.split()[0] for why in watcher.seen] == ["local", "a"]
    assert not manager.reset_prefix_cache() and len(watcher.seen) == 3, "a reset that failed has emptied nothing"


@pytest.fixture(autouse=True)
def _warnings(caplog):
    caplog.set_level(logging.INFO, logger="vllm.kvbm_cxl")
