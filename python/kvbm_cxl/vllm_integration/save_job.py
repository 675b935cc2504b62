# SPDX-License-Identifier: Apache-2.0
"""One batch of a request's blocks on its way into the pool."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import kvbm_cxl

from .failures import ThreadFailures, error_kind
from .groups import blocks_of
from .movers import Mover, PublishBatch

if TYPE_CHECKING:
    from .devices import After


NO_LOCK = "no_lock"
"""Outcome of blocks that were given up because the pool's locks did not come."""
AuditOfBatch = Callable[[PublishBatch, list[str]], None]
"""Compares blocks with those of the pool, by what became of each."""


@dataclass(frozen=True)
class SaveOutcome:
    """What became of the blocks of a job."""

    keys: list[bytes]
    outcomes: list[str]
    """One for each key, as `Mover.publish` returns them, or the kind of the error."""
    took_s: float


@dataclass
class SaveJob:
    """Publishes a batch of blocks. `keep`, `announce` where others shall see the blocks coming, and `run` are called once each, in this
    order. An error of the pool is an outcome."""

    mover: Mover
    batch: PublishBatch
    block_bytes: int
    after: "After"
    """What computes the blocks."""
    record: Callable[[SaveOutcome], None]
    """Counts what became of the blocks. Called on the thread that runs the job."""
    failures: ThreadFailures
    slices: int = 1
    """Blocks in the pool that make one of vLLM's."""
    audit: AuditOfBatch | None = None
    """Called on the thread that runs the job."""
    _reservations: Any = field(default=None, init=False)
    """What `Mover.announce` returned."""
    _error: str | None = field(default=None, init=False)
    """Kind of the error for which no block of the batch can be published."""

    @property
    def keys(self) -> list[bytes]:
        return self.batch.keys

    @property
    def len_bytes(self) -> int:
        return len(self.batch.keys) * self.block_bytes

    @property
    def block_ids(self) -> set[int]:
        return set(blocks_of(self.batch.block_ids, self.slices))

    def keep(self, places: list[int]) -> None:
        """Leaves out all blocks but those at `places` of the batch."""
        self.batch = self.batch.at(places)

    def announce(self) -> bool:
        """Reserves cells, which lets every host see that the blocks are coming, on any thread. False: the pool's locks did not come."""
        try:
            self._reservations = self.mover.announce(self.batch)
        except kvbm_cxl.CxlError as error:
            self._fail(error)
        return self._error != kvbm_cxl.TimeoutError_.kind

    def give_up(self) -> None:
        """The blocks are not published, since the pool's locks do not come. Any thread may be within `announce`."""
        self.record(SaveOutcome(self.keys, [NO_LOCK] * len(self.keys), 0.0))

    def release(self) -> None:
        """Gives back what `announce` reserved, after `give_up`."""
        reservations, self._reservations = self._reservations, None
        if reservations is not None:
            self.mover.release(reservations)

    def probe(self) -> bool:
        """Waits for the pool's locks as `announce` does; whether they came."""
        try:
            self.mover.release(self.mover.announce(self.batch))
        except kvbm_cxl.TimeoutError_:
            return False
        except kvbm_cxl.CxlError:
            pass  # Its locks came, or there is no pool at present.
        return True

    def run(self) -> None:
        """Publishes, on any thread, beside the next steps."""
        started_s = time.monotonic()
        outcomes: list[str] = []
        if self._error is None:
            try:
                outcomes = self.mover.publish(self.batch, self._reservations, self.after)
            except kvbm_cxl.CxlError as error:
                self._fail(error)
        if self._error is not None:
            outcomes = [self._error] * len(self.keys)
        self._end(outcomes, started_s)

    def _end(self, outcomes: list[str], started_s: float) -> None:
        """The blocks are published, and vLLM still keeps them."""
        self.record(SaveOutcome(self.keys, outcomes, time.monotonic() - started_s))
        if self.audit is not None:
            self.audit(self.batch, outcomes)

    def _fail(self, error: kvbm_cxl.CxlError) -> None:
        self.failures.report("publishing blocks", error, f"{len(self.keys)} blocks", count=False)
        self._error = error_kind(error)
