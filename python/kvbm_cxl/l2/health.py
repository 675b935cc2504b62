# SPDX-License-Identifier: Apache-2.0
"""Whether a store is worth a call: after some failures in a row, and while a call takes too long, it is let alone for a while."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_FAILURES = 3
_PAUSE_FIRST_S, _PAUSE_LAST_S = 1.0, 60.0


class Health:
    """What calls of a store came to. All methods may be called from any thread; slow_s: a call that takes longer has failed."""

    def __init__(self, slow_s: float) -> None:
        self._slow_s = slow_s
        self._lock = threading.Lock()
        self._under_way: dict[int, float] = {}
        self._failures = 0
        self._pause_s = _PAUSE_FIRST_S
        self._paused_until = 0.0

    def is_good(self) -> bool:
        """Whether calls are worth a try: none is under way for too long, and the last ones did not fail."""
        now = time.monotonic()
        with self._lock:
            return now >= self._paused_until and all(now - since <= self._slow_s for since in self._under_way.values())

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a call of the store. A missing object is an answer, any other exception is a failure."""
        began, me = time.monotonic(), threading.get_ident()
        with self._lock:
            self._under_way[me] = began
        try:
            yield
        except FileNotFoundError:
            self._record(me, failed=False)
            raise
        except BaseException:
            self._record(me, failed=True)
            raise
        self._record(me, failed=time.monotonic() - began > self._slow_s)

    def _record(self, me: int, *, failed: bool) -> None:
        with self._lock:
            self._under_way.pop(me, None)
            if not failed:
                self._failures, self._pause_s = 0, _PAUSE_FIRST_S
                return
            self._failures += 1
            if self._failures >= _FAILURES:
                # The next call decides: one more failure makes the pause longer.
                self._paused_until, self._failures = time.monotonic() + self._pause_s, _FAILURES - 1
                self._pause_s = min(self._pause_s * 2, _PAUSE_LAST_S)
