# SPDX-License-Identifier: Apache-2.0
"""Copies a process's own coldest blocks out of the pool before its evictor takes them."""

import logging
import threading
from typing import Any

from .level import CallCache, Level2
from .objects import BlockName

logger = logging.getLogger("kvbm_cxl")


class Demoter:
    """A thread that looks every period_s at the blocks that are next to go, `ahead` of each size of cells, and hands copies of those to the
    level that it has not got. A copy neither pins the block nor counts as a use of it: the order of eviction stays."""

    def __init__(self, call: CallCache[Any], level: Level2, *, ahead: int = 256, period_s: float = 0.05) -> None:
        self._call, self._level, self._ahead, self._period_s = call, level, ahead, period_s
        self._end = threading.Event()
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="kvbm-cxl-demoter", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(self._period_s):
            try:
                self.round()
                self._is_failing = False
            except Exception as error:
                self._level.count_dropped("unread")
                if not self._is_failing:
                    logger.warning("kvbm-cxl: demoting blocks failed and is retried: %s: %s", type(error).__name__, error)
                self._is_failing = True

    def round(self) -> None:
        """Looks once. Raises CxlError."""
        for block in self._call(lambda cache: cache.coldest(self._ahead)):
            if self._end.is_set():
                return
            name = BlockName(bytes(block.namespace), block.key)
            if not self._level.wants(name, block.len_bytes):
                continue
            payload = bytearray(block.len_bytes)
            if block.copy(payload):
                self._level.demote(name, block.parent, payload)
            else:
                self._level.count_dropped("gone")

    def close(self) -> None:
        """Ends the thread."""
        self._end.set()
        self._thread.join()
