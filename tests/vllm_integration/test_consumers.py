# SPDX-License-Identifier: Apache-2.0
"""Blocks as adapters of other engines handle them: which ones fit, and what they may be configured with."""

import kvbm_cxl
import pytest
from kvbm_cxl.consumers.blocks import Blocks
from kvbm_cxl.consumers.names import key_of, namespace_of
from kvbm_cxl.options import ThreadOptions
from kvbm_cxl.vllm_integration import pool_access

CELLS = (4 << 10, 16 << 10)
NS = namespace_of("test", name="n")


@pytest.fixture
def blocks(make_pool):
    access = pool_access.acquire(ThreadOptions.read({"pool": make_pool(size="32M", cells="4K:20%,16K:30%")}))
    yield Blocks(access)
    access.release()


@pytest.mark.parametrize("size", (1, CELLS[0], CELLS[0] + 1, CELLS[1] - 1, CELLS[1], CELLS[1] + 1))
def test_a_block_up_to_the_largest_cell_is_stored(blocks, size):
    assert tuple(blocks.access.pool.cell_bytes) == CELLS
    keys, data = [key_of(f"{size}/{number}") for number in range(3)], [bytes([number]) * size for number in (1, 2, 3)]
    fits = size <= CELLS[1]
    # Among others of another size, whose places must not shift.
    sizes, mixed = [size, 100, size], [data[0], bytes(100), data[2]]
    words = blocks.store(NS, keys, mixed, sizes)
    assert words == ["stored" if fits else "too_large", "stored", "stored" if fits else "too_large"]
    into = [bytearray(size), bytearray(100), bytearray(size)]
    loaded = blocks.load(NS, keys, into)
    assert [bool(one) for one in loaded] == [fits, True, fits]
    if fits:
        assert [bytes(one) for one in into] == mixed
    layout = kvbm_cxl.BlockLayout.of_tensors([memoryview(bytearray(data[1])).cast("B", (1, size))])
    rows = blocks.store_rows(NS, [key_of(f"row of {size}")], layout, [0])
    assert rows == ["stored" if fits else "too_large"]
    assert blocks.counts()["store"].get("too_large", 0) == (0 if fits else 3)
