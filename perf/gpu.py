#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tries and times the path between a GPU and the pool on a machine with an NVIDIA GPU, in 12 minutes at most.

    python3 gpu.py                  in the unpacked kit of `make gpu-kit`, which needs no network and nothing else; --look: is there a GPU?

Truth comes first: the engine's own test program; every byte of blocks that were published from the GPU, pulled to other places of it and
read back, with and without checksums, with hosts as they are and emulated ones; and of blocks that a second process pulls. Nothing is timed
before.

Two ways, through the same calls of package kvbm_cxl: `plain`, and with checksums `summed`. They take turns in each round, each pull is
compared outside of its time, and ratios are of medians. `..._summed_over_plain` is what checksums cost. `pool_over_pinned_to_gpu` is the
bandwidth of plain copies of 1 MiB out of the registered pool by that out of pinned memory. Ratios of the other parts: gpu_queued.py,
gpu_worker.py, gpu_nixl.py.
"""

import argparse
import ctypes
import hashlib
import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The wheel of the kit is unpacked beside this file; in a checkout there is the package.
sys.path[:0] = [str(path) for path in (HERE / "package", HERE.parent / "python") if path.exists()]

import gpu_driver  # noqa: E402
import gpu_nixl  # noqa: E402
import gpu_queued  # noqa: E402
import gpu_worker  # noqa: E402
import kvbm_cxl  # noqa: E402

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
# Way -> whether blocks have checksums.
WAYS = {"plain": False, "summed": True}
# Label -> pieces of a block, bytes of a piece: Beluga's experiments, and a block of 16 tokens of Llama 3.1 8B.
SHAPES = {"128x20k": (128, 20 * KIB), "64x32k": (64, 32 * KIB), "16384x160": (16384, 160)}
RATIOS = {}


class Late(Exception):
    """The time is over."""


class Bench:
    """What all parts use."""

    def __init__(self, said):
        self.said, self.end = said, time.monotonic() + 60 * said.minutes
        self.gpu = gpu_driver.Gpu()
        self.path = Path(said.pool)
        self.spec = f"{said.pool},size={said.pool_mib}M"
        self.number = 0
        self.random = random.Random(5)

    def go_on(self):
        if time.monotonic() > self.end:
            raise Late

    def keys(self, count):
        self.number += 1
        return [kvbm_cxl.chain_key(None, [self.number, index]) for index in range(count)]

    def format(self, block_bytes):
        kvbm_cxl.format_pool(self.spec, cells=f"{-(-block_bytes // 64) * 64}:75%", force=True)


def say(text):
    print(text, flush=True)


NS_FIELDS = {"dtype": "int8", "layer_count": 1, "kv_head_count": 1, "head_size": 1, "block_tokens": 16, "layout": "pieces"}


class Blocks:
    """Blocks on the GPU, each of as many pieces, which lie apart; `count` of them, and as much room beside them."""

    def __init__(self, bench, pieces, piece_bytes, count):
        self.gpu, self.pieces, self.piece_bytes, self.count = bench.gpu, pieces, piece_bytes, count
        self.stride = piece_bytes + 16 if piece_bytes % 16 == 0 else piece_bytes + 1
        self.len_bytes = pieces * 2 * count * self.stride
        self.address = self.gpu.allocate(self.len_bytes)
        self.content = bytearray(bench.random.randbytes(self.len_bytes))
        self.gpu.write(self.address, bytes(self.content))
        parts = [(self.address + part * 2 * count * self.stride, self.stride, piece_bytes) for part in range(pieces)]
        self.layout = kvbm_cxl.BlockLayout(parts, 2 * count, device="cuda:0")
        self.block_bytes = pieces * piece_bytes

    def change(self, random_bytes):
        """Other bytes in all of it, so that what arrives is of this round."""
        self.content[:] = random_bytes(self.len_bytes)
        self.gpu.write(self.address, bytes(self.content))

    def at(self, part, block):
        return (part * 2 * self.count + block) * self.stride

    def block(self, block):
        starts = (self.at(part, block) for part in range(self.pieces))
        return b"".join(self.content[start : start + self.piece_bytes] for start in starts)

    def check(self, moved):
        """Blocks arrived at their new places, block -> place, and not a byte beside them changed."""
        for part in range(self.pieces):
            for block, place in moved.items():
                source, to = self.at(part, block), self.at(part, place)
                self.content[to : to + self.piece_bytes] = self.content[source : source + self.piece_bytes]
        if self.gpu.read(self.address, self.len_bytes) != bytes(self.content):
            raise SystemExit("a byte on the GPU is wrong: nothing that was timed counts")

    def free(self):
        self.gpu.free(self.address)


def there_and_back(bench, cache, blocks, ns):
    """Publishes the blocks and pulls them to the room beside them; the two times."""
    keys, count = bench.keys(blocks.count), blocks.count
    places = list(range(count, 2 * count))
    bench.random.shuffle(places)
    blocks.change(bench.random.randbytes)
    start = time.perf_counter()
    stored = cache.publish_blocks(ns, keys, blocks.layout, range(count))
    published = time.perf_counter()
    found = cache.pull_blocks(ns, keys, blocks.layout, places)
    pulled = time.perf_counter()
    if stored != ["stored"] * count or found != [None] * count:
        raise SystemExit(f"blocks were not stored or not found: {stored} {found}")
    blocks.check(dict(enumerate(places)))
    cache.evict_all(ns, keys)
    return published - start, pulled - published


def test_program(bench):
    """The engine's own test of every GPU."""
    program = next((path for path in (HERE / "cuda_gpu", HERE.parent / "target/gpu-kit/cuda_gpu") if path.exists()), None)
    if program is None:
        return say("truth: the engine's test program is not in this folder")
    done = subprocess.run([program, "--nocapture"], capture_output=True, text=True, timeout=300, check=False)
    say(done.stdout[-6000:])
    if done.returncode or "skipped:" in done.stdout:
        raise SystemExit(f"the engine's test program failed: {done.stderr[-3000:]}")


