# SPDX-License-Identifier: Apache-2.0
"""Pools for tests, blocks whose bytes tell which they are, and other processes that use the same pool."""

import contextlib
import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import kvbm_cxl

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
CELL_BYTES = 64 << 10
# A starved machine must not take a host for dead that a test needs alive.
PATIENT_MS = 60_000


def namespace(model="tiny", **fields):
    """A namespace of a small model."""
    shape = {"dtype": "float32", "layer_count": 4, "kv_head_count": 2, "head_size": 64, "block_tokens": 16, "layout": "LBHNC"}
    return kvbm_cxl.Namespace(model=model, **{**shape, **fields})


def chain(count, seed=0):
    """Keys of a chain of blocks."""
    keys = []
    for number in range(count):
        keys.append(kvbm_cxl.chain_key(keys[-1] if keys else None, [seed, number]))
    return keys


def payload(key, len_bytes):
    """The bytes of a block: no two blocks have any stretch of them in common."""
    return hashlib.shake_128(bytes(key)).digest(len_bytes)


def opened(spec, **options):
    """A pool on which no host is taken for dead within a test."""
    return kvbm_cxl.Pool(spec, **{"suspect_ms": PATIENT_MS, **options})


def until(condition, what, seconds=240):
    """Waits until `condition()` is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.02)


def flip(path, data):
    """Flips one bit in the middle of the place where a file holds `data`."""
    found = Path(path).read_bytes().find(data)
    assert found >= 0, "the pool does not hold the block"
    with Path(path).open("r+b") as file:
        file.seek(found + len(data) // 2)
        byte = file.read(1)[0]
        file.seek(found + len(data) // 2)
        file.write(bytes([byte ^ 4]))


class Peer:
    """A process with a pool and a cache of its own that does what it is told, one line of JSON for each call."""

    def __init__(self, spec, folder, machine=None, **environment):
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CXL_")}
        state = folder / f"state-{machine or 'test'}"
        paths = {"PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(HERE)]), "CXL_STATE_DIR": str(state)}
        paths["CXL_MACHINE_ID"] = machine or "test"
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "pool_peer.py"), spec],
            env={**kept, **paths, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        # A reader of its own, so that waiting for an answer has a deadline.
        self.answers = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self.answer() == "ready"

    def _read(self):
        for line in self.process.stdout:
            self.answers.put(json.loads(line))
        self.answers.put(None)

    def send(self, name, *arguments):
        self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self, timeout_s=60):
        answer = self.answers.get(timeout=timeout_s)
        assert answer is not None, "the other process ended"
        return answer

    def __call__(self, name, *arguments):
        self.send(name, *arguments)
        return self.answer()

    def drain(self):
        """What it had said before it was killed."""
        said = []
        with contextlib.suppress(queue.Empty):
            while (answer := self.answers.get(timeout=60)) is not None:
                said.append(answer)
        return said

    def kill(self):
        self.process.kill()
        self.process.wait(timeout=30)

    def end(self):
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
            try:
                self.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self.kill()
