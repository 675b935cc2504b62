# SPDX-License-Identifier: Apache-2.0
"""The program that runs in a host while something is done to that host: a peer whose work counts errors as outcomes and goes on."""

import ctypes
import os

import peer
import pools
from pool_api import PoolError

FENCED, TIMEOUT = -6, -5
MADV_HWPOISON = 100
PAGE_BYTES = 4096


class Calls(peer.Calls):
    """Outcomes of blocks may be the names of errors; a counter is counted up also by a host that was fenced meanwhile."""

    def _publish(self, ns, keys, place, len_bytes):
        try:
            return super()._publish(ns, keys, place, len_bytes)
        except pools.kvbm_cxl.CxlError as error:
            return type(error).__name__

    def _pull(self, ns, key, len_bytes):
        try:
            return super()._pull(ns, key, len_bytes)
        except pools.kvbm_cxl.CxlError as error:
            return type(error).__name__

    def start_counting(self, name, lock, offset):
        """Adds 1 to a counter over and over; progress: times, repairs, and how often a call said that this host was fenced or timed out."""
        locks = self._locks()
        address = locks.address(offset, peer.COUNTER_BYTES)

        def step(loop, _):
            try:
                recovered = locks.acquire(lock, peer.LOCK_TIMEOUT_MS)
            except PoolError as error:
                loop.count({FENCED: "fenced", TIMEOUT: "timeouts"}[error.status])
                return
            now = int.from_bytes(locks.read(address, 8), "little")
            locks.write(address, (now + 1).to_bytes(8, "little"))
            loop.count("times")
            loop.count("repairs", int(recovered))
            try:
                if recovered:
                    locks.repaired(lock)
                locks.release(lock)
            except PoolError as error:
                loop.count({FENCED: "fenced"}[error.status])

        self.loops[name] = peer.Loop(step)

    def incarnation(self):
        """This host's incarnation."""
        return self.pool.incarnation

    def cells(self, model, seed, count):
        """The cell of each of the first blocks of a chain; None where it is not there."""
        found = [self.cache.lookup(pools.namespace(model), key) for key in self._chain(seed, count)]
        return [block and block.cell for block in found]

    def poison(self, offset):
        """Has the kernel take a page of the pool for damaged, and this process be told as if it had just touched it."""
        device = os.path.basename(self.spec)
        with open("/proc/self/maps", encoding="utf-8") as maps:
            base = next(int(line.split("-")[0], 16) for line in maps if line.rstrip().endswith(device))
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        if libc.madvise(base + offset - offset % PAGE_BYTES, PAGE_BYTES, MADV_HWPOISON):
            raise OSError(ctypes.get_errno(), "madvise")


def main():
    """Answers with these methods."""
    peer.main(Calls)