def truth(bench):
    """With and without checksums, hosts as they are and emulated ones; pieces of round and of odd lengths."""
    ns = kvbm_cxl.Namespace(model="truth", **NS_FIELDS)
    for pieces, piece_bytes in ((7, 4096), (5, 1501), (40, 160)):
        blocks = Blocks(bench, pieces, piece_bytes, 8)
        bench.format(blocks.block_bytes)
        for coherence in ("native", "emulated:seed=7,noise=8"):
            for way in WAYS:
                bench.go_on()
                os.environ["CXL_COHERENCE"] = coherence
                with kvbm_cxl.Pool(bench.spec) as pool, pool.cache(checksums=WAYS[way]) as cache:
                    there_and_back(bench, cache, blocks, ns)
        blocks.free()
    say(f"truth: every byte is right, {', '.join(WAYS)}; native and emulated")
    with kvbm_cxl.Pool(bench.spec) as pool, pool.cache() as cache:
        say(f"how the GPU reaches the pool: {cache.open_gpu(0)!r}")


def peer(said):
    """The second process: pulls what the first one published, and tells the digest of each block as its GPU has it."""
    gpu = gpu_driver.Gpu()
    ns = kvbm_cxl.Namespace(model="two", **NS_FIELDS)
    keys, (pieces, piece_bytes) = [bytes.fromhex(key) for key in said.peer.split(",")], (9, 4112)
    address = gpu.allocate(len(keys) * pieces * piece_bytes)
    parts = [(address + part * len(keys) * piece_bytes, piece_bytes, piece_bytes) for part in range(pieces)]
    layout = kvbm_cxl.BlockLayout(parts, len(keys), device="cuda:0")
    for checksums in (True, False):
        with kvbm_cxl.Pool(f"{said.pool},size={said.pool_mib}M") as pool, pool.cache(checksums=checksums) as cache:
            found = cache.pull_blocks(ns, keys, layout, range(len(keys)))
            if found != [None] * len(keys):
                raise SystemExit(f"not found: {found}")
    content = gpu.read(address, len(keys) * pieces * piece_bytes)
    for block in range(len(keys)):
        starts = ((part * len(keys) + block) * piece_bytes for part in range(pieces))
        print(hashlib.sha256(b"".join(content[start : start + piece_bytes] for start in starts)).hexdigest())


