# SPDX-License-Identifier: Apache-2.0
"""Installed NIXL versions and the package of the checkout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "python" / "tests"), str(ROOT / "tests" / "nixl")]

import wheels  # noqa: E402

# How memory behaves: as this machine's does, and as between hosts that are not coherent with one another.
COHERENCE = ["native", "emulated:seed=7,noise=4"]


@pytest.fixture(params=COHERENCE, ids=["native", "emulated"])
def coherence(request, monkeypatch):
    """A way in which memory behaves, for this process and those that it starts."""
    monkeypatch.setenv("CXL_COHERENCE", request.param)
    return request.param


@pytest.fixture
def this_machine(tmp_path, monkeypatch):
    """This process is of a machine of its own, and no pool is named."""
    monkeypatch.setenv("CXL_STATE_DIR", str(tmp_path / "state-test"))
    monkeypatch.setenv("CXL_MACHINE_ID", "test")
    monkeypatch.delenv("CXL_POOL", raising=False)


@pytest.fixture
def spec(tmp_path, this_machine):
    """A formatted pool of its own, of 48 MiB with cells of 64 KiB in half of it."""
    import kvbm_cxl
    import pools

    spec = f"{tmp_path / 'pool'},size=48M"
    kvbm_cxl.format_pool(spec, cells=f"{pools.CELL_BYTES}:50%")
    return spec


@pytest.fixture
def pool(spec):
    """The pool, joined."""
    import pools

    with pools.opened(spec) as pool:
        yield pool


@pytest.fixture
def cache(pool):
    """Its cache."""
    with pool.cache() as cache:
        yield cache


@pytest.fixture
def second_cache(spec):
    """That of another one who has joined the pool."""
    import pools

    with pools.opened(spec) as pool, pool.cache() as cache:
        yield cache


@pytest.fixture
def peer(spec, tmp_path):
    """Starts other processes on the pool; `machine` makes one another host."""
    import os

    import pools

    peers = []

    def start(machine=None, **environment):
        if "CXL_COHERENCE" in os.environ:
            environment = {"CXL_COHERENCE": os.environ["CXL_COHERENCE"], **environment}
        peers.append(pools.Peer(spec, tmp_path, machine, **environment))
        return peers[-1]

    yield start
    for peer in peers:
        peer.end()


@pytest.fixture(params=wheels.chosen())
def wheel(request):
    """A version of NIXL that is installed."""
    assert wheels.installed(request.param), "run `make setup-nixl`"
    return request.param


@pytest.fixture
def python(tmp_path):
    """Runs a program in a process that has a version of NIXL; returns what it printed, and fails where it fails."""

    def run(version, *arguments, expect=0, **environment):
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CXL_", "NIXL_", "PYTHON", "UCX_"))}
        paths = {"PYTHONPATH": os.pathsep.join(wheels.python_path(version)), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        paths["NIXL_LOG_LEVEL"] = "WARN"
        done = subprocess.run(
            [sys.executable, *arguments], env={**kept, **paths, **environment}, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout if expect == 0 else done.stderr

    return run
