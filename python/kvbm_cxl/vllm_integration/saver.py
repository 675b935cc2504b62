# SPDX-License-Identifier: Apache-2.0
"""The worker's saves: blocks on their way into the pool, and which steps wait for them.

Saves are handed to threads when a step has computed their blocks, and chunks of a long prompt are published while the next chunk is
computed. Only the step that completes a prompt for a decode worker waits: with `publish_behind` until every host sees the blocks coming,
else until they are there. What becomes of each block is counted.

A job first reserves cells, which may have to wait for locks of the pool, and then copies, which waits for none. While it has no cells
nothing of the engine's memory is read: it can be given up. Copies that have begun are waited for, since their source must not change.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import kvbm_cxl

from . import movers
from .adapters import LoadedAdapters
from .audit import FoundBlocks
from .config import ConnectorConfig
from .failures import ThreadFailures, error_kind
from .metadata import Blocks, StepMetadata
from .movers import After, CopyTimeout, Mover, PublishBatch, mark
from .pool_access import PoolAccess
from .stats import Tally

if TYPE_CHECKING:
    from .attachment import Attachment

# Bytes that one thread copies before another may take over: large enough to make its overhead vanish.
_JOB_BYTES = 8 << 20
# Outcomes after which every host can pull a block.
_THERE = ("stored", "exists")
# Of the silence after which a host is suspected: so long a step waits for cells at least. It waits longer where it computed for longer, so
# that a pool whose locks do not come makes no request take more than twice its time.
LEAST_PATIENCE = 0.1
NO_LOCK = "no_lock"
"""Outcome of blocks that were given up because the pool's locks did not come."""
AuditOfBatch = Callable[[PublishBatch, list[str]], None]
"""Compares blocks with those of the pool, by what became of each."""
Record = Callable[[list[bytes], list[str], float], None]
"""Counts what became of blocks: their keys, the outcome of each (those of `Mover.publish`, or the kind of the error), and the seconds."""


