# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side while weights or adapters of the workers change: what is looked up, under which names, and what is published."""

from types import SimpleNamespace

import pytest
from kvbm_cxl.vllm_integration import handover
from kvbm_cxl.vllm_integration.keys import group_keys, name_variant, tail_key
from kvbm_cxl.vllm_integration.metadata import WorkerHandshake, WorkerReport
from requests_of_vllm import BLOCK_TOKENS, Scheduled, allocation, request, tokens
from test_scheduler_side import Bench, _begin, _run, bench  # noqa: F401
from vllm.lora.request import LoRARequest

START, OTHER = b"s" * 16, b"o" * 16
A, B = b"a" * 16, b"b" * 16
LORA = LoRARequest("tenant", 1, "/somewhere")


@pytest.fixture
def here(bench) -> Bench:  # noqa: F811
    """A side whose one worker has a fingerprint of its weights."""
    made = bench(consumer=False)
    made.side.handshake({(0, 0): WorkerHandshake(((bytes(made.namespaces[0]),),), 4096, START)})
    return made


def _tell(here: Bench, orders=None, *, weights: bytes = b"", adapters=None) -> None:
    """What the worker says after a step."""
    report = WorkerReport(0)
    if orders is not None and orders.inquiry:
        report.inquiry, report.weights = orders.inquiry, {0: weights}
    report.adapters = {0: adapters} if adapters else {}
    here.side.report(SimpleNamespace(kv_connector_worker_meta=report, finished_recving=None, finished_sending=None))


def _answer(here: Bench, weights: bytes) -> None:
    """A step without anything to compute, in which the worker looks at its weights."""
    orders = here.side.step(Scheduled())
    assert orders.inquiry
    _tell(here, orders, weights=weights)


def _all_keys(asked) -> list[bytes]:
    return [*group_keys(asked, 0, 6), tail_key(asked, BLOCK_TOKENS)]


def test_after_a_reset_equal_weights_find_everything_again(here):
    asked = request("a", tokens(100))
    here.publish(asked, 6, tail=True)
    for told in (here.side.reset, lambda: here.side.weights_may_change("a call")):
        told()
        assert here.side.match(asked, 0) == (None, False), "it is not known yet which weights there are"
        _answer(here, START)
        assert here.side.match(asked, 0) == (96, True)
        here.side.step(Scheduled())
    assert here.counts()["lookups/deferred"] == 2


def test_after_a_reset_other_weights_find_nothing_of_before(here):
    asked = request("a", tokens(100))
    here.publish(asked, 6, tail=True)
    assert here.side.reset()
    _answer(here, OTHER)
    _begin(here, asked)
    assert here.counts()["lookups/none"] == 1
    saves = _run(here, asked, 100).saves
    fresh = [key for save in saves for key in save.keys]
    assert len(set(fresh)) == 7 and not set(fresh) & set(_all_keys(asked)) and saves[1].parent == fresh[5]
    for key in fresh:
        here.access.call(lambda cache: cache.publish(here.namespaces[0], key, key))
    handed_over = handover.Expected(100, str(here.namespaces[0])).to_params()
    assert here.side.match(request("b", tokens(100), handed_over), 0) == (100, True), "what it publishes from here on it finds"
    here.side.step(Scheduled())
    here.side.reset()
    _answer(here, START)
    assert here.side.match(request("c", tokens(100), handed_over), 0) == (100, True), "and with the first weights what was there before"
    here.side.step(Scheduled())


def test_weights_without_a_fingerprint_share_nothing(bench):  # noqa: F811
    here, asked = bench(), request("a", tokens(100))
    here.publish(asked, 6, tail=True)
    here.side.reset()
    _answer(here, START)
    assert here.side.match(asked, 0) == (0, False)
    here.side.note_allocation(asked, allocation([]), 0)
    first = {key for save in _run(here, asked, 100).saves for key in save.keys}
    here.side.reset()
    _answer(here, START)
    again = request("b", tokens(100))
    _begin(here, again)
    assert not first & {key for save in _run(here, again, 100).saves for key in save.keys}, "new names each time"


def test_nothing_is_published_until_the_weights_are_known(here):
    asked = request("a", tokens(100))
    _begin(here, asked)
    assert len(_run(here, asked, 32).saves) == 1
    here.side.weights_may_change("a call")
    orders = _run(here, asked, 32)
    assert not orders.saves and orders.inquiry
    _tell(here, orders, weights=START)
    (full, tail) = _run(here, asked, 36).saves
    assert full.keys == group_keys(asked, 2, 6) and tail.tail_tokens == 4, "what was left out is published then"


def test_a_request_that_went_on_with_other_weights_publishes_nothing(here):
    asked, waits = request("a", tokens(100)), request("w", tokens(100, 1))
    _begin(here, asked)
    _run(here, asked, 32)
    here.side.weights_may_change("a call")
    here.side.match(waits, 0)
    orders = _run(here, asked, 32)
    _tell(here, orders, weights=OTHER)
    here.side.local_cache_was_reset()
    assert not _run(here, asked, 36).saves, "its first blocks are of the earlier weights, and those after depend on them"
    assert here.side.finish(asked)[1] is None
    _begin(here, waits)
    assert len(_run(here, waits, 100).saves) == 2, "a request that waited meanwhile is computed with the new ones alone"


