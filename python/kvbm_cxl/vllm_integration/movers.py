# SPDX-License-Identifier: Apache-2.0
"""How blocks get from the KV cache into the pool and back.

The worker takes a few blocks at a time to a mover; what it does with errors, timing and counting is the worker's. One copies, from and to
wherever layouts say that the blocks lie; where a block lies in several cells (`shards`), one for each. The other is for a KV cache that
lies in the pool itself: it lends blocks to readers where they are, and takes them back before the engine writes to them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import kvbm_cxl

from .config import ConfigError, ConnectorConfig
from .failures import ThreadFailures, error_kind
from .pool_access import PoolAccess, PoolLost

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
    is_tail: bool = False
    """The engine may go on to fill the block."""

    def at(self, places: Sequence[int]) -> "PublishBatch":
        """Those at `places`."""
        if len(places) == len(self.keys):
            return self
        return PublishBatch(
            [self.keys[at] for at in places], [self.block_ids[at] for at in places], [self.parents[at] for at in places], self.is_tail
        )


Offer = Any
"""What a mover has begun for a batch, for itself."""


class Mover(Protocol):
    """What the worker needs."""

    def begin(self, batch: PublishBatch) -> Offer | None:
        """Takes on blocks that are computed. Called on the engine's thread, behind the step that computed them; what it returns goes to
        `publish`. Raises `CxlError`."""

    def announce(self, batch: PublishBatch, offer: Offer | None) -> Offer | None:
        """Lets every host see that these blocks are coming, on any thread; what it returns goes to `publish` in the place of `offer`. It
        need not be called. May wait for locks of the pool, for which `publish` waits no more then. Raises `CxlError`."""

    def release(self, offer: Offer | None) -> None:
        """Gives back what `announce` returned, in the place of `publish`."""

    def publish(self, batch: PublishBatch, offer: Offer | None, after: "After" = None) -> list[str]:
        """Publishes these blocks, on any thread, beside the next steps and behind `after`. The outcome of each: stored or lent, exists,
        busy, no_cell, no_hint, over_quota, taken_back. Raises `CxlError`."""

    def pull(self, keys: Sequence[bytes], block_ids: Sequence[int], after: "After" = None) -> list[str | None]:
        """Fills blocks, on any thread, behind `after`; None for each that was found and verified, else the reason why not. Those hold
        arbitrary bytes. Raises `CxlError`."""

    def before_writes(self, block_ids: Sequence[int]) -> int:
        """The engine is about to write to these blocks. Called before anything of the step runs; returns how many were taken from
        readers."""


Cell = tuple["kvbm_cxl.Namespace", tuple["kvbm_cxl.BlockLayout", ...]]
"""One of the cells that a block lies in, side by side: its namespace, and a layout for each slice of vLLM's blocks."""


def mover_for(
    config: ConnectorConfig, access: PoolAccess, cells: Sequence[Cell], region: "kvbm_cxl.LentRegion | None" = None
) -> Mover:
    """The mover for a KV cache that lies where `config` had it placed. `ConfigError` where blocks cannot be moved from there."""
    namespace, (layout, *_) = cells[0]
    try:
        if region is not None:
            mover: Mover = LendMover.over(access, namespace, layout, region)
        else:
            copies = [CopyMover(access, *cell) for cell in cells]
            mover = copies[0] if len(copies) == 1 else ShardsMover(tuple(copies))
        # Nothing, but from this memory: a device that this build has no engine for is found out now instead of by every block.
        nothing = PublishBatch([], [], [])
        mover.publish(nothing, mover.begin(nothing))
        mover.pull([], [])
    except kvbm_cxl.InvalidError as error:
        placed = ", with zero_copy in the pool itself" if config.zero_copy else ""
        raise ConfigError(f"CxlConnector cannot copy from and to the KV cache (on {layout.device}{placed}): {error}") from error
    return mover


