# SPDX-License-Identifier: Apache-2.0
"""Tests of the adapters for other caches. Each file needs its consumer, and is skipped where that is not installed."""

import contextlib
import os
import sys
import uuid
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "python"), str(HERE)]

import peers  # noqa: E402


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    """This process is a host of its own for the pools of a test."""
    monkeypatch.setenv("CXL_STATE_DIR", str(tmp_path / "state-own"))
    monkeypatch.setenv("CXL_MACHINE_ID", "own")
    # A starved machine must not take a host for dead that a test needs alive.
    monkeypatch.setenv("CXL_SUSPECT_MS", str(peers.PATIENT_MS))
    monkeypatch.delenv("CXL_POOL", raising=False)


@pytest.fixture
def make_pool():
    """Makes pools in shared memory: `make_pool(size="64M", cells="64K:75%")` returns the path."""
    import kvbm_cxl

    made = []

    def make(size: str = "64M", cells: str = "64K:75%") -> str:
        path = f"/dev/shm/kvbm-cxl-test-{uuid.uuid4().hex[:12]}"
        made.append(path)
        kvbm_cxl.format_pool(f"{path},size={size}", cells=cells)
        return path

    yield make
    for path in made:
        Path(path).unlink(missing_ok=True)


@pytest.fixture
def pool(make_pool) -> str:
    """A pool with cells of 64 KiB."""
    return make_pool()


@pytest.fixture
def make_subject(request):
    """Makes adapters of the kind that a file of tests is about, its `Subject`, in this process: `make_subject(pool, **variation)`."""
    with contextlib.ExitStack() as made:
        yield lambda pool, **variation: made.enter_context(contextlib.closing(request.module.Subject(pool, **variation)))


@pytest.fixture
def subject(pool, make_subject):
    """One adapter, on the pool of the test."""
    return make_subject(pool)


@pytest.fixture
def peer(tmp_path):
    """Starts other processes with an adapter each, which end with the test: `peer("lmcache", pool, machine="a", **variation)`."""
    with contextlib.ExitStack() as started:

        def start(consumer: str, pool: str, machine: str = "a", environment: dict | None = None, **variation) -> peers.Peer:
            state = {"CXL_STATE_DIR": str(tmp_path / f"state-{machine}"), "CXL_MACHINE_ID": machine, **(environment or {})}
            return started.enter_context(peers.Peer(consumer, pool, {**os.environ, **state}, variation))

        yield start


@pytest.fixture
def on_host(tmp_path, tmp_path_factory):
    """The environment of a program on a host of the rack: `on_host(machine)`."""

    def environment(machine: str) -> dict:
        # The second host joins once it has found the first one dead.
        own = {"CXL_STATE_DIR": str(tmp_path / f"state-{machine}"), "CXL_MACHINE_ID": machine, "CXL_SUSPECT_MS": "3000"}
        own |= {"VLLM_CACHE_ROOT": str(tmp_path_factory.getbasetemp() / "vllm"), "LMCACHE_TRACK_USAGE": "false"}
        return peers.with_paths({**os.environ, **own})

    return environment


@pytest.fixture
def engine(tmp_path, on_host):
    """Starts engines with LMCache, which end with the test: `engine(machine, model, way)`."""
    with contextlib.ExitStack() as started:

        def start(machine: str, model, way) -> peers.PeerProcess:
            words = [HERE / "lmcache_engine.py", model, way]
            made = peers.PeerProcess(words, on_host(machine), tmp_path / f"engine-{machine}", wait=False)
            started.callback(made.kill)
            made.ready()
            return made

        yield start
