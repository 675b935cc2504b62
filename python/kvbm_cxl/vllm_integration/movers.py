# SPDX-License-Identifier: Apache-2.0
"""How blocks get from the KV cache into the pool and back.

The worker takes a few blocks at a time to a mover, which copies from and to wherever layouts say that the blocks lie; where a block lies
in several cells (`shards`), there is one for each. Errors, timing and counting are the worker's.

Copies run on threads of their own. On a CPU what the forward pass wrote is there when it returns. On a GPU it is only queued: a copy
follows an event on the stream of the forward pass, which also orders it after earlier steps that still use blocks vLLM gave away since. The
GPU itself keeps that order; no thread waits for the event first.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import kvbm_cxl
import torch

from ..options import ConfigError
from .pool_access import PoolAccess

After = torch.cuda.Event | None
"""What copies follow; None in the memory of a host."""
# Before each try to reserve a cell. A block that another host is about to evict ("busy") is tried again.
_BUSY_WAITS_S = (0, 0.001, 0.002, 0.004, 0.008)


COPY_TIMEOUT_MS = 60_000
"""Longest wait for copies that have to be complete. Beyond it the engine stops: memory that is still being read must not change."""


class CopyTimeout(RuntimeError):
    """Copies did not end in time. Their source or target must not be used again, so the engine has to stop."""


def mark(device: torch.device) -> After:
    """What follows this follows all work that was queued so far on this thread's stream."""
    if device.type == "cpu":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def check_device(device: torch.device) -> str:
    """The name of the copy engine's device. `ConfigError` for one that it cannot reach."""
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"CxlConnector cannot copy from and to {device}: it knows CPUs and CUDA devices")
    # With its number: each worker of a group has a GPU of its own.
    return str(device) if device.type == "cuda" else device.type


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


@dataclass
class _Reserved:
    """Cells for blocks of one slice."""

    cells: "kvbm_cxl.Reservations"
    layout: "kvbm_cxl.BlockLayout"
    at: Sequence[int]
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
        found: list[_Reserved] = []
        try:
            for layout, at, ids in self._slices(batch.block_ids):
                for wait_s in _BUSY_WAITS_S:
                    if wait_s:
                        time.sleep(wait_s)
                    part = batch.at(at)
                    cells = self.access.call(lambda cache: cache.reserve_blocks(self.namespace, part.keys, layout, parents=part.parents))
                    found.append(_Reserved(cells, layout, at, ids))
                    if "busy" not in cells.outcomes:
                        break
                    busy = [index for index, outcome in enumerate(cells.outcomes) if outcome == "busy"]
                    at, ids = [at[index] for index in busy], [ids[index] for index in busy]
        except kvbm_cxl.CxlError:
            self.release(found)
            raise
        return found

    def release(self, reservations: list[_Reserved]) -> None:
        """Gives back what `announce` returned, in the place of `publish`."""
        for reserved in reservations:
            reserved.cells.release()

    def publish(self, batch: PublishBatch, reservations: list[_Reserved] | None, after: After = None) -> list[str]:
        """Publishes these blocks, on any thread, during the next steps and after `after`. `reservations`: what `announce` returned, if it
        was called. The outcome of each: stored, exists, busy, no_cell, no_hint, over_quota. Raises `CxlError`."""
        outcomes = [""] * len(batch.keys)
        for reserved in self.announce(batch) if reservations is None else reservations:
            published = self.access.call(lambda _: reserved.cells.publish(reserved.layout, reserved.ids, after=after))
            for place, outcome in zip(reserved.at, published):
                outcomes[place] = outcome
        return outcomes

    def pull(self, keys: Sequence[bytes], block_ids: Sequence[int], after: After = None) -> list[str | None]:
        """Fills blocks, on any thread, after `after`; None for each that was found and verified, else the reason why not. Those hold
        arbitrary bytes. Raises `CxlError`."""
        if len(self.layouts) == 1:
            return self.access.call(lambda cache: cache.pull_blocks(self.namespace, keys, self.layouts[0], block_ids, after=after))
        reasons: dict[int, str | None] = {}
        for layout, at, ids in self._slices(block_ids):
            wanted = [keys[index] for index in at]
            pulled = self.access.call(lambda cache: cache.pull_blocks(self.namespace, wanted, layout, ids, after=after))
            reasons.update(zip(at, pulled))
        # A block that no slice has is an error here, never a hit.
        return [reasons[index] for index in range(len(block_ids))]

    def _slices(self, block_ids: Sequence[int]) -> list[tuple["kvbm_cxl.BlockLayout", Sequence[int], list[int]]]:
        """The layout of each slice with a block among these: their places in the list, and vLLM's numbers of them."""
        count = len(self.layouts)
        if count == 1:
            return [(self.layouts[0], range(len(block_ids)), list(block_ids))]
        by_slice = [[index for index, block_id in enumerate(block_ids) if block_id % count == number] for number in range(count)]
        return [
            (layout, at, [block_ids[index] // count for index in at]) for layout, at in zip(self.layouts, by_slice, strict=True) if at
        ]


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

    def publish(self, batch: PublishBatch, reservations: list[list[_Reserved]] | None, after: After = None) -> list[str]:
        """A block is stored when one of its cells is, and the others are there."""
        by_cell = [mover.publish(batch, each, after) for mover, each in zip(self.movers, reservations or repeat(None))]
        return [_of_cells(outcomes) for outcomes in zip(*by_cell)]

    def pull(self, keys: Sequence[bytes], block_ids: Sequence[int], after: After = None) -> list[str | None]:
        """A block that is a miss in one cell is one."""
        by_cell = [mover.pull(keys, block_ids, after) for mover in self.movers]
        return [next(filter(None, reasons), None) for reasons in zip(*by_cell)]


Mover = CopyMover | ShardsMover


def _of_cells(outcomes: Sequence[str]) -> str:
    others = [outcome for outcome in outcomes if outcome not in ("stored", "exists")]
    return others[0] if others else "stored" if "stored" in outcomes else "exists"
