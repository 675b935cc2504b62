# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a block lie in vLLM's KV cache.

vLLM 0.31 hands a connector one tensor `[blocks, heads, tokens, content]` per layer, all views of one allocation whose physical order is the
engine's choice (`KVCacheLayout`). A block of ours is the pages of all layers, one after the other. It is copied whole, a prompt's tail too:
the order of numbers within a page is the attention backend's (on CPUs keys lie packed over tokens), so no part of it belongs to a token.
Where blocks lie in the pool in several cells (`shards`), a cell has of every page what its heads and tokens are, in the order of a page of
that size.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
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


Pieces = Sequence[tuple[int, int]]
"""Stretches of a page: (offset, length) in bytes."""
Cutter = Callable[[str, "torch.Tensor", int], list[list[Pieces]]]
"""Of a layer's name, its tensor and a number of slices: for each shard and each slice of a page what belongs to it."""


def _whole(name: str, tensor: "torch.Tensor", slices: int) -> list[list[Pieces]]:
    return [[_page_pieces(tensor)]]


def cell_parts(
    tensors: Sequence[tuple[str, "torch.Tensor"]], block_count: int, shards: int = 1, slices: int = 1, cut: Cutter = _whole
) -> list[list[list[Part]]]:
    """For each shard and each slice the parts of such a cell of a block, in the order in which they lie in the pool: by layer, then by
    place in the page of an engine that has such blocks.

    `tensors`: one or more per layer, `[block_count * n, heads, tokens, content]` with any strides, `n` kernel blocks to a block of
    vLLM's block tables. `cut`: asked where a page has several shards or slices.
    """
    cells: list[list[list[Part]]] = [[[] for _ in range(slices)] for _ in range(shards)]
    for name, tensor in tensors:
        kernel_blocks = _kernel_blocks(tensor, block_count)
        # Several pages to a slice, or several slices to a page.
        pages, within = max(kernel_blocks // slices, 1), max(slices // kernel_blocks, 1)
        if pages * slices != kernel_blocks * within or (within > 1 and tensor.shape[2] % within):
            raise GeometryError(f"{kernel_blocks} pages of shape {tuple(tensor.shape[1:])} to a block cannot be divided by {slices}")
        pieces = cut(name, tensor, within) if shards > 1 or within > 1 else _whole(name, tensor, 1)
        for shard, of_shard in zip(cells, pieces, strict=True):
            for number, cell in enumerate(shard):
                first = number // within * pages
                for page in range(first, first + pages):
                    cell += _kernel_parts(tensor, block_count, page, of_shard[number % within])
    return [[_merge(cell) for cell in shard] for shard in cells]


def _kernel_blocks(tensor: "torch.Tensor", block_count: int) -> int:
    if tensor.dim() < 2 or block_count <= 0 or tensor.shape[0] % block_count:
        raise GeometryError(f"a KV cache tensor of shape {tuple(tensor.shape)} has no {block_count} blocks in its first dimension")
    return tensor.shape[0] // block_count


def _kernel_parts(tensor: "torch.Tensor", block_count: int, kernel_block: int, pieces: Pieces) -> Iterable[Part]:
    kernel_stride = tensor.stride(0) * tensor.element_size()
    start = tensor.data_ptr() + kernel_block * kernel_stride
    for offset, len_bytes in pieces:
        yield Part(start + offset, kernel_stride * (tensor.shape[0] // block_count), len_bytes)


def _page_pieces(tensor: "torch.Tensor") -> Pieces:
    """All of a page."""
    item_bytes = tensor.element_size()
    run_bytes, outer = item_bytes, []
    for stride, size in sorted((stride * item_bytes, size) for stride, size in zip(tensor.stride()[1:], tensor.shape[1:]) if size > 1):
        if stride == run_bytes and not outer:
            run_bytes *= size
        elif stride < run_bytes:
            raise GeometryError(f"the pages of a KV cache tensor overlap: shape {tuple(tensor.shape)}, strides {tensor.stride()}")
        else:
            outer.append((stride, size))
    # The outermost dimension moves slowest, so that parts follow one another as they lie in memory.
    return [(sum(steps), run_bytes) for steps in product(*(range(0, stride * size, stride) for stride, size in reversed(outer)))]


def _merge(parts: Iterable[Part]) -> list[Part]:
    """The same bytes in the same order, with neighbours put together."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if last and last.stride_bytes == part.stride_bytes and last.address + last.len_bytes == part.address:
            merged[-1] = Part(last.address, last.stride_bytes, last.len_bytes + part.len_bytes)
        else:
            merged.append(part)
    return merged


def cache_tensors(kv_caches: Mapping[str, "torch.Tensor"], layer_names: Sequence[str]) -> list[tuple[str, "torch.Tensor"]]:
    """The tensors of the layers that own their cache, each with its layer, in the order of `layer_names`. Layers that reuse another's are
    left out."""
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
                tensors.append((name, tensor))
    if len({tensor.device for _, tensor in tensors}) != 1:
        raise GeometryError(f"the KV cache lies on several devices: {sorted({str(tensor.device) for _, tensor in tensors})}")
    return tensors
