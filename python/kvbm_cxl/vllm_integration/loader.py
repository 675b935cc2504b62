# SPDX-License-Identifier: Apache-2.0
"""The worker's loads: copies out of the pool during the forward pass.

vLLM schedules a request when its load is over. Threads copy; in a step that computes nothing the engine's own thread copies as well, since
it would only wait for the others. A block that does not come is reported to vLLM, which computes it.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import kvbm_cxl

from . import movers
from .adapters import LoadedAdapters
from .config import ConnectorConfig
from .failures import ThreadFailures, error_kind
from .log import logger
from .metadata import Blocks, StepMetadata
from .movers import After, CopyTimeout, mark
from .pool_access import PoolAccess
from .stats import Tally

if TYPE_CHECKING:
    from .attachment import AttachedGroup, Attachment

# Bytes that one thread copies before another may take over. A load is of use only when it is complete, and the pool's own threads share the
# work of each. An engine without computation is held up by one of these, some milliseconds.
_JOB_BYTES = 16 << 20


@dataclass
class Load:
    """A request's blocks on their way out of the pool."""

    request_id: str
    pending: int
    """Jobs that have not ended."""
    block_ids: set[int]
    started_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    """When its last job ended."""
    failed_blocks: set[int] = field(default_factory=set)
    is_cancelled: bool = False
    is_void: bool = False
    """Weights changed meanwhile: all its blocks count as failed."""


