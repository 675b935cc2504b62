#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs nixlbench, from a binary of NIXL's build, over our plugin and over UCX, and compares them; every byte is verified.

    upstream_bench.py BINARY [--wheel 1.4.1] [--max-block 4194304] [--max-batch 4] [--name Mooncake]

Two processes are two hosts of a pool, each with an identity of its own. They find each other by nixlbench's ASIO runtime: without etcd.
nixlbench knows a closed list of backends: our plugin is there under the name of one that gets no parameters and has memory on both sides,
by a folder for NIXL_PLUGIN_DIR in which that name is a link to it. A binary that knows CXL runs it with --name CXL. nixlbench's memory
is ordinary memory, so these are staged transfers. The last line has our bandwidth by UCX's: above 1 ours is faster.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pool_api
import wheels
from upstream_suite import PLUGIN, environment, plugins, transfers

OPERATIONS = ("READ", "WRITE")
BANDWIDTH = "B/W (GB/Sec)"
START_TIMEOUT_S = 60


class Failed(Exception):
    """What went wrong in a run, with what its processes said."""


def rows(said):
    """(block size, batch size) -> GB/s, of what nixlbench prints. Columns are at least two spaces apart in the heading alone."""
    found, at = {}, None
    for line in said.splitlines():
        if BANDWIDTH in line and "Block Size (B)" in line:
            names = [name.strip() for name in line.replace("  ", "\t").split("\t") if name.strip()]
            at = names.index(BANDWIDTH)
        words = line.split()
        if at is not None and len(words) > at and words[0].isdigit() and words[1].isdigit():
            found[int(words[0]), int(words[1])] = float(words[at])
    return found


def is_listening(port):
    """Whether a process waits at a port; without a connection, which would be taken for the other side's."""
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(name).read_text().splitlines()[1:]:
                words = line.split()
                if int(words[1].rsplit(":", 1)[1], 16) == port and words[3] == "0A":
                    return True
    return False


def free_port():
    """A port that no process has."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def end(process):
    """Ends a process with what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_pair(asked, backend, operation, environments, folder):
    """One run of two processes: the rows that it printed. The first to start is the initiator."""
    port = free_port()
    command = [str(asked.binary), f"--backend={backend}", f"--op_type={operation}", "--check_consistency=true", "--runtime_type=ASIO"]
    command += ["--asio_address=127.0.0.1", f"--asio_port={port}", f"--total_buffer_size={asked.buffer}"]
    command += [f"--start_block_size={asked.min_block}", f"--max_block_size={asked.max_block}", "--start_batch_size=1"]
    command += [f"--max_batch_size={asked.max_batch}", f"--num_iter={asked.iterations}", f"--warmup_iter={asked.warmup}"]
    logs = [folder / f"{backend}-{operation}-{side}" for side in ("initiator", "target")]
    processes = []
    try:
        for env, log in zip(environments, logs, strict=True):
            with log.open("wb") as out:
                started = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
            processes.append(started)
            deadline = time.monotonic() + START_TIMEOUT_S
            while len(processes) == 1 and not is_listening(port) and started.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
        deadline = time.monotonic() + asked.timeout_s
        for process in processes:
            process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise Failed(f"{backend} {operation} did not end within {asked.timeout_s:.0f} s") from None
    finally:
        for process in processes:
            end(process)
    said = [log.read_text(errors="replace") for log in logs]
    text = "\n".join(f"-- {log.name}\n{each[-4000:]}" for log, each in zip(logs, said, strict=True))
    if any(process.returncode for process in processes):
        raise Failed(f"{backend} {operation} ended with {[process.returncode for process in processes]}:\n{text}")
    if any("onsistency check failed" in each for each in said):
        raise Failed(f"{backend} {operation}: bytes are wrong:\n{text}")
    found = rows(said[0]) or rows(said[1])
    if not found:
        raise Failed(f"{backend} {operation} printed no table:\n{text}")
    return found


