# SPDX-License-Identifier: Apache-2.0
"""Blocks in the order of a stream: published when a step has been waited for, or after it in its stream. Used by gpu.py.

A step computes the pages of its blocks layer by layer: memory of the GPU is set again and again, the page last.
`step_publish_waited_over_queued` is the time of a step with its publish that waits for the step first, by that with `queue_publish`; above
1 the latter is faster. `step_pull_waited_over_queued` is the same for a pull and a step after it.
`queue_call_share` is the part of a step with its publish that the call takes of the caller's time.
"""

import ctypes
import statistics
import struct
import time
from types import SimpleNamespace

import kvbm_cxl
from gpu_bench import ratio, say, wrong

# Of Llama 3.1 8B: 32 layers, of each 64 KiB in a block of 16 tokens.
LAYERS, PAGE_BYTES, COUNT = 32, 64 << 10, 32
# What a layer sets besides its pages, in bytes and times: about a millisecond of an H100.
WORK_BYTES, WORK_TIMES = 256 << 20, 8


class Step:
    """The blocks of a step in memory of the GPU, and the work that computes them."""

    def __init__(self, bench, layers, count, work_bytes):
        self.gpu, self.layers, self.count, self.work_bytes = bench.gpu, layers, count, work_bytes
        self.stream = SimpleNamespace(cuda_stream=bench.gpu.stream.value)
        self.addresses = [self.gpu.allocate(count * PAGE_BYTES) for _ in range(layers)]
        self.work = self.gpu.allocate(work_bytes)
        self.layout = kvbm_cxl.BlockLayout([(at, PAGE_BYTES, PAGE_BYTES) for at in self.addresses], count, device="cuda:0")
        self.block_bytes, self.number = layers * PAGE_BYTES, 0

    def word(self, layer, block):
        return (self.number << 16 | layer << 8 | block) * 2654435761 & 0xFFFFFFFF

    def _set(self, address, word, len_bytes):
        self.gpu("cuMemsetD32Async", ctypes.c_uint64(address), ctypes.c_uint(word), ctypes.c_size_t(len_bytes // 4), self.gpu.stream)

    def keep_busy(self):
        """Gives the stream the work of a layer besides its pages."""
        for _ in range(WORK_TIMES):
            self._set(self.work, self.number, self.work_bytes)

    def compute(self, layer):
        """Gives the stream the work of a layer."""
        self.keep_busy()
        for block in range(self.count):
            self._set(self.addresses[layer] + block * PAGE_BYTES, self.word(layer, block), PAGE_BYTES)

    def compute_all(self):
        for layer in range(self.layers):
            self.compute(layer)

    def block(self, block):
        """What the step computes for a block."""
        return b"".join(struct.pack("<I", self.word(layer, block)) * (PAGE_BYTES // 4) for layer in range(self.layers))


def _publish(way, cache, ns, keys, step):
    """Computes and publishes the blocks; the seconds of the caller's call, where there is one that returns at once."""
    ids = range(step.count)
    step.compute_all()
    if way == "waited":
        step.gpu.wait()
        return cache.publish_blocks(ns, keys, step.layout, ids), 0.0
    start = time.perf_counter()
    queued = cache.queue_publish(ns, keys, step.layout, ids, stream=step.stream)
    call_s = time.perf_counter() - start
    return queued.wait(), call_s


def _pull(way, cache, ns, keys, step):
    """Pulls the blocks and gives the stream a layer's work behind them."""
    if way == "waited":
        found = cache.pull_blocks(ns, keys, step.layout, range(step.count))
        step.keep_busy()
    else:
        queued = cache.queue_pull(ns, keys, step.layout, range(step.count), stream=step.stream)
        step.keep_busy()
        found = queued.wait()
    step.gpu.wait()
    return found


def measure(bench):
    """Every byte of every block is compared outside of the times."""
    step = Step(bench, bench.sized(LAYERS, 2), bench.sized(COUNT, 2), bench.sized(WORK_BYTES, 4096))
    ns, times, ways = bench.namespace("steps"), {}, ("waited", "queued")
    bench.format(step.block_bytes)
    with kvbm_cxl.Pool(bench.spec) as pool, pool.cache(checksums=False) as cache:
        cache.open_gpu(0)
        for number in range(bench.rounds + 1):
            for way in ways:
                step.number, keys = step.number + 1, bench.keys(step.count)
                start = time.perf_counter()
                stored, call_s = _publish(way, cache, ns, keys, step)
                took_s = time.perf_counter() - start
                into = bytearray(step.block_bytes)
                for block, key in enumerate(keys):
                    if stored[block] != "stored" or not cache.pull(ns, key, into) or into != step.block(block):
                        wrong(f"of a block that was published {way}")
                for layer in range(step.layers):
                    step.gpu.write(step.addresses[layer], bytes(step.count * PAGE_BYTES))
                start = time.perf_counter()
                found = _pull(way, cache, ns, keys, step)
                pull_s = time.perf_counter() - start
                if number:  # The first round opens the engine, and touches the memory.
                    for name, seconds in (("publish", took_s), ("call", call_s), ("pull", pull_s)):
                        times.setdefault((name, way), []).append(seconds)
                pages = [step.gpu.read(address, step.count * PAGE_BYTES) for address in step.addresses]
                for block, miss in enumerate(found):
                    at = block * PAGE_BYTES
                    if miss is not None or b"".join(page[at : at + PAGE_BYTES] for page in pages) != step.block(block):
                        wrong(f"of a block that was pulled {way}")
                cache.evict_all(ns, keys)
    medians = {key: statistics.median(found) for key, found in times.items()}
    rates = (f"{way} {1e3 * medians['publish', way]:.2f} ms" for way in ways)
    say(f"a step of {step.layers} layers with the publish of {step.count} blocks: {', '.join(rates)}")
    ratio("step_publish_waited_over_queued", medians["publish", "waited"] / medians["publish", "queued"])
    ratio("step_pull_waited_over_queued", medians["pull", "waited"] / medians["pull", "queued"])
    ratio("queue_call_share", medians["call", "queued"] / medians["publish", "queued"])
