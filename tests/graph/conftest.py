# SPDX-License-Identifier: Apache-2.0
"""Tests of the graph at the level of processes. They need the environment that `make serve` makes; elsewhere they are not collected."""

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "deploy" / "dynamo")]

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
