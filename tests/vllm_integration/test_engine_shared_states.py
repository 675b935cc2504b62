# SPDX-License-Identifier: Apache-2.0
"""Models with recurrent layers: prompts that begin alike, each asked of an engine of its own. The first engine to meet a prefix that the
pool has without the state at its end publishes the state, and the next one goes on from there."""

import pytest
import tiny_models
from engines import engine, prompt

FAMILIES = ("qwen3-next", "granite4", "nemotron-h")
SYSTEM, EXAMPLES = prompt(1400, 1)["prompt_token_ids"], prompt(800, 2)["prompt_token_ids"]


def _asked(begin: list[int], seed: int) -> dict:
    return {"prompt_token_ids": begin + prompt(170, seed)["prompt_token_ids"]}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_second_engine_to_see_a_prefix_keeps_its_state_for_the_third(name, folder, make_pool):
    """A prefix within another one, too: what is found of the shorter one does not hide that the pool has more."""
    model, options, pool = tiny_models.make(name, folder), tiny_models.options(name), make_pool(size="256M", cells="512K:80%")
    asked = [_asked(SYSTEM, 11), *(_asked(SYSTEM + EXAMPLES, seed) for seed in (12, 13, 14)), _asked(SYSTEM, 15)]
    with engine(model, None, **{key: value for key, value in options.items() if key != "extra"}) as alone:
        expected = []
        for each in asked:
            expected += alone.texts([each])
            alone.forget()
    found = []
    for each, text in zip(asked, expected):
        with engine(model, "kv_both", pool, **options) as running:
            align = running.scheduler_side.shape.align_tokens
            assert running.texts([each]) == [text]
            running.settle()
            counted = running.counted()
            found.append(counted.get("external_hits", 0))
            assert counted["prompt_tokens/computed"] == len(each["prompt_token_ids"]) - found[-1], counted
    shared, longer = len(SYSTEM) // align * align, len(SYSTEM + EXAMPLES) // align * align
    assert shared > align and found == [0, 0, shared, longer, shared]
