# SPDX-License-Identifier: Apache-2.0
"""Models with recurrent layers or sliding windows: prompts that begin alike, each asked of an engine of its own. The first engine to meet a
prefix that the pool has without the state, or the window, at its end publishes it, and the next one continues from there."""

import pytest
import tiny_models
from engines import engine, prompt

FAMILIES = ("qwen3-next", "granite4", "nemotron-h", "gpt-oss", "gemma3")
SYSTEM, EXAMPLES = prompt(1400, 1)["prompt_token_ids"], prompt(800, 2)["prompt_token_ids"]


def _asked(begin: list[int], seed: int) -> dict:
    return {"prompt_token_ids": begin + prompt(170, seed)["prompt_token_ids"]}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_the_second_engine_publishes_of_a_prefix_the_third_continues(name, folder, make_pool):
    """A prefix within another one, too: what is found of the shorter one does not hide that the pool has more."""
    model, options, pool = tiny_models.make(name, folder), tiny_models.options(name), make_pool(size="256M", cells="512K:80%")
    # Windows are published at the ends of prompts, and at no other place by themselves.
    options["extra"]["window_every_tokens"] = 1 << 20
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


def test_of_prompts_asked_at_once_the_state_is_kept_once(folder, make_pool):
    """Two prompts in one step with a beginning that the pool has: one computes it, and both end with the right text."""
    model, options, pool = tiny_models.make("granite4", folder), tiny_models.options("granite4"), make_pool(size="128M", cells="512K:80%")
    asked = [_asked(SYSTEM, seed) for seed in (21, 22, 23, 24)]
    with engine(model, None, **{key: value for key, value in options.items() if key != "extra"}) as alone:
        expected = [alone.texts([each])[0] for each in asked]
    with engine(model, "kv_both", pool, **options) as first:
        assert first.texts(asked[:1]) == expected[:1]
    with engine(model, "kv_both", pool, **options) as second:
        assert second.texts(asked[1:3]) == expected[1:3]
        assert "external_hits" not in second.counted()
    with engine(model, "kv_both", pool, **options) as third:
        assert third.texts(asked[3:]) == expected[3:]
        align = third.scheduler_side.shape.align_tokens
        assert third.counted()["external_hits"] == len(SYSTEM) // align * align
