# SPDX-License-Identifier: Apache-2.0
"""Where blocks lie: for every physical order that vLLM 0.31 knows, the parts of a block are its bytes, each once."""

import itertools

import pytest
import torch
from kvbm_cxl.vllm_integration.geometry import GeometryError, cache_tensors, cell_parts
from vllm.v1.kv_cache_layout import KVCacheLayout

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 5, 2, 4, 6


def block_parts(tensors, block_count):
    """The parts of whole blocks."""
    ((parts,),) = cell_parts([("", tensor) for tensor in tensors], block_count)
    return parts


def _views(layout: KVCacheLayout, kernel_blocks: int = 1) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One allocation with a different number in every place, and a view per layer, as vLLM makes them."""
    sizes = (LAYERS, BLOCKS * kernel_blocks, HEADS, TOKENS, CONTENT)
    physical = tuple(sizes[dim] for dim in layout.stride_order)
    memory = torch.arange(torch.Size(sizes).numel(), dtype=torch.int32).reshape(physical)
    logical = memory.permute(tuple(layout.stride_order.index(dim) for dim in range(5)))
    return memory, [logical[layer] for layer in range(LAYERS)]


def _gathered(memory: torch.Tensor, parts, block: int) -> list[int]:
    numbers = memory.flatten().tolist()
    found = []
    for part in parts:
        start = part.address + block * part.stride_bytes - memory.data_ptr()
        assert start % 4 == 0 and part.len_bytes % 4 == 0
        found += numbers[start // 4 : (start + part.len_bytes) // 4]
    return found


@pytest.mark.parametrize(("layout", "kernel_blocks"), itertools.product(KVCacheLayout, (1, 3)))
def test_a_block_is_all_of_its_bytes(layout, kernel_blocks):
    memory, views = _views(layout, kernel_blocks)
    parts = block_parts(views, BLOCKS)
    seen = []
    for block in range(BLOCKS):
        pages = [view[block * kernel_blocks : (block + 1) * kernel_blocks] for view in views]
        mine = _gathered(memory, parts, block)
        assert sorted(mine) == sorted(number for page in pages for number in page.flatten().tolist())
        seen += mine
    assert sorted(seen) == list(range(memory.numel()))


@pytest.mark.parametrize(("slices", "kernel_blocks"), ((2, 4), (3, 3), (2, 2)))
def test_slices_of_several_pages_are_these_pages(slices, kernel_blocks):
    memory, views = _views(KVCacheLayout.LBHNC, kernel_blocks)
    (cells,) = cell_parts([("", view) for view in views], BLOCKS, 1, slices)
    pages = kernel_blocks // slices
    for block, number in itertools.product(range(BLOCKS), range(slices)):
        first = block * kernel_blocks + number * pages
        expected = [value for view in views for value in view[first : first + pages].flatten().tolist()]
        assert _gathered(memory, cells[number], block) == expected
    with pytest.raises(GeometryError, match="cannot be divided by"):
        cell_parts([("", view) for view in views], BLOCKS, 1, kernel_blocks + 1)


def test_pages_that_lie_together_are_one_part():
    for layout, expected in (("LBHNC", LAYERS), ("LBNHC", LAYERS), ("BLHNC", 1), ("BLNHC", 1), ("LHBNC", LAYERS * HEADS)):
        _, views = _views(KVCacheLayout[layout])
        assert len(block_parts(views, BLOCKS)) == expected, layout
    _, views = _views(KVCacheLayout.LBHNC, kernel_blocks=3)
    assert len(block_parts(views, BLOCKS)) == LAYERS


def test_parts_follow_one_another_as_they_lie():
    """Padding behind every token and every head."""
    padded = torch.arange(400, dtype=torch.int32).as_strided((4, 2, 3, 4), (100, 40, 10, 1))
    parts = block_parts([padded], 4)
    assert [(part.address - padded.data_ptr()) // 4 for part in parts] == [0, 10, 20, 40, 50, 60]
    assert {(part.stride_bytes, part.len_bytes) for part in parts} == {(400, 16)}


def test_layers_follow_one_another_in_their_order():
    memory, views = _views(KVCacheLayout.LBHNC)
    named = {f"layer.{layer}": view for layer, view in enumerate(views)}
    names = ["layer.2", "layer.0", "layer.1"]
    ((parts,),) = cell_parts(cache_tensors(named, names), BLOCKS)
    assert _gathered(memory, parts, 1) == [number for layer in (2, 0, 1) for number in views[layer][1].flatten().tolist()]


def test_layers_that_share_a_cache_are_counted_once():
    _, views = _views(KVCacheLayout.LBHNC)
    assert len(cache_tensors({"a": views[0], "b": views[1], "c": views[0]}, ["a", "b", "c"])) == 2
    with pytest.raises(GeometryError, match="no KV cache for d"):
        cache_tensors({"a": views[0]}, ["a", "d"])


def test_shapes_without_blocks_are_refused():
    with pytest.raises(GeometryError, match="has no 4 blocks"):
        block_parts([torch.zeros(6, 2, 3)], 4)
    with pytest.raises(GeometryError, match="has no 0 blocks"):
        block_parts([torch.zeros(6, 2, 3)], 0)
    overlapping = torch.zeros(100).as_strided((4, 3, 5), (20, 2, 1))
    with pytest.raises(GeometryError, match="overlap"):
        block_parts([overlapping], 4)
