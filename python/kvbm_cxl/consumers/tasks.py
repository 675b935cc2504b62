# SPDX-License-Identifier: Apache-2.0
"""Work on threads, for consumers that give tasks and ask later what became of them."""

import itertools
import logging
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

logger = logging.getLogger("kvbm_cxl")
_R = TypeVar("_R")


@dataclass
class Tasks(Generic[_R]):
    """Tasks of one kind. Each one ends exactly once: with its result, or with what `failed` says of it."""

    name: str
    threads: int
    ended: Callable[[], None] = lambda: None
    """Called on a thread of the tasks, after the end of one is there to be taken."""
    begin: Callable[[], None] = lambda: None
    """Called first by each thread; must not raise."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _results: dict[int, _R] = field(default_factory=dict)
    _under_way: int = 0

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self._threads = ThreadPoolExecutor(self.threads, f"kvbm-cxl-{self.name}", self.begin)
        self._idle = threading.Condition(self._lock)

    def submit(self, work: Callable[[], _R], failed: Callable[[], _R], number: int | None = None) -> int:
        """Has `work` done; returns the number of the task, which is `number` where the caller has one. Never waits."""
        with self._lock:
            number = next(self._numbers) if number is None else number
            self._under_way += 1
        self._threads.submit(self._run, number, work, failed)
        return number

    def end(self, number: int, result: _R) -> None:
        """A task of the caller's number that ended as soon as it was given."""
        with self._lock:
            self._results[number] = result
        self.ended()

    def _run(self, number: int, work: Callable[[], _R], failed: Callable[[], _R]) -> None:
        try:
            result = work()
        except Exception as error:
            logger.exception("%s task %d failed", self.name, number)
            # A handler of logs may keep the error, and must not keep the consumer's memory with it.
            traceback.clear_frames(error.__traceback__)
            result = failed()
        with self._lock:
            self._results[number] = result
        try:
            self.ended()
        finally:
            with self._lock:
                self._under_way -= 1
                self._idle.notify_all()

    def take(self, number: int) -> _R | None:
        """The result of a task that has ended, once."""
        with self._lock:
            return self._results.pop(number, None)

    def take_all(self) -> dict[int, _R]:
        """The results of all tasks that have ended, once."""
        with self._lock:
            results, self._results = self._results, {}
        return results

    def is_idle(self) -> bool:
        """Whether no task is under way and every result was taken."""
        with self._lock:
            return self._under_way == 0 and not self._results

    def drain(self) -> None:
        """Waits until every task has ended."""
        with self._lock:
            self._idle.wait_for(lambda: self._under_way == 0)

    def close(self) -> None:
        """Waits until every task has ended, and takes no more."""
        self._threads.shutdown(wait=True)
