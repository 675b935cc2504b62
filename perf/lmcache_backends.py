#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times LMCache's storage plugin over the pool beside LMCache's own DAX backend, in one run.

Both are plugins of the same storage manager of LMCache 0.5.6 in the same process, have the same chunks, the same allocator and as many
threads, and take turns, round after round. A store ends when every chunk is in the backend, a retrieve when every chunk is in LMCache's
memory; outside of the times every byte is compared. One process, and two at once, which are two hosts of one pool of mode `software`; each
has a file of its own for the DAX backend, which keeps its index in its process and can share nothing. All files are in /dev/shm.

The baseline is named in the ratio: `store_1m_vs_dax` is the DAX backend's time by ours for chunks of 1 MiB, `_x2_` with two processes at
once, by the slower of the two; above 1 ours is faster. Ratios are medians over the rounds. The DAX backend compares no checksum,
writes through the caches, stores on the caller's thread, and copies twice to retrieve, its staging slab made so that all of its workers
have a share of a batch; ours stores a batch on one thread of its own, so that another host sees it, and verifies what it retrieves.
"""

import contextlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests" / "consumers")]

import kvbm_cxl  # noqa: E402
import peers  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"128k": 128 * KIB, "1m": MIB, "4m": 4 * MIB, "16m": 16 * MIB}
BATCH_BYTES, MOST_CHUNKS = 64 * MIB, 64
ROUNDS, WARM_UP = 7, 1
THREADS = 2


def together(hosts, call, *arguments):
    """Has it done by all hosts at once; the longest time."""
    for host in hosts:
        host.send(call, *arguments)
    return max(host.answer() for host in hosts)


def measured(hosts, first):
    """Times of one round by what was done and the backend."""
    for number, host in enumerate(hosts):
        host("begin", first + number * 1000)
    order = ("dax", "cxl") if first // 10_000 % 2 else ("cxl", "dax")
    times = {(call, name): together(hosts, call, name) for call in ("store", "retrieve") for name in order}
    for host in hosts:
        host("end")
    return times


def of_size(label, chunk_bytes, folder):
    """The ratios of one size of chunks."""
    count, ratios = min(MOST_CHUNKS, BATCH_BYTES // chunk_bytes), {}
    pool = folder / f"pool-{label}"
    kvbm_cxl.format_pool(f"{pool},size=768M", cells=f"{chunk_bytes // KIB}K:75%")
    with contextlib.ExitStack() as started:
        hosts = []
        for number in range(2):
            arena = folder / f"dax-{label}-{number}"
            with arena.open("wb") as file:
                file.truncate(2 * count * chunk_bytes)
            environment = {"CXL_STATE_DIR": str(folder / f"state-{number}"), "CXL_MACHINE_ID": f"perf-{number}"}
            path = os.pathsep.join(filter(None, [str(ROOT / "perf"), os.environ.get("PYTHONPATH")]))
            environment |= {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR", "PYTHONPATH": path}
            variation = {"arena": str(arena), "chunk_bytes": chunk_bytes, "count": count, "threads": THREADS}
            hosts.append(started.enter_context(peers.Peer("backends", str(pool), {**os.environ, **environment}, variation)))
        for many in (1, 2):
            rounds = [measured(hosts[:many], (10 * many + number) * 10_000) for number in range(WARM_UP + ROUNDS)][WARM_UP:]
            for call in ("store", "retrieve"):
                median_s = {name: statistics.median(times[call, name] for times in rounds) for name in ("dax", "cxl")}
                rates = {name: many * count * chunk_bytes / took_s / 1e9 for name, took_s in median_s.items()}
                ratio = statistics.median(times[call, "dax"] / times[call, "cxl"] for times in rounds)
                ratios[f"{call}_{label}{'_x2' if many == 2 else ''}_vs_dax"] = round(ratio, 4)
                text = f"{call:8} {label:>4} x {count}, processes: {many}   pool {rates['cxl']:6.2f} GB/s   DAX {rates['dax']:6.2f} GB/s"
                print(f"{text}   {ratio:.2f}", flush=True)
    pool.unlink()
    for arena in folder.glob(f"dax-{label}-*"):
        arena.unlink()
    return ratios


def main():
    ratios = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbm-cxl-perf-") as name:
        for label, chunk_bytes in SIZES.items():
            ratios |= of_size(label, chunk_bytes, Path(name))
    print("RATIOS " + json.dumps(ratios))


if __name__ == "__main__":
    main()
