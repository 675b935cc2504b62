# SPDX-License-Identifier: Apache-2.0
"""How blocks get from the KV cache into the pool and back.

The worker takes a few blocks at a time to a mover, which copies from and to wherever layouts say that the blocks lie; where a block lies
in several cells (`shards`), there is one for each. Errors, timing and counting are the worker's.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

import kvbm_cxl

from .config import ConfigError
from .pool_access import PoolAccess

if TYPE_CHECKING:
    from .devices import After

# A block that is about to go when it is to be published ("busy") is tried again this often, from 1 ms on, each time twice as late.
_BUSY_TRIES = 5


@dataclass(frozen=True)
class PublishBatch:
    """Blocks to be published: their keys in the pool, where they lie in the KV cache, and the key before each."""

    keys: list[bytes]
    block_ids: list[int]
    """As in `metadata.Blocks`."""
    parents: list[bytes | None]

    def at(self, places: Sequence[int]) -> "PublishBatch":
        """Those at `places`."""
        if len(places) == len(self.keys):
            return self
        return PublishBatch([self.keys[at] for at in places], [self.block_ids[at] for at in places], [self.parents[at] for at in places])


Cell = tuple["kvbm_cxl.Namespace", tuple["kvbm_cxl.BlockLayout", ...]]
"""One of the cells that a block lies in, side by side: its namespace, and a layout for each slice of vLLM's blocks."""


def mover_for(access: PoolAccess, cells: Sequence[Cell]) -> "Mover":
    """The mover for blocks that lie in these cells. `ConfigError` where blocks cannot be moved from where the KV cache lies."""
    copies = [CopyMover(access, *cell) for cell in cells]
    mover = copies[0] if len(copies) == 1 else ShardsMover(tuple(copies))
    try:
        # Nothing, but from this memory: a device that this build has no engine for is found out now instead of by every block.
        mover.publish(PublishBatch([], [], []), None)
        mover.pull([], [])
    except kvbm_cxl.InvalidError as error:
        device = copies[0].layouts[0].device
        raise ConfigError(f"CxlConnector cannot copy from and to the KV cache (on {device}): {error}") from error
    return mover


@dataclass(frozen=True)
class _Reserved:
    """Cells for blocks of one slice."""

    cells: "kvbm_cxl.Reservations"
    layout: "kvbm_cxl.BlockLayout"
    at: list[int]
    """Places of the blocks in their batch. Of several cells for one place the last one counts: the others were about to go."""
    ids: list[int]