@dataclass(frozen=True)
class _Reserved:
    """Cells for blocks of one slice."""

    cells: "kvbm_cxl.Reservations"
    layout: "kvbm_cxl.BlockLayout"
    at: list[int]
    """Places of the blocks in their batch. A later one of the batch with the same place counts more."""
    ids: list[int]


@dataclass(frozen=True)
class CopyMover:
    """Copies between the KV cache, in memory of a host or a device, and cells of the pool."""

    access: PoolAccess
    namespace: "kvbm_cxl.Namespace"
    layouts: tuple["kvbm_cxl.BlockLayout", ...]
    """One for each slice of vLLM's blocks."""

    def begin(self, batch: PublishBatch) -> None:
        """Nothing to take on: the copy is made by `publish`."""

    def announce(self, batch: PublishBatch, offer: None) -> list[_Reserved]:
        """Reserves their cells, for each slice. Blocks that are about to go are tried again."""
        found = []
        try:
            for layout, at, ids in self._slices(batch.block_ids):
                self._reserve(batch, layout, list(at), dict(zip(at, ids)), found)
        except kvbm_cxl.CxlError:
            self.release(found)
            raise
        return found

    def _reserve(self, batch: PublishBatch, layout: "kvbm_cxl.BlockLayout", at: list[int], ids: dict[int, int], found: list[_Reserved]):
        for attempt in range(_BUSY_TRIES):
            if attempt:
                time.sleep(0.001 * 2 ** (attempt - 1))
            part = batch.at(at)
            cells = self.access.call(lambda cache: cache.reserve_blocks(self.namespace, part.keys, layout, parents=part.parents))
            found.append(_Reserved(cells, layout, at, [ids[place] for place in at]))
            at = [place for place, outcome in zip(at, cells.outcomes) if outcome == "busy"]
            if not at:
                return

    def release(self, offer: list[_Reserved] | None) -> None:
        for reserved in offer or ():
            reserved.cells.release()

    def publish(self, batch: PublishBatch, offer: list[_Reserved] | None, after: "After" = None) -> list[str]:
        if offer is None:
            offer = self.announce(batch, None)
        outcomes = [""] * len(batch.keys)
        for reserved in offer:
            published = self.access.call(lambda _: reserved.cells.publish(reserved.layout, reserved.ids, after=after))
            for place, outcome in zip(reserved.at, published):
                outcomes[place] = outcome
        return outcomes

    def busy_again(self, batch: PublishBatch, outcomes: list[str], after: "After" = None) -> list[str]:
        """The outcomes of a batch whose cells were reserved before, after another try of those that were about to go then: by now they
        may have."""
        busy = [place for place, outcome in enumerate(outcomes) if outcome == "busy"]
        again = self.publish(batch.at(busy), None, after) if busy else []
        for place, outcome in zip(busy, again):
            outcomes[place] = outcome
        return outcomes

    def pull(self, keys: Sequence[bytes], block_ids: Sequence[int], after: "After" = None) -> list[str | None]:
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

    def before_writes(self, block_ids: Sequence[int]) -> int:
        """The pool has copies of its own."""
        return 0