def two_processes(bench):
    ns = kvbm_cxl.Namespace(model="two", **NS_FIELDS)
    blocks = Blocks(bench, 9, 4112, 6)
    bench.format(blocks.block_bytes)
    for coherence in ("native", "emulated:seed=3,noise=8"):
        bench.go_on()
        os.environ["CXL_COHERENCE"] = coherence
        with kvbm_cxl.Pool(bench.spec) as pool, pool.cache(checksums=True) as cache:
            keys = bench.keys(6)
            blocks.change(bench.random.randbytes)
            if cache.publish_blocks(ns, keys, blocks.layout, range(6)) != ["stored"] * 6:
                raise SystemExit("blocks were not stored")
            arguments = [*bench.said.again, "--peer", ",".join(key.hex() for key in keys)]
            done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, timeout=120, check=False)
        if done.returncode or done.stdout.split() != [hashlib.sha256(blocks.block(block)).hexdigest() for block in range(6)]:
            raise SystemExit(f"another process has other bytes: {done.stdout[-500:]} {done.stderr[-2000:]}")
    blocks.free()
    say("truth: another process has every byte")


def plain_memory(bench):
    """Registration, and plain copies of the registered pool beside those of pinned memory."""
    gpu, size = bench.gpu, min(bench.said.pool_mib, 1024) * MIB
    with open(bench.path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), size)
    hold = ctypes.c_char.from_buffer(memory)
    base = ctypes.addressof(hold)
    for at in range(0, size, mmap.PAGESIZE):
        memory[at]
    start = time.perf_counter()
    status = gpu.register(base, size)
    seconds = time.perf_counter() - start
    if status:
        say(f"registering {size // MIB} MiB of the pool is refused: CUDA error {status}. Is the memory-lock limit too small?")
    else:
        say(f"registering {size // MIB} MiB of the pool takes {seconds:.3f} s")
        RATIOS["registration_gib_per_s"] = size / GIB / seconds
        part, pinned = min(size, 256 * MIB), None
        pinned, on_gpu = gpu.pinned(part), gpu.allocate(part)
        times = {}
        for _ in range(bench.said.rounds):
            bench.go_on()
            for name, host in (("pinned", pinned), ("pool", base)):
                for way in ("to_gpu", "from_gpu"):
                    offsets = range(0, part, MIB)
                    moves = [(on_gpu + at, host + at, MIB) if way == "to_gpu" else (host + at, on_gpu + at, MIB) for at in offsets]
                    if way == "to_gpu":
                        ctypes.memset(host, bench.random.randrange(256), 64)
                    start = time.perf_counter()
                    gpu.copy(moves)
                    times.setdefault((name, way), []).append(time.perf_counter() - start)
                    if gpu.read(on_gpu, MIB) != ctypes.string_at(host, MIB):
                        raise SystemExit(f"a plain copy {way} of {name} memory is wrong")
        for way in ("to_gpu", "from_gpu"):
            pinned_s, pool_s = (statistics.median(times[name, way]) for name in ("pinned", "pool"))
            RATIOS[f"pool_over_pinned_{way}"] = pinned_s / pool_s
            say(f"1 MiB copies {way}: pinned {part / pinned_s / 1e9:.2f} GB/s, pool {part / pool_s / 1e9:.2f} GB/s")
        gpu.free(on_gpu)
        gpu.free_pinned(pinned)
        gpu.unregister(base)
    del hold
    memory.close()


def shape(bench, label, pieces, piece_bytes, count):
    """One call with blocks of this shape by each way; medians by way and direction."""
    ns = kvbm_cxl.Namespace(model=label, **NS_FIELDS)
    blocks = Blocks(bench, pieces, piece_bytes, count)
    bench.format(blocks.block_bytes)
    times = {}
    for number in range(bench.said.rounds + 1):
        for way in WAYS:
            bench.go_on()
            with kvbm_cxl.Pool(bench.spec) as pool, pool.cache(checksums=WAYS[way]) as cache:
                # The first call opens the engine and registers what it touches.
                there_and_back(bench, cache, blocks, ns)
                timed = [there_and_back(bench, cache, blocks, ns) for _ in range(3)]
            if number:
                for name, found in zip(("publish", "pull"), zip(*timed, strict=True), strict=True):
                    times.setdefault((name, way), []).extend(found)
    medians = {key: statistics.median(found) for key, found in times.items()}
    for name in ("publish", "pull"):
        rates = (f"{way} {1e6 * medians[name, way]:.0f} us" for way in WAYS)
        say(f"{label} x {count} blocks, {name}: {', '.join(rates)}; {count * blocks.block_bytes / MIB:.2f} MiB")
        RATIOS[f"{name}_{label}_summed_over_plain"] = medians[name, "summed"] / medians[name, "plain"]
    blocks.free()