@dataclass
class Loads:
    """Loads under way. One thread gives orders and others copy; while it has nothing else to do, it copies, too."""

    threads: int
    failures: ThreadFailures = field(default_factory=ThreadFailures)
    begin: Callable[[], None] = lambda: None
    """Called first by each thread; must not raise."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _loads: dict[str, Load] = field(default_factory=dict)
    _done: list[Load] = field(default_factory=list)
    _fatal: CopyTimeout | None = None

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.threads, "kvbm-cxl-load", self.begin)

    def submit(self, request_id: str, jobs: list[tuple[Iterable[int], Callable[[], set[int]]]], here: bool = False) -> None:
        """Starts a request's load: for each job the blocks that it fills, and what returns those that it could not.

        here: the calling thread runs the first job before this returns, which saves waking another thread and passing it the interpreter's
        lock.
        """
        load = Load(request_id, len(jobs), set().union(*(block_ids for block_ids, _ in jobs)))
        with self._changed:
            if request_id in self._loads:
                raise RuntimeError(f"request {request_id} is being loaded already")
            self._loads[request_id] = load
        for block_ids, job in jobs[here:]:
            self._pool.submit(self._run, load, block_ids, job)
        if here:
            self._run(load, *jobs[0])

    def _run(self, load: Load, block_ids: Iterable[int], job: Callable[[], set[int]]) -> None:
        failed = set(block_ids)
        try:
            # Jobs of a cancelled load that have not begun are left out. Their blocks count as failed: they hold nothing.
            if not (load.is_cancelled or load.is_void):
                failed = job()
        except CopyTimeout as error:
            self._fatal = error
        except Exception as error:
            self.failures.report("loading blocks", error, f"{len(failed)} of request {load.request_id}")
        finally:
            with self._changed:
                load.failed_blocks |= failed
                load.pending -= 1
                if load.pending == 0:
                    load.ended_s = time.monotonic()
                    del self._loads[load.request_id]
                    self._done.append(load)
                    self._changed.notify_all()

    def cancel(self, requests: Iterable[str]) -> None:
        """Cancels the loads of these requests that have not begun; they end as loads do."""
        with self._changed:
            for request in requests:
                if load := self._loads.get(request):
                    load.is_cancelled = True

    def fail_all(self) -> None:
        """Ends loads under way, and those that `take_done` has not returned yet, without a block."""
        with self._changed:
            for load in (*self._loads.values(), *self._done):
                load.is_void = True

    def end_all(self) -> None:
        """`fail_all`, and waits until no load writes to memory of the engine. Each job has its own time limit."""
        self.fail_all()
        with self._changed:
            self._changed.wait_for(lambda: not self._loads)

    def take_done(self, wait_s: float = 0.0) -> list[Load]:
        """Loads that ended since the last call. Waits up to `wait_s` for one if there is none but some are under way. Raises the
        `CopyTimeout` of a job: memory of the engine may still be written to."""
        with self._changed:
            if wait_s and self._loads and not self._done:
                self._changed.wait(wait_s)
            if self._fatal is not None:
                raise self._fatal
            done, self._done = self._done, []
        for load in done:
            if load.is_void:
                load.failed_blocks |= load.block_ids
        return done

    def close(self) -> None:
        """Ends the running loads."""
        with self._changed:
            for load in self._loads.values():
                load.is_cancelled = True
        self._pool.shutdown(wait=True)


@dataclass
class Loader:
    """Turns orders into loads, and their ends into reports for vLLM. Called by the worker's thread."""

    config: ConnectorConfig
    access: PoolAccess
    tally: Tally
    adapters: LoadedAdapters
    _failed_blocks: set[int] = field(default_factory=set)
    _failed_requests: set[str] = field(default_factory=set)
    _corrupt: set[bytes] = field(default_factory=set)
    """Added to by the threads of loads."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards `_corrupt`."""

    def __post_init__(self) -> None:
        self.loads = Loads(self.config.workers, self.access.failures, self.access.bind_worker)

    def load(self, attachment: "Attachment", orders: StepMetadata) -> None:
        """Starts the loads of a step."""
        after = mark(attachment.device)
        jobs: dict[str, list] = {}
        for blocks in orders.loads:
            jobs.setdefault(blocks.request_id, []).extend(self._jobs(attachment, blocks, orders, after))
        *_, last = jobs
        for request_id, of_request in jobs.items():
            # The last one's: by then all others are on their way.
            self.loads.submit(request_id, of_request, here=orders.idle and request_id == last)

    def _jobs(self, attachment: "Attachment", blocks: Blocks, orders: StepMetadata, after: After) -> list:
        group = attachment.groups[blocks.group]
        if group is None:
            return [((), set)]
        audit = attachment.audit
        is_isolated = audit is not None and audit.has_differed and not orders.is_isolated
        if is_isolated or (blocks.adapter and not self.adapters.is_loaded(*blocks.adapter)):
            self.tally.count("pulled_blocks", "isolated" if is_isolated else "other_adapter", len(blocks.keys))
            failed = group.of_vllm(blocks.block_ids)
            return [(failed, lambda: set(failed))]
        pieces = blocks.pieces(_JOB_BYTES // group.block_bytes)
        return [(group.of_vllm(piece.block_ids), partial(self.pull, group, piece, after)) for piece in pieces]

    def pull(self, group: "AttachedGroup", blocks: Blocks, after: After) -> set[int]:
        """Fills blocks, on any thread; numbers of those of vLLM that hold nothing."""
        try:
            reasons = group.mover.pull(blocks.keys, blocks.block_ids, after)
        except kvbm_cxl.CxlError as error:
            self.access.failures.report("pulling blocks", error, f"{len(blocks.keys)} of request {blocks.request_id}", count=False)
            reasons = [error_kind(error)] * len(blocks.keys)
            if isinstance(error, kvbm_cxl.TimeoutError_):
                self._check_settled(len(blocks.keys))
        hits = reasons.count(None)
        self.tally.count("pulled_blocks", "hit", hits)
        self.tally.count("bytes", "pulled", hits * group.block_bytes)
        if hits == len(reasons):
            return set()
        self._count_misses(group, blocks.keys, reasons)
        return set(group.of_vllm(block_id for block_id, reason in zip(blocks.block_ids, reasons) if reason is not None))

    def _check_settled(self, blocks: int) -> None:
        """A copy of a GPU that did not end in time may still write to its blocks, which vLLM would give away. Raises `CopyTimeout` where
        the end does not come."""
        try:
            if self.access.call(lambda cache: cache.is_settled(timeout_ms=movers.COPY_TIMEOUT_MS)):
                return
        except kvbm_cxl.CxlError as error:
            self.access.failures.report("waiting for the end of a copy", error, count=False)
        raise CopyTimeout(f"CxlConnector: the GPU may still write to {blocks} blocks whose load took too long; see `cxlctl doctor --gpu`")

    def _count_misses(self, group: "AttachedGroup", keys: list[bytes], reasons: list[str | None]) -> None:
        for reason, count in Counter(filter(None, reasons)).items():
            self.tally.count("pulled_blocks", reason, count)
        for key, reason in zip(keys, reasons):
            if reason == "checksum":
                logger.error("block %s of namespace %s has a wrong checksum", key.hex(), group.namespaces[0])
                with self._lock:
                    self._corrupt.add(key)

    def take_loaded(self, finished: set[str], wait_s: float) -> set[str]:
        """Requests whose load is over; waits up to `wait_s` for one. `finished`: vLLM wants no more of these."""
        if finished:
            self.loads.cancel(finished)
        loaded = set()
        for load in self.loads.take_done(wait_s):
            loaded.add(load.request_id)
            self.tally.time("pull_seconds", load.ended_s - load.started_s)
            self.tally.time("noticed_seconds", time.monotonic() - load.ended_s)
            self.tally.count("loads", "cancelled" if load.is_cancelled else "failed" if load.failed_blocks else "complete")
            if load.failed_blocks:
                self._failed_blocks |= load.failed_blocks
                self._failed_requests.add(load.request_id)
        return loaded

    def take_failed_blocks(self) -> set[int]:
        """Blocks that hold nothing although a load was to fill them, of the loads that `take_loaded` has just returned."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def failed_requests(self) -> set[str]:
        """Requests that own these blocks. They stay until `take_report`."""
        self._failed_blocks = set()
        return set(self._failed_requests)

    def take_report(self) -> tuple[set[str], set[bytes]]:
        """Requests whose loads failed, and keys of corrupt blocks, since the last call."""
        failed, self._failed_requests = self._failed_requests, set()
        with self._lock:
            corrupt, self._corrupt = self._corrupt, set()
        return failed, corrupt
