# SPDX-License-Identifier: Apache-2.0
"""How far a block from the pool is from the same block as this engine computed it.

Numerics and a wrong key differ in shape. Other batches, kernels and GPUs change every number by a little, and some tokens by a lot: those
for which a router chose another expert. A wrong key changes all tokens. So the difference of a layer is the median over the tokens of the
relative distance of their vectors, keys and values apart, and that of a block is the largest of its layers. Keys and values of the first
layer depend on no other token, and on no expert: there the token with the largest distance counts, which also shows weights that differ
for a few tokens only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .token_places import rows_of_page

if TYPE_CHECKING:
    from .token_places import PageWriter

# How --kv-cache-dtype names numbers that torch sees as plain bytes.
_IN_BYTES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_NUMBERS = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
# A vector shorter than this part of the usual length counts as so long: next to nothing, everything is far.
_SHORT = 0.1
# The distance of numbers that are not finite from any other ones.
_FAR = 2.0


@dataclass(frozen=True)
class Difference:
    """Relative distances: 0 for equal numbers, about 1.4 for unrelated ones."""

    typical: float
    """The median token of the layer in which that is largest."""
    first_layer: float
    """The median token of the first layer; 0 where the block has none of it, as below."""
    farthest: float
    """The farthest token of the first layer."""

    def exceeds(self, limit: "Difference") -> bool:
        """Whether a wrong key is the only explanation."""
        return self.typical > limit.typical or self.first_layer > limit.first_layer or self.farthest > limit.farthest


# Between what numerics and wrong keys reach; docs/internals/audit.md has the measurements.
_LIMITS = {
    torch.float32: Difference(0.02, 0.005, 0.1),
    torch.float16: Difference(0.1, 0.01, 0.25),
    torch.bfloat16: Difference(0.1, 0.015, 0.25),
    torch.float8_e4m3fn: Difference(0.25, 0.1, 0.5),
    torch.float8_e5m2: Difference(0.4, 0.2, 0.6),
}


def numbers_of(tensor: torch.Tensor, cache_dtype: str) -> torch.Tensor | None:
    """A KV cache tensor as numbers; None for a packed format."""
    if tensor.dtype in (torch.uint8, torch.int8):
        plain = _IN_BYTES.get(cache_dtype)
        return tensor.view(plain) if plain else None
    return tensor if tensor.dtype in _NUMBERS else None


def states_of(tensor: torch.Tensor, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor] | None:
    """The states that lie one after the other in the pages of a recurrent layer, which vLLM hands over as bytes; None where they lie
    otherwise."""
    if tensor.dtype not in (torch.uint8, torch.int8) or tensor.shape[1:-1].numel() != 1:
        return None
    pages, found, start = tensor.flatten(1), [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        stop = start + math.prod(shape) * dtype.itemsize
        if dtype not in _NUMBERS or stop > pages.shape[1] or start % dtype.itemsize or pages.stride(0) % dtype.itemsize:
            return None
        found.append(pages[:, start:stop].view(dtype))
        start = stop
    return found


def limit_of(tensors: Sequence[torch.Tensor], computed: torch.dtype, is_exact: bool = True) -> Difference:
    """What numerics may reach in tensors of numbers, by the coarsest format in use. `is_exact`: False where what the first layer gets
    depends on the batch, as pictures do and numbers that are quantized at run time."""
    limits = [_LIMITS[dtype] for dtype in {computed, *(tensor.dtype for tensor in tensors)} if dtype in _LIMITS]
    typical = max(each.typical for each in limits)
    return Difference(
        typical, max(each.first_layer for each in limits) if is_exact else typical, max(each.farthest for each in limits)
    )


@dataclass(frozen=True)
class LayerRows:
    """Which numbers of a layer's block form a vector."""

    rows: torch.Tensor
    """The row of each number of a page, `[heads, tokens, content]`: twice the token for keys, one more for values. A single 0 where a
    block is one vector."""
    page_tokens: int
    """Tokens of a page; 0 where a block is one vector."""
    is_first: bool
    """Whether it is the model's first layer."""

    @classmethod
    def of_tokens(cls, tensor: torch.Tensor, writer: "PageWriter | None", key_size: int, is_first: bool) -> "LayerRows":
        """Of attention. `writer`: asked where tokens lie, for a backend that packs them; None where the dimensions say so. `key_size`: how
        much of a token's content are keys."""
        _, heads, tokens, content = tensor.shape
        if writer is not None:
            rows = rows_of_page(tensor[:1], writer)
        else:
            is_value = torch.arange(content, device=tensor.device) >= key_size
            rows = (2 * torch.arange(tokens, device=tensor.device)[:, None] + is_value).expand(heads, -1, -1)
        return cls(rows.contiguous(), tokens, is_first)

    @classmethod
    def of_state(cls, tensor: torch.Tensor, is_first: bool) -> "LayerRows":
        """Of a recurrent layer: a block is one vector."""
        return cls(torch.zeros(tensor.shape[1:], dtype=torch.int64, device=tensor.device), 0, is_first)

    def distances(self, here: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        """The relative distances of a block, `[tokens, 2]`, or `[1, 1]` where it is one vector."""
        pages = here.shape[0]
        width = 2 * self.page_tokens
        rows = (self.rows[None] + width * torch.arange(pages, device=here.device).view(-1, *[1] * (here.dim() - 1))).reshape(-1)
        here, there = here.to(torch.float32).reshape(-1), there.to(torch.float32).reshape(-1)
        usable = torch.isfinite(here) & torch.isfinite(there)
        broken = ~usable & ~((here == there) | (here.isnan() & there.isnan()))
        here, there = here.where(usable, 0), there.where(usable, 0)
        count = pages * width or 1

        def sum_rows(values: torch.Tensor) -> torch.Tensor:
            total = torch.zeros(count, dtype=torch.float32, device=values.device)
            return total.index_add_(0, rows, values).view(-1, 2 if self.page_tokens else 1)

        length = (sum_rows(here * here + there * there) / 2).sqrt()
        floor = _SHORT * (length * length).mean(0).sqrt()
        distance = sum_rows((here - there) ** 2).sqrt() / torch.maximum(length, floor).clamp_min(torch.finfo(torch.float32).tiny)
        return distance.where(sum_rows(broken.to(torch.float32)) == 0, _FAR)


def difference(
    layers: Sequence[LayerRows], here: Sequence[torch.Tensor], there: Sequence[torch.Tensor], part: int = 0, parts: int = 1
) -> Difference:
    """That of a block: pages of each layer, as numbers. Where the block from the pool is one of several `parts` of them, the tokens of that
    part are compared."""
    typical, first, farthest = [], [], []
    for layer, mine, other in zip(layers, here, there, strict=True):
        distances = layer.distances(mine, other)
        tokens = distances.shape[0] // parts
        distances = distances[part * tokens : (part + 1) * tokens]
        typical.append(distances.median(0).values.max())
        if layer.is_first:
            first.append(typical[-1])
            farthest.append(distances.max())
    nothing = [torch.zeros_like(typical[0])]
    return Difference(*torch.stack([torch.stack(each or nothing).max() for each in (typical, first, farthest)]).tolist())
