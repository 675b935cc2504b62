# SPDX-License-Identifier: Apache-2.0
"""The runner of nixlbench, with a small program in its place that moves real bytes by our plugin and by UCX."""

import json
import os
import subprocess
import sys

import pool_api
import pytest
import upstream_bench
import wheels
from upstream_suite import counted

RUNNER, FAKE = wheels.HERE / "upstream_bench.py", wheels.HERE / "fake_nixlbench.py"


def run(tmp_path, how="", *more):
    """The runner's exit status and output over the stand-in."""
    program = tmp_path / "nixlbench"
    program.write_text(f"#!{sys.executable}\n" + FAKE.read_text())
    program.chmod(0o755)
    env = {**os.environ, "PYTHONPATH": str(wheels.HERE), "FAKE_NIXLBENCH": how}
    sizes = ["--sizes", "64K-128K:2", "--timeout-s", "120"]
    ended = subprocess.run([sys.executable, str(RUNNER), str(program), *sizes, *more], env=env, capture_output=True, text=True, timeout=500)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("how", ["", "old"])
def test_both_backends_move_and_are_compared(plugin, tmp_path, how):
    before = set(os.listdir("/dev/shm"))
    status, told = run(tmp_path, how)
    assert status == 0, told
    ratios = json.loads(told.splitlines()[-1].removeprefix("RATIOS "))
    rows = [(operation, size, batch) for operation in ("read", "write") for size in ("64k", "128k") for batch in (1, 2)]
    names = [f"{pool}{operation}_{size}_x{batch}_vs_ucx" for operation, size, batch in rows for pool in ("", "pool_")]
    assert list(ratios) == names and all(ratio > 0 for ratio in ratios.values())
    # Of each operation four sizes and batches, from ordinary memory and from the pool's.
    assert "transfers that our plugin made: 16" in told
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("kvbm-cxl-bench")]


@pytest.mark.parametrize(("how", "named"), [("wrong-bytes", "bytes are wrong"), ("crash", "ended with"), ("idle", "moved nothing")])
def test_what_goes_wrong_is_no_result(plugin, tmp_path, how, named):
    status, told = run(tmp_path, how)
    assert status == 1 and named in told and "RATIOS" not in told, told


@pytest.mark.parametrize(("memory", "prefixes"), [("heap", {""}), ("pool", {"pool_"})])
def test_one_place_of_the_buffers_alone(plugin, tmp_path, memory, prefixes):
    status, told = run(tmp_path, "", "--memory", memory)
    assert status == 0, told
    assert {name.split("read_")[0] for name in json.loads(told.splitlines()[-1].removeprefix("RATIOS ")) if "read_" in name} == prefixes


@pytest.mark.parametrize("column", ["CXL", "CXL, pool"])
def test_bytes_that_went_another_way_are_no_result(column):
    none = dict.fromkeys(("staged_read_bytes", "staged_written_bytes", "pool_read_bytes", "pool_written_bytes"), 0)
    with pytest.raises(upstream_bench.Failed, match="moved nothing"):
        upstream_bench.went_the_right_way(column, none, none)
    staged, direct = ({**none, name: 4096} for name in ("staged_read_bytes", "pool_written_bytes"))
    right, wrong = (staged, direct) if column == "CXL" else (direct, staged)
    upstream_bench.went_the_right_way(column, none, right)
    with pytest.raises(upstream_bench.Failed, match="over staging blocks"):
        upstream_bench.went_the_right_way(column, none, wrong)


@pytest.mark.parametrize("sizes", ["64K", "1M-64K:1", "64K-1M:0", "0-1M:1"])
def test_sizes_that_are_none_are_refused(sizes):
    with pytest.raises(ValueError):
        upstream_bench.sizes_of(sizes)


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


def test_the_command_of_the_package_runs_both_hosts(plugin, tmp_path, monkeypatch):
    """`kvbm-cxl nixlbench` on two hosts, the target's first: it waits. The NIXL is the one that this Python has."""
    program, pool, port = tmp_path / "nixlbench", tmp_path / "pool", upstream_bench.free_port()
    program.write_text(f"#!{sys.executable}\n" + FAKE.read_text())
    program.chmod(0o755)
    monkeypatch.setenv("CXL_MACHINE_ID", "bench-0")
    monkeypatch.setenv("CXL_STATE_DIR", str(tmp_path / "state-0"))
    pool_api.format_pool(f"{pool},size=256M")
    sizes = ["--total_buffer_size=67108864", "--start_block_size=65536", "--max_block_size=1048576", "--max_batch_size=4"]
    command = [sys.executable, "-m", "kvbm_cxl.cli", "nixlbench", "--initiator", "127.0.0.1", f"--port={port}", str(program)]
    command += ["--", "--op_type=WRITE", *sizes]
    hosts = []
    for number in (1, 0):
        env = {**os.environ, "PYTHONPATH": str(wheels.ROOT / "python"), "CXL_POOL": str(pool), "CXL_MACHINE_ID": f"bench-{number}"}
        env["CXL_STATE_DIR"] = str(tmp_path / f"state-{number}")
        hosts.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    said = [host.communicate(timeout=240)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], said
    # Whichever came first waited for the other, and printed the table.
    assert sum((1 << 20, 4) in upstream_bench.rows(each) for each in said) == 1
    moved = counted({**os.environ, "CXL_POOL": str(pool)})
    assert moved["writes"] == 15 and moved["failed"] == moved["staged_written_bytes"] == 0
