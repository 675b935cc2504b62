# SPDX-License-Identifier: Apache-2.0
"""Whole engines of other kinds on one pool: number types, block sizes, ranks. Each finds its own blocks and no others."""

import kvbm_cxl
import pytest
import torch
from engines import BLOCK_BYTES, engine, prompt

PROMPT = prompt(300, 3)
KINDS = [{}, {"block_size": 64}, {"dtype": "bfloat16"}]


def _round(model: str, pool: str, tokens: int, **options) -> None:
    """Publishes in one engine, pulls in another one of the same kind, with the same text."""
    with engine(model, "kv_producer", pool, **options) as prefill:
        expected = prefill.texts([PROMPT])
        counted = prefill.counted()
        assert counted["published_blocks/stored"] > 0 and "external_hits" not in counted, "it meets nothing of the engines before it"
    with engine(model, "kv_consumer", pool, **options) as decode:
        assert decode.texts([PROMPT]) == expected
        assert decode.counted()["external_hits"] == tokens


def has_fp8() -> bool:
    """Whether vLLM has kernels for it: CPUs with AMX have AVX-512, too."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def test_kv_types_and_block_sizes_share_a_pool(model, make_pool):
    pool = make_pool(size="128M", cells="512K:75%")
    for options in KINDS:
        _round(model, pool, 300, **options)


@pytest.mark.skipif(not has_fp8(), reason="vLLM computes with fp8 on CPUs with AVX-512 or AMX only")
def test_fp8_shares_a_pool_with_the_others(model, make_pool):
    pool = make_pool(size="128M", cells="512K:75%")
    for options in [*KINDS, {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}]:
        _round(model, pool, 300, **options)


def test_metadata_on_another_device(model, make_pool):
    pool = make_pool(size="128M", cells="512K:75%", metadata="64M")
    assert kvbm_cxl.pool_info(pool)["metadata_bytes"] > 0
    _round(model, pool, 300)


def test_two_ranks(model, make_pool):
    """Each rank publishes its heads under a namespace of its own; what one of them lacks is a miss for both."""
    pool = make_pool(size="128M", cells="512K:75%")
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(model, "kv_producer", pool, **options) as prefill:
        expected = prefill.texts([PROMPT])
        counted = prefill.counted()
        assert counted["published_blocks/stored"] == 2 * 3
        assert counted["bytes/published"] == 3 * BLOCK_BYTES
    with engine(model, "kv_consumer", pool, **options) as decode:
        assert decode.scheduler_side.workers == 2
        assert decode.texts([PROMPT]) == expected
        counted = decode.counted()
        assert counted["external_hits"] == 300 and counted["pulled_blocks/hit"] == 2 * 3
        decode.llm.reset_prefix_cache()
        side = decode.scheduler_side
        second = side.namespaces[1]
        side.access.call(lambda cache: cache.evict(second, decode.keys(PROMPT)[1]))
        for _ in range(1000):
            if not any(side.access.call(lambda cache: cache.has(second, decode.keys(PROMPT)[1:2]))):
                break
        assert decode.texts([PROMPT]) == expected
        assert decode.counted()["external_hits"] == 128
    with engine(model, "kv_consumer", pool) as alone:
        alone.texts([PROMPT])
        assert "external_hits" not in alone.counted(), "blocks of half the heads are not those of all"
