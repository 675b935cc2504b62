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

DAMAGED = """
import sys
sys.path.insert(0, {folder!r})
import gpu, gpu_nixl
fill = gpu_nixl.Memory.fill
def damaging(memory, seed, len_bytes):
    fill(memory, seed, len_bytes)
    memory.gpu.write(memory.address + 4097, b"x")
gpu_nixl.Memory.fill = damaging
sys.exit(gpu.main())
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    driver = fake_gpu.compiled(tmp_path_factory.mktemp("driver"))
    path = os.pathsep.join(wheels.python_path(wheels.DEFAULT))
    return os.environ | {"CXL_CUDA_LIBRARY": str(driver), "PYTHONPATH": path}


def _run(environment, folder, program=ROOT / "perf" / "gpu.py"):
    command = [sys.executable, str(program), "--dry", "--part=nixl", f"--pool={folder / 'pool'}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


def test_cxl_moves_every_byte_and_what_cannot_is_left_out(environment, tmp_path):
    done = _run(environment, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"nixl_vram_read_1m_of_link"' in done.stdout and "left out: UCX ended with" in done.stdout, done.stdout + done.stderr


def test_a_wrong_byte_ends_it(environment, tmp_path):
    program = tmp_path / "damaged.py"
    program.write_text(DAMAGED.format(folder=str(ROOT / "perf")))
    done = _run(environment, tmp_path, program)
    assert done.returncode != 0 and "WRONG bytes: moved by CXL" in done.stderr and "RATIO " not in done.stdout, done.stdout + done.stderr
