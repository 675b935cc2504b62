# SPDX-License-Identifier: Apache-2.0
"""Whole engines of two data-parallel ranks: what one of them computes, the other pulls from the pool, and so does an engine by itself."""

import pytest
import tiny_models
from engines import engine, prompt
from parallel_ranks import ranks

# Twelve blocks and a half.
LENGTH, FULL_TOKENS = 400, 384
PROMPTS = [prompt(LENGTH, 61), prompt(LENGTH, 62)]
# Ranks that end at different times: with experts the one that is done goes on with steps without requests.
ANSWERS = (24, 6)
# Dense ranks are independent of each other. Those of a mixture of experts step together, each with a part of every expert. With whole
# experts in each (expert parallelism) vLLM's kernel for CPUs ends the process, with a connector or without.
KINDS = {"llama": {}, "qwen3-moe": {"worker_extension_cls": "uneven_gathers.Extension"}}


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_share_blocks_with_each_other_and_with_engines_without(kind, folder, make_pool):
    model, options, pool = tiny_models.make(kind, folder), tiny_models.options(kind), make_pool(size="128M", cells="512K:75%")
    asked = list(zip((0, 1), PROMPTS, ANSWERS))
    # Divided experts have other random weights than whole ones: the text is held against that of the same ranks without a connector.
    with ranks(model, None, **{key: value for key, value in (options | KINDS[kind]).items() if key != "extra"}) as plain:
        expected = plain.texts(asked)
    with ranks(model, "kv_both", pool, **{**options, **KINDS[kind]}) as both:
        assert both.texts(asked) == expected
        assert [both.counted("external_prefix_cache_hits", rank) for rank in (0, 1)] == [0, 0]
        for rank in (0, 1):
            both.wait_published(rank, FULL_TOKENS // 32)
        both.forget()
        # Each has what the other one computed.
        assert both.texts([(1 - rank, *rest) for rank, *rest in asked]) == expected
        assert [both.counted("external_prefix_cache_hits", rank) for rank in (0, 1)] == [FULL_TOKENS, FULL_TOKENS]
        both.forget()
        # A rank without requests keeps step with one that loads, and the other way round.
        assert both.texts(asked[:1]) == expected[:1] and both.texts(asked[1:]) == expected[1:]
        assert [both.counted("external_prefix_cache_hits", rank) for rank in (0, 1)] == [FULL_TOKENS, FULL_TOKENS]
        assert [both.counted("kvbm_cxl_weights", rank, found="changed") for rank in (0, 1)] == [0, 0]
    if KINDS[kind]:
        return
    with engine(model, "kv_both", pool, **options) as single:
        assert [single.texts([one], max_tokens=tokens)[0] for one, tokens in zip(PROMPTS, ANSWERS)] == expected
        assert single.counted()["external_hits"] == 2 * FULL_TOKENS
