#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs nixlbench, from a binary of NIXL's build, over our plugin and over UCX, and compares them; every byte is verified.

    upstream_bench.py BINARY [--wheel 1.4.1] [--sizes 4K-1M:64,2M-64M:4] [--memory both] [--name Mooncake]

Two processes are two hosts of a pool, each with an identity of its own. They find each other by nixlbench's ASIO runtime: without etcd.
nixlbench knows a closed list of backends: our plugin is there under the name of one that gets no parameters and has memory on both sides,
by a folder for NIXL_PLUGIN_DIR in which that name is a link to it. A binary that knows CXL runs it with --name CXL. nixlbench takes its
buffers from posix_memalign(): ordinary memory, so these are staged transfers, and with libcxl_malloc.so in front of the C library memory
of the pool, which is what the backend is for. UCX has ordinary memory. The last line has our bandwidth by UCX's, `pool_...` from pool
memory to pool memory: above 1 ours is faster.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import typing
from pathlib import Path

import pool_api
import wheels
from upstream_suite import PLUGIN, counted, environment, plugins

OPERATIONS = ("READ", "WRITE")
# Smallest and largest block, largest batch, of one run each. nixlbench allocates the largest batch of the largest blocks.
SIZES = "4K-1M:64,2M-64M:4"
HOOK = PLUGIN.with_name("libcxl_malloc.so")
BANDWIDTH = "B/W (GB/Sec)"
START_TIMEOUT_S = 60


class Failed(Exception):
    """What went wrong in a run, with what its processes said."""


class Sizes(typing.NamedTuple):
    """One run's: bytes of the smallest and of the largest block, blocks of the largest batch."""

    min_block: int
    max_block: int
    max_batch: int

    @property
    def buffer(self):
        """Bytes that a process allocates."""
        return max(64 << 20, 2 * self.max_block * self.max_batch)


def sizes_of(text):
    """The runs that an option names: [Sizes]. ValueError if it is not of the form SMALLEST-LARGEST:BATCH,..."""
    found = []
    for part in text.split(","):
        said = re.fullmatch(r"(\d+)([KM]?)-(\d+)([KM]?):(\d+)", part)
        if not said:
            raise ValueError(f"{part!r} is no SMALLEST-LARGEST:BATCH, such as 4K-1M:64")
        unit = {"": 1, "K": 1 << 10, "M": 1 << 20}
        run = Sizes(int(said[1]) * unit[said[2]], int(said[3]) * unit[said[4]], int(said[5]))
        if not 0 < run.min_block <= run.max_block or not run.max_batch:
            raise ValueError(f"{part!r}: the smallest block comes first, and a batch has a block at least")
        found.append(run)
    return found


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


def run_pair(asked, sizes, backend, operation, environments, folder):
    """One run of two processes: the rows that it printed. The first to start is the initiator."""
    port = free_port()
    command = [str(asked.binary), f"--backend={backend}", f"--op_type={operation}", "--check_consistency=true", "--runtime_type=ASIO"]
    command += ["--asio_address=127.0.0.1", f"--asio_port={port}", f"--total_buffer_size={sizes.buffer}"]
    command += [f"--start_block_size={sizes.min_block}", f"--max_block_size={sizes.max_block}", "--start_batch_size=1"]
    command += [f"--max_batch_size={sizes.max_batch}", f"--num_iter={asked.iterations}", f"--warmup_iter={asked.warmup}"]
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


def went_the_right_way(column, before, after):
    """Failed, unless our plugin moved the bytes of a run, and as the place of the buffers says: between pool memory nothing is staged."""
    staged, direct = (
        sum(after[name] - before[name] for name in names)
        for names in (("staged_read_bytes", "staged_written_bytes"), ("pool_read_bytes", "pool_written_bytes"))
    )
    if not staged + direct:
        raise Failed("our plugin moved nothing")
    if (column == "CXL, pool") != (staged == 0):
        raise Failed(f"{column}: {staged} bytes went over staging blocks, {direct} directly")


def compare(asked, folder):
    """Runs all, prints the table: (name of a ratio -> our bandwidth by UCX's)."""
    base = {**environment(asked.wheel), "LD_LIBRARY_PATH": wheels.library_path(asked.wheel)}
    # Both sides' buffers with what one of them is aligned to, and as much again for staging and what the pool needs itself.
    pool = f"{folder / 'pool'},size={max(256, 5 * max(sizes.buffer for sizes in asked.sizes) >> 20)}M"
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
    columns = {}
    if asked.memory != "pool":
        columns["CXL"] = (asked.name, hosts)
    if asked.memory != "heap":
        columns["CXL, pool"] = (asked.name, [{**host, "LD_PRELOAD": str(HOOK)} for host in hosts])
    columns["UCX"] = ("UCX", [ucx, ucx])
    start, ratios = counted(hosts[0]), {}
    print(f"   {'GB/s':19}" + "".join(f"{column:>12}" for column in columns))
    for operation in OPERATIONS:
        for sizes in asked.sizes:
            by = {}
            for column, (name, environments) in columns.items():
                before = counted(hosts[0])
                by[column] = run_pair(asked, sizes, name, operation, environments, folder)
                if column != "UCX":
                    went_the_right_way(column, before, counted(hosts[0]))
            for block, batch in sorted(by["UCX"]):
                rates = {column: table.get((block, batch)) for column, table in by.items()}
                shown = "".join(f"{rate or float('nan'):>12.3f}" for rate in rates.values())
                print(f"   {operation:6}{label(block):>7} x{batch:<4}{shown}")
                for column, prefix in (("CXL", ""), ("CXL, pool", "pool_")):
                    if rates.get(column) and rates["UCX"]:
                        ratios[f"{prefix}{operation.lower()}_{label(block)}_x{batch}_vs_ucx"] = round(rates[column] / rates["UCX"], 4)
    moved = {name: counted(hosts[0])[name] - start[name] for name in ("reads", "writes")}
    print(f"   every byte verified; transfers that our plugin made: {sum(moved.values())}")
    return ratios


def main():
    """Runs it, or says why not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary", type=Path)
    parser.add_argument("--wheel", choices=wheels.VERSIONS, default=wheels.DEFAULT)
    parser.add_argument("--name", default="Mooncake", help="of a backend that the binary knows, which our plugin stands for")
    parser.add_argument("--sizes", type=sizes_of, default=SIZES, help="SMALLEST-LARGEST:BATCH, a run each; default %(default)s")
    parser.add_argument("--memory", choices=("heap", "pool", "both"), default="both", help="where nixlbench's buffers lie with our plugin")
    parser.add_argument("--iterations", type=int, default=64)
    parser.add_argument("--warmup", type=int, default=16)
    parser.add_argument("--timeout-s", type=float, default=1800, help="of one run of two processes")
    asked = parser.parse_args()
    asked.binary = asked.binary.resolve()
    if not os.access(asked.binary, os.X_OK) or not asked.binary.is_file():
        sys.exit(f"{asked.binary} is no program: name the binary nixlbench of NIXL's build")
    if asked.memory != "heap" and not HOOK.is_file():
        sys.exit(f"{HOOK} is not there: run `make build-plugin`")
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
