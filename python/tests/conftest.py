# SPDX-License-Identifier: Apache-2.0
"""Installed NIXL versions and the package of the checkout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests" / "nixl")]

import wheels  # noqa: E402


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
