# SPDX-License-Identifier: Apache-2.0
"""The runner of nixlbench, with a small program in its place that moves real bytes by our plugin and by UCX."""

import json
import os
import subprocess
import sys

import pytest
import upstream_bench
import wheels

RUNNER, FAKE = wheels.HERE / "upstream_bench.py", wheels.HERE / "fake_nixlbench.py"


def run(tmp_path, how="", *more):
    """The runner's exit status and output over the stand-in."""
    program = tmp_path / "nixlbench"
    program.write_text(f"#!{sys.executable}\n" + FAKE.read_text())
    program.chmod(0o755)
    env = {**os.environ, "PYTHONPATH": str(wheels.HERE), "FAKE_NIXLBENCH": how}
    sizes = ["--min-block", "65536", "--max-block", "131072", "--max-batch", "2", "--timeout-s", "120"]
    ended = subprocess.run([sys.executable, str(RUNNER), str(program), *sizes, *more], env=env, capture_output=True, text=True, timeout=500)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("how", ["", "old"])
def test_both_backends_move_and_are_compared(plugin, tmp_path, how):
    before = set(os.listdir("/dev/shm"))
    status, told = run(tmp_path, how)
    assert status == 0, told
    ratios = json.loads(told.splitlines()[-1].removeprefix("RATIOS "))
    names = [f"{operation}_{size}_x{batch}_vs_ucx" for operation in ("read", "write") for size in ("64k", "128k") for batch in (1, 2)]
    assert list(ratios) == names and all(ratio > 0 for ratio in ratios.values())
    # Of each operation four sizes and batches.
    assert "transfers that our plugin made: 8" in told
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("kvbm-cxl-bench")]


@pytest.mark.parametrize(("how", "named"), [("wrong-bytes", "bytes are wrong"), ("crash", "ended with"), ("idle", "moved nothing")])
def test_what_goes_wrong_is_no_result(plugin, tmp_path, how, named):
    status, told = run(tmp_path, how)
    assert status == 1 and named in told and "RATIOS" not in told, told


def test_a_name_that_the_binary_does_not_know_is_told(plugin, tmp_path):
    status, told = run(tmp_path, "", "--name", "CXL")
    assert status == 1 and "Unsupported NIXLBench backend: CXL" in told, told


def test_a_binary_that_is_none_is_named(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(wheels.HERE)}
    ended = subprocess.run([sys.executable, str(RUNNER), str(tmp_path / "none")], env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "name the binary nixlbench" in ended.stderr


def test_tables_of_both_forms_are_read():
    heading = "Block Size (B)      Batch Size     B/W (GB/Sec)   Avg Lat. (us)  \n" + "-" * 80 + "\n"
    new = heading + "65536               4              1.25           9.0\nend 1 2\n"
    old = "Block Size (B)      Batch Size     Avg Lat. (us)  B/W (MiB/Sec)  B/W (GiB/Sec)  B/W (GB/Sec)   \n1024 1 9.0 8.0 7.0 6.5\n"
    assert upstream_bench.rows(new) == {(65536, 4): 1.25} and upstream_bench.rows(old) == {(1024, 1): 6.5}
    assert upstream_bench.rows("65536 4 1.25\n") == {}
