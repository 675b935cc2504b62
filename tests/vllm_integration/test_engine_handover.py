# SPDX-License-Identifier: Apache-2.0
"""Whole engines: what prefill publishes decode pulls, to the last token, and the text is that of an engine without the pool."""

import pytest
from engines import BLOCK_BYTES, BLOCK_TOKENS, engine, prompt

# Shorter than a block, a tail of 1 and of 127 tokens, whole blocks without a tail, several chunks of prefill.
LENGTHS = (37, 128, 129, 255, 256, 1000)
PROMPTS = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
BLOCKS = sum(-(-length // BLOCK_TOKENS) for length in LENGTHS)
TOKENS = sum(LENGTHS)
FULL_BLOCKS = sum(length // BLOCK_TOKENS for length in LENGTHS)
FULL_TOKENS = FULL_BLOCKS * BLOCK_TOKENS


@pytest.fixture(scope="module")
def texts(model):
    """Answers of an engine without a connector."""
    with engine(model, None) as plain:
        return plain.texts(PROMPTS)


@pytest.mark.parametrize("behind", (False, True))
def test_decode_pulls_every_token_of_the_prompt(model, pool, texts, behind):
    with engine(model, "kv_producer", pool, max_num_batched_tokens=384, extra={"publish_behind": behind}) as prefill:
        params = [output.kv_transfer_params for output in prefill.outputs(PROMPTS, max_tokens=1)]
        prefill.settle()
        counted = prefill.counted()
    assert [each["kvbm_cxl"]["tokens"] for each in params] == list(LENGTHS)
    assert counted["published_blocks/stored"] == BLOCKS
    assert counted["bytes/published"] == BLOCKS * BLOCK_BYTES
    assert counted["prompt_tokens/computed"] == TOKENS and "external_hits" not in counted

    with engine(model, "kv_consumer", pool) as decode:
        answers = []
        for each, handed_over in zip(PROMPTS, params):
            answers += decode.texts([each], extra_args={"kv_transfer_params": handed_over})
        counted = decode.counted()
        assert answers == texts
        assert counted["prompt_tokens/pulled"] == counted["external_hits"] == counted["source/external_kv_transfer"] == TOKENS
        assert "prompt_tokens/computed" not in counted and "source/local_compute" not in counted
        assert counted["pulled_blocks/hit"] == BLOCKS and counted["bytes/pulled"] == BLOCKS * BLOCK_BYTES
        assert counted["handovers/complete"] == counted["loads/complete"] == len(LENGTHS)
        assert "published_blocks/stored" not in counted, "a consumer publishes nothing"
        assert decode.scheduler_side.lookups.pinned == 0 and decode.scheduler_side.access.call(lambda cache: cache.pinned()) == 0
        assert not decode.scheduler_side._tracked


def test_a_fresh_engine_reuses_what_another_computed(model, pool, texts):
    """kv_both, all prompts in one batch, prefill in chunks; then a second engine with nothing of its own."""
    with engine(model, "kv_both", pool, max_num_batched_tokens=256) as first:
        assert first.texts(PROMPTS) == texts
        first.settle()
        # With its answer, the prompt of 255 tokens fills a block.
        assert first.counted()["published_blocks/stored"] == FULL_BLOCKS + 1
        # vLLM has them itself now: nothing is pulled, nothing is published twice.
        assert first.texts(PROMPTS) == texts
        counted = first.counted()
        assert "published_blocks/stored" not in counted and counted["published_blocks/exists"] == FULL_BLOCKS + 1
        assert counted["prompt_tokens/reused"] >= sum(length // BLOCK_TOKENS * BLOCK_TOKENS for length in (129, 255, 1000))
    with engine(model, "kv_both", pool) as second:
        assert second.texts(PROMPTS) == texts
        counted = second.counted()
        assert counted["external_hits"] == counted["prompt_tokens/pulled"] == FULL_TOKENS
        assert counted["prompt_tokens/computed"] == TOKENS - FULL_TOKENS
        assert "published_blocks/stored" not in counted
        # A prompt that begins like another one but ends otherwise: its shared blocks are vLLM's own by now, its end is computed.
        longer = {"prompt_token_ids": PROMPTS[5]["prompt_token_ids"][:900] + prompt(200, 99)["prompt_token_ids"]}
        mine = second.texts([longer])
        second.settle()
        counted = second.counted()
        assert counted["prompt_tokens/reused"] == 896 and counted["prompt_tokens/computed"] == 204
        assert counted["published_blocks/stored"] == 1, "the block after the seven that are there"
    with engine(model, None) as plain:
        assert plain.texts([longer]) == mine


def test_prompts_with_a_common_prefix_in_one_batch(model, pool, texts):
    """All at once, both while the prefix is computed and while it is pulled."""
    prefix = prompt(512, 7)["prompt_token_ids"]
    batch = [{"prompt_token_ids": prefix + prompt(100 + each, 100 + each)["prompt_token_ids"]} for each in range(4)]
    with engine(model, None) as plain:
        expected = plain.texts(batch)
    with engine(model, "kv_producer", pool) as prefill:
        prefill.texts(batch, max_tokens=1)
        prefill.settle()
        counted = prefill.counted()
        assert counted["published_blocks/stored"] == 4 + 4, "the prefix once, and four tails"
    with engine(model, "kv_consumer", pool) as decode:
        assert decode.texts(batch) == expected
        counted = decode.counted()
        ends = sum(len(each["prompt_token_ids"]) - len(prefix) for each in batch)
        assert counted["external_hits"] == len(prefix) + ends, "the prefix once: the others wait for it and share its blocks"
        assert decode.scheduler_side.access.call(lambda cache: cache.pinned()) == 0


def test_salts_keep_requests_apart(model, pool):
    """A tail shorter than a block has no hash of vLLM's behind it: the salt has to be in our own, too."""
    asked = [prompt(300, 5), prompt(60, 6)]
    salted = [{**each, "cache_salt": "one tenant"} for each in asked]
    with engine(model, "kv_producer", pool) as prefill:
        prefill.texts(salted, max_tokens=1)
        prefill.settle()
        assert prefill.counted()["published_blocks/stored"] == 4
    with engine(model, "kv_consumer", pool) as decode:
        decode.texts(asked)
        decode.texts([{**each, "cache_salt": "another"} for each in asked])
        counted = decode.counted()
        assert "external_hits" not in counted and counted["lookups/none"] == 4
        decode.texts(salted)
        assert decode.counted()["external_hits"] == 360


def test_prompt_logprobs_are_computed(model, pool):
    asked = [prompt(300, 8)]
    with engine(model, "kv_both", pool) as both:
        both.texts(asked)
        both.llm.reset_prefix_cache()
        both.counted()
        (output,) = both.outputs(asked, prompt_logprobs=1)
        assert len(output.prompt_logprobs) == 300
        counted = both.counted()
        assert "external_hits" not in counted and counted["lookups/skipped"] == 1
        both.llm.reset_prefix_cache()
        both.texts(asked)
        assert both.counted()["external_hits"] == 256


def test_short_prompts_leave_the_pool_to_what_is_shared(model, make_pool):
    """Room for 36 blocks: a prompt that others begin with stays, whatever number of prompts come that are shorter than a block."""
    pool, shared, short = make_pool(size="24M", cells="512K:75%"), prompt(900, 20), [prompt(20, 100 + each) for each in range(72)]
    later = {"prompt_token_ids": shared["prompt_token_ids"][:896] + prompt(60, 21)["prompt_token_ids"]}
    with engine(model, None) as plain:
        expected, (text,) = plain.texts(short, max_tokens=2), plain.texts([later])
    with engine(model, "kv_both", pool) as running:
        running.texts([shared])
        assert running.texts(short, max_tokens=2) == expected
        running.settle()
        counted = running.counted()
        assert counted["published_blocks/stored"] == 7 and counted["bytes/published"] == 7 * BLOCK_BYTES
    with engine(model, "kv_both", pool) as other:
        assert other.texts([later]) == [text]
        counted = other.counted()
        assert counted["external_hits"] == counted["prompt_tokens/pulled"] == 896 and counted["bytes/pulled"] == 7 * BLOCK_BYTES
        # The same prompt once more: its end is computed, not pulled as a block.
        assert other.texts([later]) == [text]
        counted = other.counted()
        assert counted["prompt_tokens/computed"] == 60 and "bytes/pulled" not in counted and "published_blocks/stored" not in counted


def test_one_engine_hands_over_some_requests_and_decodes_others(model, pool, texts):
    """Only what is handed over has its tail in the pool, and only decode of a hand-over takes it."""
    with engine(model, "kv_both", pool) as first:
        handed_over = first.handed_over(PROMPTS[:3])
        assert first.texts(PROMPTS[3:]) == texts[3:]
        first.settle()
        # Of 37, 128, 129 tokens all; of 255, 256 and 1000 whole blocks, and the one that the answer to the first of these fills.
        assert first.counted()["published_blocks/stored"] == 1 + 1 + 2 + 1 + 2 + 7 + 1
    with engine(model, "kv_both", pool) as second:
        for asked, params, text in zip(PROMPTS, handed_over, texts):
            assert second.texts([asked], extra_args=params) == [text]
        counted = second.counted()
        assert counted["external_hits"] == counted["prompt_tokens/pulled"] == 37 + 128 + 129 and counted["handovers/complete"] == 3
        assert "prompt_tokens/computed" not in counted and "published_blocks/stored" not in counted
        second.forget()
        assert second.texts(PROMPTS) == texts
        assert second.counted()["external_hits"] == FULL_TOKENS
