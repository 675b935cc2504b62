# SPDX-License-Identifier: Apache-2.0
"""The part of `make perf-gpu` that drives the connector's worker, over tensors of a CPU: with vLLM and without it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "perf" / "gpu_worker.py"


def _program():
    spec = importlib.util.spec_from_file_location("gpu_worker", PROGRAM)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


@pytest.mark.parametrize("without", ("", "1"), ids=("with vLLM", "without"))
def test_it_compares_every_byte_and_ends(tmp_path, without):
    environment = os.environ | {"KVBM_CXL_WITHOUT_VLLM": without, "CXL_STATE_DIR": str(tmp_path)}
    command = [sys.executable, PROGRAM, "--device", "cpu", "--rounds", "1", "--pool", str(tmp_path / "pool")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0 and "worker_step_summed_over_whole" in done.stdout, done.stdout + done.stderr
    assert not (tmp_path / "pool").exists()


def test_a_wrong_byte_ends_it(tmp_path, monkeypatch):
    program = _program()
    load = program.Side.load

    def damaging(side, keys, block_ids):
        failed = load(side, keys, block_ids)
        side.memory[3, block_ids[5], 2, 1, 7] += 1
        return failed

    for name in ("namespace_fields", "shape_of"):
        monkeypatch.setattr(f"kvbm_cxl.vllm_integration.attachment.{name}", None)
    monkeypatch.setattr("kvbm_cxl.vllm_integration.attachment.Attacher._ranks", None)
    monkeypatch.setattr(program.Side, "load", damaging)
    with pytest.raises(SystemExit, match="a byte of the worker's blocks is wrong"):
        program.measure(f"{tmp_path / 'pool'},size=512M", "cpu", 0)