def shapes(bench):
    for label, (pieces, piece_bytes) in SHAPES.items():
        shape(bench, label, max(2, pieces // bench.said.divide), piece_bytes, 1)


def token_blocks(bench):
    """Blocks of 16, 64 and 256 tokens of Llama 3.1 8B: 64 pieces, 64 MiB a call."""
    for tokens in (16, 64, 256):
        piece_bytes = tokens * 2 * KIB
        count = max(1, 64 * MIB // (64 * piece_bytes) // bench.said.divide)
        shape(bench, f"{tokens}_tokens", max(2, 64 // bench.said.divide), piece_bytes, count)


def streams(bench):
    """Blocks in the order of streams."""
    RATIOS.update(gpu_queued.measure(bench, kvbm_cxl.Namespace(model="streams", **NS_FIELDS), say))


def nixl(bench):
    """NIXL between the memory of the GPU in two processes, beside UCX."""
    kvbm_cxl.format_pool(bench.spec, force=True)
    RATIOS.update(gpu_nixl.measure(bench.spec, bench.said.rounds, say))


def has_torch(what):
    """Whether PyTorch has CUDA; else it is said that `what` is left out."""
    try:
        import torch

        if not torch.cuda.is_available():
            raise ImportError("it has no CUDA")
    except ImportError as reason:
        say(f"{what}: left out, no PyTorch with CUDA ({reason})")
        return False
    return True


def connector(bench):
    """The worker's side of CxlConnector over tensors."""
    if has_torch("the worker's side of CxlConnector"):
        RATIOS.update(gpu_worker.measure(bench.spec, "cuda:0", bench.said.rounds, say, bench.go_on))


def computing(bench):
    """A product of matrices beside copies, where PyTorch is there."""
    if not has_torch("computing beside copies"):
        return
    import threading

    import torch

    x = torch.randn(8192, 8192, device="cuda:0", dtype=torch.bfloat16)
    ns = kvbm_cxl.Namespace(model="computing", **NS_FIELDS)

    def products():
        start = time.perf_counter()
        for _ in range(40):
            x @ x
        torch.cuda.synchronize()
        return time.perf_counter() - start

    products()
    blocks = Blocks(bench, 64, 32 * KIB, 16)
    bench.format(blocks.block_bytes)
    for way in WAYS:
        with kvbm_cxl.Pool(bench.spec) as pool, pool.cache(checksums=WAYS[way]) as cache:
            there_and_back(bench, cache, blocks, ns)
            keys = bench.keys(16)
            cache.publish_blocks(ns, keys, blocks.layout, range(16))
            alone, stop = statistics.median(products() for _ in range(3)), threading.Event()

            def pull(cache=cache, keys=keys, stop=stop):
                while not stop.is_set():
                    cache.pull_blocks(ns, keys, blocks.layout, range(16, 32))

            thread = threading.Thread(target=pull)
            thread.start()
            beside = statistics.median(products() for _ in range(3))
            stop.set()
            thread.join()
        RATIOS[f"product_beside_{way}_over_alone"] = beside / alone
        say(f"a product beside pulls by {way}: {beside / alone:.3f} of its time alone")
    blocks.free()


def main():
    parser = argparse.ArgumentParser(description="The path between a GPU and the pool, tried and timed.")
    parser.add_argument("--look", action="store_true", help="say whether there is a GPU to try, and exit with 1 where there is none")
    parser.add_argument("--pool", default="/dev/shm/kvbm-cxl-perf-gpu", help="a file that is made and removed")
    parser.add_argument("--pool-mib", type=int, default=1536)
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--divide", type=int, default=1, help="smaller lists, for a look at the program itself")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    said = parser.parse_args()
    said.again = [f"--pool={said.pool}", f"--pool-mib={said.pool_mib}"]
    if said.peer:
        return peer(said)
    try:
        bench = Bench(said)
    except gpu_driver.NoGpu as reason:
        print(f"skipped: no GPU to try: {reason}")
        return 1 if said.look else 0
    if said.look:
        return print("there is a GPU")
    try:
        for part in (test_program, truth, two_processes, plain_memory, shapes, streams, connector, nixl, token_blocks, computing):
            bench.go_on()
            os.environ["CXL_COHERENCE"] = "native"
            part(bench)
    except Late:
        say(f"{said.minutes} minutes are over: what comes after was left out")
    finally:
        bench.path.unlink(missing_ok=True)
    print("RATIOS " + json.dumps({name: round(value, 4) for name, value in RATIOS.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
