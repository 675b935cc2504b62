# SPDX-License-Identifier: Apache-2.0
"""Programs that tests start and kill: servers and engines, whose answers are lines of JSON."""

import json
import queue
import socket
import subprocess
import threading
from pathlib import Path


def free_port() -> int:
    """One of 127.0.0.1 that no program listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Program:
    """A process whose lines are kept, and which ends with the test."""

    def __init__(self, command, environment, log):
        self.log = Path(log)
        with self.log.open("w") as file:
            self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True)
        self.lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            with self.log.open("a") as file:
                file.write(line)
            if line.startswith("ANSWERS "):
                self.lines.put(json.loads(line[8:]))
        self.lines.put(None)

    def answers(self):
        answers = self.lines.get(timeout=1800)
        assert answers is not None, self.log.read_text()[-4000:]
        return answers

    def kill(self):
        self.process.kill()
        self.process.wait()
