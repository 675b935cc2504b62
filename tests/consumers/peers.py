# SPDX-License-Identifier: Apache-2.0
"""Other processes with an adapter each, told what to do one line of JSON at a time.

`peers.py CONSUMER POOL VARIATION` is such a process: it makes the `Subject` of module `subject_CONSUMER`, and calls its methods.
"""

import hashlib
import importlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PATIENT_MS = 60_000
# Where one is killed with locks in its hands, others wait so long.
MORTAL = {"CXL_SUSPECT_MS": "3000"}
# Importing torch and the consumer takes half a minute, and on a machine with twenty times as much to do as it can ten.
START_S, ANSWER_S = 1800, 900


def payload(name: str, len_bytes: int) -> bytes:
    """The bytes of a block: no two blocks have any stretch of them in common."""
    return hashlib.shake_128(name.encode()).digest(len_bytes)


def until(condition, what: str, seconds: float = ANSWER_S):
    """Waits until `condition()` is true; returns what it was."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.02)
    return found


def damage(pool: str, data: bytes) -> None:
    """Flips a bit in the middle of the place where the pool's file holds `data`, behind the back of all hosts."""
    found = Path(pool).read_bytes().find(data)
    assert found >= 0, "the pool does not hold the block"
    with Path(pool).open("r+b") as file:
        file.seek(found + len(data) // 2)
        byte = file.read(1)[0]
        file.seek(found + len(data) // 2)
        file.write(bytes([byte ^ 4]))


def fsck(pool: str) -> dict[str, int]:
    """How many findings of each kind a check of the pool's metadata has."""
    program = ROOT / "target" / "release" / "cxlctl"
    done = subprocess.run([program, "--pool", pool, "fsck", "--json"], capture_output=True, text=True, timeout=ANSWER_S)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)["counts"]


class Peer:
    """Such a process."""

    def __init__(self, consumer: str, pool: str, environment: dict, variation: dict):
        path = os.pathsep.join([str(ROOT / "python"), str(HERE), *filter(None, [environment.get("PYTHONPATH")])])
        command = [sys.executable, str(HERE / "peers.py"), consumer, pool, json.dumps(variation)]
        self.process = subprocess.Popen(
            command, env={**environment, "PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answers = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._started = False

    def _read(self):
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                self._answers.put(json.loads(line[7:]))
            else:  # What vLLM logs.
                sys.stderr.write(line)
        self._answers.put({"error": "the process has ended"})

    def begin(self, call: str, *args):
        """Has something done; `answer` tells what came of it."""
        if not self._started:
            assert self.answer(START_S) == "ready"
            self._started = True
        self.process.stdin.write(json.dumps([call, args]) + "\n")
        self.process.stdin.flush()

    def answer(self, seconds: float = ANSWER_S):
        answer = self._answers.get(timeout=seconds)
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def __call__(self, call: str, *args):
        self.begin(call, *args)
        return self.answer()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()


def main() -> None:
    consumer, pool, variation = sys.argv[1:]
    subject = importlib.import_module(f"subject_{consumer}").Subject(pool, **json.loads(variation))

    def answer(**fields) -> None:
        print("ANSWER " + json.dumps(fields), flush=True)

    answer(value="ready")
    for line in sys.stdin:
        call, args = json.loads(line)
        try:
            answer(value=getattr(subject, call)(*args))
        except Exception as error:
            answer(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
