# SPDX-License-Identifier: Apache-2.0
"""Stock NixlConnector over the plugin: the same texts, every byte through the pool, counted on both sides."""

import leftovers
import pytest
from graph import counters
from graph.counters import COMPUTED, PULLED
from graph.model import BLOCK_TOKENS
from serving import blocks, serving, tokens

PROMPTS = [tokens(f"nixl {number}", length) for number, length in enumerate([100, BLOCK_TOKENS, 700, 3000])]
BURST = [tokens(f"nixl burst {number}", 500 + 40 * number) for number in range(8)]


@pytest.fixture(scope="module")
def served():
    with serving([*PROMPTS, *BURST], connector="nixl-cxl") as one:
        yield one


def test_the_round_of_make_serve_finds_everything_right(served):
    served.ask_round()


def plugin_settled(graph):
    """The plugins' counters, once they have all that the connectors of decode have counted: hosts publish them twice a second."""
    reads = counters.of_role(counters.read(graph), "decode").transfers
    seen = {}

    def has_all():
        seen.update(counters.of_plugin(graph.pool))
        return seen["reads"] == reads and seen["staged_read_bytes"] == seen["served_read_bytes"]

    leftovers.wait_for(has_all, what=lambda: f"the connectors have counted {reads} transfers, the plugins {seen}")
    return seen


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_a_prompt_is_staged_through_the_pool(served, prompt):
    before, counted = counters.read(served.graph), plugin_settled(served.graph)
    served.ask(prompt)
    after = counters.wait_settled(served.graph, before)
    decode = counters.of_role(after, "decode") - counters.of_role(before, "decode")
    assert decode.tokens[COMPUTED] == 0 and decode.tokens[PULLED] == len(prompt)
    assert decode.transfers >= 1
    now = plugin_settled(served.graph)
    # The connector moves whole blocks; what one engine reads the other one has gathered.
    assert now["staged_read_bytes"] - counted["staged_read_bytes"] == blocks(prompt) * served.graph.model.block_bytes
    assert now["reads"] - counted["reads"] == decode.transfers and now["failed"] == 0


def test_requests_at_the_same_time_are_all_right(served):
    before = counters.read(served.graph)
    assert served.ask_all(BURST, at_once=4) == []
    after = counters.wait_settled(served.graph, before, len(BURST))
    decode = counters.of_role(after, "decode") - counters.of_role(before, "decode")
    assert decode.tokens[COMPUTED] == 0 and decode.failed == 0
