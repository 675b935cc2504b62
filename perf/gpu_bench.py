# SPDX-License-Identifier: Apache-2.0
"""Shared by the parts of gpu.py: the pool, sizes, figures, and blocks in memory of the GPU. A line that a part prints begins with RATIO,
ROW (label, value, aim) or LEFT_OUT, or is text."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The wheel of the kit is unpacked next to this file; in a checkout there is the package.
sys.path[:0] = [str(path) for path in (HERE / "package", HERE.parent / "python") if path.exists()]

import gpu_driver  # noqa: E402
import kvbm_cxl  # noqa: E402

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
# Way -> whether blocks have checksums.
WAYS = {"plain": False, "summed": True}


class LeftOut(Exception):
    """Why a part does not run on this machine."""


def wrong(what):
    """Ends a part whose figures do not count."""
    print(f"WRONG bytes: {what}", flush=True)
    raise SystemExit(f"WRONG bytes: {what}: nothing that was timed counts")


def say(text):
    print(text, flush=True)


def ratio(name, value):
    say("RATIO " + json.dumps({name: float(f"{value:.4g}")}))


def row(label, value, aim=""):
    say("ROW " + json.dumps([label, value, aim]))


def has_cuda():
    """PyTorch with CUDA, or why not."""
    try:
        import torch
    except ImportError as reason:
        raise LeftOut(f"no PyTorch ({reason})") from None
    return torch.cuda.is_available()


class Bench:
    """One part's GPU, pool and sizes."""

    def __init__(self, options, arguments):
        self.gpu, self.path, self.is_dry, self.others = gpu_driver.Gpu(), options.pool, options.dry, options.others
        self.again = [f"--part={options.part}", *arguments]
        self.spec = self.spec_of(self.sized(1536, 32))
        self.rounds = self.sized(5, 1)
        self.number, self.random = 0, random.Random(5)

    def sized(self, value, dry):
        """A size of this run."""
        return dry if self.is_dry else value

    def spec_of(self, mib):
        return f"{self.path},size={mib}M"

    def device(self):
        """Of tensors: the GPU's, in a dry run the CPU's. Raises LeftOut without PyTorch that has CUDA."""
        if has_cuda():
            return "cuda:0"
        if self.is_dry:
            return "cpu"
        raise LeftOut("PyTorch has no CUDA")

    def namespace(self, model):
        fields = {"dtype": "int8", "layer_count": 1, "kv_head_count": 1, "head_size": 1, "block_tokens": 16, "layout": "pieces"}
        return kvbm_cxl.Namespace(model=model, **fields)

    def keys(self, count):
        self.number += 1
        return [kvbm_cxl.chain_key(None, [self.number, index]) for index in range(count)]

    def format(self, block_bytes):
        kvbm_cxl.format_pool(self.spec, cells=f"{-(-block_bytes // 64) * 64}:75%", force=True)

    def second(self, *arguments):
        """The output of this part in a second process that gets these arguments, too."""
        command = [sys.executable, sys.argv[0], *self.again, *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the second process ended with {done.returncode}")
        return done.stdout.splitlines()

    def link_s(self, len_bytes):
        """Seconds of a copy of pinned memory from the GPU and to it."""
        pinned, on_gpu, times = self.gpu.pinned(len_bytes), self.gpu.allocate(len_bytes), []
        for move in ((pinned, on_gpu, len_bytes), (on_gpu, pinned, len_bytes)):
            self.gpu.copy([move])
            start = time.perf_counter()
            self.gpu.copy([move])
            times.append(time.perf_counter() - start)
        self.gpu.free(on_gpu)
        self.gpu.free_pinned(pinned)
        return times


class Blocks:
    """`count` blocks on the GPU, each of `pieces` pieces that lie apart, and as much room for others."""

    def __init__(self, bench, pieces, piece_bytes, count, gap_bytes=None):
        self.bench, self.gpu, self.pieces, self.piece_bytes, self.count = bench, bench.gpu, pieces, piece_bytes, count
        self.stride = piece_bytes + (gap_bytes if gap_bytes is not None else 16 if piece_bytes % 16 == 0 else 1)
        self.len_bytes = pieces * 2 * count * self.stride
        self.address = self.gpu.allocate(self.len_bytes)
        # Of a period that no stride is a multiple of.
        random_bytes = bench.random.randbytes(min(self.len_bytes, MIB + 7))
        self.content = bytearray(random_bytes * (self.len_bytes // len(random_bytes) + 1))[: self.len_bytes]
        parts = [(self.address + part * 2 * count * self.stride, self.stride, piece_bytes) for part in range(pieces)]
        self.layout = kvbm_cxl.BlockLayout(parts, 2 * count, device="cuda:0")
        self.block_bytes = pieces * piece_bytes

    def change(self):
        """Other bytes at each place, so that what arrives is of this round."""
        by = self.bench.random.randrange(1, min(self.len_bytes, MIB))
        self.content = self.content[by:] + self.content[:by]
        self.gpu.write(self.address, self.content)

    def at(self, part, block):
        return (part * 2 * self.count + block) * self.stride

    def block(self, block):
        starts = (self.at(part, block) for part in range(self.pieces))
        return b"".join(self.content[start : start + self.piece_bytes] for start in starts)

    def check(self, moved):
        """Blocks arrived at their new places, block -> place, and no other byte changed."""
        for part in range(self.pieces):
            for block, place in moved.items():
                source, to = self.at(part, block), self.at(part, place)
                self.content[to : to + self.piece_bytes] = self.content[source : source + self.piece_bytes]
        if self.gpu.read(self.address, self.len_bytes) != self.content:
            wrong("on the GPU after a pull")

    def there_and_back(self, cache, ns):
        """Publishes the blocks and pulls them to the room; the seconds of both."""
        keys, count = self.bench.keys(self.count), self.count
        places = list(range(count, 2 * count))
        self.bench.random.shuffle(places)
        self.change()
        start = time.perf_counter()
        stored = cache.publish_blocks(ns, keys, self.layout, range(count))
        published = time.perf_counter()
        found = cache.pull_blocks(ns, keys, self.layout, places)
        pulled = time.perf_counter()
        if stored != ["stored"] * count or found != [None] * count:
            raise SystemExit(f"blocks were not stored or not found: {stored[:4]} {found[:4]}")
        self.check(dict(enumerate(places)))
        cache.evict_all(ns, keys)
        return published - start, pulled - published

    def free(self):
        self.gpu.free(self.address)
