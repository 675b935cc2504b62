# SPDX-License-Identifier: Apache-2.0
"""The program that runs in a host of the lab, `main` with the arguments SPEC OPTIONS; `lines.py` says how it is asked.

Beside what the peer of the Python package's tests can do: locks and a counter in the pool, and work in the background.
"""

import itertools
import json
import sys
import threading

import lines
import pool_peer
import pools
from pool_api import PoolHandle

COUNTER_BYTES = 64
LOCK_TIMEOUT_MS = 60_000


class Loop:
    """Work in the background, over and over until it is stopped; `progress` is what it has done so far."""

    def __init__(self, step):
        self.progress, self.step, self.ending = {}, step, threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def count(self, what, by=1):
        """Adds to the progress."""
        self.progress[what] = self.progress.get(what, 0) + by

    def _run(self):
        try:
            for number in itertools.count():
                if self.ending.is_set():
                    return
                self.step(self, number)
        except Exception as error:
            self.progress["raised"] = f"{type(error).__name__}: {error}"

    def stop(self):
        """What it had done in the end."""
        self.ending.set()
        self.thread.join()
        return self.progress


class Calls(pool_peer.Calls):
    """What a test can ask for. Blocks are those of `pools`: a chain is named by its seed, and so are the bytes of its blocks."""

    def __init__(self, spec, **options):
        super().__init__(spec, **options)
        self.spec, self.options, self.handle, self.loops, self.chains = spec, options, None, {}, {}

    def outcomes(self, model, seed, count, len_bytes, first=0):
        """Pulls blocks of a chain: for each "hit" with the right bytes, "wrong", or why it was a miss."""
        return [self._pull(pools.namespace(model), key, len_bytes) for key in self._chain(seed, first + count)[first:]]

    def publish_some(self, model, seed, first, count, len_bytes):
        """Publishes blocks of a chain; for each its outcome, or the kind of the error."""
        keys = self._chain(seed, first + count)
        return [self._publish(pools.namespace(model), keys, place, len_bytes) for place in range(first, first + count)]

    def chain_length(self, model, seed, count):
        """How many leading blocks of a chain a lookup finds."""
        return self.cache.lookup_chain(pools.namespace(model), self._chain(seed, count))

    def usage(self):
        """Cells of this process: owned, free, ready, quarantined."""
        usage = self.cache.usage()
        return {name: getattr(usage, name) for name in ("owned", "free", "ready", "quarantined")}

    def clear(self):
        """Evicts all blocks of the pool that are not pinned."""
        return self.cache.clear_all()

    def _chain(self, seed, count):
        if len(self.chains.get(seed, ())) < count:
            self.chains[seed] = pools.chain(2 * count, seed)
        return self.chains[seed][:count]

    def _publish(self, ns, keys, place, len_bytes):
        parent = keys[place - 1] if place else None
        try:
            return self.cache.publish(ns, keys[place], pools.payload(keys[place], len_bytes), parent=parent)
        except pools.kvbm_cxl.FullError:
            return "full"

    def _pull(self, ns, key, len_bytes):
        into = bytearray(len_bytes)
        result = self.cache.pull(ns, key, into)
        if not result:
            return result.reason
        return "hit" if bytes(into) == pools.payload(key, len_bytes) else "wrong"

    # Locks, and a counter that one of them protects.

    def _locks(self):
        if self.handle is None:
            self.handle = PoolHandle(self.spec, timeout_ms=LOCK_TIMEOUT_MS, suspect_ms=self.options.get("suspect_ms", pools.PATIENT_MS))
        return self.handle

    def new_counter(self):
        """A lock, and the offset of a counter that stands at 0."""
        locks = self._locks()
        address = locks.alloc(COUNTER_BYTES)
        locks.write(address, bytes(COUNTER_BYTES))
        return [locks.new_lock(LOCK_TIMEOUT_MS), locks.offset(address)]

    def count(self, lock, offset, times):
        """Adds 1 to a counter, under its lock, so many times; how often a repair was due."""
        return sum(self._count_once(lock, offset) for _ in range(times))

    def counted(self, lock, offset):
        """Where a counter stands."""
        locks = self._locks()
        recovered = locks.acquire(lock, LOCK_TIMEOUT_MS)
        try:
            return int.from_bytes(locks.read(locks.address(offset, COUNTER_BYTES), 8), "little")
        finally:
            if recovered:
                locks.repaired(lock)
            locks.release(lock)

    def acquire(self, lock, timeout_ms=LOCK_TIMEOUT_MS):
        """Takes a lock and keeps it; whether a repair is due."""
        return self._locks().acquire(lock, timeout_ms)

    def give_back(self, lock, repaired=True):
        """Releases a lock that `acquire` took."""
        if repaired:
            self.handle.repaired(lock)
        self.handle.release(lock)

    def _count_once(self, lock, offset):
        locks = self._locks()
        address = locks.address(offset, COUNTER_BYTES)
        # A counter is one word: the last holder of the lock left it whole when it died.
        recovered = locks.acquire(lock, LOCK_TIMEOUT_MS)
        if recovered:
            locks.repaired(lock)
        now = int.from_bytes(locks.read(address, 8), "little")
        locks.write(address, (now + 1).to_bytes(8, "little"))
        locks.release(lock)
        return recovered

    # Work in the background.

    def start_publishing(self, name, model, seed, len_bytes, count=1 << 20):
        """Publishes a chain from its beginning to `count` blocks and over again; progress: outcomes."""
        ns = pools.namespace(model)

        def step(loop, number):
            loop.count(self._publish(ns, self._chain(seed, number % count + 1), number % count, len_bytes))

        self.loops[name] = Loop(step)

    def start_pulling(self, name, model, seed, len_bytes, count):
        """Pulls the first blocks of a chain, over and over; progress: outcomes, of which "wrong" must never be one."""
        ns, keys = pools.namespace(model), self._chain(seed, count)
        self.loops[name] = Loop(lambda loop, number: loop.count(self._pull(ns, keys[number % count], len_bytes)))

    def start_counting(self, name, lock, offset):
        """Adds 1 to a counter over and over; progress: times and repairs."""

        def step(loop, _):
            loop.count("repairs", int(self._count_once(lock, offset)))
            loop.count("times")

        self.loops[name] = Loop(step)

    def progress(self, name):
        """What work in the background has done so far."""
        return dict(self.loops[name].progress)

    def stop(self, name):
        """Ends it; what it had done."""
        return self.loops.pop(name).stop()

    def leave(self):
        """Leaves the pool, as a program that ends does."""
        for name in list(self.loops):
            self.stop(name)
        if self.handle is not None:
            self.handle.close()
        self.kept.clear()
        self.pool.close()


def main(kind=Calls):
    """Answers with the methods of `kind`."""
    lines.serve(lambda: kind(sys.argv[1], **json.loads(sys.argv[2]))).leave()
