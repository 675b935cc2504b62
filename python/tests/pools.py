# SPDX-License-Identifier: Apache-2.0
"""Pools for tests, blocks whose bytes tell which they are, and other processes that use the same pool."""

import hashlib
import os
import sys
from pathlib import Path

import kvbm_cxl

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PEERS = ROOT / "tests" / "peers"
sys.path.append(str(PEERS))

from peer_process import PeerProcess  # noqa: E402
from waiting import until  # noqa: E402, F401

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


def flip(path, data):
    """Flips one bit in the middle of the place where a file holds `data`."""
    found = Path(path).read_bytes().find(data)
    assert found >= 0, "the pool does not hold the block"
    with Path(path).open("r+b") as file:
        file.seek(found + len(data) // 2)
        byte = file.read(1)[0]
        file.seek(found + len(data) // 2)
        file.write(bytes([byte ^ 4]))


class Peer(PeerProcess):
    """A process with a pool and a cache of its own (`pool_peer`)."""

    def __init__(self, spec, folder, machine=None, **environment):
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CXL_")}
        state = folder / f"state-{machine or 'test'}"
        paths = {"PYTHONPATH": os.pathsep.join(map(str, [ROOT / "python", HERE, PEERS])), "CXL_STATE_DIR": str(state)}
        super().__init__([HERE / "pool_peer.py", spec], {**kept, **paths, "CXL_MACHINE_ID": machine or "test", **environment})
