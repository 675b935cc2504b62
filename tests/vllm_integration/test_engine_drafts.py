# SPDX-License-Identifier: Apache-2.0
"""Whole engines whose guesses come from a draft: EAGLE, EAGLE3, and a model by itself whose guesses are all right. The text is that of
an engine without a pool, and what later engines find was computed of accepted tokens.
"""

from pathlib import Path

import pytest
import tiny_models
from engines import engine, prompt

LENGTH, ANSWER = 500, 200
PROMPTS = [prompt(LENGTH, 21), prompt(LENGTH, 22)]


def _drafts(name: str, folder: Path) -> tuple[str, dict]:
    """A model, and how its tokens are guessed."""
    method, _, target = name.partition("/")
    named = {"eagle": "eagle-llama", "eagle3": "eagle3-llama", "draft_model": target}
    more = {"model": tiny_models.make(named[method], folder)}
    return target, {"method": method, "num_speculative_tokens": 3, **more}


@pytest.mark.parametrize("name", ("eagle/llama", "eagle3/llama", "draft_model/llama"))
def test_what_drafts_guess_is_published_once_it_is_accepted(name, folder, make_pool):
    target, drafts = _drafts(name, folder)
    model, options = tiny_models.make(target, folder), {**tiny_models.options(target), "speculative_config": drafts, "blocks": 128}
    pool = make_pool(size="256M", cells="512K:80%")
    with engine(model, None, **{key: value for key, value in options.items() if key != "extra"}) as alone:
        expected = [alone.texts([asked], max_tokens=ANSWER)[0] for asked in PROMPTS]
        turns = [{"prompt_token_ids": asked["prompt_token_ids"] + answer} for asked, answer in zip(PROMPTS, expected)]
        later = [alone.texts([turn])[0] for turn in turns]
    with engine(model, "kv_both", pool, **options) as first:
        assert first.texts(PROMPTS, max_tokens=ANSWER) == expected
        first.settle()
        align, shape = first.scheduler_side.shape.align_tokens, first.scheduler_side.shape
    with engine(model, "kv_both", pool, **options) as decode:
        assert decode.texts(PROMPTS) == [answer[:8] for answer in expected]
        reach = shape.reach(LENGTH, with_tail=False)
        assert decode.counted()["external_hits"] == len(PROMPTS) * reach > len(PROMPTS) * (LENGTH - 2 * align)
    with engine(model, "kv_both", pool, **options) as second:
        assert second.texts(turns) == later
        counted = second.counted()
        # The last token of an answer is never computed, and with EAGLE the last block of a match is computed again.
        assert counted["external_hits"] >= len(PROMPTS) * ((LENGTH + ANSWER - 1) // align - 1) * align, counted
        assert "loads/failed" not in counted