class SaveJob:
    """Publishes a batch of blocks. `announce` and `run` are called once each, in this order. An error of the pool is an outcome."""

    def __init__(
        self,
        mover: Mover,
        batch: PublishBatch,
        block_bytes: int,
        slices: int,
        after: After,
        failures: ThreadFailures,
        record: Record,
        audit: AuditOfBatch | None = None,
    ) -> None:
        """slices: blocks in the pool that make one of vLLM's. after: what computes the blocks. record, audit: called on the thread that
        runs the job."""
        self.mover, self.block_bytes, self.slices, self.after = mover, block_bytes, slices, after
        self.failures, self.record, self.audit = failures, record, audit
        self._reservations: Any = None
        self._error: str | None = None
        self._take(batch)

    def _take(self, batch: PublishBatch) -> None:
        self.batch, self.keys = batch, batch.keys
        self.len_bytes = len(batch.keys) * self.block_bytes
        self.block_ids = set(batch.block_ids) if self.slices == 1 else {place // self.slices for place in batch.block_ids}
        """Numbers of vLLM's blocks that it reads."""

    def keep(self, places: Sequence[int]) -> None:
        """Leaves out all blocks but those at `places` of `keys`. Called on the thread that submits the job."""
        self._take(self.batch.at(places))

    def announce(self) -> bool:
        """Reserves cells, which lets every host see that the blocks are coming. Called on a thread of `Saves`, one job after the other.
        False: the pool's locks did not come in time."""
        try:
            self._reservations = self.mover.announce(self.batch)
        except kvbm_cxl.CxlError as error:
            self._fail(error)
        return self._error != kvbm_cxl.TimeoutError_.kind

    def give_up(self) -> None:
        """The blocks are not published, since the pool's locks do not come. Called on any thread instead of `run`, before `announce` has
        returned."""
        self.record(self.keys, [NO_LOCK] * len(self.keys), 0.0)

    def release(self) -> None:
        """Gives back what `announce` reserved, after `give_up`."""
        reservations, self._reservations = self._reservations, None
        if reservations is not None:
            self.mover.release(reservations)

    def probe(self) -> bool:
        """Waits for the pool's locks as `announce` does. False: they did not come."""
        try:
            self.mover.release(self.mover.announce(self.batch))
        except kvbm_cxl.TimeoutError_:
            return False
        except kvbm_cxl.CxlError:
            pass  # Its locks came, or there is no pool at present.
        return True

    def run(self) -> None:
        """Publishes the blocks, on a thread of `Saves`, during the next steps."""
        started_s = time.monotonic()
        outcomes: list[str] = []
        if self._error is None:
            try:
                outcomes = self.mover.publish(self.batch, self._reservations, self.after)
            except kvbm_cxl.CxlError as error:
                self._fail(error)
        if self._error is not None:
            outcomes = [self._error] * len(self.keys)
        self.record(self.keys, outcomes, time.monotonic() - started_s)
        if self.audit is not None:
            self.audit(self.batch, outcomes)

    def _fail(self, error: kvbm_cxl.CxlError) -> None:
        self.failures.report("publishing blocks", error, f"{len(self.keys)} blocks", count=False)
        self._error = error_kind(error)


@dataclass(eq=False)
class _SaveUnderWay:
    job: SaveJob
    requests: list[str] = field(default_factory=list)
    """Those that wait for this job."""
    steps: list[int] = field(default_factory=list)
    """The step of each."""
    is_given_up: bool = False


@dataclass
class Saves:
    """Blocks on their way into the pool. Called by the worker's thread; jobs run on threads of their own. A thread that copies nothing
    reserves cells, so that no job waits for the copies of others."""

    threads: int
    max_bytes: int
    timeout_ms: int
    """Longest wait for copies."""
    failures: ThreadFailures = field(default_factory=ThreadFailures)
    begin: Callable[[], None] = lambda: None
    """Called first by each thread; must not raise."""
    patience_s: float = 1.0
    """Longest wait for cells. Jobs that have none by then are given up."""
    is_held_up: bool = False
    """The pool's locks do not come: new saves are dropped at once, until a probe finds that they come again."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _by_key: dict[bytes, _SaveUnderWay] = field(default_factory=dict)
    _by_block: Counter[int] = field(default_factory=Counter)
    _by_request: Counter[str] = field(default_factory=Counter)
    _by_step: Counter[int] = field(default_factory=Counter)
    _without_cells: dict[_SaveUnderWay, None] = field(default_factory=dict)
    _announcing_s: float | None = None
    """Since when a job waits for its cells."""
    _bytes: int = 0

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.threads, "kvbm-cxl-save", self.begin)
        self._announcer = ThreadPoolExecutor(1, "kvbm-cxl-announce", self.begin)
        self._ending = threading.Event()

    def submit(self, owner: tuple[str, int], job: SaveJob) -> bool:
        """Has `job` run for those of its keys that no earlier job is publishing already. Whether there were any.

        The owner (request, step) waits for those of earlier jobs, too. Waits for room where the job's bytes would go beyond the bound.
        """
        (request, step), keys = owner, job.keys
        with self._changed:
            if self._bytes and self._bytes + job.len_bytes > self.max_bytes:
                self._wait(
                    lambda: self._bytes == 0 or self._bytes + job.len_bytes <= self.max_bytes, "room to publish blocks", lambda _: True
                )
            earlier, fresh = {}, range(len(keys))
            if not self._by_key.keys().isdisjoint(keys):
                earlier = {save: None for key in keys if (save := self._by_key.get(key))}
                fresh = [place for place in fresh if keys[place] not in self._by_key]
            if fresh:
                if len(fresh) < len(keys):
                    job.keep(fresh)
                if self.is_held_up:
                    job.give_up()
                else:
                    save = _SaveUnderWay(job)
                    self._without_cells[save] = earlier[save] = None
                    self._by_key.update(dict.fromkeys(job.keys, save))
                    self._by_block.update(job.block_ids)
                    self._bytes += job.len_bytes
                    self._announcer.submit(self._announce, save)
            for each in earlier:
                each.requests.append(request)
                each.steps.append(step)
                self._by_request[request] += 1
                self._by_step[step] += 1
        return bool(fresh)

    def _announce(self, save: _SaveUnderWay) -> None:
        if save.is_given_up:  # While it waited for its turn. The locks came to those before it.
            with self._changed:
                self.is_held_up = False
            return
        comes = True
        self._announcing_s = time.monotonic()
        try:
            comes = save.job.announce()
        except Exception as error:
            self.failures.report("reserving cells", error, f"{len(save.job.keys)} blocks")
        with self._changed:
            self._without_cells.pop(save, None)
            self._announcing_s, self.is_held_up = None, not comes
            if not comes:  # Those after it would wait for the end of the probe.
                self._give_up(list(self._without_cells))
            self._changed.notify_all()
        if save.is_given_up:
            self._try(save.job.release, "giving cells back")
        else:
            self._pool.submit(self._run, save)
        if not comes:
            self._probe(save.job)

    def _probe(self, job: SaveJob) -> None:
        """Waits until the pool's locks come. Jobs that are submitted meanwhile are given up."""
        while not self._ending.is_set() and not self._try(job.probe, "looking whether the pool's locks come"):
            pass
        with self._changed:
            self.is_held_up = False

    def _try(self, work: Callable[[], object], doing: str) -> bool:
        """Whether `work` returns a true value; true as well where it fails, which is reported."""
        try:
            return bool(work())
        except Exception as error:
            self.failures.report(doing, error)
            return True

    def _give_up(self, saves: Iterable[_SaveUnderWay]) -> None:
        """Gives up jobs that have no cells."""
        for save in saves:
            del self._without_cells[save]
            save.is_given_up = self.is_held_up = True
            self._forget(save)
            save.job.give_up()

    def _run(self, save: _SaveUnderWay) -> None:
        job = save.job
        try:
            job.run()
        except Exception as error:
            self.failures.report("publishing blocks", error, f"{len(job.keys)} blocks")
        finally:
            with self._changed:
                self._forget(save)
                self._changed.notify_all()

    def _forget(self, save: _SaveUnderWay) -> None:
        """It is over."""
        job = save.job
        for key in job.keys:
            del self._by_key[key]
        for counts, names in ((self._by_block, job.block_ids), (self._by_request, save.requests), (self._by_step, save.steps)):
            for name in names:
                counts[name] -= 1
                if counts[name] <= 0:
                    del counts[name]
        self._bytes -= job.len_bytes

    def _wait(self, is_over: Callable[[], bool], what: str, concerns: Callable[[_SaveUnderWay], bool]) -> None:
        """Waits. Jobs that `concerns` selects and that get no cells in time are given up. Raises `CopyTimeout`."""
        waits_for_cells, until_s = True, time.monotonic() + self.patience_s
        while not is_over():
            if waits_for_cells:
                without = [save for save in self._without_cells if concerns(save)]
                if not without or time.monotonic() >= until_s:
                    self._give_up(without)
                    waits_for_cells, until_s = False, time.monotonic() + self.timeout_ms / 1000
                    if without:
                        continue
            if not self._changed.wait(max(until_s - time.monotonic(), 0)) and not waits_for_cells and not is_over():
                raise CopyTimeout(f"CxlConnector waited {self.timeout_ms} ms for {what}: the pool does not answer; see `cxlctl doctor`")

    def give_up_late(self, late_s: float) -> None:
        """Drops blocks without cells if the first of these jobs has waited for so long. No step waits for them, but vLLM keeps their
        blocks."""
        with self._changed:
            since_s = self._announcing_s
            if since_s is not None and time.monotonic() - since_s > late_s:
                self._give_up(list(self._without_cells))
                self._changed.notify_all()

    def wait(self, requests: Iterable[str]) -> None:
        """Waits until nothing is under way for these requests. Raises `CopyTimeout`."""
        with self._changed:
            if wanted := self._by_request.keys() & set(requests):
                self._wait(
                    lambda: wanted.isdisjoint(self._by_request),
                    f"blocks of request {', '.join(sorted(wanted))} to be published",
                    lambda save: not wanted.isdisjoint(save.requests),
                )

    def wait_blocks(self, block_ids: Iterable[int]) -> None:
        """Waits until nothing is read from these blocks of vLLM any more, for whichever request. Raises `CopyTimeout`."""
        with self._changed:
            if self._by_block and (busy := self._by_block.keys() & set(block_ids)):
                self._wait(
                    lambda: busy.isdisjoint(self._by_block),
                    f"{len(busy)} blocks to be published that are about to change",
                    lambda save: not busy.isdisjoint(save.job.block_ids),
                )

    def wait_all(self) -> None:
        """Waits until nothing is under way. Raises `CopyTimeout`."""
        with self._changed:
            self._wait(lambda: not self._by_key, "all blocks to be published", lambda _: True)

    def wait_announced(self, requests: Iterable[str]) -> None:
        """Waits until every host can see the running saves of these requests. Raises `CopyTimeout`."""
        with self._changed:
            if wanted := self._by_request.keys() & set(requests):
                self._wait(
                    lambda: all(wanted.isdisjoint(save.requests) for save in self._without_cells),
                    f"cells for the blocks of request {', '.join(sorted(wanted))}",
                    lambda save: not wanted.isdisjoint(save.requests),
                )

    def is_busy(self, request: str) -> bool:
        """Whether something is under way for this request."""
        with self._changed:
            return request in self._by_request

    def done_step(self, step: int) -> int:
        """The latest step, up to `step`, through which every save is over."""
        with self._changed:
            return min(self._by_step, default=step + 1) - 1

    def wait_any(self, timeout_s: float) -> None:
        """Waits a little for one of them to end, if there are any."""
        with self._changed:
            if self._by_key:
                self._changed.wait(timeout_s)

    def close(self) -> None:
        """Waits for the running saves, and takes no more."""
        self._ending.set()
        self._announcer.shutdown(wait=True)
        self._pool.shutdown(wait=True)


@dataclass
class Saver:
    """Publishes what steps compute. Called by the worker's thread."""

    config: ConnectorConfig
    access: PoolAccess
    tally: Tally
    adapters: LoadedAdapters
    clears_first: bool = False
    """See `support.clears_first`."""
    saved_step: int = 0
    """Latest step whose saves were handed to threads. With speculative decoding vLLM asks for a step's report before that."""
    begun_s: float = 0.0
    """When the step began."""
    _waiting: set[str] = field(default_factory=set)
    """Released requests for which a save is still under way."""
    _tails: dict[str, list[int]] = field(default_factory=dict)
    """vLLM's blocks with each request's tail that is published, or about to be, with no token after it yet."""
    _states: list[int] = field(default_factory=list)
    """vLLM's blocks with the states that the last step had published."""
    _stored: Counter[bytes] = field(default_factory=Counter)
    """Keys for routers. Added to by the threads of saves."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards `_stored`."""

    def __post_init__(self) -> None:
        config = self.config
        limits = (config.workers, config.max_inflight_bytes, movers.COPY_TIMEOUT_MS)
        self._suspect_s = self.access.pool.suspect_ms / 1000 if self.access.pool else 1.0
        self.saves = Saves(*limits, self.access.failures, self.access.bind_worker, self._suspect_s * LEAST_PATIENCE)

    def before_overwrite(self, orders: StepMetadata) -> None:
        """Ends the saves whose blocks the step may write to: those that other requests were given, tails, which fill up token by token,
        and states. The others of a long prompt may take longer than the step."""
        changes, self._states = orders.taken + self._states, []
        for request in self._tails.keys() & (orders.grows | orders.preempted):
            changes += self._tails.pop(request)
        if changes:
            self.saves.wait_blocks(changes)
        if orders.preempted:
            self.saves.wait(orders.preempted)

    def save(self, attachment: "Attachment", orders: StepMetadata) -> None:
        """Has the step's blocks published, and waits for those that must be there when it ends."""
        self.saves.patience_s = max(time.monotonic() - self.begun_s, self._suspect_s * LEAST_PATIENCE)
        if orders.saves and attachment.publishes:
            after = mark(attachment.device)
            # The next step waits for states: the copies of other blocks do not stand before them.
            for blocks in sorted(orders.saves, key=attrgetter("is_state"), reverse=True):
                self._submit(attachment, blocks, orders, after)
        if self.clears_first:
            self.saves.wait_all()
        elif not orders.complete:
            return
        elif self.config.publish_behind:
            self.saves.wait_announced(orders.complete)
        else:
            self.saves.wait(orders.complete)

    def _submit(self, attachment: "Attachment", blocks: Blocks, orders: StepMetadata, after: After) -> None:
        """Hands blocks to threads."""
        if blocks.adapter and not self.adapters.is_loaded(*blocks.adapter):
            self.tally.count("published_blocks", "other_adapter", len(blocks.keys))
            return
        group = attachment.groups[blocks.group]
        if group is None:
            return
        if blocks.tail_tokens:
            self._tails.setdefault(blocks.request_id, []).extend(group.of_vllm(blocks.block_ids))
        if blocks.is_state:
            self._states += group.of_vllm(blocks.block_ids)
        audit = attachment.audit and attachment.audit.of_batch(group.audit, blocks, blocks.request_id in orders.audited)
        mover, record = group.mover, partial(self._record, group.block_bytes)
        if blocks.only_audited:
            mover, record = FoundBlocks(), _ignore
        for piece in blocks.pieces(_JOB_BYTES // group.block_bytes):
            batch = PublishBatch(piece.keys, piece.block_ids, [piece.parent, *piece.keys[:-1]])
            job = SaveJob(mover, batch, group.block_bytes, group.slices, after, self.access.failures, record, audit)
            self.saves.submit((blocks.request_id, orders.step), job)

    def _record(self, block_bytes: int, keys: list[bytes], outcomes: list[str], took_s: float) -> None:
        """Counts what a job published, on the job's thread."""
        self.tally.time("publish_seconds", took_s)
        for outcome, count in Counter(outcomes).items():
            self.tally.count("published_blocks", outcome, count)
        self.tally.count("bytes", "published", outcomes.count("stored") * block_bytes)
        if self.config.events:
            with self._lock:
                for key, outcome in zip(keys, outcomes):
                    self._stored[key] += outcome in _THERE

    def take_saved(self, orders: StepMetadata | None, finished: set[str], wait_s: float) -> set[str]:
        """Released requests whose blocks vLLM may give away; waits up to `wait_s` for one. `finished`: vLLM keeps their blocks until they
        are saved."""
        self.saves.give_up_late(max(self._suspect_s, self.saves.patience_s))
        for request in finished:
            self._tails.pop(request, None)
        if orders is not None:
            self._waiting |= orders.release
        if not self._waiting:
            return set()
        if wait_s:
            self.saves.wait_any(wait_s)
        saved = {request for request in self._waiting if not self.saves.is_busy(request)}
        self._waiting -= saved
        return saved

    def take_stored(self) -> dict[bytes, int]:
        """Keys that every host can pull since the last call, and how often each was published; none without KV events."""
        with self._lock:
            stored, self._stored = self._stored, Counter()
        return dict(stored)

    def done_step(self) -> int:
        """The latest step through which every save is over."""
        return self.saves.done_step(self.saved_step)


def _ignore(*_: object) -> None:
    """Blocks that are only compared count as nothing that was published."""
