# SPDX-License-Identifier: Apache-2.0
"""The other process of the tests, which answers the calls of `Calls`."""

import itertools
import os
import sys

import kvbm_cxl
import lines
import pools
from kvbm_cxl import l2


class Calls:
    def __init__(self, spec, **options):
        self.pool = pools.opened(spec, **options)
        self.cache = self.pool.cache()
        self.pins = []
        self.kept = []

    def publish(self, model, seed, count, len_bytes):
        """Publishes a chain, block by block."""
        ns, keys = pools.namespace(model), pools.chain(count, seed)
        return [self.cache.publish(ns, key, pools.payload(key, len_bytes)) for key in keys]

    def stream(self, model, seed, len_bytes):
        """Publishes blocks of a chain without end, in batches; says after each how many are there."""
        ns, done, batch = pools.namespace(model), 0, 16
        keys = pools.chain(4096, seed)
        blocks = bytearray(batch * len_bytes)
        layout = kvbm_cxl.BlockLayout.of_tensors([memoryview(blocks).cast("B", (batch, len_bytes))])
        while True:
            some = keys[done % 4096 :][:batch]
            for place, key in enumerate(some):
                blocks[place * len_bytes : (place + 1) * len_bytes] = pools.payload(key, len_bytes)
            self.cache.publish_blocks(ns, some, layout, range(len(some)))
            done += len(some)
            lines.say(done)

    def demote_stream(self, model, seed, len_bytes, target):
        """Publishes a chain without end, and keeps what is about to go in a store."""
        level = l2.Level2(l2.open_store(target), max_bytes=1 << 40)
        l2.Demoter(lambda work: work(self.cache), level, period_s=0.002)
        ns = pools.namespace(model)
        for key in itertools.cycle(pools.chain(4096, seed)):
            self.cache.publish(ns, key, pools.payload(key, len_bytes))

    def promote(self, model, seed, count, target):
        """Brings a chain back from a store, again and again."""
        ns, keys = pools.namespace(model), pools.chain(count, seed)
        level = l2.Level2(l2.open_store(target), max_bytes=1 << 40)
        while True:
            if promotion := level.promote(lambda work: work(self.cache), [bytes(ns)], keys):
                promotion.wait(60)
            self.cache.clear(ns)

    def right(self, model, seed, count, len_bytes):
        """How many blocks of a chain are hits, all with the right bytes."""
        ns, hits = pools.namespace(model), 0
        for key in pools.chain(count, seed):
            into = bytearray(len_bytes)
            if self.cache.pull(ns, key, into):
                assert bytes(into) == pools.payload(key, len_bytes)
                hits += 1
        return hits

    def pin(self, model, seed, count):
        self.pins.append(self.cache.pin_chain(pools.namespace(model), pools.chain(count, seed)))
        return len(self.pins[-1])

    def release(self):
        for pins in self.pins:
            pins.release()
        return self.cache.pinned()

    def store(self, name, text):
        memory = self.pool.allocate(len(text), name=name)
        memoryview(memory)[:] = text.encode()
        memory.flush()
        self.kept.append(memory)
        return memory.offset

    def pin_and_release(self, model, seed, count):
        """Does both without end."""
        ns, keys = pools.namespace(model), pools.chain(count, seed)
        lines.say("begun")
        while True:
            self.cache.pin_chain(ns, keys).release()

    def free(self):
        """Gives back what it stored last; what went wrong, if anything, and the name that it has still."""
        try:
            self.kept[-1].free()
        except kvbm_cxl.CxlError as error:
            return [error.kind, self.kept[-1].name]
        del self.kept[-1]
        return ["freed", None]

    def load(self, name):
        memory = self.pool.find(name)
        memory.flush()
        return bytes(memory).decode()

    def queue(self, driver, count):
        """Publishes the first two blocks of a chain from a GPU; then queues the rest, and a pull of those, on a GPU that does nothing."""
        import fake_gpu
        import test_native_cuda as on_gpu

        self.cache.close()
        self.cache = self.pool.cache(checksums=False)
        self.cache.open_gpu(0)
        keys, gpu = pools.chain(count), fake_gpu.Gpu(driver)
        places = on_gpu.layout([gpu.allocate(part) for part in on_gpu.parts(keys, range(count))])
        stored = self.cache.publish_blocks(on_gpu.NS, keys[:2], places, range(2))
        gpu.set("is_stuck", 1)
        self.kept += [
            gpu,
            self.cache.queue_publish(on_gpu.NS, keys[2:], places, range(2, count), stream=0),
            self.cache.queue_pull(on_gpu.NS, keys[:2], places, range(2), stream=0),
        ]
        return stored, self.cache.pinned()

    def slot(self):
        return self.pool.slot

    def incarnation(self):
        return self.pool.incarnation


def main():
    options = {"join_timeout_ms": int(os.environ["PEER_JOIN_TIMEOUT_MS"])} if "PEER_JOIN_TIMEOUT_MS" in os.environ else {}
    calls = lines.serve(lambda: Calls(sys.argv[1], **options))
    calls.kept.clear()
    calls.pool.close()


if __name__ == "__main__":
    main()
