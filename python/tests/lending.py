# SPDX-License-Identifier: Apache-2.0
"""A small paged KV cache in the pool, of two parts for each block, and blocks whose bytes tell which version of which block they are."""

import kvbm_cxl
import numpy
from pools import chain, payload

BLOCKS = 12
# Neither a multiple of a cache line.
_FIRST, _SECOND = 9000, 3100
BLOCK_BYTES = _FIRST + _SECOND


def parts_at(address):
    """Where the parts lie in memory at an address: the second ones behind all of the first, further apart than they are long."""
    return [(address, _FIRST, _FIRST), (address + BLOCKS * _FIRST, 2 * _SECOND, _SECOND)]


def region_of(cache):
    """A region, and its memory as an array."""
    region = cache.lent_region(BLOCKS * (_FIRST + 2 * _SECOND), BLOCKS, parts=2)
    region.set_layout(kvbm_cxl.BlockLayout(parts_at(region.memory.address), BLOCKS))
    return region, numpy.frombuffer(region.memory, numpy.uint8)


def fill(memory, block, content):
    """Writes a block as an engine does."""
    content = numpy.frombuffer(content, numpy.uint8)
    memory[block * _FIRST :][:_FIRST] = content[:_FIRST]
    memory[BLOCKS * _FIRST + block * 2 * _SECOND :][:_SECOND] = content[_FIRST:]


def written(block):
    """The key of a block that is written again and again."""
    return chain(BLOCKS, seed=77)[block]


def version(block, number):
    """Its bytes in some version: the first 8 say which."""
    return number.to_bytes(8, "little") + payload(f"{block} {number}".encode(), BLOCK_BYTES - 8)


def version_of(block, content):
    """The version that a block has; fails unless all of it is of that one."""
    number = int.from_bytes(content[:8], "little")
    assert content == version(block % BLOCKS, number), "bytes of no version"
    return number
