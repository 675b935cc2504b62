# SPDX-License-Identifier: Apache-2.0
"""Graphs on one pool, one after the other: blocks outlive the graph that made them, and no model ever gets another one's."""

import os
import uuid

import pytest
from graph import counters
from graph.counters import COMPUTED, PULLED, REUSED
from graph.model import BLOCK_TOKENS, block_bytes, tiny_model
from graph.options import Options
from graph.pool import cxlctl, format_pool
from serving import serving, tokens

SIZE_BYTES = 256 << 20
PROMPTS = [tokens(f"of two models {number}", 4 * BLOCK_TOKENS + 9 * number + 5) for number in range(3)]
TOKENS = sum(map(len, PROMPTS))
FULL_TOKENS = sum(len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in PROMPTS)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """A pool that an operator formatted, and what the graphs on it are told of this machine."""
    folder = tmp_path_factory.mktemp("pool")
    spec, machine = f"/dev/shm/kvbm-cxl-test-{uuid.uuid4().hex[:12]}", uuid.uuid4().hex
    format_pool(f"{spec},size={SIZE_BYTES}", block_bytes_of_tiny())
    yield {"pool": spec, "environment": {"CXL_MACHINE_ID": machine, "CXL_STATE_DIR": str(folder / "host")}}
    os.unlink(spec)


def block_bytes_of_tiny():
    import json

    return block_bytes(json.loads((tiny_model(Options.state / "models") / "config.json").read_text()))


def one_graph(pool, seed):
    """Asks a graph with the model of this seed; texts, and what prefill and decode counted."""
    model = tiny_model(Options.state / "models", seed)
    with serving(PROMPTS, connector="cxl", model=str(model), **pool) as served:
        before = counters.read(served.graph)
        assert served.ask_all(PROMPTS, at_once=1) == []
        after = counters.wait_settled(served.graph, before, len(PROMPTS))
        served.assert_whole()
        texts = [served.expected(prompt) for prompt in PROMPTS]
    return texts, *(counters.of_role(after, role) - counters.of_role(before, role) for role in ("prefill", "decode"))


def test_each_model_has_its_own_blocks_and_finds_them_again(pool):
    first, prefill, decode = one_graph(pool, seed=20)
    assert prefill.tokens == {COMPUTED: TOKENS, PULLED: 0, REUSED: 0} and decode.tokens[COMPUTED] == 0
    other, prefill, decode = one_graph(pool, seed=21)
    assert prefill.tokens == {COMPUTED: TOKENS, PULLED: 0, REUSED: 0} and decode.tokens[COMPUTED] == 0
    assert not set(first) & set(other), "the same prompts mean something else to it"
    again, prefill, decode = one_graph(pool, seed=20)
    assert again == first
    assert prefill.tokens[PULLED] >= FULL_TOKENS, "blocks outlive the graph that made them"
    assert decode.tokens[COMPUTED] == 0
    # The graphs are gone; the pool is not, and nothing of it is held.
    assert "0 cells pinned" in cxlctl(pool["pool"], "cache", "stat")