@dataclass(frozen=True)
class ShardsMover:
    """Copies blocks that lie in several cells, each with some of the heads."""

    movers: tuple[CopyMover, ...]

    def begin(self, batch: PublishBatch) -> None:
        """Nothing to take on, as with `CopyMover`."""

    def announce(self, batch: PublishBatch, offer: None) -> list[Offer]:
        """Reserves a cell for each part of each block."""
        found: list[Offer] = []
        try:
            for mover in self.movers:
                found.append(mover.announce(batch, None))
        except kvbm_cxl.CxlError:
            self.release(found)
            raise
        return found

    def release(self, offer: list[Offer] | None) -> None:
        for mover, each in zip(self.movers, offer or ()):
            mover.release(each)

    def publish(self, batch: PublishBatch, offer: list[Offer] | None, after: "After" = None) -> list[str]:
        """A block is stored when one of its cells is, and the others are there."""
        offers = offer or [None] * len(self.movers)
        by_cell = [mover.publish(batch, each, after) for mover, each in zip(self.movers, offers)]
        return [_of_cells(outcomes) for outcomes in zip(*by_cell)]

    def pull(self, keys: Sequence[bytes], block_ids: Sequence[int], after: "After" = None) -> list[str | None]:
        """A block that is a miss in one cell is one."""
        by_cell = [mover.pull(keys, block_ids, after) for mover in self.movers]
        return [next(filter(None, reasons), None) for reasons in zip(*by_cell)]

    def before_writes(self, block_ids: Sequence[int]) -> int:
        """The pool has copies of its own."""
        return 0


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
            failures.report("publishing blocks", error, f"{len(places)} blocks", count=False)
            tried = [error_kind(error)] * len(places)
        outcomes.update(zip(places, tried))
        places = [at for at, outcome in zip(places, tried) if outcome == "busy"]
        if not places:
            break
    return [outcomes[at] for at in range(len(batch.keys))]


@dataclass(frozen=True)
class LendMover:
    """Lends blocks of a KV cache that lies in the pool, and fills them from there.

    The engine's thread offers a block, and another thread lends it later, so that the engine may take it back at any time in between. For
    that reason a busy block is not tried again: only the engine's thread knows whether it may still be offered.
    """

    access: PoolAccess
    namespace: "kvbm_cxl.Namespace"
    region: "kvbm_cxl.LentRegion"
    pool: "kvbm_cxl.Pool | None"
    """The pool that has the KV cache. There is no going on without it."""
    copies_tails: bool
    """Tails go into cells of their own. vLLM has no name for them, so it gives their blocks to the next request that comes."""

    @classmethod
    def over(
        cls, access: PoolAccess, namespace: "kvbm_cxl.Namespace", layout: "kvbm_cxl.BlockLayout", region: "kvbm_cxl.LentRegion"
    ) -> "LendMover":
        """Tells the region where its blocks lie. Raises `InvalidError` for a layout of other memory."""
        region.set_layout(layout)
        pool = access.pool
        cells = pool.cell_bytes if pool else []
        return cls(access, namespace, region, pool, layout.block_bytes <= max(cells, default=0))

    def announce(self, batch: PublishBatch, offer: "kvbm_cxl.LentOffer | None") -> list[str] | None:
        """Lends them: nothing is copied. Returns the outcomes."""
        return self.access.call(lambda _: offer.lend()) if offer is not None else None

    def release(self, offer: list[str] | None) -> None:
        """Nothing: lent blocks stay until the engine writes to them."""

    def begin(self, batch: PublishBatch) -> "kvbm_cxl.LentOffer | None":
        if batch.is_tail and self.copies_tails:
            return None
        return self.access.call(lambda _: self.region.offer(self.namespace, batch.keys, batch.block_ids, parents=batch.parents))

    def publish(self, batch: PublishBatch, offer: "kvbm_cxl.LentOffer | list[str] | None", after: "After" = None) -> list[str]:
        """`after` is None: only a host's memory lies in the pool. The same below."""
        if offer is None:
            return _retried(self._publish, batch, self.access.failures)
        return offer if isinstance(offer, list) else self.announce(batch, offer)

    def _publish(self, batch: PublishBatch) -> list[str]:
        return self.access.call(lambda _: self.region.publish_blocks(self.namespace, batch.keys, batch.block_ids, parents=batch.parents))

    def pull(self, keys: Sequence[bytes], block_ids: Sequence[int], after: "After" = None) -> list[str | None]:
        return self.access.call(lambda _: self.region.pull_blocks(self.namespace, keys, block_ids))

    def before_writes(self, block_ids: Sequence[int]) -> int:
        if self.access.pool is not self.pool:
            raise PoolLost(self.access.spec, "and with it the KV cache, which lies in it (zero_copy): start the engine again")
        return self.region.take_back(block_ids)
