# SPDX-License-Identifier: Apache-2.0
"""LMCache's own tests and its own benchmark against our adapter, with every object verified."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lmcache", reason="LMCache is not installed: `make setup-lmcache`")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# `make setup-lmcache` puts the tests of LMCache's source archive there.
SOURCE = Path(os.environ.get("LMCACHE_SOURCE") or ROOT / ".venv" / "lmcache-source")
CONTRACT = SOURCE / "tests" / "v1" / "distributed" / "test_mock_l2_adapter.py"
# What the mock simulates and no other adapter does.
NOT_OURS = ("TestBandwidthSimulation::test_store_completion_is_delayed_by_bandwidth",)


def _environment() -> dict:
    path = os.pathsep.join(map(str, [ROOT / "python", HERE, *filter(None, [os.environ.get("PYTHONPATH")])]))
    return {**os.environ, "PYTHONPATH": path, "LMCACHE_TRACK_USAGE": "false"}


def test_the_contract_of_adapters(tmp_path):
    if not CONTRACT.exists():
        pytest.skip(f"no tests of LMCache in {SOURCE}: `make setup-lmcache` puts them there")
    # Alone: beside it lies a folder lmcache, which would be taken for the package.
    shutil.copy(CONTRACT, tmp_path)
    deselected = [f"--deselect={CONTRACT.name}::{name}" for name in NOT_OURS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "lmcache_contract", "-p", "no:cacheprovider", CONTRACT.name, *deselected]
    done = subprocess.run(command, cwd=tmp_path, env=_environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed, 1 deselected", done.stdout)[1]) >= 41, done.stdout[-300:]


def test_the_benchmark_verifies_every_object(make_pool):
    adapter = {"type": "plugin", "module_path": "kvbm_cxl.lmcache", "class_name": "CxlL2Adapter"}
    adapter["adapter_params"] = {"pool": make_pool(size="128M", cells="1M:75%")}
    command = [sys.executable, "-m", "lmcache.cli.main", "bench", "l2", "--l2-adapter", json.dumps(adapter)]
    command += ["--no-skip-verify", "--num-keys", "16", "--data-size-kb", "1024", "--rounds", "3"]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=900)
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "All 16 keys data verified OK" in said, said[-4000:]
