# SPDX-License-Identifier: Apache-2.0
"""Why nothing is found: each reason has one warning, which says what differs."""

import pytest
from kvbm_cxl.vllm_integration import diagnosis, handover
from kvbm_cxl.vllm_integration.diagnosis import Reasons, differences, facts_of
from requests_of_vllm import Scheduled, allocation, request, tokens
from test_scheduler_side import Bench, bench  # noqa: F401

FIELDS = {
    "model": "weights:0123",
    "dtype": "bfloat16/auto",
    "block_tokens": 128,
    "tp_size": 1,
    "layer_count": 4,
    "tenant_salt": b"secret",
    "extra": {"backend": "CPU_ATTN/" + "amx" * 20, "hash": "sha256", "side": ""},
}


def test_facts_are_short_and_keep_the_secret():
    facts = facts_of(FIELDS)
    assert facts["block_tokens"] == "128" and facts["hash"] == "sha256" and "secret" not in str(facts)
    assert max(map(len, facts.values())) <= 24 and facts == facts_of(FIELDS)
    assert handover.expected_of(handover.Expected(5, "n", facts).to_params()).facts == facts


def test_facts_of_others_are_bounded():
    for said in ([], "x", {str(number): "x" for number in range(65)}):
        assert handover.expected_of({"kvbm_cxl": {"version": 1, "tokens": 5, "namespace": "n", "facts": said}}).facts == {}
    said = {"model": "x" * 65, "seed": 7, "pool": "\u202e", "hash": "sha256"}
    assert handover.expected_of({"kvbm_cxl": {"version": 1, "tokens": 5, "namespace": "n", "facts": said}}).facts == {"hash": "sha256"}


@pytest.mark.parametrize(
    ("name", "words"),
    (
        ("pool", "another pool"),
        ("seed", "PYTHONHASHSEED"),
        ("hash", "--prefix-caching-hash-algo"),
        ("model", "weights, or model_id"),
        ("weights", "replaced in memory"),
        ("adapter", "files of the adapter"),
        ("dtype", "--kv-cache-dtype"),
        ("block_tokens", "--block-size"),
        ("tp_size", "tensor parallelism"),
        ("layer_count", "pipeline parallelism"),
        ("backend", "instruction set"),
        ("side", "quantization"),
        ("namespace", "tenant_salt"),
    ),
)
def test_each_reason_is_named_once(bench, caplog, name, words):  # noqa: F811
    """A request of a prefill engine that differs in one thing: it is computed at once, and one warning says why."""
    here = bench()
    here.side.names._facts = facts_of(FIELDS)
    first = request("a", tokens(100))
    here.publish(first, 6, tail=True)
    mine = here.side.names.facts(here.side._track(first))
    facts = {**mine, name: "something else"}
    for each in "bcd":
        asked = request(each, tokens(100, ord(each)), handover.Expected(100, facts["namespace"], {**facts}).to_params())
        assert here.side.match(asked, 0) == (0, False), "it does not wait"
        here.side.note_allocation(asked, allocation([]), 0)
    assert here.counts()["handovers/foreign"] == 3
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert words in said and "request b" in said and "something else there" in said
    caplog.clear()
    asked = request("e", tokens(100), handover.Expected(100, mine["namespace"], mine).to_params())
    assert here.side.match(asked, 0) == (100, True) and not caplog.records, "equal facts are found, and nothing is said"
    here.side.step(Scheduled())


def test_a_fact_that_one_side_does_not_tell_is_no_difference():
    assert differences({"namespace": "n", "of_a_later_version": "x"}, {"namespace": "n", "seed": "s"}) == {}


def test_blocks_that_should_be_there_and_are_not(bench, waits, caplog):  # noqa: F811
    waits(handover_ms=0)
    here = bench()
    for name, has_facts in (("a", True), ("b", True), ("c", False)):
        asked = request(name, tokens(100, ord(name)))
        facts = here.side.names.facts(here.side._track(asked))
        expected = handover.Expected(100, facts.pop("namespace"), facts if has_facts else {})
        asked = request(name, tokens(100, ord(name)), expected.to_params())
        assert here.side.match(asked, 0) == (0, False)
        here.side.note_allocation(asked, allocation([]), 0)
    assert here.counts()["handovers/short"] == 3
    (said,) = [record.getMessage() for record in caplog.records]
    assert "100 tokens of request a" in said and "too small" in said and "PYTHONHASHSEED" not in said
    Reasons().absent("c", 100, False)
    assert "PYTHONHASHSEED" in caplog.records[-1].getMessage(), "an earlier version's prefill does not tell it"


def test_an_engine_that_publishes_nothing_is_named(bench, caplog):  # noqa: F811
    here = bench(producer=False)
    for name in "ab":
        asked = request(name, tokens(100, ord(name)), handover.prefill_params())
        here.side.match(asked, 0)
        here.side.note_allocation(asked, allocation([]), 0)
        assert here.side.finish(asked) == (False, None)
    assert [record.getMessage().count("kv_role is kv_consumer") for record in caplog.records] == [1]


def test_prompts_of_which_none_is_ever_found(bench, caplog):  # noqa: F811
    here = bench()
    for number in range(200):
        here.side.match(request(str(number), tokens(40, number)), 0)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "none of the first 64 prompts" in said and str(here.namespaces[0]) in said
    caplog.clear()
    other = bench()
    found = request("found", tokens(40))
    other.publish(found, 2)
    other.side.match(found, 0)
    for number in range(1, 200):
        other.side.match(request(str(number), tokens(40, number)), 0)
    assert not caplog.records, "something was found"
    other.side.step(Scheduled())


def test_a_reason_is_said_again_after_an_hour(monkeypatch, caplog):
    reasons, now = Reasons(), [1e6]
    monkeypatch.setattr(diagnosis.time, "monotonic", lambda: now[0])
    assert reasons.say("a", "words") and not reasons.say("a", "words") and reasons.say("b", "words")
    now[0] += 3601
    assert reasons.say("a", "words") and len(caplog.records) == 3


def test_an_engine_that_cannot_take_hits_looks_nothing_up(bench, caplog):  # noqa: F811
    here = bench()
    here.side.lookups.reads = False
    asked = request("a", tokens(100))
    here.publish(asked, 6, tail=True)
    assert here.side.match(asked, 0) == (0, False) and here.counts() == {"lookups/skipped": 1}
