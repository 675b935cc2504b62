# SPDX-License-Identifier: Apache-2.0
"""How blocks get from the KV cache into the pool and back.

The worker takes a few blocks at a time to a mover, which copies from and to wherever layouts say that the blocks lie; where a block lies
in several cells (`shards`), there is one for each. Errors, timing and counting are the worker's.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, TypeVar

import kvbm_cxl

from .config import ConfigError
from .failures import ThreadFailures, error_kind
from .pool_access import PoolAccess

if TYPE_CHECKING:
    from .devices import After

_T = TypeVar("_T")
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


CellReservations = list["kvbm_cxl.Reservations"]
"""Reserved cells of a batch, those of each slice together."""
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
class CopyMover:
    """Copies between the KV cache, in memory of a host or a device, and cells of the pool."""

    access: PoolAccess
    namespace: "kvbm_cxl.Namespace"
    layouts: tuple["kvbm_cxl.BlockLayout", ...]
    """One for each slice of vLLM's blocks."""

    def announce(self, batch: PublishBatch) -> CellReservations:
        """Reserves cells for these blocks, on any thread, so that every host sees that they are coming. Raises `CxlError`."""
        found = []
        for layout, at, _ in self._slices(batch.block_ids):
            part = batch.at(at)
            keys, parents = part.keys, part.parents
            found.append(self.access.call(lambda cache: cache.reserve_blocks(self.namespace, keys, layout, parents=parents)))
        return found

    def publish(self, batch: PublishBatch, reservations: CellReservations | None, after: "After" = None) -> list[str]:
        """Publishes these blocks, on any thread, beside the next steps and behind `after`. `reservations`: what `announce` returned, if it
        was called. The outcome of each: stored, exists, busy, no_cell, no_hint, over_quota. Raises `CxlError`."""
        if reservations is None:
            return _retried(partial(self._publish, after), batch, self.access.failures)
        outcomes = [""] * len(batch.keys)
        for reserved, (layout, at, ids) in zip(reservations, self._slices(batch.block_ids)):
            for place, outcome in zip(at, self.access.call(lambda _: reserved.publish(layout, ids, after=after))):
                outcomes[place] = outcome
        return self.busy_again(batch, outcomes, after)

    def busy_again(self, batch: PublishBatch, outcomes: list[str], after: "After" = None) -> list[str]:
        """The outcomes of a batch whose cells were reserved before, after another try of those that were about to go then: by now they
        may have."""
        busy = [place for place, outcome in enumerate(outcomes) if outcome == "busy"]
        again = _retried(partial(self._publish, after), batch.at(busy), self.access.failures) if busy else []
        for place, outcome in zip(busy, again):
            outcomes[place] = outcome
        return outcomes

    def _publish(self, after: "After", batch: PublishBatch) -> list[str]:
        def publish(layout: "kvbm_cxl.BlockLayout", at: list[int], ids: list[int]) -> list[str]:
            part = batch.at(at)
            return self.access.call(
                lambda cache: cache.publish_blocks(self.namespace, part.keys, layout, ids, parents=part.parents, after=after)
            )

        return self._by_slice(batch.block_ids, publish)

    def pull(self, keys: Sequence[bytes], block_ids: Sequence[int], after: "After" = None) -> list[str | None]:
        """Fills blocks, on any thread, behind `after`; None for each that was found and verified, else the reason why not. Those hold
        arbitrary bytes. Raises `CxlError`."""

        def pull(layout: "kvbm_cxl.BlockLayout", at: list[int], ids: list[int]) -> list[str | None]:
            wanted = [keys[index] for index in at]
            return self.access.call(lambda cache: cache.pull_blocks(self.namespace, wanted, layout, ids, after=after))

        return self._by_slice(block_ids, pull)

    def _by_slice(self, block_ids: Sequence[int], move: Callable[["kvbm_cxl.BlockLayout", list[int], list[int]], list[_T]]) -> list[_T]:
        """What `move` returns for each block, called once for each slice."""
        found: dict[int, _T] = {}
        for layout, at, ids in self._slices(block_ids):
            found.update(zip(at, move(layout, at, ids)))
        return [found[index] for index in range(len(block_ids))]

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

    def announce(self, batch: PublishBatch) -> list[CellReservations]:
        """Reserves a cell for each part of each block."""
        return [mover.announce(batch) for mover in self.movers]

    def publish(self, batch: PublishBatch, reservations: list[CellReservations] | None, after: "After" = None) -> list[str]:
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


def _retried(publish: Callable[[PublishBatch], list[str]], batch: PublishBatch, failures: ThreadFailures) -> list[str]:
    """The outcome of each block; `publish` is called again for those that are busy."""
    outcomes: dict[int, str] = {}
    places = list(range(len(batch.keys)))
    for attempt in range(_BUSY_TRIES):
        if attempt:
            time.sleep(0.001 * 2 ** (attempt - 1))
        try:
            tried = publish(batch.at(places))
        except kvbm_cxl.CxlError as error:
            failures.report(f"publishing {len(places)} blocks", error, count=False)
            tried = [error_kind(error)] * len(places)
        outcomes.update(zip(places, tried))
        places = [at for at, outcome in zip(places, tried) if outcome == "busy"]
        if not places:
            break
    return [outcomes[at] for at in range(len(batch.keys))]
