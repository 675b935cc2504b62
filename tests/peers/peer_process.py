# SPDX-License-Identifier: Apache-2.0
"""Another process of this machine that answers calls (`lines.serve`): `peer("publish", "tiny", 7)`. Every wait has a deadline."""

import contextlib
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lines

HERE = Path(__file__).resolve().parent


class PeerProcess:
    """Such a process, ended by its id."""

    # Importing torch and an engine takes half a minute, and on a machine with twenty times as much to do as it can ten.
    START_S, ANSWER_S = 1800, 900

    def __init__(self, words: Sequence[Any], environment: Mapping[str, str], log: Path | None = None, wait: bool = True) -> None:
        """`log`: where its standard error goes. Without `wait`, `ready` waits for it."""
        self.log = log
        with log.open("wb") if log else contextlib.nullcontext() as errors:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            self.process = subprocess.Popen([sys.executable, *map(str, words)], env=dict(environment), **pipes)
        # A reader of its own, so that waiting for an answer has a deadline.
        self._answers: queue.Queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        if wait:
            self.ready()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._answers.put(lines.parse(line))
        self._answers.put(None)

    def ready(self) -> None:
        """Waits until it can be called."""
        assert self.answer(self.START_S) == "ready"

    def send(self, name: str, *arguments: Any, **named: Any) -> None:
        """Calls, without waiting for the answer."""
        self.process.stdin.write(lines.call(name, *arguments, **named))
        self.process.stdin.flush()

    def answer(self, timeout_s: float | None = None) -> Any:
        """The oldest answer that was not taken. Raises `lines.Raised` where the call raised an error."""
        answer = self._answers.get(timeout=timeout_s or self.ANSWER_S)
        printed = self.log.read_text(errors="replace")[-4000:] if self.log and answer is None else ""
        assert answer is not None, f"the other process has ended: {self.process.wait(30)}\n{printed}"
        return lines.value_of(answer)

    def __call__(self, name: str, *arguments: Any, **named: Any) -> Any:
        self.send(name, *arguments, **named)
        return self.answer()

    def drain(self) -> list[Any]:
        """What it had said before it was killed."""
        return [lines.value_of(answer) for answer in iter(lambda: self._answers.get(timeout=60), None)]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def end(self) -> None:
        """Ends it in good order, if it can."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
        self.process.stdout.close()

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()
