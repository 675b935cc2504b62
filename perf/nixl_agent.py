# SPDX-License-Identifier: Apache-2.0
"""One process of `make perf-nixl`: a NIXL agent whose transfers are timed one by one. Driven by perf/nixl_transfers.py through a socket.

A buffer is a working set beyond the last-level cache, cut into slots of the length in question. Each transfer goes from slots to slots that
were not used lately, on both sides alike, so that none finds its bytes warm because it moved them just before. A slot's bytes tell of their
place, so what a transfer left can be told from what was there.

Pages are another thing: in a virtual machine the first access to one that has rested for some seconds was seen to wait for 0.05 to
0.3 ms, without a page fault that the system counts. So a byte of every page is read before anything is timed.
"""

import ctypes
import mmap
import os
import time

import numpy
from pattern import pattern
from worker import Worker, serve


def rows(base, slots, length, device=0):
    """Descriptors of these slots."""
    made = numpy.zeros((len(slots), 3), numpy.uint64)
    made[:, 0] = numpy.asarray(slots, numpy.uint64) * numpy.uint64(length) + numpy.uint64(base)
    made[:, 1], made[:, 2] = length, device
    return made


class Agent(Worker):
    """The methods of the tests' worker, and those that measure."""

    def file(self, key, path, len_bytes, seed):
        """A file in memory instead of a buffer, for backend POSIX: filled, registered; returns its descriptor."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(descriptor, len_bytes)
        view = numpy.frombuffer(mmap.mmap(descriptor, len_bytes), numpy.uint8)
        view[:] = pattern(seed, len_bytes)
        self.files = {**getattr(self, "files", {}), key: view}
        self.now.register_memory([(0, len_bytes, descriptor, "")], "FILE", backends=[self.backend])
        return descriptor

    def file_view(self, key):
        """The bytes of a file; None if the key is that of a buffer."""
        return getattr(self, "files", {}).get(key)

    def touch(self, key):
        """Reads a byte of every page of a buffer or file."""
        view = self.file_view(key)
        if view is None:
            view = self.mapped(self.buffers[key])
        return int(view[:: mmap.PAGESIZE].sum(dtype=numpy.uint64))

    @staticmethod
    def mapped(buffer):
        """The bytes of a buffer as they are mapped here; of the pool, whatever this processor's caches hold of them."""
        if buffer.where != "pool":
            return buffer.view
        return numpy.ctypeslib.as_array((ctypes.c_uint8 * buffer.len_bytes).from_address(buffer.address))

    def measure(self, operation, length, pieces, count, local, remote, peer):
        """The times in ns of `count` transfers of `pieces` slots each.

        `local` is (key, slots), `remote` (address, slots, memory, device); there are pieces * count slots on either side.
        """
        key, slots = local
        address, far, memory, device = remote
        handles = []
        for first in range(0, pieces * count, pieces):
            near = rows(self.buffers[key].address, slots[first : first + pieces], length)
            there = rows(address, far[first : first + pieces], length, device)
            descriptors = self.now.get_xfer_descs(near, "DRAM"), self.now.get_xfer_descs(there, memory)
            handles.append(self.now.initialize_xfer(operation, *descriptors, peer, b"", [self.backend]))
        bound = self.now.agent
        post, state, clock = bound.postXferReq, bound.getXferStatus, time.perf_counter_ns
        times = []
        from nixl._bindings import NIXL_IN_PROG, NIXL_SUCCESS

        for handle in handles:
            number = handle._handle
            start = clock()
            status = post(number, b"")
            # Taken before the answer is looked at: comparing these objects takes Python a tenth of a microsecond.
            end = clock()
            while status == NIXL_IN_PROG:
                status = state(number)
                end = clock()
            times.append(end - start)
            if status != NIXL_SUCCESS:
                raise RuntimeError(f"a {operation} of {pieces} x {length} bytes ended with {status}")
        for handle in handles:
            handle.release()
        return times

    def verify(self, key, length, slots, seed, sources):
        """"" if slot slots[i] of a buffer or file holds slot sources[i] of the buffer of `seed`, for all i, else which does not."""
        view = self.file_view(key)
        buffer = None if view is not None else self.buffers[key]
        for slot, source in zip(slots.tolist(), sources.tolist(), strict=True):
            if view is not None:
                found = view[slot * length : (slot + 1) * length]
            elif buffer.where == "pool":
                found = numpy.empty(length, numpy.uint8)
                self.pool.copy_out(found, buffer.address + slot * length)
            else:
                found = buffer.view[slot * length : (slot + 1) * length]
            if not numpy.array_equal(found, pattern(seed, length, source * length)):
                return f"{key}: slot {slot} of {length} bytes does not hold slot {source} of seed {seed}"
        return ""


if __name__ == "__main__":
    serve(Agent())
