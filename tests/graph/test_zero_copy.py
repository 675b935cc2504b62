# SPDX-License-Identifier: Apache-2.0
"""KV caches that lie in the pool: full blocks are published without a copy, decode pulls them from where prefill computed them."""

import pytest
from graph import counters
from graph.counters import COMPUTED, PULLED
from graph.model import BLOCK_TOKENS
from serving import blocks, serving, tokens

PROMPTS = [tokens(f"in place {number}", length) for number, length in enumerate([100, BLOCK_TOKENS, 700, 3000])]
# More than a KV cache has blocks: the first ones' are taken back while others are asked.
BURST = [tokens(f"in place, burst {number}", 1500 + 40 * number) for number in range(24)]


@pytest.fixture(scope="module")
def served():
    with serving([*PROMPTS, *BURST], connector="cxl", zero_copy=True) as one:
        yield one


def test_the_round_of_make_serve_finds_everything_right(served):
    served.ask_round()


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_decode_pulls_every_token_from_where_prefill_computed_it(served, prompt):
    before = counters.read(served.graph)
    served.ask(prompt)
    after = counters.settled(served.graph, before)
    prefill, decode = (counters.of_role(after, role) - counters.of_role(before, role) for role in ("prefill", "decode"))
    assert decode.tokens[COMPUTED] == 0 and decode.tokens[PULLED] == len(prompt)
    assert prefill.lent_blocks == len(prompt) // BLOCK_TOKENS
    assert prefill.lent_blocks + prefill.published_blocks == decode.pulled_blocks == blocks(prompt)


def test_blocks_that_are_taken_back_make_no_text_wrong(served):
    for _ in range(2):
        assert served.ask_all(BURST, at_once=4) == []
    served.assert_whole()
