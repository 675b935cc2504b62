#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads through NIXL's UCX backend on request: the peer that `cxl-bench pool --ucx` measures against.

Two processes on this machine: the owner holds `working_set` bytes of ordinary memory, the reader (this one) reads from them into one
buffer, from place to place. Requests come on stdin, one per line, each answered by one line:

    read LEN COUNT           COUNT reads of LEN bytes, each from another place of the working set
    list PIECES LEN COUNT    COUNT reads of descriptor lists of PIECES pieces of LEN bytes, scattered over the working set
    quit

The answer is `ns TIME...`, the time of each read alone, or `error TEXT`. Every word of every read is compared with what the owner has
there, outside of the time; each 8-byte word of the working set is different. The first line printed is `ready DESCRIPTION`.
"""

import argparse
import multiprocessing
import os
import sys
import time

MULTIPLIER = 0x9E3779B97F4A7C15


def words(numpy, first, count):
    """What the owner has in words `first` to `first + count - 1`."""
    with numpy.errstate(over="ignore"):
        return (numpy.arange(first, first + count, dtype=numpy.uint64) + numpy.uint64(1)) * numpy.uint64(MULTIPLIER)


def agent_of(name):
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def own(pipe, working_set):
    """The owner: fills its memory, registers it, and waits until the reader is gone."""
    import numpy

    try:
        memory = words(numpy, 0, working_set // 8)
        agent = agent_of("owner")
        agent.register_memory([(memory.ctypes.data, working_set, 0, "")], "DRAM")
        pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
        pipe.recv()
    except EOFError:
        pass
    except Exception as error:  # The reader reports it: this process has no other way to.
        pipe.send((f"{type(error).__name__}: {error}", None))
    os._exit(0)


class Reader:
    """One buffer, and reads into it."""

    def __init__(self, working_set, most_bytes):
        import numpy

        self.numpy = numpy
        self.working_set = working_set
        self.pipe, theirs = multiprocessing.Pipe()
        self.owner = multiprocessing.get_context("spawn").Process(target=own, args=(theirs, working_set), daemon=True)
        self.owner.start()
        theirs.close()
        if not self.pipe.poll(120):
            raise RuntimeError("the owner did not answer within 120 s")
        metadata, self.base = self.pipe.recv()
        if self.base is None:
            raise RuntimeError(metadata)
        self.agent = agent_of("reader")
        self.buffer = numpy.ones(most_bytes // 8, dtype=numpy.uint64)
        self.agent.register_memory([(self.buffer.ctypes.data, most_bytes, 0, "")], "DRAM")
        self.peer = self.agent.add_remote_agent(metadata)
        self.next = 0
        self.at = 0

    def place(self, length):
        """Another stretch of the working set, far from the last one."""
        count = self.working_set // length
        self.next = (self.next + 2477) % count
        return self.next * length

    def read(self, pieces, length):
        """One read of `pieces` pieces; returns its time in ns. The bytes are compared."""
        places = [self.place(length) for _ in range(pieces)]
        # Where a block goes is seldom in a cache: reads go to places of the buffer in turn.
        total = pieces * length
        if self.at + total > self.buffer.nbytes:
            self.at = 0
        at, self.at = self.at, self.at + total
        local = [(self.buffer.ctypes.data + at + index * length, length, 0) for index in range(pieces)]
        remote = [(self.base + place, length, 0) for place in places]
        local = self.agent.get_xfer_descs(local, "DRAM")
        remote = self.agent.get_xfer_descs(remote, "DRAM")
        handle = self.agent.initialize_xfer("READ", local, remote, self.peer)
        start = time.perf_counter_ns()
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        taken = time.perf_counter_ns() - start
        self.agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"a read ended in state {state}")
        for index, place in enumerate(places):
            found = self.buffer[(at + index * length) // 8 : (at + (index + 1) * length) // 8]
            if not (found == words(self.numpy, place // 8, length // 8)).all():
                raise RuntimeError(f"a read of {length} bytes at {place} gave other bytes")
        return taken

    def answer(self, line):
        """Does what a request says."""
        match line.split():
            case ["read", length, count]:
                pieces, length, count = 1, int(length), int(count)
            case ["list", pieces, length, count]:
                pieces, length, count = int(pieces), int(length), int(count)
            case _:
                raise ValueError(f"unknown request {line!r}")
        if length % 8 or pieces * length > self.buffer.nbytes or length > self.working_set:
            raise ValueError(f"{pieces} pieces of {length} bytes do not fit")
        return [self.read(pieces, length) for _ in range(count)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--working-set-mib", type=int, default=512)
    parser.add_argument("--most-mib", type=int, default=64, help="size of the buffer that is read into")
    options = parser.parse_args()
    # NIXL and UCX write to stdout; the answers go to what stdout was.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        reader = Reader(options.working_set_mib << 20, options.most_mib << 20)
    except Exception as error:
        print(f"error {type(error).__name__}: {error}".replace("\n", " "), file=out)
        return 1
    print(f"ready NIXL UCX reads between two processes, working set {options.working_set_mib} MiB", file=out)
    for line in sys.stdin:
        if line.strip() == "quit":
            break
        try:
            print("ns", *reader.answer(line), file=out)
        except Exception as error:
            print(f"error {type(error).__name__}: {error}".replace("\n", " "), file=out)
    return 0


if __name__ == "__main__":
    status = main()
    # The backends' threads have nothing to finish, and some of their destructors wait for peers that are gone.
    sys.stdout.flush()
    os._exit(status)
