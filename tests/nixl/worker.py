# SPDX-License-Identifier: Apache-2.0
"""One NIXL agent in a process of its own, which does what the test asks through a socket: `worker.py FD`.

A request is (method, arguments, named arguments); the answer (True, result) or (False, kind of error, text).
"""

import faulthandler
import mmap
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import numpy
from pattern import differences, expected, expected_of_list, pattern
from pool_api import PoolError, PoolHandle

# Whether ordinary memory asks for huge pages, or has what the system gives on its own.
HUGE_PAGES = os.environ.get("TEST_HUGE_PAGES") == "1"


class Buffer:
    """Memory that is filled with the pattern of its seed. `view` is what this process sees of it."""

    def __init__(self, where, len_bytes, seed, pool, pool_file, offset):
        self.where, self.len_bytes, self.seed, self.pool = where, len_bytes, seed, pool
        if where == "heap":
            self.memory = mmap.mmap(-1, len_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if HUGE_PAGES:
                self.memory.madvise(mmap.MADV_HUGEPAGE)
            self.view = numpy.frombuffer(self.memory, numpy.uint8)
            self.address = self.view.ctypes.data
        elif where == "pool":  # A block of the C interface, at its address in this process.
            self.address = pool.alloc(len_bytes)
        else:  # A block that the test allocated, through a mapping of this program's own.
            with open(pool_file, "r+b") as file:
                self.memory = mmap.mmap(file.fileno(), 0)
            self.view = numpy.frombuffer(self.memory, numpy.uint8)[offset : offset + len_bytes]
            self.address = self.view.ctypes.data
        self.fill(seed)

    def fill(self, seed):
        """Writes the pattern of `seed` over all of it."""
        self.seed = seed
        if self.where == "pool":
            self.pool.copy_in(self.address, pattern(seed, self.len_bytes))
        else:
            self.view[:] = pattern(seed, self.len_bytes)

    def content(self):
        """What is in it now."""
        if self.where != "pool":
            return self.view
        data = numpy.empty(self.len_bytes, numpy.uint8)
        self.pool.copy_out(data, self.address)
        return data


class Worker:
    """The methods that a test can ask for."""

    def __init__(self):
        self.agents, self.buffers, self.registered, self.handles, self.pool, self.last = {}, {}, {}, {}, None, 0

    def hello(self):
        """Whose process this is."""
        return os.getpid()

    def open_pool(self, spec):
        """Opens a pool for the buffers of this program."""
        self.pool = PoolHandle(spec)

    def agent(self, name, backend, parameters=None, progress=True, telemetry=False):
        """Makes an agent with one backend; it is the one that the calls below mean. `progress`: with a thread of its own for that."""
        if backend == "CXL":
            import kvbm_cxl.nixl

            kvbm_cxl.nixl.enable()
        from nixl._api import nixl_agent, nixl_agent_config

        self.backend, self.name = backend, name
        self.now = nixl_agent(name, nixl_agent_config(enable_prog_thread=progress, capture_telemetry=telemetry, backends=[]))
        self.now.create_backend(backend, {key: str(value) for key, value in (parameters or {}).items()})
        self.agents[name] = self.now

    def use(self, name):
        """Lets the calls below mean another agent of this process."""
        self.now, self.name = self.agents[name], name

    def drop_agent(self, name):
        """Ends an agent: what was prepared with it goes first."""
        self.handles = {}
        if self.now is self.agents[name]:
            self.now = None
        del self.agents[name]

    def end_agent(self, name):
        """Ends an agent that nothing here was prepared with, as an application that lets go of it."""
        if self.now is self.agents[name]:
            self.now = None
        self.agents.pop(name)

    def parameters(self):
        """What the backend says of itself."""
        return self.now.get_backend_params(self.backend)

    def buffer(self, key, where, len_bytes, seed, pool_file=None, offset=None, register=True):
        """Makes a buffer, and registers it; returns its address."""
        self.buffers[key] = Buffer(where, len_bytes, seed, self.pool, pool_file, offset)
        if register:
            self.register(key)
        return self.buffers[key].address

    def register(self, key):
        buffer = self.buffers[key]
        self.registered[key] = self.now.register_memory([(buffer.address, buffer.len_bytes, 0, "")], "DRAM", backends=[self.backend])

    def deregister(self, key):
        self.now.deregister_memory(self.registered.pop(key), backends=[self.backend])

    def deregister_twice(self, key):
        """Registers a buffer once more, and deregisters both in one list; whether NIXL took that."""
        self.register(key)
        buffer = self.buffers[key]
        row = (buffer.address, buffer.len_bytes, 0, "")
        try:
            self.now.deregister_memory(self.now.get_reg_descs([row, row], "DRAM"), backends=[self.backend])
        except Exception as error:
            return type(error).__name__
        return "taken"

    def fill_pool(self):
        """Allocates all of the pool that this process can get."""
        self.blocks = []
        for len_bytes in (16 << 20, 1 << 20, 64 << 10, 4 << 10):
            while True:
                try:
                    self.blocks.append(self.pool.alloc(len_bytes))
                except PoolError:
                    break

    def empty_pool(self):
        """Frees what fill_pool() allocated."""
        for block in self.blocks:
            self.pool.free(block)

    def threads(self):
        """The names of the threads of this process."""
        return [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]

    def prepare_sides(self, local, remote, peer):
        """Prepared lists of both sides, for push()."""
        self.sides = [
            self.now.prep_xfer_dlist(agent, self.now.get_xfer_descs(numpy.asarray(rows, numpy.uint64), "DRAM"))
            for agent, rows in (("NIXL_INIT_AGENT", local), (peer, remote))
        ]

    def push(self, requests, timeout_s=30):
        """WRITEs of blocks of the prepared lists, (here, there, notification) each, all under way at once and released as they end, as
        vLLM's push worker does it: (state, bytes, descriptors) by NIXL's telemetry of each."""
        handles, ended = {}, {}
        for number, (here, there, notification) in enumerate(requests):
            here, there = (numpy.asarray(blocks, numpy.int32) for blocks in (here, there))
            handles[number] = self.now.make_prepped_xfer("WRITE", self.sides[0], here, self.sides[1], there, notif_msg=notification)
            self.now.transfer(handles[number])
        end = time.monotonic() + timeout_s
        while handles and time.monotonic() < end:
            for number, handle in list(handles.items()):
                if (state := self.now.check_xfer_state(handle)) == "PROC":
                    continue
                told = self.now.get_xfer_telemetry(handle) if state == "DONE" else None
                ended[number] = (state, told.totalBytes, told.descCount, told.xferDuration) if told else (state, 0, 0, 0)
                self.now.release_xfer_handle(handles.pop(number))
        return [ended.get(number, ("PROC", 0, 0, 0)) for number in range(len(requests))]

    def heartbeat(self, peer, message):
        """A notification as vLLM sends it: no backend is named."""
        self.now.send_notif(peer, notif_msg=message)

    def free(self, key):
        """Gives a block of the pool back."""
        self.pool.free(self.buffers.pop(key).address)

    def fill(self, key, seed):
        self.buffers[key].fill(seed)

    def check(self, key, pieces=()):
        """"" if the buffer holds its pattern with these pieces of others in it and nothing else, else what differs."""
        buffer = self.buffers[key]
        return differences(buffer.content(), expected(buffer.seed, buffer.len_bytes, pieces))

    def check_list(self, key, other, at, start, length):
        """The same for many pieces of one length of one other seed."""
        buffer = self.buffers[key]
        return differences(buffer.content(), expected_of_list(buffer.seed, buffer.len_bytes, other, at, start, length))

    def metadata(self):
        return self.now.get_agent_metadata()

    def add(self, metadata):
        name = self.now.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else name

    def remove(self, peer):
        self.now.remove_remote_agent(peer)

    def remove_if_known(self, peer):
        if self.now.check_remote_metadata(peer):
            self.now.remove_remote_agent(peer)

    def connect(self, peer):
        self.now.make_connection(peer, [self.backend])

    def prepare(self, operation, local, remote, peer, notification=b""):
        """A transfer request. `local` and `remote` have a row (address, length, 0) per descriptor."""
        local, remote = (self.now.get_xfer_descs(numpy.asarray(rows, numpy.uint64), "DRAM") for rows in (local, remote))
        handle = self.now.initialize_xfer(operation, local, remote, peer, notification, [self.backend])
        self.last += 1
        self.handles[self.last] = handle
        return self.last

    def prepare_blocks(self, operation, local, remote, peer, indices, notification=b""):
        """A request from two prepared lists: the blocks `indices` of both."""
        sides = [
            self.now.prep_xfer_dlist(agent, numpy.asarray(rows, numpy.uint64), "DRAM", [self.backend])
            for agent, rows in (("NIXL_INIT_AGENT", local), (peer, remote))
        ]
        indices = numpy.asarray(indices, numpy.int32)
        handle = self.now.make_prepped_xfer(operation, sides[0], indices, sides[1], indices, notification, [self.backend])
        self.last += 1
        self.handles[self.last] = handle
        self.handles[-self.last] = sides
        return self.last

    def post(self, handle, notification=b""):
        return self.now.transfer(self.handles[handle], notification)

    def state(self, handle):
        return self.now.check_xfer_state(self.handles[handle])

    def wait(self, handle, timeout_s=30):
        """The state of a posted transfer once it is not under way any more, or PROC at the deadline."""
        end = time.monotonic() + timeout_s
        while (state := self.state(handle)) == "PROC" and time.monotonic() < end:
            pass
        return state

    def release(self, handle):
        self.handles.pop(handle).release()
        for side in self.handles.pop(-handle, ()):
            side.release()

    def cost(self, handle):
        return self.now.estimate_xfer_cost(self.handles[handle])

    def transfer(self, operation, local, remote, peer, notification=b"", timeout_s=30, times=1):
        """Prepares, posts `times` times, each to its end, and releases; the last state."""
        handle = self.prepare(operation, local, remote, peer, notification)
        for _ in range(times):
            state = self.post(handle, notification)
            if state == "PROC":
                state = self.wait(handle, timeout_s)
            if state != "DONE":
                break
        if state != "PROC":
            self.release(handle)
        return state

    def give_up(self, operation, local, remote, peer):
        """Posts and releases at once: done or not, the request is gone when this returns."""
        handle = self.prepare(operation, local, remote, peer)
        self.post(handle)
        self.release(handle)

    def repeat_times(self, operation, local, remote, peer, times, words):
        """Posts one request `times` times, each with a notification of its own; the last state."""
        handle = self.prepare(operation, local, remote, peer, words)
        for turn in range(times):
            state = self.post(handle, words + str(turn).encode())
            if state == "PROC":
                state = self.wait(handle)
            if state != "DONE":
                return state
        self.release(handle)
        return state

    def repeat(self, operation, local, remote, peer, seconds, key=None, pieces=(), notification=b""):
        """Transfers over and over until one does not end well or the time is over: (how many did, last state, what was wrong).

        With `key`, a local buffer, every transfer that is DONE must have put `pieces` there; it is filled anew before each.
        """
        done, end = 0, time.monotonic() + seconds
        seed = self.buffers[key].seed if key else 0
        try:
            handle = self.prepare(operation, local, remote, peer, notification)
            while time.monotonic() < end:
                if key:
                    self.fill(key, seed)
                state = self.post(handle, notification + str(done).encode() if notification else b"")
                if state == "PROC":
                    state = self.wait(handle, 20)
                if state != "DONE":
                    return done, state, ""
                if key and (wrong := self.check(key, pieces)):
                    return done, "WRONG", wrong
                done += 1
            self.release(handle)
        except Exception as error:
            return done, type(error).__name__, str(error)
        return done, "DONE", ""

    def notify(self, peer, message):
        # The wrapper's own way of naming a backend does not fit what it calls: it passes one where a list is due.
        self.now.agent.genNotif(peer, message, [self.now.backends[self.backend]])

    def notifications(self, count, timeout_s=20, quiet_s=0.0):
        """Waits for `count` notifications, or the deadline, and then `quiet_s` for any that are too many: {agent: [message]}."""
        found, end = {}, time.monotonic() + timeout_s
        quiet_end = None
        while time.monotonic() < (end if quiet_end is None else quiet_end):
            for agent, messages in self.now.get_new_notifs([self.backend]).items():
                agent = agent.decode() if isinstance(agent, bytes) else agent
                found.setdefault(agent, []).extend(messages)
            if quiet_end is None and sum(map(len, found.values())) >= count:
                quiet_end = time.monotonic() + quiet_s
            time.sleep(0.0005)
        return found

    def query(self, rows, memory):
        return self.now.query_memory(rows, self.backend, memory)

    def cpu_s(self, seconds):
        """Processor time that this process uses while it does nothing for `seconds`."""
        start = time.process_time()
        time.sleep(seconds)
        return time.process_time() - start


def serve(worker):
    """Does what comes through the socket until it is closed or the other side says that it is over."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    connection = Connection(int(sys.argv[1]))
    while True:
        try:
            method, arguments, named = connection.recv()
        except EOFError:
            break
        if method == "quit":
            # As an application ends: the interpreter destroys the agents.
            worker.handles, worker.now, worker.agents = {}, None, {}
            connection.send((True, None))
            break
        try:
            answer = (True, getattr(worker, method)(*arguments, **named))
        except Exception as error:
            answer = (False, type(error).__name__, f"{error}\n{traceback.format_exc()}")
        connection.send(answer)


if __name__ == "__main__":
    serve(Worker())
