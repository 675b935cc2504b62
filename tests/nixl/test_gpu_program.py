# SPDX-License-Identifier: Apache-2.0
"""The part of `make perf-gpu` with NIXL, over a driver that is faked: two processes, every byte compared. UCX does not know that driver."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import wheels

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python" / "tests"))

import fake_gpu  # noqa: E402


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    driver = fake_gpu.compiled(tmp_path_factory.mktemp("driver"))
    path = os.pathsep.join(wheels.python_path(wheels.DEFAULT))
    return os.environ | {"CXL_CUDA_LIBRARY": str(driver), "PYTHONPATH": path}


def _run(environment, program, *arguments):
    command = [sys.executable, str(program), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


def test_cxl_moves_every_byte_and_what_cannot_is_left_out(environment, tmp_path):
    done = _run(environment, ROOT / "perf" / "gpu_nixl.py", f"--pool={tmp_path / 'pool'}", "--rounds=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NIXL CXL, READ between GPU memory: 1m " in done.stdout and "NIXL UCX between GPU memory: left out" in done.stdout
    assert done.stdout.splitlines()[-1] == "RATIOS {}" and not (tmp_path / "pool").exists()


def test_a_wrong_byte_ends_it(environment, tmp_path):
    source = (ROOT / "perf" / "gpu_nixl.py").read_text()
    line = "        self.gpu.write(self.address, random.Random(seed).randbytes(len_bytes))"
    assert line in source
    program = tmp_path / "gpu_nixl.py"
    program.write_text(source.replace(line, line + '; self.gpu.write(self.address + 4097, b"x")'))
    path = os.pathsep.join([str(ROOT / "perf"), environment["PYTHONPATH"]])
    done = _run(environment | {"PYTHONPATH": path}, program, f"--pool={tmp_path / 'pool'}", "--rounds=1")
    assert done.returncode != 0 and "CXL moved a wrong byte" in done.stderr and "RATIOS" not in done.stdout, done.stdout + done.stderr
