# SPDX-License-Identifier: Apache-2.0
"""How blocks get from the KV cache into the pool and back.

The worker takes a few blocks at a time to a mover; what it does with errors, timing and counting is the worker's. One copies, from and to
wherever the layout says that the blocks lie. The other is for a KV cache that lies in the pool itself: it lends blocks to readers where
they are, and takes them back before the engine writes to them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import kvbm_cxl

from .config import ConfigError, ConnectorConfig
from .log import logger
from .pool_access import PoolAccess, PoolLost, error_kind

# A block that is about to go when it is to be published ("busy") is tried again this often, from 1 ms on, each time twice as late.
_BUSY_TRIES = 5

Publication = Callable[[], list[str]]
"""Publishes blocks; the outcome of each: stored or lent, exists, busy, no_cell, no_hint, over_quota, taken_back. Raises `CxlError`."""


class Mover(Protocol):
    """What the worker needs."""

    def begin(self, keys: Sequence[bytes], block_ids: Sequence[int], parents: Sequence[bytes | None], is_tail: bool = False) -> Publication:
        """Takes on blocks that are whole now. Called on the engine's thread, behind the step that made them so; what it returns runs on
        any thread, beside the next steps. `is_tail`: the engine may go on to fill the block. Raises `CxlError`."""

    def pull(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> list[str | None]:
        """Fills blocks, on any thread; None for each that is there and verified, else the reason why not. Those hold anything. Raises
        `CxlError`."""

    def before_writes(self, block_ids: Sequence[int]) -> int:
        """The engine is about to write to these blocks. Called before anything of the step runs; returns how many were taken from
        readers."""


def mover_for(
    config: ConnectorConfig,
    access: PoolAccess,
    namespace: "kvbm_cxl.Namespace",
    layout: "kvbm_cxl.BlockLayout",
    region: "kvbm_cxl.LentRegion | None" = None,
) -> Mover:
    """The mover for a KV cache that lies where `config` had it placed. `ConfigError` where blocks cannot be moved from there."""
    try:
        mover = CopyMover(access, namespace, layout) if region is None else LendMover.over(access, namespace, layout, region)
        # Nothing, but from this memory: a device that this build has no engine for is found out now instead of by every block.
        mover.begin([], [], [])()
        mover.pull([], [])
    except kvbm_cxl.InvalidError as error:
        placed = ", with zero_copy in the pool itself" if config.zero_copy else ""
        raise ConfigError(f"CxlConnector cannot copy from and to the KV cache (on {layout.device}{placed}): {error}") from error
    return mover


@dataclass(frozen=True)
class CopyMover:
    """Copies between the KV cache, in memory of a host or a device, and cells of the pool."""

    access: PoolAccess
    namespace: "kvbm_cxl.Namespace"
    layout: "kvbm_cxl.BlockLayout"

    def begin(self, keys: Sequence[bytes], block_ids: Sequence[int], parents: Sequence[bytes | None], is_tail: bool = False) -> Publication:
        def some(keys: Sequence[bytes], block_ids: Sequence[int], parents: Sequence[bytes | None]) -> list[str]:
            return self.access.call(lambda cache: cache.publish_blocks(self.namespace, keys, self.layout, block_ids, parents=parents))

        return lambda: _patiently(some, keys, block_ids, parents)

    def pull(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> list[str | None]:
        return self.access.call(lambda cache: cache.pull_blocks(self.namespace, keys, self.layout, block_ids))

    def before_writes(self, block_ids: Sequence[int]) -> int:
        """The pool has copies of its own."""
        return 0


def _patiently(
    publish: Callable[[Sequence[bytes], Sequence[int], Sequence[bytes | None]], list[str]],
    keys: Sequence[bytes],
    block_ids: Sequence[int],
    parents: Sequence[bytes | None],
) -> list[str]:
    """The outcome of each block, those that are busy tried again."""
    outcomes: dict[int, str] = {}
    places = list(range(len(keys)))
    for attempt in range(_BUSY_TRIES):
        if attempt:
            time.sleep(0.001 * 2 ** (attempt - 1))
        try:
            tried = publish([keys[at] for at in places], [block_ids[at] for at in places], [parents[at] for at in places])
        except kvbm_cxl.CxlError as error:
            logger.warning("publishing %d blocks: %s", len(places), error)
            tried = [error_kind(error)] * len(places)
        outcomes.update(zip(places, tried))
        places = [at for at, outcome in zip(places, tried) if outcome == "busy"]
        if not places:
            break
    return [outcomes[at] for at in range(len(keys))]


@dataclass(frozen=True)
class LendMover:
    """Lends blocks of a KV cache that lies in the pool, and fills them from there.

    A block is promised to readers on the engine's thread and lent later, so that the engine may have it back at any time in between. For
    that reason one that is busy is not tried again: nobody but the engine's thread knows whether it may still be promised.
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

    def begin(self, keys: Sequence[bytes], block_ids: Sequence[int], parents: Sequence[bytes | None], is_tail: bool = False) -> Publication:
        if is_tail and self.copies_tails:
            return lambda: _patiently(self._publish, keys, block_ids, parents)
        offer = self.access.call(lambda _: self.region.offer(self.namespace, keys, block_ids, parents=parents))
        return lambda: self.access.call(lambda _: offer.lend())

    def _publish(self, keys: Sequence[bytes], block_ids: Sequence[int], parents: Sequence[bytes | None]) -> list[str]:
        return self.access.call(lambda _: self.region.publish_blocks(self.namespace, keys, block_ids, parents=parents))

    def pull(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> list[str | None]:
        return self.access.call(lambda _: self.region.pull_blocks(self.namespace, keys, block_ids))

    def before_writes(self, block_ids: Sequence[int]) -> int:
        if self.access.pool is not self.pool:
            raise PoolLost(self.access.spec, "and with it the KV cache, which lies in it (zero_copy): start the engine again")
        return self.region.take_back(block_ids)
