# SPDX-License-Identifier: Apache-2.0
"""One batch of a request's blocks on its way into the pool."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import kvbm_cxl

from .failures import ThreadFailures, error_kind
from .groups import blocks_of
from .movers import CellReservations, Mover, PublishBatch

if TYPE_CHECKING:
    from .devices import After


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
    _reservations: list[CellReservations] | CellReservations | None = field(default=None, init=False)
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

    def announce(self) -> None:
        """Lets every host see that the blocks are coming, on any thread."""
        try:
            self._reservations = self.mover.announce(self.batch)
        except kvbm_cxl.CxlError as error:
            self._fail(error)

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
        self.record(SaveOutcome(self.keys, outcomes, time.monotonic() - started_s))

    def _fail(self, error: kvbm_cxl.CxlError) -> None:
        self.failures.report(f"publishing {len(self.keys)} blocks", error, count=False)
        self._error = error_kind(error)
