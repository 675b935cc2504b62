# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a block lie in vLLM's KV cache.

vLLM 0.31 hands a connector one tensor `[blocks, heads, tokens, content]` per layer, all views of one allocation whose physical order is the
engine's choice (`KVCacheLayout`). A block of ours is the pages of all layers, one after the other. It is copied whole, a prompt's tail too:
the order of numbers within a page is the attention backend's (on CPUs keys lie packed over tokens), so no part of it belongs to a token.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class GeometryError(ValueError):
    """The KV cache does not have a shape that blocks can be taken from."""


@dataclass(frozen=True)
class Part:
    """A run of bytes that every block has: block `i` has it at `address + i * stride_bytes`."""

    address: int
    stride_bytes: int
    len_bytes: int


def block_parts(tensors: Sequence["torch.Tensor"], block_count: int) -> list[Part]:
    """The parts of a block, in the order in which they lie in the pool: by layer, then by place in the page.

    `tensors`: one per layer, `[block_count * n, heads, tokens, content]` with any strides, `n` kernel blocks to a block of vLLM's block
    tables.
    """
    parts = []
    for tensor in tensors:
        parts += _layer_parts(tensor, block_count)
    return _merged(parts)


def _layer_parts(tensor: "torch.Tensor", block_count: int) -> Iterable[Part]:
    if tensor.dim() < 2 or block_count <= 0 or tensor.shape[0] % block_count:
        raise GeometryError(f"a KV cache tensor of shape {tuple(tensor.shape)} has no {block_count} blocks in its first dimension")
    per_block = tensor.shape[0] // block_count
    item_bytes = tensor.element_size()
    kernel_stride = tensor.stride(0) * item_bytes
    run_bytes, outer = item_bytes, []
    for stride, size in sorted((stride * item_bytes, size) for stride, size in zip(tensor.stride()[1:], tensor.shape[1:]) if size > 1):
        if stride == run_bytes and not outer:
            run_bytes *= size
        elif stride < run_bytes:
            raise GeometryError(f"the pages of a KV cache tensor overlap: shape {tuple(tensor.shape)}, strides {tensor.stride()}")
        else:
            outer.append((stride, size))
    # The outermost dimension moves slowest, so that parts follow one another as they lie in memory.
    offsets = [sum(steps) for steps in product(*(range(0, stride * size, stride) for stride, size in reversed(outer)))]
    for kernel_block in range(per_block):
        for offset in offsets:
            yield Part(tensor.data_ptr() + kernel_block * kernel_stride + offset, kernel_stride * per_block, run_bytes)


def _merged(parts: Iterable[Part]) -> list[Part]:
    """The same bytes in the same order, with neighbours put together."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if last and last.stride_bytes == part.stride_bytes and last.address + last.len_bytes == part.address:
            merged[-1] = Part(last.address, last.stride_bytes, last.len_bytes + part.len_bytes)
        else:
            merged.append(part)
    return merged


def cache_tensors(kv_caches: Mapping[str, "torch.Tensor"], layer_names: Sequence[str]) -> list["torch.Tensor"]:
    """The tensors of the layers that own their cache, in the order of `layer_names`. Layers that reuse another's are left out."""
    if missing := [name for name in layer_names if name not in kv_caches]:
        raise GeometryError(f"vLLM registered no KV cache for {', '.join(missing[:4])}")
    tensors, seen = [], set()
    for name in layer_names:
        # Recurrent layers have several: those of the convolution and of the state.
        of_layer = kv_caches[name]
        for tensor in of_layer if isinstance(of_layer, (list, tuple)) else [of_layer]:
            place = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
            if place not in seen:
                seen.add(place)
                tensors.append(tensor)
    if len({tensor.device for tensor in tensors}) != 1:
        raise GeometryError(f"the KV cache lies on several devices: {sorted({str(tensor.device) for tensor in tensors})}")
    return tensors
