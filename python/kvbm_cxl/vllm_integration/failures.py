# SPDX-License-Identifier: Apache-2.0
"""Errors of the connector's background threads: logged, counted by reason, and the last one kept.

A background thread has no caller that an exception could reach. It reports here instead, and continues. The counts leave with the stats of
the process's next connector that is asked for them, as `thread_errors`.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from .log import logger

# An error that repeats is logged again after this time.
_LOG_AGAIN_S = 60.0


def error_kind(error: BaseException) -> str:
    """The kind of a pool's error, for counters."""
    kind = getattr(error, "kind", None)
    return kind if isinstance(kind, str) else "other"


@dataclass(frozen=True)
class ThreadError:
    """An error that a background thread met."""

    thread: str
    """Name of the thread."""
    doing: str
    """The work that failed."""
    detail: str
    """Which blocks, request or file it was for."""
    reason: str
    """The kind of a pool's error, or `other`."""
    message: str
    at_s: float
    """Seconds since 1970."""


class ThreadFailures:
    """What background threads of one process report. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._logged_s: dict[tuple[str, str], float] = {}
        self._last: ThreadError | None = None

    @property
    def last_error(self) -> ThreadError | None:
        """The latest error, or None."""
        with self._lock:
            return self._last

    def report(self, doing: str, error: BaseException, detail: str = "", *, count: bool = True) -> None:
        """Logs, keeps and counts an error of the calling thread. `doing` is a fixed text: an error of the same kind at the same work is
        logged once a minute, whatever `detail` adds. An exception that is no error of the pool is a fault of the connector, and is logged
        with its traceback. `count`: False where the stats have the error already, as the outcome of blocks."""
        reason, now_s = error_kind(error), time.monotonic()
        message = str(error) if reason != "other" else f"{type(error).__name__}: {error}"
        with self._lock:
            self._counts[reason] += count
            self._last = ThreadError(threading.current_thread().name, doing, detail, reason, message, time.time())
            is_repeated = now_s - self._logged_s.get((doing, reason), -_LOG_AGAIN_S) < _LOG_AGAIN_S
            if not is_repeated:
                self._logged_s[doing, reason] = now_s
        if not is_repeated:
            where = f"{doing} ({detail})" if detail else doing
            logger.warning("kvbm-cxl: %s: %s", where, message, exc_info=error if reason == "other" else None)

    def start_thread(self, name: str, doing: str, target: Callable[[], None]) -> threading.Thread:
        """Starts a thread whose end by an exception is reported."""
        thread = threading.Thread(target=self._run, args=(doing, target), name=name, daemon=True)
        thread.start()
        return thread

    def _run(self, doing: str, target: Callable[[], None]) -> None:
        try:
            target()
        except Exception as error:
            self.report(doing, error)

    def take_counts(self) -> Counter[str]:
        """Errors since the last call, by reason."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts
