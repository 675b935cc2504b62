# SPDX-License-Identifier: Apache-2.0
"""Copies beside the forward pass: which are under way, for whom, and how many bytes of them there may be.

A job of `Saves` first reserves cells, which may have to wait for locks of the pool, and then copies, which waits for none. While it has no
cells nothing of the engine's memory is read: it can be given up. Copies that have begun are waited for, since their source must not change.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from .failures import ThreadFailures


class CopyTimeout(RuntimeError):
    """Copies did not end in time. Their source or target must not be used again, so the engine has to stop."""


class SaveWork(Protocol):
    """A job of `Saves`. `save_job.SaveJob` is one."""

    @property
    def keys(self) -> Sequence[bytes]:
        """Keys of the blocks that it publishes; after `keep` those that it keeps."""

    @property
    def len_bytes(self) -> int:
        """Bytes of these blocks."""

    @property
    def block_ids(self) -> Collection[int]:
        """Numbers of vLLM's blocks that it reads; after `keep` as `keys`."""

    def keep(self, places: list[int]) -> None:
        """Leaves out all blocks but those at `places` of `keys`. Called on the thread that submits the job."""

    def announce(self) -> bool:
        """Reserves their cells, which lets every host see that they are coming. Called on a thread of `Saves`, one job after the other.
        False: the pool's locks did not come in time."""

    def run(self) -> None:
        """Publishes them. Called on a thread of `Saves`, after `announce`."""

    def give_up(self) -> None:
        """They are not published. Called on any thread instead of `run`, before `announce` has returned."""

    def release(self) -> None:
        """Gives back what `announce` reserved. Called on a thread of `Saves` after `give_up`, where `announce` was called."""

    def probe(self) -> bool:
        """Waits for the pool's locks as `announce` does. False: they did not come. Called on a thread of `Saves`."""


@dataclass
class _SaveUnderWay:
    job: SaveWork
    owners: list[tuple[str, int]] = field(default_factory=list)
    """(request, step) that wait for this job."""
    is_given_up: bool = False

    def is_of(self, requests: set[str]) -> bool:
        """Whether one of these requests waits for it."""
        return not requests.isdisjoint(request for request, _ in self.owners)


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
    """The pool's locks do not come: what is submitted is given up at once, until a probe finds that they come again."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _by_key: dict[bytes, _SaveUnderWay] = field(default_factory=dict)
    _by_block: Counter[int] = field(default_factory=Counter)
    _by_request: Counter[str] = field(default_factory=Counter)
    _without_cells: dict[int, _SaveUnderWay] = field(default_factory=dict)
    """By identity."""
    _announcing_s: float | None = None
    """Since when a job waits for its cells."""
    _by_step: Counter[int] = field(default_factory=Counter)
    _bytes: int = 0

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.threads, "kvbm-cxl-save", self.begin)
        self._announcer = ThreadPoolExecutor(1, "kvbm-cxl-announce", self.begin)
        self._ending = threading.Event()

    def _is_room(self, len_bytes: int) -> bool:
        return self._bytes == 0 or self._bytes + len_bytes <= self.max_bytes

    def submit(self, owner: tuple[str, int], job: SaveWork) -> bool:
        """Has `job` run for those of its keys that no earlier job is publishing already. Whether there were any.

        The owner (request, step) waits for those of earlier jobs, too. Waits for room where the job's bytes would go beyond the bound.
        """
        keys = job.keys
        with self._changed:
            self._wait(lambda: self._is_room(job.len_bytes), "room to publish blocks", lambda _: True)
            fresh = [place for place, key in enumerate(keys) if key not in self._by_key]
            for save in {id(save): save for key in keys if (save := self._by_key.get(key))}.values():
                self._own(save, owner)
            if not fresh:
                return False
            job.keep(fresh)
            if self.is_held_up:
                job.give_up()
                return True
            save = _SaveUnderWay(job)
            self._without_cells[id(save)] = save
            self._own(save, owner)
            self._by_key.update(dict.fromkeys(job.keys, save))
            self._by_block.update(job.block_ids)
            self._bytes += job.len_bytes
        self._announcer.submit(self._announce, save)
        return True

    def _own(self, save: _SaveUnderWay, owner: tuple[str, int]) -> None:
        save.owners.append(owner)
        self._by_request[owner[0]] += 1
        self._by_step[owner[1]] += 1

    def _announce(self, save: _SaveUnderWay) -> None:
        comes = True
        try:
            if save.is_given_up:
                return  # While it waited for its turn.
            self._announcing_s = time.monotonic()
            comes = save.job.announce()
        except Exception as error:
            self.failures.report("reserving cells", error, f"{len(save.job.keys)} blocks")
        finally:
            self._announced(save, comes)
        if save.is_given_up:
            self._try(save.job.release, "giving cells back")
        else:
            self._pool.submit(self._run, save)
        if not comes:
            self._probe(save.job)

    def _announced(self, save: _SaveUnderWay, comes: bool) -> None:
        with self._changed:
            self._without_cells.pop(id(save), None)
            self._announcing_s, self.is_held_up = None, not comes
            if not comes:  # Those after it would wait for the end of the probe.
                self._give_up(self._without_cells.values())
            self._changed.notify_all()

    def _probe(self, job: SaveWork) -> None:
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
        for save in list(saves):
            del self._without_cells[id(save)]
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
        for block_id in job.block_ids:
            _down(self._by_block, block_id)
        for request, step in save.owners:
            _down(self._by_request, request)
            _down(self._by_step, step)
        self._bytes -= job.len_bytes

    def _wait(self, ready: Callable[[], bool], what: str, concerns: Callable[[_SaveUnderWay], bool]) -> None:
        """Waits. Jobs that `concerns` selects and that get no cells in time are given up. Raises `CopyTimeout`."""
        self._changed.wait_for(lambda: ready() or not any(map(concerns, self._without_cells.values())), self.patience_s)
        if not ready():
            self._give_up(filter(concerns, self._without_cells.values()))
        if not self._changed.wait_for(ready, self.timeout_ms / 1000):
            raise CopyTimeout(f"CxlConnector waited {self.timeout_ms} ms for {what}: the pool does not answer; see `cxlctl doctor`")

    def give_up_late(self, late_s: float) -> None:
        """Gives up what has no cells, where the first of these jobs has waited for so long. No step waits for them, but vLLM keeps their
        blocks."""
        with self._changed:
            since_s = self._announcing_s
            if since_s is not None and time.monotonic() - since_s > late_s:
                self._give_up(self._without_cells.values())
                self._changed.notify_all()

    def wait(self, requests: Iterable[str]) -> None:
        """Waits until nothing is under way for these requests. Raises `CopyTimeout`."""
        wanted = set(requests)
        with self._changed:
            self._wait(
                lambda: not any(self._by_request[request] for request in wanted),
                f"blocks of request {', '.join(sorted(wanted))} to be published",
                lambda save: save.is_of(wanted),
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
        """Waits until every host can see what is under way for these requests. Raises `CopyTimeout`."""
        wanted = set(requests)
        with self._changed:
            self._wait(
                lambda: not any(save.is_of(wanted) for save in self._without_cells.values()),
                f"cells for the blocks of request {', '.join(sorted(wanted))}",
                lambda save: save.is_of(wanted),
            )

    def busy(self, request: str) -> bool:
        """Whether something is under way for this request."""
        with self._changed:
            return self._by_request[request] > 0

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
        """Waits for what is under way, and takes nothing more."""
        self._ending.set()
        self._announcer.shutdown(wait=True)
        self._pool.shutdown(wait=True)


def _down(counter: Counter, key: str | int) -> None:
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]


@dataclass
class Load:
    """A request's blocks on their way out of the pool."""

    request_id: str
    pending: int
    """Jobs that have not ended."""
    started_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    """When its last job ended."""
    failed_blocks: set[int] = field(default_factory=set)
    block_ids: set[int] = field(default_factory=set)
    cancelled: bool = False
    is_void: bool = False
    """Weights changed meanwhile: all its blocks count as failed."""


