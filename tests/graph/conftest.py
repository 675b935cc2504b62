# SPDX-License-Identifier: Apache-2.0
"""Tests of the graph at the level of processes. They need the environment that `make serve` makes; elsewhere they are not collected."""

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "deploy" / "dynamo")]

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def state_directory(tmp_path_factory):
    """Commands of the tests are processes of this machine: what it keeps between them goes with the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXL_STATE_DIR", str(tmp_path_factory.mktemp("machine")))
        yield
