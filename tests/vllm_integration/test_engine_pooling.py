# SPDX-License-Identifier: Apache-2.0
"""Engines that cannot begin in the middle of a prompt are promised nothing: all pooling types, and vLLM's caches turned off."""

import gc

import pytest
import torch
from engines import BLOCK_BYTES, Engine, engine, prompt
from kvbm_cxl.vllm_integration import CONNECTOR_NAME, register, support
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

PROMPT = prompt(300, 61)


def _pooled(model: str, pool: str, pooling: str, **options):
    """Two equal requests of a pooling engine: their vectors, and what was counted of the second."""
    from vllm import LLM
    from vllm.config import PoolerConfig

    register()
    task = "token_embed" if pooling in ("ALL", "STEP") else "embed"
    transfer = {
        "kv_connector": CONNECTOR_NAME,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"pool": pool},
    }
    settings = {"dtype": "float32", "max_model_len": 2048, "enforce_eager": True, "seed": 0, "disable_log_stats": False}
    llm = LLM(
        model=model,
        runner="pooling",
        kv_cache_memory_bytes=64 * BLOCK_BYTES,
        pooler_config=PoolerConfig(task=task, pooling_type=pooling),
        kv_transfer_config=transfer,
        **settings,
        **options,
    )
    running = Engine(llm)
    try:
        vectors = []
        for _ in range(2):
            running.settle()
            running.counted()
            llm.reset_prefix_cache()
            (output,) = llm.encode([PROMPT], pooling_task=task, use_tqdm=False)
            vectors.append(output.outputs.data)
        return vectors, running.counted()
    finally:
        llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        del llm, running
        gc.collect()


@pytest.mark.parametrize("pooling", ("LAST", "MEAN", "CLS", "ALL", "STEP"))
def test_all_ways_of_pooling(model, pool, pooling):
    (first, second), counted = _pooled(model, pool, pooling)
    assert torch.allclose(first, second, atol=1e-4)
    assert counted.get("external_hits", 0) == (256 if pooling == "LAST" else 0)


@pytest.mark.parametrize("off", ("enable_prefix_caching", "enable_chunked_prefill"))
def test_pooling_with_a_cache_of_vllms_turned_off(model, pool, off):
    (first, second), counted = _pooled(model, pool, "LAST", **{off: False})
    assert torch.allclose(first, second, atol=1e-4) and "external_hits" not in counted


@pytest.mark.parametrize("off", ("enable_prefix_caching", "enable_chunked_prefill"))
def test_generating_with_a_cache_of_vllms_turned_off(model, pool, off):
    """vLLM does nothing of the kind by itself then; hand-overs go on, whole ones and parts."""
    longer = {"prompt_token_ids": PROMPT["prompt_token_ids"] + prompt(100, 62)["prompt_token_ids"]}
    with engine(model, None) as plain:
        expected = plain.texts([PROMPT, longer])
    with engine(model, "kv_producer", pool, **{off: False}) as prefill:
        assert prefill.texts([PROMPT]) == expected[:1]
    with engine(model, "kv_consumer", pool, **{off: False}) as decode:
        assert decode.texts([PROMPT]) == expected[:1] and decode.counted()["external_hits"] == 300
        assert decode.texts([longer]) == expected[1:]


def test_no_promise_against_vllms_own_advice():
    """A caller may turn both back on for a model that does not support them; vLLM warns, and fails in the middle of a step."""
    from types import SimpleNamespace as Names

    def takes_hits(runner="pooling", caching=True, chunks=True, supports_caching=True, supports_chunks=True) -> bool:
        model = Names(runner_type=runner, is_prefix_caching_supported=supports_caching, is_chunked_prefill_supported=supports_chunks)
        return support.takes_hits(
            Names(
                model_config=model,
                cache_config=Names(enable_prefix_caching=caching),
                scheduler_config=Names(enable_chunked_prefill=chunks),
            )
        )

    assert takes_hits() and takes_hits(runner="generate", caching=False, chunks=False)
    for off in ("caching", "chunks", "supports_caching", "supports_chunks"):
        assert not takes_hits(**{off: False})
