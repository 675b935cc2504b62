# SPDX-License-Identifier: Apache-2.0
"""Other processes with an adapter each.

`peers.py CONSUMER POOL VARIATION` is such a process: it makes the `Subject` of module `subject_CONSUMER`, and calls its methods.
"""

import hashlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PEERS = ROOT / "tests" / "peers"
sys.path.append(str(PEERS))

import lines  # noqa: E402
from peer_process import PeerProcess  # noqa: E402
from waiting import until  # noqa: E402, F401

PATIENT_MS = 60_000
# Where one is killed with locks in its hands, others wait so long.
MORTAL = {"CXL_SUSPECT_MS": "3000"}


def payload(name: str, len_bytes: int) -> bytes:
    """The bytes of a block: no two blocks have any stretch of them in common."""
    return hashlib.shake_128(name.encode()).digest(len_bytes)


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
    done = subprocess.run([program, "--pool", pool, "fsck", "--json"], capture_output=True, text=True, timeout=PeerProcess.ANSWER_S)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)["counts"]


class Peer(PeerProcess):
    """Such a process."""

    def __init__(self, consumer: str, pool: str, environment: dict, variation: dict):
        super().__init__([HERE / "peers.py", consumer, pool, json.dumps(variation)], with_paths(environment), wait=False)
        self._is_ready = False

    def send(self, name: str, *arguments) -> None:
        if not self._is_ready:
            self.ready()
            self._is_ready = True
        super().send(name, *arguments)

    def __exit__(self, *_) -> None:
        self.kill()
        self.end()


def with_paths(environment: dict) -> dict:
    """An environment in which processes find the package and these modules."""
    path = [str(ROOT / "python"), str(HERE), str(PEERS), environment.get("PYTHONPATH")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def main() -> None:
    consumer, pool, variation = sys.argv[1:]
    lines.serve(lambda: importlib.import_module(f"subject_{consumer}").Subject(pool, **json.loads(variation)))


if __name__ == "__main__":
    main()
