# SPDX-License-Identifier: Apache-2.0
"""Where an attention backend puts the numbers of a token within a page.

A page is `[heads, tokens, content]` by name only: on CPUs keys lie packed over all tokens of a page, in an order that depends on the
instruction set. So the backend is asked: it writes tokens whose numbers are all different, once into a page of the engine and once into
pages of the size of a cell, and where equal numbers lie is what belongs together. What it does not tell for certain is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import torch

from ..options import ConfigError
from .geometry import Pieces

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Backends whose function writes to the page that it is given, keeps nothing of it, and takes any number of tokens in a block.
_BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
# Numbers are written digit by digit: 1 to 16 are exact in every type that a KV cache has.
_BASE = 16


@dataclass(frozen=True)
class PageWriter:
    """What a layer's backend does with the keys and values of a step."""

    write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    """Keys and values `[tokens, heads, size]`, the KV cache `[blocks, heads, tokens, content]`, and the slot of each token."""
    head_size: int
    head_size_v: int
    dtype: torch.dtype
    name: str = ""
    """Backend and instruction set: layers with one name and one shape of pages are alike."""


def writer_of(vllm_config: "VllmConfig", layer_name: str) -> PageWriter:
    """The writer of a layer. Raises `ConfigError` where its backend cannot be asked."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layer: Any = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, [layer_name])[layer_name]
    backend = layer.get_attn_backend().get_name()
    if backend not in _BACKENDS:
        raise ConfigError(
            f"CxlConnector cannot tell where attention backend {backend} puts tokens; it can of {', '.join(_BACKENDS)}. Leave stored_tp "
            "and stored_block_tokens out"
        )

    def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)

    name = f"{backend}/{getattr(layer, 'isa', '')}"
    return PageWriter(write, layer.head_size, layer.head_size_v, vllm_config.model_config.dtype, name)


def pieces_of_cells(page: torch.Tensor, writer: PageWriter, shards: int, slices: int) -> list[list[Pieces]]:
    """For each shard of the heads and each slice of the tokens of a page, the bytes that make the page of a cell, in its order.

    `page`: `[1, heads, tokens, content]` of the KV cache; only its shape and strides are looked at. Raises `ConfigError` where the backend
    does not put every number of a page in a place of its own.
    """
    _, heads, tokens, _ = page.shape
    content = writer.head_size + writer.head_size_v
    numbers = torch.arange(tokens * heads * content, device=page.device).view(tokens, heads, content)
    whole = _write_page(page, writer, numbers, 1)
    cells = [_write_page(page, writer, part, slices) for part in numbers.chunk(shards, dim=1)]
    codes = _codes([whole, *cells])
    order = numpy.argsort(codes[0], kind="stable")
    at = numpy.searchsorted(codes[0][order], numpy.concatenate(codes[1:]))
    found = order[numpy.minimum(at, len(order) - 1)]
    # Every place of the page is that of one number in the cells. Of equal numbers only the first place is found.
    if not numpy.array_equal(numpy.sort(found), numpy.arange(len(order))):
        raise ConfigError(
            f"CxlConnector: attention backend {writer.name} mixes several tokens or heads in one place of a page; leave stored_tp and "
            "stored_block_tokens out"
        )
    offsets = _offsets(page)[found].reshape(shards, slices, -1)
    return [[_stretches(cell, page.element_size()) for cell in shard] for shard in offsets]


def rows_of_page(page: torch.Tensor, writer: PageWriter) -> torch.Tensor:
    """Twice the token of each number of a page, `[heads, tokens, content]`, and one more for those of values. Raises `ConfigError` where
    the backend does not put every number in a place of its own."""
    _, heads, tokens, _ = page.shape
    rows = 2 * torch.arange(tokens, device=page.device)[:, None, None].expand(-1, heads, writer.head_size + writer.head_size_v).clone()
    rows[..., writer.head_size :] += 1
    written = _write_page(page, writer, rows, 1)
    found = torch.zeros(written.shape[1], dtype=torch.int64)
    for digit, seen in enumerate(written):
        numbers = torch.from_numpy(seen.copy()).view(page.dtype).reshape(-1).to(torch.int64) - 1
        if not bool(((numbers >= 0) & (numbers < _BASE)).all()):
            raise ConfigError(f"CxlConnector: attention backend {writer.name} leaves parts of a page empty, or changes numbers")
        found += numbers * _BASE**digit
    order = _physical(page)
    return found.view([page.shape[dim] for dim in order]).permute([order.index(dim) for dim in (1, 2, 3)]).to(page.device)


def _write_page(page: torch.Tensor, writer: PageWriter, numbers: torch.Tensor, blocks: int) -> numpy.ndarray:
    """Bytes `[digits, numbers, bytes]` of pages as they lie in memory, once `numbers` were written to them, one digit after the other."""
    tokens, heads, content = numbers.shape
    sizes = {1: heads, 2: tokens // blocks, 3: page.shape[3]}
    order = _physical(page)
    # Logical dimensions in the order of the page's memory.
    back = [0, *(1 + order.index(dim) for dim in (1, 2, 3))]
    slots = torch.arange(tokens, dtype=torch.int64, device=page.device)
    seen, highest = [], page.shape[1] * page.shape[2] * content
    scale = 1
    while scale < highest:
        memory = torch.zeros([blocks, *(sizes[dim] for dim in order)], dtype=page.dtype, device=page.device)
        digit = (numbers // scale % _BASE + 1).to(writer.dtype)
        keys, values = digit.split((writer.head_size, writer.head_size_v), dim=-1)
        writer.write(keys.contiguous(), values.contiguous(), memory.permute(back), slots)
        seen.append(memory.reshape(-1).view(torch.uint8).view(-1, page.element_size()).cpu().numpy())
        scale *= _BASE
    return numpy.stack(seen)


def _physical(page: torch.Tensor) -> list[int]:
    """The dimensions of a page as they lie in memory, outermost first."""
    return sorted((1, 2, 3), key=lambda dim: (-page.stride(dim), dim))


def _codes(written: Sequence[numpy.ndarray]) -> list[numpy.ndarray]:
    """One number for each that was written, equal where all its digits are."""
    views = [each.view(f"u{each.shape[2]}")[..., 0] for each in written]
    known, digits = numpy.unique(numpy.concatenate([view.reshape(-1) for view in views]), return_inverse=True)
    codes, start = [], 0
    for view in views:
        mine = digits[start : start + view.size].reshape(view.shape).astype(numpy.int64)
        start += view.size
        code = numpy.zeros(view.shape[1], numpy.int64)
        for digit in mine:
            code = code * len(known) + digit
        codes.append(code)
    return codes


def _offsets(page: torch.Tensor) -> numpy.ndarray:
    """Bytes from the start of the page to each of its numbers, in the order in which they lie in memory."""
    total = numpy.zeros((), numpy.int64)
    for dim in _physical(page):
        total = total[..., None] + numpy.arange(page.shape[dim], dtype=numpy.int64) * page.stride(dim) * page.element_size()
    return total.reshape(-1)


def _stretches(offsets: numpy.ndarray, item_bytes: int) -> Pieces:
    starts = numpy.flatnonzero(numpy.concatenate(([True], numpy.diff(offsets) != item_bytes)))
    lengths = numpy.diff(numpy.append(starts, len(offsets))) * item_bytes
    return list(zip(offsets[starts].tolist(), lengths.tolist()))
