# SPDX-License-Identifier: Apache-2.0
"""Children of the launcher: each in a session of its own, with a log, and gone with the launcher."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .sweep import Record, kill

TAIL_BYTES = 6000


class Child:
    """A process and its children."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, record: Record):
        self.name, self.log, self.record = name, log, record
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        self.pid = self.process.pid
        record.add_session(self.pid)
        self.expected_to_end = False

    def status(self) -> int | None:
        """None while it runs; its exit status, negative for a signal."""
        return self.process.poll()

    def tail(self) -> str:
        """The end of its log."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
                return log.read().decode(errors="replace")
        except OSError as error:
            return f"({error})"

    def text(self) -> str:
        """All of its log."""
        return self.log.read_text(errors="replace")

    def session(self) -> dict[int, int]:
        """Its session, as `sweep` reads it."""
        return {leader: started for leader, started in self.record.sessions.items() if leader == self.pid}

    def ask_to_end(self) -> None:
        """Tells it to end in its own way."""
        self.expected_to_end = True
        self.record.look(self.session())
        self.signal(signal.SIGTERM)

    def signal(self, number: int) -> None:
        """Sends a signal to the process itself."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> list[int]:
        """Ends it and its children at once; the numbers of those that did not end."""
        self.expected_to_end = True
        left = kill(self.record, self.session())
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            left.append(self.pid)
        return left


def end_all(children: Sequence[Child], patience_s: float) -> list[int]:
    """Asks all to end, waits, kills the rest; returns the ids of those that did not end."""
    for child in children:
        child.ask_to_end()
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and any(child.status() is None for child in children):
        time.sleep(0.05)
    return [pid for child in children for pid in child.kill()]


def start_watcher(record: Record) -> subprocess.Popen:
    """A process that sweeps when this one is gone. It ends by itself once its standard input is closed."""
    record.write()
    command = [sys.executable, "-I", str(Path(__file__).with_name("watcher.py")), str(record.file)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
