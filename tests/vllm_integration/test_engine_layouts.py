# SPDX-License-Identifier: Apache-2.0
"""Whole engines with different tensor parallelism and block sizes on one pool: each finds what the others published, with the text of an
engine alone. The model has two KV heads, so that four ranks share them."""

import pytest
import tiny_models
from engines import engine, prompt

LENGTH = 300
STORED = {"stored_tp": 4, "stored_block_tokens": 32}
# Each one reads what those before it published, and publishes another prompt.
ENGINES = ((1, 128), (2, 32), (4, 64), (1, 64))
PROMPTS = [prompt(LENGTH, 40 + number) for number in range(len(ENGINES))]


def options(tp_size: int, block_tokens: int, **extra) -> dict:
    ranks = {"tensor_parallel_size": tp_size, "distributed_executor_backend": "mp"} if tp_size > 1 else {}
    return {**ranks, "block_size": block_tokens, "extra": extra}


def test_engines_of_any_parallelism_and_block_size_share_blocks(model, make_pool):
    pool = make_pool(size="128M", cells="64K:50%,256K:30%")
    with engine(model, None) as alone:
        texts = alone.texts(PROMPTS)
    for number, (tp_size, block_tokens) in enumerate(ENGINES):
        found = LENGTH // block_tokens * block_tokens
        with engine(model, "kv_both", pool, **options(tp_size, block_tokens, **STORED)) as running:
            for before in range(number):
                assert running.texts([PROMPTS[before]]) == [texts[before]]
                counted = running.counted()
                assert counted["external_hits"] == found and counted["loads/complete"] == tp_size, (number, before, counted)
                # Cells of every rank, for blocks of 32 tokens.
                assert counted["pulled_blocks/hit"] == tp_size * found // 32
            assert running.texts([PROMPTS[number]]) == [texts[number]]
            running.settle()
            counted = running.counted()
            assert "external_hits" not in counted and counted["published_blocks/stored"] == min(tp_size, 2) * (LENGTH // 32)
            side = running.scheduler_side
            assert len(side.namespaces) == 2 and side.workers == min(tp_size, 2), "two heads, each stored once"
            assert side.access.call(lambda cache: cache.pinned()) == 0
    # An engine that has such blocks itself needs no option.
    with engine(model, "kv_both", pool, **options(2, 32)) as plain:
        assert plain.texts(PROMPTS) == texts
        assert plain.counted()["external_hits"] == LENGTH // 32 * 32 * len(PROMPTS)
    # Of another block size, and without the option: it computes.
    with engine(model, "kv_both", pool, **options(1, 64)) as other:
        assert other.texts(PROMPTS[:1]) == texts[:1]
        assert "external_hits" not in other.counted()


def test_prefill_and_decode_of_other_block_sizes(model, make_pool, caplog):
    """A hand-over with tails of every kind; and without the option decode says once what differs."""
    lengths = (37, 64, 129, 255, 1000)
    asked = [prompt(length, 60 + length) for length in lengths]
    pool = make_pool(size="128M", cells="128K:50%,512K:30%")
    with engine(model, None) as alone:
        texts = alone.texts(asked)
    stored = {"stored_block_tokens": 32}
    with engine(model, "kv_producer", pool, max_num_batched_tokens=384, **options(1, 32, **stored)) as prefill:
        params = [output.kv_transfer_params for output in prefill.outputs(asked, max_tokens=1)]
    announcing = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
    with engine(model, "kv_consumer", pool, **announcing, **options(1, 128, **stored)) as decode:
        assert decode.scheduler_side.events is None, "routers know blocks of 128 tokens"
        for each, handed_over, text in zip(asked, params, texts):
            assert decode.texts([each], extra_args={"kv_transfer_params": handed_over}) == [text]
        counted = decode.counted()
        assert counted["external_hits"] == sum(lengths) and counted["handovers/complete"] == len(lengths)
        assert "prompt_tokens/computed" not in counted
    with engine(model, "kv_consumer", pool, **options(1, 128)) as decode:
        for each, handed_over, text in zip(asked[:2], params, texts):
            assert decode.texts([each], extra_args={"kv_transfer_params": handed_over}) == [text]
        assert decode.counted()["handovers/foreign"] == 2
        mine = str(decode.scheduler_side.namespaces[0])
    said = [record.getMessage() for record in caplog.records if "What differs" in record.getMessage()]
    assert len(said) == 1 and "--block-size (stored_block_tokens" in said[0] and "(32 there, 128 here)" in said[0], said
    assert mine in said[0] and params[0]["kvbm_cxl"]["namespace"] in said[0]


def test_windows_of_engines_with_other_block_sizes(folder, make_pool):
    """gpt-oss: full attention and a window of 64 tokens, whose blocks vLLM loads as a whole."""
    model, pool = tiny_models.make("gpt-oss", folder), make_pool(size="128M", cells="128K:75%")
    more = {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": True}
    first = prompt(LENGTH, 70)["prompt_token_ids"]
    asked = [{"prompt_token_ids": first}, {"prompt_token_ids": first[:260] + prompt(100, 71)["prompt_token_ids"]}]
    with engine(model, None, block_size=32, **more) as alone:
        texts = [alone.texts([each])[0] for each in asked]
    stored = {"stored_block_tokens": 32, "model_id": "gpt-oss"}
    with engine(model, "kv_both", pool, **more, **options(1, 32, **stored)) as writer:
        assert writer.texts(asked[:1]) == texts[:1]
    for block_tokens in (64, 128):
        with engine(model, "kv_both", pool, **more, **options(1, block_tokens, **stored)) as reader:
            assert reader.texts(asked[:1]) == texts[:1]
            assert reader.counted()["external_hits"] == LENGTH // block_tokens * block_tokens
            # Its second prompt shares blocks that it has itself by now, windows included.
            assert reader.texts(asked[1:]) == texts[1:]
        with engine(model, "kv_consumer", pool, **more, **options(1, block_tokens, **stored)) as later:
            assert later.texts(asked[1:]) == texts[1:]
            assert later.counted()["external_hits"] >= 256


def test_what_an_engine_cannot_store_is_refused_at_start(model, make_pool):
    pool = make_pool(size="64M", cells="512K:75%")
    for extra, words in (({"stored_tp": 3}, "stored_tp is 3"), ({"stored_block_tokens": 48}, "stored_block_tokens is 48")):
        with pytest.raises(Exception, match=words):
            with engine(model, "kv_both", pool, **options(1, 64, **extra)):
                pass