@dataclass
class Loads:
    """Loads under way. As with `Saves`, one thread gives orders and others copy; while it has nothing else to do, it copies, too."""

    threads: int
    failures: ThreadFailures = field(default_factory=ThreadFailures)
    begin: Callable[[], None] = lambda: None
    """As in `Saves`."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _loads: dict[str, Load] = field(default_factory=dict)
    _done: list[Load] = field(default_factory=list)
    _fatal: CopyTimeout | None = None

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(self.threads, "kvbm-cxl-load", self.begin)

    def submit(self, request_id: str, jobs: list[tuple[list[int], Callable[[], set[int]]]], here: bool = False) -> None:
        """Starts a request's load: for each job the blocks that it fills, and what returns those that it could not.

        here: the calling thread runs the first job before this returns, which saves waking another thread and passing it the interpreter's
        lock.
        """
        load = Load(request_id, len(jobs), block_ids={block_id for block_ids, _ in jobs for block_id in block_ids})
        with self._changed:
            if request_id in self._loads:
                raise RuntimeError(f"request {request_id} is being loaded already")
            self._loads[request_id] = load
        own = 1 if here else 0
        for block_ids, job in jobs[own:]:
            self._pool.submit(self._run, load, block_ids, job)
        for block_ids, job in jobs[:own]:
            self._run(load, block_ids, job)

    def _run(self, load: Load, block_ids: list[int], job: Callable[[], set[int]]) -> None:
        failed = set(block_ids)
        try:
            # Jobs of a cancelled load that have not begun are left out. Their blocks count as failed: they hold nothing.
            if not (load.cancelled or load.is_void):
                failed = job()
        except CopyTimeout as error:
            self._fatal = error
        except Exception as error:
            self.failures.report("loading blocks", error, f"{len(block_ids)} of request {load.request_id}")
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
        """Leaves out what has not begun of these requests; they end as loads do."""
        with self._changed:
            for request in requests:
                if load := self._loads.get(request):
                    load.cancelled = True

    def fail_all(self) -> None:
        """Ends loads under way, and those that `take_done` has not returned yet, without a block."""
        with self._changed:
            for load in (*self._loads.values(), *self._done):
                load.is_void = True

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
        """Ends what is under way."""
        with self._changed:
            for load in self._loads.values():
                load.cancelled = True
        self._pool.shutdown(wait=True)
