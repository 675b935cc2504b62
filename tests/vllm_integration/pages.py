# SPDX-License-Identifier: Apache-2.0
"""Pages of KV caches, written by vLLM's own kernel for CPUs or in the order of their names."""

import torch
from kvbm_cxl.vllm_integration.token_places import PageWriter

HEAD_SIZE = 32


def empty(blocks: int, heads: int, tokens: int, dtype: torch.dtype, order: tuple[int, ...], content: int = 2 * HEAD_SIZE) -> torch.Tensor:
    """`[blocks, heads, tokens, content]` that lies in memory in an order of these dimensions."""
    sizes = {1: heads, 2: tokens, 3: content}
    memory = torch.zeros([blocks, *(sizes[dim] for dim in order)], dtype=dtype)
    return memory.permute([0, *(1 + order.index(dim) for dim in (1, 2, 3))])


def keys_and_values(tokens: int, heads: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ones, `[tokens, heads, size]` each."""
    random = torch.Generator().manual_seed(seed)
    made = torch.randn(2, tokens, heads, HEAD_SIZE, generator=random).to(dtype)
    return made[0], made[1]


def written(writer: PageWriter, cache: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots=None) -> torch.Tensor:
    """The cache with tokens in it, from the first slot on or in `slots`."""
    places = torch.arange(len(keys), dtype=torch.int64) if slots is None else torch.as_tensor(slots, dtype=torch.int64)
    writer.write(keys.contiguous(), values.contiguous(), cache, places)
    return cache


def plain_writer(dtype: torch.dtype) -> PageWriter:
    """Of a backend that lets every number lie where the page's dimensions say."""

    def write(keys, values, cache, slots):
        tokens = cache.shape[2]
        cache[slots // tokens, :, slots % tokens] = torch.cat((keys, values), dim=-1)

    return PageWriter(write, HEAD_SIZE, HEAD_SIZE, dtype, "plain")


def cpu_writer(dtype: torch.dtype) -> PageWriter:
    """vLLM's backend for CPUs, as the layer of a model calls it."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(dtype, 32, HEAD_SIZE)

    def write(keys, values, cache, slots):
        blocks, heads, tokens, _ = cache.shape
        key_cache, value_cache = cache.view((blocks, heads, tokens * 2, -1)).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto")

    return PageWriter(write, HEAD_SIZE, HEAD_SIZE, dtype, f"CPU_ATTN/{isa}")