def test_nothing_is_published_upon_what_vllm_kept_of_other_weights(here):
    first = request("a", tokens(100))
    _begin(here, first)
    _run(here, first, 100)
    here.side.finish(first)
    here.side.weights_may_change("a call")
    _answer(here, OTHER)
    second = request("b", tokens(100))
    _begin(here, second)
    assert not _run(here, second, 100).saves and here.side.finish(second) == (False, None)
    here.side.local_cache_was_reset()
    here.side.weights_may_change("a reset")
    _answer(here, OTHER)
    third = request("c", tokens(100))
    _begin(here, third)
    assert len(_run(here, third, 100).saves) == 2


def test_a_hand_over_tells_of_weights(here):
    def published(name: str) -> handover.Expected:
        asked = request(name, tokens(100), handover.prefill_params())
        _begin(here, asked)
        _run(here, asked, 100)
        return handover.expected_of(here.side.finish(asked)[1])

    before = published("a")
    here.side.local_cache_was_reset()
    here.side.reset()
    _answer(here, OTHER)
    after = published("b")
    assert before.facts["weights"] == "" and after.facts["weights"] and before.namespace == after.namespace
    assert here.side.match(request("c", tokens(100, 5), before.to_params()), 0) == (0, False), "of the earlier weights"
    assert here.counts()["handovers/foreign"] == 1


def test_a_hand_over_of_earlier_weights_is_not_promised(here):
    """The prompt was published, and then the weights changed before the request ended: decode would look under other names."""
    asked = request("a", tokens(100), handover.prefill_params())
    _begin(here, asked)
    assert len(_run(here, asked, 100).saves) == 2
    here.side.weights_may_change("a call")
    _tell(here, _run(here, asked, 1), weights=OTHER)
    assert here.side.finish(asked)[1] is None


# Adapters


def _adapted(name: str, params: dict | None = None, length: int = 100):
    return request(name, tokens(length), params, lora_request=LORA)


def _publish_adapted(here: Bench, asked, content: bytes) -> None:
    for key in _all_keys(asked):
        key = name_variant(key, b"", content)
        here.access.call(lambda cache: cache.publish(here.namespaces[0], key, key))


def test_an_adapter_that_is_not_known_yet_is_loaded_first(here):
    asked = _adapted("a", params=handover.Expected(100, str(here.namespaces[0])).to_params())
    _publish_adapted(here, asked, A)
    assert here.side.match(asked, 0) == (None, False)
    orders = here.side.step(Scheduled())
    assert orders.adapters == [LORA]
    _tell(here, adapters={1: A})
    assert here.side.match(asked, 0) == (100, True)
    here.side.note_allocation(asked, allocation(list(range(7))), 100)
    orders = here.side.step(Scheduled())
    (load,) = orders.loads
    assert load.adapter == (1, A) and orders.adapters == [LORA], "in memory when its blocks arrive"
    here.finish_load("a")


@pytest.mark.parametrize("length", (100, 10))
def test_adapters_of_one_name_never_meet(here, length):
    """Whole blocks and tails: neither those of the other adapter, nor those without one."""
    names = []
    for content in (A, B):
        here.side.adapters_may_change()
        here.side.local_cache_was_reset()
        asked = _adapted(content.hex(), length=length)
        here.side.match(asked, 0)
        here.side.step(Scheduled())
        _tell(here, adapters={1: content})
        _begin(here, asked)
        orders = _run(here, asked, length)
        assert {save.adapter for save in orders.saves} == {(1, content)}
        names.append({key for save in orders.saves for key in save.keys})
    plain = request("p", tokens(length))
    _begin(here, plain)
    names.append({key for save in _run(here, plain, length).saves for key in save.keys})
    assert len(set.union(*names)) == sum(map(len, names)) == 3 * -(-length // BLOCK_TOKENS)


def test_an_adapter_without_a_digest_shares_nothing(here, caplog):
    asked = _adapted("a")
    here.side.match(asked, 0)
    here.side.step(Scheduled())
    _tell(here, adapters={1: b""})
    for name in "ab":
        asked = _adapted(name)
        assert here.side.match(asked, 0) == (0, False)
        here.side.note_allocation(asked, allocation([]), 0)
        assert not _run(here, asked, 100).saves and here.side.finish(asked) == (False, None)
    assert caplog.text.count("known by name alone") == 1


def _begun_with_an_adapter(here):
    """A request whose first block was computed and saved with adapter A."""
    asked = _adapted("a")
    here.side.match(asked, 0)
    here.side.step(Scheduled())
    _tell(here, adapters={1: A})
    _begin(here, asked)
    assert len(_run(here, asked, 32).saves) == 1
    return asked


def test_a_request_whose_adapter_was_replaced_publishes_nothing(here):
    asked = _begun_with_an_adapter(here)
    _tell(here, adapters={1: B})
    assert not _run(here, asked, 68).saves
    assert here.side.finish(asked)[1] is None
    again = _adapted("b")
    _begin(here, again)
    assert not _run(here, again, 100).saves, "vLLM may have blocks of the first one itself, under the same hashes"
    here.side.local_cache_was_reset()
    last = _adapted("c")
    _begin(here, last)
    assert [save.adapter for save in _run(here, last, 100).saves] == [(1, B)] * 2


def test_an_adapter_that_was_replaced_and_is_back_is_not_the_same_request(here):
    asked = _begun_with_an_adapter(here)
    _tell(here, adapters={1: B})
    _tell(here, adapters={1: A})
    assert not _run(here, asked, 68).saves, "some step may have computed with the other one"
