# SPDX-License-Identifier: Apache-2.0
"""Parts of gpu.py on blocks in memory of the GPU: whether each byte is right, then how long calls take."""

import ctypes
import hashlib
import mmap
import os
import shutil
import statistics
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import kvbm_cxl
from gpu_bench import GIB, HERE, KIB, MIB, WAYS, Blocks, LeftOut, has_cuda, ratio, row, say, wrong

# Label -> pieces of a block, bytes of a piece: Beluga's experiments.
SHAPES = {"128x20k": (128, 20 * KIB), "64x32k": (64, 32 * KIB), "16384x160": (16384, 160)}


def _test_program():
    found = [path for path in (HERE / "cuda_gpu", HERE.parent / "target/gpu-kit/cuda_gpu") if path.exists()]
    if not found:
        raise LeftOut("the engine's test program is not in this folder")
    return found[0]


def test_program(bench):
    """The engine's own test of every GPU."""
    if bench.is_dry:
        raise LeftOut("a dry run")
    _run_program([_test_program(), "--nocapture"])


def _run_program(command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    say(done.stdout[-6000:])
    if done.returncode or "skipped:" in done.stdout:
        raise SystemExit(f"{Path(command[0]).name} ended with {done.returncode}: {(done.stderr or done.stdout)[-3000:]}")


def _sanitizer(tool):
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if not program:
        raise LeftOut("compute-sanitizer is not installed")
    _run_program([program, "--tool", tool, "--error-exitcode", "3", _test_program(), "--nocapture"])


def memcheck(bench):
    """The kernels' accesses, checked by compute-sanitizer."""
    _sanitizer("memcheck")


def racecheck(bench):
    """Races between the kernels' threads, found by compute-sanitizer."""
    _sanitizer("racecheck")


def truth(bench):
    """With and without checksums, native and emulated hosts; pieces of round and of odd lengths."""
    ns = bench.namespace("truth")
    for pieces, piece_bytes in bench.sized(((7, 4096), (5, 1501), (40, 160)), ((5, 1501),)):
        blocks = Blocks(bench, pieces, piece_bytes, 8)
        bench.format(blocks.block_bytes)
        for coherence in ("native", "emulated:seed=7,noise=8"):
            os.environ["CXL_COHERENCE"] = coherence
            for has_checksums in WAYS.values():
                with kvbm_cxl.Pool(bench.spec) as pool, pool.cache(checksums=has_checksums) as cache:
                    blocks.there_and_back(cache, ns)
        blocks.free()
    say(f"every byte is right: {', '.join(WAYS)}; native and emulated")
    with kvbm_cxl.Pool(bench.spec) as pool, pool.cache() as cache:
        say(f"how the GPU reaches the pool: {cache.open_gpu(0)!r}")


def two_processes(bench):
    """A second process pulls the blocks that the first one published."""
    ns, shape = bench.namespace("two"), (9, 4112)
    if bench.others:
        return _pull_and_print(bench, ns, shape, [bytes.fromhex(key) for key in bench.others[0].split(",")])
    blocks = Blocks(bench, *shape, 6)
    bench.format(blocks.block_bytes)
    for coherence in ("native", "emulated:seed=3,noise=8"):
        os.environ["CXL_COHERENCE"] = coherence
        with kvbm_cxl.Pool(bench.spec) as pool, pool.cache(checksums=True) as cache:
            keys = bench.keys(6)
            blocks.change()
            if cache.publish_blocks(ns, keys, blocks.layout, range(6)) != ["stored"] * 6:
                raise SystemExit("blocks were not stored")
            digests = bench.second(",".join(key.hex() for key in keys))
        if digests != [hashlib.sha256(blocks.block(block)).hexdigest() for block in range(6)]:
            wrong("in another process")
    say("another process has every byte")


def _pull_and_print(bench, ns, shape, keys):
    """The second process: prints the digest of each block as its GPU has it."""
    pieces, piece_bytes = shape
    stride = len(keys) * piece_bytes
    address = bench.gpu.allocate(pieces * stride)
    parts = [(address + part * stride, piece_bytes, piece_bytes) for part in range(pieces)]
    layout = kvbm_cxl.BlockLayout(parts, len(keys), device="cuda:0")
    for has_checksums in (True, False):
        with kvbm_cxl.Pool(bench.spec) as pool, pool.cache(checksums=has_checksums) as cache:
            if (found := cache.pull_blocks(ns, keys, layout, range(len(keys)))) != [None] * len(keys):
                raise SystemExit(f"not found: {found}")
    content = bench.gpu.read(address, pieces * stride)
    for block in range(len(keys)):
        starts = (part * stride + block * piece_bytes for part in range(pieces))
        print(hashlib.sha256(b"".join(content[start : start + piece_bytes] for start in starts)).hexdigest())


def _times(bench, blocks, ns, rounds):
    """Seconds by direction and way; ways take turns, each after a call that opens the engine and registers the pool."""
    times = {}
    with ExitStack() as opened:
        pools = {way: opened.enter_context(kvbm_cxl.Pool(bench.spec)) for way in WAYS}
        caches = {way: opened.enter_context(pool.cache(checksums=WAYS[way])) for way, pool in pools.items()}
        for number in range(rounds + 1):
            for way, cache in caches.items():
                found = blocks.there_and_back(cache, ns)
                if number:
                    times.setdefault(("publish", way), []).append(found[0])
                    times.setdefault(("pull", way), []).append(found[1])
    return {key: statistics.median(found) for key, found in times.items()}


def blocks_of_a_model(bench):
    """1 GiB of blocks of 16 tokens of Llama 3.1 8B, 64 pieces of 32 KiB each; one such block; the caller's time of queue_pull."""
    ns, pieces = bench.namespace("model"), bench.sized(64, 4)
    one = Blocks(bench, pieces, 32 * KIB, 1)
    bench.format(one.block_bytes)
    medians = _times(bench, one, ns, bench.sized(20, 1))
    rates = " / ".join(f"{1e3 * medians[name, 'summed']:.3f}" for name in ("publish", "pull"))
    row("one block of 2 MiB, publish / pull, ms", rates, "0.15 / 0.12")
    one.free()
    link = dict(zip(("publish", "pull"), bench.link_s(bench.sized(256 * MIB, MIB)), strict=True))
    link = {name: bench.sized(256 * MIB, MIB) / seconds for name, seconds in link.items()}
    row("the link, to the host / from it, GB/s", " / ".join(f"{rate / 1e9:.1f}" for rate in link.values()))
    many = Blocks(bench, pieces, 32 * KIB, bench.sized(512, 4), gap_bytes=0)
    medians = _times(bench, many, ns, bench.sized(2, 1))
    for way, aim in (("summed", "0.85"), ("plain", "0.93")):
        shares = {name: many.count * many.block_bytes / medians[name, way] / link[name] for name in link}
        row(f"1 GiB, {way}, of the link: publish / pull", " / ".join(f"{share:.3f}" for share in shares.values()), aim)
        for name, share in shares.items():
            ratio(f"{name}_1g_{way}_of_link", share)
    _queued(bench, many, ns)


def _queued(bench, blocks, ns):
    keys, stream = bench.keys(blocks.count), SimpleNamespace(cuda_stream=bench.gpu.stream.value)
    with kvbm_cxl.Pool(bench.spec) as pool, pool.cache() as cache:
        cache.open_gpu(0)
        blocks.change()
        cache.publish_blocks(ns, keys, blocks.layout, range(blocks.count))
        calls = []
        for _ in range(bench.sized(3, 1)):
            start = time.perf_counter()
            queued = cache.queue_pull(ns, keys, blocks.layout, range(blocks.count, 2 * blocks.count), stream=stream)
            calls.append(time.perf_counter() - start)
            if queued.wait() != [None] * blocks.count:
                raise SystemExit("blocks that were queued are not found")
    blocks.check({block: blocks.count + block for block in range(blocks.count)})
    row("queue_pull of 1 GiB, the caller's time, ms", f"{1e3 * statistics.median(calls):.3f}", "0.5")


def shapes(bench):
    """One block of each shape in a call."""
    for label, (pieces, piece_bytes) in SHAPES.items():
        ns, blocks = bench.namespace(label), Blocks(bench, bench.sized(pieces, pieces // 32), piece_bytes, 1)
        bench.format(blocks.block_bytes)
        medians = _times(bench, blocks, ns, 3 * bench.rounds)
        for name in ("publish", "pull"):
            say(f"{label}, {name}: " + ", ".join(f"{way} {1e6 * medians[name, way]:.0f} us" for way in WAYS))
            ratio(f"{name}_{label}_summed_over_plain", medians[name, "summed"] / medians[name, "plain"])
        if label == "16384x160":
            row("sparse 16384 x 160 B, pull, ms", f"{1e3 * medians['pull', 'plain']:.3f}", "0.25")
        blocks.free()


def plain_memory(bench):
    """Registration, and plain copies of the registered pool next to those of pinned memory."""
    gpu, size = bench.gpu, bench.sized(GIB, 16 * MIB)
    bench.format(MIB)
    with open(bench.path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), size)
    hold = ctypes.c_char.from_buffer(memory)
    base, part = ctypes.addressof(hold), min(size, 64 * MIB)
    for at in range(0, size, mmap.PAGESIZE):
        memory[at]
    start = time.perf_counter()
    if status := gpu.register(base, size):
        raise SystemExit(f"registering {size // MIB} MiB of the pool is refused: CUDA error {status}. Is the memory-lock limit too small?")
    row(f"registration of {size // MIB} MiB, GiB/s", f"{size / GIB / (time.perf_counter() - start):.1f}")
    on_gpu, pinned, times = gpu.allocate(part), gpu.pinned(part), {}
    for _ in range(bench.rounds):
        for name, host in (("pinned", pinned), ("pool", base)):
            ctypes.memset(host, bench.random.randrange(256), 64)
            for way in ("to_gpu", "from_gpu"):
                moves = [(on_gpu + at, host + at, MIB) if way == "to_gpu" else (host + at, on_gpu + at, MIB) for at in range(0, part, MIB)]
                start = time.perf_counter()
                gpu.copy(moves)
                times.setdefault((name, way), []).append(time.perf_counter() - start)
                if gpu.read(on_gpu, MIB) != ctypes.string_at(host, MIB):
                    wrong(f"of a plain copy {way} of {name} memory")
    for way in ("to_gpu", "from_gpu"):
        pinned_s, pool_s = (statistics.median(times[name, way]) for name in ("pinned", "pool"))
        ratio(f"pool_over_pinned_{way}", pinned_s / pool_s)
        say(f"1 MiB copies {way}: pinned {part / pinned_s / 1e9:.2f} GB/s, pool {part / pool_s / 1e9:.2f} GB/s")
    gpu.unregister(base)
    del hold
    memory.close()


def computing(bench):
    """A product of matrices during pulls, compared with one alone."""
    if not has_cuda():
        raise LeftOut("PyTorch has no CUDA")
    import threading

    import torch

    x = torch.randn(8192, 8192, device="cuda:0", dtype=torch.bfloat16)

    def products():
        start = time.perf_counter()
        for _ in range(40):
            x @ x
        torch.cuda.synchronize()
        return time.perf_counter() - start

    products()
    ns, blocks = bench.namespace("computing"), Blocks(bench, 64, 32 * KIB, 16)
    bench.format(blocks.block_bytes)
    for way, has_checksums in WAYS.items():
        with kvbm_cxl.Pool(bench.spec) as pool, pool.cache(checksums=has_checksums) as cache:
            keys, stop = bench.keys(16), threading.Event()
            cache.publish_blocks(ns, keys, blocks.layout, range(16))
            alone = statistics.median(products() for _ in range(3))

            def pull(cache=cache, keys=keys, stop=stop):
                while not stop.is_set():
                    cache.pull_blocks(ns, keys, blocks.layout, range(16, 32))

            thread = threading.Thread(target=pull)
            thread.start()
            during = statistics.median(products() for _ in range(3))
            stop.set()
            thread.join()
        ratio(f"product_during_{way}_over_alone", during / alone)
