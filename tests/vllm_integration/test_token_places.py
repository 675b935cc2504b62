# SPDX-License-Identifier: Apache-2.0
"""Where backends put tokens: the pages of cells, cut from pages of an engine, are those that the backend writes itself."""

import pytest
import torch
from kvbm_cxl.options import ConfigError
from kvbm_cxl.vllm_integration.token_places import PageWriter, pieces_of_cells
from pages import HEAD_SIZE, cpu_writer, empty, keys_and_values, plain_writer, written

WRITERS = {"cpu": cpu_writer, "plain": plain_writer}
# Orders of heads and tokens within a page; CPUs have the first one alone.
ORDERS = {"HNC": (1, 2, 3), "NHC": (2, 1, 3)}
CASES = [("cpu", "HNC"), ("plain", "HNC"), ("plain", "NHC")]


def cut(page: torch.Tensor, pieces) -> bytes:
    """The bytes that pieces take from a page."""
    storage = torch.empty(0, dtype=torch.uint8).set_(page.untyped_storage()).numpy().tobytes()
    start = page.storage_offset() * page.element_size()
    return b"".join(storage[start + offset : start + offset + size] for offset, size in pieces)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(("shards", "slices"), ((1, 2), (2, 1), (2, 2), (4, 4), (1, 4)))
@pytest.mark.parametrize(("writer", "order"), CASES)
def test_cells_are_pages_of_an_engine_with_such_blocks(writer, order, shards, slices, dtype):
    heads, tokens = 4, 128
    made = WRITERS[writer](dtype)
    keys, values = keys_and_values(tokens, heads, dtype)
    page = written(made, empty(1, heads, tokens, dtype, ORDERS[order]), keys, values)
    found = pieces_of_cells(page, made, shards, slices)
    assert len(found) == shards and {len(shard) for shard in found} == {slices}
    for shard in range(shards):
        part = slice(shard * heads // shards, (shard + 1) * heads // shards)
        small = empty(slices, heads // shards, tokens // slices, dtype, ORDERS[order])
        written(made, small, keys[:, part], values[:, part])
        for number in range(slices):
            wanted = small[number].permute([dim - 1 for dim in ORDERS[order]]).contiguous()
            assert cut(page, found[shard][number]) == wanted.view(torch.uint8).numpy().tobytes()


def test_pages_with_room_between_heads_are_cut_where_their_numbers_lie():
    made = plain_writer(torch.float32)
    keys, values = keys_and_values(4, 2, torch.float32)
    padded = torch.zeros(1000).as_strided((1, 2, 4, 2 * HEAD_SIZE), (1000, 4 * 2 * HEAD_SIZE + 8, 2 * HEAD_SIZE, 1), 3)
    page = written(made, padded, keys, values)
    found = pieces_of_cells(page, made, 2, 2)
    small = written(made, empty(2, 1, 2, torch.float32, (1, 2, 3)), keys[:, 1:], values[:, 1:])
    assert cut(page, found[1][1]) == small[1].contiguous().view(torch.uint8).numpy().tobytes()


def test_a_slice_of_whole_pages_is_one_stretch():
    """Few, long copies where the order allows it."""
    page = empty(1, 4, 64, torch.bfloat16, (1, 2, 3))
    for shard in pieces_of_cells(page, plain_writer(torch.bfloat16), 2, 1):
        assert [size for _, size in shard[0]] == [2 * 64 * 2 * HEAD_SIZE * 2]


def refused(write) -> None:
    page = empty(1, 2, 8, torch.float32, (1, 2, 3))
    with pytest.raises(ConfigError, match="several tokens or heads in one place"):
        pieces_of_cells(page, PageWriter(write, HEAD_SIZE, HEAD_SIZE, torch.float32, "odd"), 2, 2)


def test_backends_that_mix_tokens_are_refused():
    plain = plain_writer(torch.float32).write

    def sums(keys, values, cache, slots):
        plain(keys, values, cache, slots)
        cache[:, :, 0] += cache[:, :, 1]

    def forgets(keys, values, cache, slots):
        plain(keys[1:], values[1:], cache, slots[1:])

    def coarse(keys, values, cache, slots):
        plain(keys.clamp(max=8), values.clamp(max=8), cache, slots)

    def by_size(keys, values, cache, slots):
        plain(keys, values, cache, slots)
        if cache.shape[2] == 4:  # The small pages have another number in one place.
            cache[:, :, 0, 0] = 99

    for write in (sums, forgets, coarse, by_size):
        refused(write)