@dataclass(frozen=True)
class CopyMover:
    """Copies between the KV cache, in memory of a host or a device, and cells of the pool."""

    access: PoolAccess
    namespace: "kvbm_cxl.Namespace"
    layouts: tuple["kvbm_cxl.BlockLayout", ...]
    """One for each slice of vLLM's blocks."""

    def announce(self, batch: PublishBatch) -> list[_Reserved]:
        """Reserves cells for these blocks, on any thread, so that every host sees that they are coming. Blocks that are about to go are
        tried again. May wait for locks of the pool, for which `publish` waits no more then. Raises `CxlError`."""
        found = []
        try:
            for layout, at, ids in self._slices(batch.block_ids):
                self._reserve(batch, layout, list(at), dict(zip(at, ids)), found)
        except kvbm_cxl.CxlError:
            self.release(found)
            raise
        return found

    def _reserve(
        self, batch: PublishBatch, layout: "kvbm_cxl.BlockLayout", at: list[int], ids: dict[int, int], found: list[_Reserved]
    ) -> None:
        """Adds to `found` the cells for the blocks at places `at`, of one slice; `ids`: their numbers by place."""
        for attempt in range(_BUSY_TRIES):
            if attempt:
                time.sleep(0.001 * 2 ** (attempt - 1))
            part = batch.at(at)
            cells = self.access.call(lambda cache: cache.reserve_blocks(self.namespace, part.keys, layout, parents=part.parents))
            found.append(_Reserved(cells, layout, at, [ids[place] for place in at]))
            at = [place for place, outcome in zip(at, cells.outcomes) if outcome == "busy"]
            if not at:
                return

    def release(self, reservations: list[_Reserved]) -> None:
        """Gives back what `announce` returned, in the place of `publish`."""
        for reserved in reservations:
            reserved.cells.release()

    def publish(self, batch: PublishBatch, reservations: list[_Reserved] | None, after: "After" = None) -> list[str]:
        """Publishes these blocks, on any thread, beside the next steps and after `after`. `reservations`: what `announce` returned, if it
        was called. The outcome of each: stored, exists, busy, no_cell, no_hint, over_quota. Raises `CxlError`."""
        if reservations is None:
            reservations = self.announce(batch)
        outcomes = [""] * len(batch.keys)
        for reserved in reservations:
            published = self.access.call(lambda _: reserved.cells.publish(reserved.layout, reserved.ids, after=after))
            for place, outcome in zip(reserved.at, published):
                outcomes[place] = outcome
        return outcomes

    def pull(self, keys: Sequence[bytes], block_ids: Sequence[int], after: "After" = None) -> list[str | None]:
        """Fills blocks, on any thread, after `after`; None for each that was found and verified, else the reason why not. Those hold
        arbitrary bytes. Raises `CxlError`."""

        reasons: dict[int, str | None] = {}
        for layout, at, ids in self._slices(block_ids):
            wanted = [keys[index] for index in at]
            pulled = self.access.call(lambda cache: cache.pull_blocks(self.namespace, wanted, layout, ids, after=after))
            reasons.update(zip(at, pulled))
        # A block that no slice has is an error here, never a hit.
        return [reasons[index] for index in range(len(block_ids))]

    def _slices(self, block_ids: Sequence[int]) -> Iterator[tuple["kvbm_cxl.BlockLayout", list[int], list[int]]]:
        """The layout of each slice with a block among these: their places in the list, and vLLM's numbers of them."""
        count = len(self.layouts)
        for number, layout in enumerate(self.layouts):
            at = [index for index, block_id in enumerate(block_ids) if block_id % count == number]
            if at or count == 1:
                yield layout, at, [block_ids[index] // count for index in at]


@dataclass(frozen=True)
class ShardsMover:
    """Copies blocks that lie in several cells, each with some of the heads."""

    movers: tuple[CopyMover, ...]

    def announce(self, batch: PublishBatch) -> list[list[_Reserved]]:
        """Reserves a cell for each part of each block."""
        found: list[list[_Reserved]] = []
        try:
            for mover in self.movers:
                found.append(mover.announce(batch))
        except kvbm_cxl.CxlError:
            self.release(found)
            raise
        return found

    def release(self, reservations: list[list[_Reserved]]) -> None:
        for mover, each in zip(self.movers, reservations):
            mover.release(each)

    def publish(self, batch: PublishBatch, reservations: list[list[_Reserved]] | None, after: "After" = None) -> list[str]:
        """A block is stored when one of its cells is, and the others are there."""
        by_cell = [mover.publish(batch, each, after) for mover, each in zip(self.movers, reservations or repeat(None))]
        return [_of_cells(outcomes) for outcomes in zip(*by_cell)]

    def pull(self, keys: Sequence[bytes], block_ids: Sequence[int], after: "After" = None) -> list[str | None]:
        """A block that is a miss in one cell is one."""
        by_cell = [mover.pull(keys, block_ids, after) for mover in self.movers]
        return [next(filter(None, reasons), None) for reasons in zip(*by_cell)]


Mover = CopyMover | ShardsMover


def _of_cells(outcomes: Sequence[str]) -> str:
    others = [outcome for outcome in outcomes if outcome not in ("stored", "exists")]
    return others[0] if others else "stored" if "stored" in outcomes else "exists"
