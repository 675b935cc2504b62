# SPDX-License-Identifier: Apache-2.0
"""Keeps the entries of living workers in file discovery: one that is not renewed for 10 s is taken out and never comes back.

A worker renews its own; on a machine with more processes than cores it can be late. The entries of a worker that has died are left to
expire, as a lease would.
"""

import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

PERIOD_S = 2


class KeepAlive:
    """A thread that renews what belongs to living processes until it is stopped."""

    def __init__(self, folder: Path, dead_ports: Callable[[], Iterable[int]]):
        self.folder, self.dead_ports = folder, dead_ports
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, name="discovery", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self.stopped.set()
        self.thread.join()

    def _run(self) -> None:
        while not self.stopped.wait(PERIOD_S):
            self.renew()

    def renew(self) -> None:
        """Touches every entry that names no port of a dead worker."""
        dead = [f":{port}" for port in self.dead_ports()]
        for entry in self.folder.rglob("*"):
            try:
                if entry.is_file() and not any(port in entry.read_text(errors="replace") for port in dead):
                    os.utime(entry)
            except OSError:
                continue  # It went between being listed and being touched.
