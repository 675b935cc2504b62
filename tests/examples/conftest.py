# SPDX-License-Identifier: Apache-2.0
"""Runs the programs under examples/ as a user would: with a pool of their own, and the package of the checkout."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A starved machine must not make a program late for its user.
TIMEOUT_S = 600


@pytest.fixture
def run(tmp_path):
    """Runs a command in the checkout and returns what it printed; it must exit with 0."""

    def start(*command, **environment):
        kept = {name: text for name, text in os.environ.items() if not name.startswith("CXL_")}
        told = {"CXL_STATE_DIR": str(tmp_path / "state"), "PYTHONPATH": str(ROOT / "python"), **environment}
        done = subprocess.run(
            [str(part) for part in command], cwd=ROOT, env=kept | told, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert done.returncode == 0, f"{command} exits with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return start


@pytest.fixture
def pool(tmp_path, run):
    """The path of a formatted pool of 64 MiB."""
    run(ROOT / "target/release/cxlctl", "--pool", f"{tmp_path / 'pool'},size=64M", "format", "--cells", "64K:50%")
    return str(tmp_path / "pool")
