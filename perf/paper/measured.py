# SPDX-License-Identifier: Apache-2.0
"""What of the papers' experiments can be measured without CXL memory: two things beside one another in one run, on a pool in /dev/shm.

Memory is numpy's, data are unique for each block, and every byte that is pulled is compared outside of the times.
"""

import contextlib
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests" / "nixl")]

import kvbm_cxl  # noqa: E402
import pool_api  # noqa: E402

ROUNDS, WARM_UP = 7, 2
# Llama 3.1 8B: 32 layers, K and V, 8 heads of 128, 2 bytes: 64 pieces of 2 KiB a token.
KV_BYTES_PER_TOKEN = 128 << 10
# A block of 16 tokens: pieces and their bytes (Beluga, experiment 9).
LAYOUTS = {"Qwen3-32B": (128, 32 << 10), "Llama-3.1-8B": (64, 32 << 10), "Qwen3-32B-FP8": (128, 16 << 10)}


@contextlib.contextmanager
def cache(size, cells):
    """A prefix cache over a new pool of mode software, whose host is this process."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbm-cxl-papers-") as folder:
        os.environ["CXL_STATE_DIR"], os.environ["CXL_MACHINE_ID"] = f"{folder}/state", "papers"
        kvbm_cxl.format_pool(f"{folder}/pool,size={size}", cells=cells)
        with kvbm_cxl.Pool(f"{folder}/pool") as pool, pool.cache() as opened:
            yield opened


def namespace(name):
    """One of its own for each measurement: no block is found by mistake."""
    fields = {"dtype": "bfloat16", "layer_count": 32, "kv_head_count": 8, "head_size": 128, "block_tokens": 16}
    return kvbm_cxl.Namespace(model=name, layout="papers", **fields)


def keys(seed, count):
    """Keys of a chain."""
    found, parent = [], None
    for number in range(count):
        parent = kvbm_cxl.chain_key(parent, [seed, number])
        found.append(parent)
    return found


def filled(count, len_bytes, seed):
    """Blocks with bytes of their own: an array (count, len_bytes)."""
    words = numpy.arange(count * len_bytes // 8, dtype=numpy.uint64)
    words *= numpy.uint64(0x9E3779B97F4A7C15)
    words ^= numpy.uint64(seed)
    return words.view(numpy.uint8).reshape(count, len_bytes)


def layout_of(array, pieces):
    """`array` (pieces, blocks, bytes): block i is array[:, i], as a KV cache has it in its layers."""
    stride, step = array.strides[0], array.strides[1]
    parts = [(array.ctypes.data + piece * stride, step, array.shape[2]) for piece in range(pieces)]
    return kvbm_cxl.BlockLayout(parts, array.shape[1], owner=array)


def timed(work):
    """Seconds that it took, and what it gave."""
    begin = time.perf_counter()
    given = work()
    return time.perf_counter() - begin, given


def _published(outcomes):
    if any(outcome != "stored" for outcome in outcomes):
        raise RuntimeError(f"blocks were not published: {sorted(set(map(str, outcomes)))}")


def _pulled(reasons):
    if any(reason is not None for reason in reasons):
        raise RuntimeError(f"blocks were missed: {sorted(set(map(str, reasons)))}")


def _same(one, other):
    if not (one == other).all():
        raise RuntimeError("pulled bytes are not those that were published")


def block_sizes(total_bytes=256 << 20):
    """Beluga, figure 13c: tokens of a block -> (publish, pull) in GB/s of the same KV, from a cache of 64 pieces a block."""
    times = {tokens: ([], []) for tokens in (16, 32, 64, 256)}
    with cache("2G", ",".join(f"{tokens * KV_BYTES_PER_TOKEN >> 20}M:18%" for tokens in times)) as opened:
        for number in range(WARM_UP + ROUNDS):
            for tokens in times if number % 2 else reversed(times):
                count, piece = total_bytes // (tokens * KV_BYTES_PER_TOKEN), tokens * KV_BYTES_PER_TOKEN // 64
                here = filled(64 * count, piece, number).reshape(64, count, piece)
                there = numpy.zeros_like(here)
                ns, chain = namespace(f"blocks-{tokens}"), keys(number, count)
                took, outcomes = timed(lambda: opened.publish_blocks(ns, chain, layout_of(here, 64), range(count)))
                _published(outcomes)
                pulling, reasons = timed(lambda: opened.pull_blocks(ns, chain, layout_of(there, 64), range(count)))
                _pulled(reasons)
                _same(here, there)
                opened.clear(ns)
                if number >= WARM_UP:
                    times[tokens][0].append(took)
                    times[tokens][1].append(pulling)
    return {tokens: tuple(total_bytes / statistics.median(each) / 1e9 for each in both) for tokens, both in times.items()}


def dense(count=48):
    """Beluga, figure 14: layout -> (write, read): time of ours by that of two steps, over a buffer of the host, in one run."""
    ratios = {}
    with cache("1G", "1M:5%,2M:30%,4M:55%") as opened:
        for name, (pieces, piece) in LAYOUTS.items():
            here = filled(pieces * count, piece, pieces + piece).reshape(pieces, count, piece)
            there, bounce = numpy.zeros_like(here), numpy.zeros((count, pieces, piece), numpy.uint8)
            direct, back = layout_of(here, pieces), layout_of(there, pieces)
            flat = kvbm_cxl.BlockLayout.of_tensors([bounce])
            writes, reads = [], []
            for number in range(WARM_UP + ROUNDS):
                pair = {}
                for way in ("direct", "two steps") if number % 2 else ("two steps", "direct"):
                    ns, chain = namespace(f"{name}-{way}"), keys(number, count)

                    def write(way=way, ns=ns, chain=chain):
                        if way == "direct":
                            return opened.publish_blocks(ns, chain, direct, range(count))
                        bounce[:] = here.transpose(1, 0, 2)
                        return opened.publish_blocks(ns, chain, flat, range(count))

                    def read(way=way, ns=ns, chain=chain):
                        if way == "direct":
                            return opened.pull_blocks(ns, chain, back, range(count))
                        reasons = opened.pull_blocks(ns, chain, flat, range(count))
                        there.transpose(1, 0, 2)[:] = bounce
                        return reasons

                    writing, outcomes = timed(write)
                    _published(outcomes)
                    there[:] = 0
                    reading, reasons = timed(read)
                    _pulled(reasons)
                    _same(here, there)
                    opened.clear(ns)
                    pair[way] = writing, reading
                if number >= WARM_UP:
                    writes.append(pair["direct"][0] / pair["two steps"][0])
                    reads.append(pair["direct"][1] / pair["two steps"][1])
            ratios[name] = statistics.median(writes), statistics.median(reads)
    return ratios


def stores(len_bytes=16 << 10, blocks=4096, rounds=9):
    """Beluga, table 4: time to write 16 KiB by plain stores and flushes, by that past the caches; both by the C interface, over 64 MiB, so
    that most of it is in no cache."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbm-cxl-papers-") as folder:
        os.environ["CXL_STATE_DIR"], os.environ["CXL_MACHINE_ID"] = f"{folder}/state", "papers"
        pool_api.format_pool(f"{folder}/pool,size=256M")
        pool = pool_api.PoolHandle(f"{folder}/pool")
        pool.library.cxl_shm_flush.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        data, ratios = filled(blocks, len_bytes, 5), []
        places = [pool.alloc(len_bytes) for _ in range(blocks)]

        def flushed():
            for place, row in zip(places, sources, strict=True):
                ctypes.memmove(place, row, len_bytes)
                pool.library.cxl_shm_flush(place, len_bytes)

        def past():
            for place, row in zip(places, sources, strict=True):
                pool.library.cxl_shm_copy_in(place, row, len_bytes)

        sources = [row.ctypes.data for row in data]
        for number in range(rounds):
            took = {way: timed(way)[0] for way in ((flushed, past) if number % 2 else (past, flushed))}
            ratios.append(took[flushed] / took[past])
            for place, row in zip(places[:: blocks // 16], data[:: blocks // 16], strict=True):
                if pool.read(place, len_bytes) != row.tobytes():
                    raise RuntimeError("what was written is not there")
        pool.close()
    return statistics.median(ratios)


# A process that copies to or from memory at a fixed rate until its input ends: PATH, bytes a second, read or write.
BACKGROUND = """
import mmap, sys, time, threading, numpy
path, rate, way = sys.argv[1], float(sys.argv[2]), sys.argv[3]
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
with open(path, "r+b") as file:
    memory = numpy.frombuffer(mmap.mmap(file.fileno(), 0), numpy.uint8)
step = 1 << 20
near, at, begin, moved = numpy.ones(step, numpy.uint8), 0, time.monotonic(), 0
print("ready", flush=True)
while not ended.is_set():
    if way == "read":
        near[:] = memory[at:at + step]
    else:
        memory[at:at + step] = near
    at, moved = (at + step) % (len(memory) - step), moved + step
    time.sleep(max(0.0, moved / rate - (time.monotonic() - begin)))
"""


def background(rates_gb_s=(0, 1, 2, 4), count=20_000):
    """Beluga, figure 8: GB/s of another process that reads -> (p50, p99) of a look at one line of another host's block, in us.

    The line is a lookup of one block, which fetches from memory; the other process has a file of its own in the same memory.
    """
    found = {}
    with cache("256M", "64K:60%") as opened, tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="kvbm-cxl-papers-") as file:
        file.truncate(256 << 20)
        ns, chain = namespace("background"), keys(1, 1)
        _published(opened.publish_all(ns, chain, [bytes(4096)]))
        for rate in rates_gb_s:
            with contextlib.ExitStack() as held:
                if rate:
                    command = [sys.executable, "-c", BACKGROUND, file.name, str(rate * 1e9), "read"]
                    process = held.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
                    process.stdout.readline()
                    held.callback(process.stdin.close)
                took = []
                for _ in range(count):
                    begin = time.perf_counter_ns()
                    there = opened.lookup(ns, chain[0])
                    took.append(time.perf_counter_ns() - begin)
                    if there is None:
                        raise RuntimeError("the block is gone")
                took.sort()
                found[rate] = took[count // 2] / 1e3, took[count * 99 // 100] / 1e3
    return found
