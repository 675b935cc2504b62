# SPDX-License-Identifier: Apache-2.0
"""Whole engines of the families that people serve, tiny and with random weights.

A prompt that one engine publishes and another pulls, and one that shares its beginning, have the text of an engine without a connector.
"""

import json
from pathlib import Path

import numpy
import pytest
import tiny_models
from engine_process import EngineProcess
from engines import HAND_OVER, engine, flip_bytes, prompt
from PIL import Image

LENGTH, SHARED = 700, 512


def prompts() -> list[dict]:
    first, other = prompt(LENGTH, 1)["prompt_token_ids"], prompt(LENGTH, 2)["prompt_token_ids"]
    return [{"prompt_token_ids": first}, {"prompt_token_ids": first[:SHARED] + other[:150]}]


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_text_is_that_of_an_engine_alone(name, folder, make_pool):
    model, pool = tiny_models.make(name, folder), make_pool(size="256M", cells="512K:80%")
    options = tiny_models.options(name)
    alone = {key: value for key, value in options.items() if key != "extra"}
    with engine(model, None, **alone) as single:
        expected = [single.texts([asked])[0] for asked in prompts()]
    with engine(model, "kv_both", pool, **options) as prefill:
        (output,) = prefill.outputs(prompts()[:1], extra_args=HAND_OVER)
        assert list(output.outputs[0].token_ids) == expected[0]
        shape = prefill.scheduler_side.shape
        assert prefill.counted()["published_blocks/stored"] > 0
    with engine(model, "kv_both", pool, **options) as decode:
        assert decode.texts(prompts()[:1], extra_args={"kv_transfer_params": output.kv_transfer_params}) == expected[:1]
        counted = decode.counted()
        assert counted["external_hits"] == shape.reach(LENGTH, with_tail=True) > LENGTH - 2 * shape.align_tokens, counted
        assert counted["loads/complete"] == 1 and "loads/failed" not in counted
    with engine(model, "kv_both", pool, **options) as later:
        assert later.texts(prompts()[1:]) == expected[1:]
        counted = later.counted()
        # vLLM keeps the states of recurrent layers at the ends of chunks alone: none of them here but at the prompt's end.
        if not shape.has_states:
            assert counted["external_hits"] >= SHARED - 128 - shape.align_tokens, counted


@pytest.mark.parametrize("policy", ("recompute", "fail"))
@pytest.mark.parametrize("group", (0, 1))
def test_a_flipped_byte_of_any_group_is_never_served(folder, make_pool, group, policy):
    model, pool = tiny_models.make("gpt-oss", folder), make_pool(size="256M", cells="512K:80%")
    options = {**tiny_models.options("gpt-oss"), "policy": policy}
    asked = prompts()[0]
    with engine(model, "kv_both", pool, **options) as running:
        (expected,) = running.texts([asked])
        running.settle()
        running.llm.reset_prefix_cache()
        side = running.scheduler_side
        size = running.worker_side.attachment.groups[group].block_bytes
        (key, payload) = _a_block(running, asked, group, size)
        flip_bytes(pool, payload, [size // 3])
        running.counted()
        (output,) = running.outputs([asked])
        running.settle()
        counted = running.counted()
        assert (counted.get("pulled_blocks/checksum"), counted.get("loads/failed")) == (1, 1), counted
        if policy == "recompute":
            assert list(output.outputs[0].token_ids) == expected
        else:
            assert output.outputs[0].finish_reason == "error"
        assert side.access.call(lambda cache: cache.pinned()) == 0
        running.llm.reset_prefix_cache()
        assert running.texts([asked]) == [expected]
        assert "pulled_blocks/checksum" not in running.counted(), key.hex()


def _a_block(running, asked, group: int, size: int) -> tuple[bytes, bytes]:
    """Key and bytes of the last full block of a prompt."""
    from kvbm_cxl.vllm_integration.request_state import RequestState
    from vllm import SamplingParams
    from vllm.v1.request import Request

    side = running.scheduler_side
    request = Request("keys", asked["prompt_token_ids"], SamplingParams(), None, block_hasher=running.core.request_block_hasher)
    last = LENGTH // side.shape.groups[group].block_tokens - 1
    (key,) = side.names.keys(RequestState(request), last, last + 1, group)
    into = bytearray(size)
    assert side.access.call(lambda cache: cache.pull(side.names.by_group[group][0], key, into))
    return key, bytes(into)


def test_speculative_decoding_by_ngrams_publishes_what_was_accepted(model, make_pool):
    """A prompt that repeats itself, so that guesses are made, and some are right and some wrong. Each engine has a process of its own: once
    numba was imported, vLLM 0.31 starts no second one in a process."""
    pool, repeated = make_pool(size="128M", cells="512K:75%"), prompt(40, 5)["prompt_token_ids"]
    asked = {"prompt_token_ids": repeated * 8}
    options = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}}
    with EngineProcess(model, None) as plain:
        (expected,) = plain("texts", [asked], max_tokens=300)
        turn = {"prompt_token_ids": [*asked["prompt_token_ids"], *expected, *repeated]}
        (later,) = plain("texts", [turn])
    with EngineProcess(model, "kv_both", pool, **options) as first:
        assert first("texts", [asked], max_tokens=300) == [expected]
    for more in (options, {}):
        with EngineProcess(model, "kv_both", pool, **more) as second:
            assert second("texts", [turn]) == [later]
            # What the first one accepted is there, up to the last full block.
            assert second("counted")["external_hits"] >= (320 + 300 - 1) // 128 * 128


def _seen(model: str, picture: int) -> dict:
    """A prompt with a picture of random points near its end."""
    config = json.loads((Path(model) / "config.json").read_text())
    points = numpy.random.default_rng(picture).integers(0, 256, (112, 112, 3), dtype=numpy.uint8)
    before, behind = prompt(130, 31)["prompt_token_ids"], prompt(10, 32)["prompt_token_ids"]
    marks = [config[f"{name}_token_id"] for name in ("vision_start", "image", "vision_end")]
    return {"prompt_token_ids": [*before, *marks, *behind], "multi_modal_data": {"image": Image.fromarray(points)}}


def test_a_picture_is_part_of_what_a_block_is_called(model, folder, make_pool):
    """Of two pictures of one size, each has the text that it has without a pool; what stands before them is shared."""
    seeing, pool = tiny_models.make_multimodal(folder, Path(model) / "tokenizer.json"), make_pool(size="128M", cells="512K:80%")
    options = {**tiny_models.options("qwen2-vl"), "skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1, "video": 0}}
    alone = {key: value for key, value in options.items() if key != "extra"}
    with engine(seeing, None, **alone) as single:
        outputs = [single.outputs([_seen(seeing, picture)])[0] for picture in (1, 2)]
    expected = [list(output.outputs[0].token_ids) for output in outputs]
    assert expected[0] != expected[1], "the picture decides what is said"
    with engine(seeing, "kv_both", pool, **options) as prefill:
        (handed_over,) = prefill.handed_over([_seen(seeing, 1)])
    with engine(seeing, "kv_both", pool, **options) as decode:
        assert decode.texts([_seen(seeing, 1)], extra_args=handed_over) == expected[:1]
        assert decode.counted()["external_hits"] == len(outputs[0].prompt_token_ids) > 150
    with engine(seeing, "kv_both", pool, **options) as other:
        assert other.texts([_seen(seeing, 2)]) == expected[1:]
        assert other.counted()["external_hits"] == 130 // 32 * 32, "the blocks before the picture"
