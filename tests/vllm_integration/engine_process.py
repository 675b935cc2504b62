# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own, beside that of the test, which tells it what to do in lines of JSON; as a program, that process."""

import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# An engine is imported, made and warmed up in it; the machine may be a small one.
START_S, ANSWER_S = 900, 600


class EngineProcess:
    """The same arguments as `engines.engine`; calls are methods of `engines.Engine`."""

    def __init__(self, *arguments: Any, env: dict[str, str] | None = None, wait: bool = True, **options: Any) -> None:
        """`env`: more for its environment. Without `wait`, `ready` waits for it."""
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "engine_process.py"), json.dumps([arguments, options])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {}), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        # A reader of its own, so that waiting for an answer has a deadline.
        self._answers: queue.Queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        if wait:
            self.ready()

    def ready(self) -> None:
        """Waits until it is made."""
        self.answer(START_S)

    def _read(self) -> None:
        for line in self.process.stdout:
            if line.startswith("answer "):
                self._answers.put(json.loads(line.removeprefix("answer ")))
        self._answers.put(None)

    def answer(self, timeout_s: float = ANSWER_S) -> Any:
        """What the last call gave."""
        answer = self._answers.get(timeout=timeout_s)
        assert answer is not None, f"the engine's process ended: {self.process.wait(30)}"
        return answer["value"]

    def start(self, name: str, *arguments: Any, **options: Any) -> None:
        """Calls, without waiting for the answer."""
        self.process.stdin.write(json.dumps([name, arguments, options]) + "\n")
        self.process.stdin.flush()

    def __call__(self, name: str, *arguments: Any, **options: Any) -> Any:
        self.start(name, *arguments, **options)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends it in good order, if it can."""
        if self.process.poll() is None:
            self.process.stdin.close()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()


def _answer(value: Any) -> None:
    print("answer " + json.dumps({"value": value}), flush=True)


def main() -> None:
    import conftest  # What it sets in the environment comes before vLLM.
    from engines import engine
    from kvbm_cxl.vllm_integration import movers, saver

    saver.LEAST_PATIENCE = conftest.PATIENT
    # Longer than any test: copies that a test holds do not end by themselves.
    movers.COPY_TIMEOUT_MS = 3_600_000
    arguments, options = json.loads(sys.argv[1])
    with engine(*arguments, **options) as running:
        _answer("ready")
        for line in sys.stdin:
            name, arguments, options = json.loads(line)
            _answer(getattr(running, name)(*arguments, **options))


if __name__ == "__main__":
    main()
