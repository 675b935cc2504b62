# SPDX-License-Identifier: Apache-2.0
"""One prefill worker, one decode worker: every token of a prompt goes through the pool, none is computed twice, none is wrong."""

import json
import urllib.request

import pytest
from graph import counters, question
from graph.counters import COMPUTED, PULLED, REUSED
from graph.model import BLOCK_TOKENS
from serving import blocks, serving, tokens

LENGTHS = [2, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS, 700, 3000]
BY_LENGTH = {length: tokens(f"length {length}", length) for length in LENGTHS}
AGAIN = tokens("again", 5 * BLOCK_TOKENS + 30)
BURST = [tokens("burst", 2 * BLOCK_TOKENS) + tokens(f"burst {number}", 40 * number + 7) for number in range(12)]


@pytest.fixture(scope="module")
def served():
    with serving([*BY_LENGTH.values(), AGAIN, *BURST], connector="cxl") as one:
        yield one


def test_the_round_of_make_serve_finds_everything_right(served):
    round_ = served.ask_round()
    assert round_[0].answer.text != round_[1].answer.text
    # The same round against other texts is found wrong: the check can fail.
    assert len(question.verify(served.graph, round_, ["something", "else"])) == 2


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_of_any_length_is_published_whole_and_pulled_whole(served, length):
    prompt = BY_LENGTH[length]
    before = counters.read(served.graph)
    served.ask(prompt)
    after = counters.wait_settled(served.graph, before)
    prefill, decode = (counters.of_role(after, role) - counters.of_role(before, role) for role in ("prefill", "decode"))
    assert prefill.tokens == {COMPUTED: length, PULLED: 0, REUSED: 0}
    assert decode.tokens == {COMPUTED: 0, PULLED: length, REUSED: 0}
    assert prefill.published_blocks == decode.pulled_blocks == blocks(prompt)
    assert prefill.published_bytes == decode.pulled_bytes >= length * served.graph.model.block_bytes // BLOCK_TOKENS


def test_blocks_that_the_workers_forgot_come_back_from_the_pool(served):
    served.ask(AGAIN)
    served.forget()
    before = counters.read(served.graph)
    served.ask(AGAIN)
    after = counters.wait_settled(served.graph, before)
    prefill, decode = (counters.of_role(after, role) - counters.of_role(before, role) for role in ("prefill", "decode"))
    full = len(AGAIN) // BLOCK_TOKENS * BLOCK_TOKENS
    assert prefill.tokens[PULLED] >= full and prefill.tokens[COMPUTED] <= len(AGAIN) - full and prefill.tokens[REUSED] == 0
    assert prefill.published_blocks <= 1, "only the tail may be written again"
    assert decode.tokens == {COMPUTED: 0, PULLED: len(AGAIN), REUSED: 0}


def test_requests_at_the_same_time_are_all_right(served):
    before = counters.read(served.graph)
    assert served.ask_all(BURST, at_once=6) == []
    after = counters.wait_settled(served.graph, before, len(BURST))
    prefill, decode = (counters.of_role(after, role) - counters.of_role(before, role) for role in ("prefill", "decode"))
    assert decode.tokens[COMPUTED] == 0 and decode.failed == prefill.failed == 0
    assert sum(decode.tokens.values()) == sum(map(len, BURST))


def test_a_chat_is_answered(served):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Who pulls a block?"}], "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{served.graph.port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        said = json.load(answer)
    assert said["usage"]["completion_tokens"] == 8 and said["choices"][0]["message"]["content"]


def test_what_the_connector_counts_can_be_read_from_dynamos_metrics(served):
    page = counters.Sample.parse(served.graph.metrics("decode-0"))
    assert page.sum("vllm:kvbm_cxl_pulled_blocks_total", result="hit") > 0
    assert page.sum("vllm:kvbm_cxl_pulled_blocks_total", result="checksum") == 0
    assert page.sum("vllm:kvbm_cxl_pull_seconds_count") > 0


def test_the_pool_is_whole_in_the_end(served):
    served.assert_whole()