def named(folder, wheel, name):
    """A folder for NIXL_PLUGIN_DIR in which our plugin has this name."""
    made = plugins(folder, wheel, is_in_place_of_ucx=False)
    link = made / f"libplugin_{name}.so"
    link.unlink(missing_ok=True)
    link.symlink_to(PLUGIN)
    return made


def label(size):
    """A block size as people write it."""
    return f"{size >> 20}m" if size >= 1 << 20 else f"{size >> 10}k"


def compare(asked, folder):
    """Runs all, prints the table: (name of a ratio -> our bandwidth by UCX's)."""
    base = {**environment(asked.wheel), "LD_LIBRARY_PATH": wheels.library_path(asked.wheel)}
    pool = f"{folder / 'pool'},size={asked.pool >> 20}M"
    os.environ.update(CXL_MACHINE_ID="nixlbench-0", CXL_STATE_DIR=str(folder / "state-0"))
    pool_api.format_pool(pool)
    ours = named(folder / "plugins", asked.wheel, asked.name)
    hosts = [
        {
            **base,
            "NIXL_PLUGIN_DIR": str(ours),
            "CXL_POOL": str(folder / "pool"),
            "CXL_MACHINE_ID": f"nixlbench-{number}",
            "CXL_STATE_DIR": str(folder / f"state-{number}"),
        }
        for number in (0, 1)
    ]
    ucx = {**base, "NIXL_PLUGIN_DIR": str(plugins(folder / "ucx", asked.wheel, is_in_place_of_ucx=False))}
    ratios = {}
    print(f"   GB/s            {'CXL':>10}{'UCX':>10}")
    for operation in OPERATIONS:
        by_ours = run_pair(asked, asked.name, operation, hosts, folder)
        by_ucx = run_pair(asked, "UCX", operation, [ucx, ucx], folder)
        for block, batch in sorted(by_ours):
            mine, theirs = by_ours[block, batch], by_ucx.get((block, batch))
            print(f"   {operation:6}{label(block):>5} x{batch:<3}{mine:>10.3f}" + (f"{theirs:>10.3f}" if theirs else f"{'-':>10}"))
            if theirs:
                ratios[f"{operation.lower()}_{label(block)}_x{batch}_vs_ucx"] = round(mine / theirs, 4)
    moved = transfers(hosts[0])
    print(f"   every byte verified; transfers that our plugin made: {moved}")
    if not moved:
        raise Failed("our plugin moved nothing")
    return ratios


def main():
    """Runs it, or says why not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary", type=Path)
    parser.add_argument("--wheel", choices=wheels.VERSIONS, default=wheels.DEFAULT)
    parser.add_argument("--name", default="Mooncake", help="of a backend that the binary knows, which our plugin stands for")
    parser.add_argument("--min-block", type=int, default=64 << 10)
    parser.add_argument("--max-block", type=int, default=4 << 20)
    parser.add_argument("--max-batch", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=64)
    parser.add_argument("--warmup", type=int, default=16)
    parser.add_argument("--timeout-s", type=float, default=900, help="of one run of two processes")
    asked = parser.parse_args()
    asked.binary = asked.binary.resolve()
    asked.buffer = max(64 << 20, 2 * asked.max_block * asked.max_batch)
    asked.pool = 256 << 20
    if not os.access(asked.binary, os.X_OK) or not asked.binary.is_file():
        sys.exit(f"{asked.binary} is no program: name the binary nixlbench of NIXL's build")
    if not wheels.installed(asked.wheel):
        sys.exit(f"the wheel {asked.wheel} is not installed: run `make setup-nixl`")
    folder = Path(tempfile.mkdtemp(prefix="kvbm-cxl-bench-", dir="/dev/shm"))
    try:
        ratios = compare(asked, folder)
    except Failed as failure:
        sys.exit(f"nixlbench: {failure}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"RATIOS {json.dumps(ratios)}")


if __name__ == "__main__":
    main()
