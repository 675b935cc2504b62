# SPDX-License-Identifier: Apache-2.0
"""Hosts on one pool, with one backend, one wheel and one kind of memory."""

import itertools
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy
from hosts import SUSPECT_MS, Host
from pool_api import FORMAT_COHERENT, PoolHandle, format_pool
from wheels import ROOT

MIB = 1 << 20
EMULATED = "emulated:seed={seed},noise=4"
# How each host sees the pool. Under the emulator each process has its own view of it, and whole lines are written back. Apart: the pool's
# metadata lies on another device.
MEMORY = {"plain": None, "emulated": EMULATED, "coherent": None, "apart": None, "apart-emulated": EMULATED}


class Cluster:
    """Makes hosts, and agents and buffers on them; ends everything when left."""

    def __init__(self, folder, backend, wheel, memory="plain", pool_mib=256):
        self.folder = Path(tempfile.mkdtemp(prefix="pool-", dir=folder))
        self.backend, self.wheel, self.memory = backend, wheel, memory
        self.hosts, self.names, self.seeds, self.handle = [], itertools.count(1), itertools.count(1), None
        # What CXL_POOL says, and the file that the pool's blocks lie in: how far before their place in the pool.
        self.pool_file, self.pool, self.shift = self.folder / "pool", str(self.folder / "pool"), 0
        # This process is a host too, so that a manager serves whichever workers come and go.
        os.environ["CXL_MACHINE_ID"], os.environ["CXL_STATE_DIR"] = "the test", str(self.folder / "state-test")
        os.environ["CXL_SUSPECT_MS"] = str(SUSPECT_MS)
        if backend == "CXL":
            flags = FORMAT_COHERENT if memory == "coherent" else 0
            if memory.startswith("apart"):
                self.pool += f",metadata={self.folder / 'metadata'}"
                format_pool(f"{self.pool},size={pool_mib}M,metadata_size={pool_mib}M", flags)
                self.shift = self._metadata_bytes()
            else:
                format_pool(f"{self.pool},size={pool_mib}M", flags)
            self.handle = PoolHandle(self.pool)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # While the hosts live: a lock that one of them has is not waited for until it counts as dead.
        try:
            if self.handle:
                self.handle.close()
        finally:
            for host in self.hosts:
                host.discard()
        shutil.rmtree(self.folder, ignore_errors=True)

    def host(self, name=None, parameters=None, environment=None, agent=True, machine=None):
        """A process with an agent of its own."""
        environment = dict(environment or {})
        if self.backend == "CXL":
            environment.setdefault("CXL_POOL", self.pool)
            if MEMORY[self.memory]:
                environment["CXL_COHERENCE"] = MEMORY[self.memory].format(seed=len(self.hosts) + 1)
        host = Host(self.folder, self.wheel, environment, machine)
        self.hosts.append(host)
        host.name = name or f"agent-{next(self.names)}"
        host.opened = False
        if agent:
            host.agent(host.name, self.backend, parameters)
        return host

    def buffer(self, host, where, len_bytes, register=True):
        """A buffer with a seed of its own in a host: `Side`. A "file" is a block that this process allocates and the host maps by itself.

        Under the emulator a process has one view of the pool, and that is the plugin's: there "pool" means "file".
        """
        key, seed = f"buffer-{next(self.seeds)}", next(self.seeds)
        offset = None
        if where == "file" or (where == "pool" and MEMORY[self.memory]):
            where, offset = "file", self.block(len_bytes)
        elif where == "pool" and not host.opened:
            host.open_pool(self.pool)
            host.opened = True
        in_file = None if offset is None else offset - self.shift
        address = host.buffer(key, where, len_bytes, seed, str(self.pool_file), in_file, register)
        return Side(host, key, seed, address, len_bytes, offset)

    def _metadata_bytes(self):
        command = [str(ROOT / "target" / "release" / "cxlctl"), "--pool", self.pool, "--json", "info"]
        return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)["geometry"]["metadata_bytes"]

    def give_back(self, side):
        """Frees the block of a buffer in a "file", whose process is gone."""
        self.handle.free(self.handle.address(side.offset, side.len_bytes))

    def block(self, len_bytes):
        """The offset of a block of the pool that this process has allocated."""
        return self.handle.offset(self.handle.alloc(len_bytes))

    def introduce(self, one, other):
        """Lets two agents know of each other all that they have registered."""
        for here, there in ((one, other), (other, one)):
            here.add(there.metadata())


class Side:
    """A buffer of a host."""

    def __init__(self, host, key, seed, address, len_bytes, offset=None):
        self.host, self.key, self.seed, self.address, self.len_bytes, self.offset = host, key, seed, address, len_bytes, offset

    def rows(self, places, length):
        """Descriptors of `length` bytes at these places of the buffer."""
        places = numpy.asarray(places, numpy.uint64)
        rows = numpy.zeros((len(places), 3), numpy.uint64)
        rows[:, 0] = places + numpy.uint64(self.address)
        rows[:, 1] = length
        return rows

    def row(self, place, length):
        return self.rows([place], length)

    def renew(self, seed):
        """Fills it with another pattern."""
        self.seed = seed
        self.host.fill(self.key, seed)

    def check(self, pieces=()):
        assert self.host.check(self.key, pieces) == ""

    def check_list(self, other, at, start, length):
        assert self.host.check_list(self.key, other.seed, numpy.asarray(at), numpy.asarray(start), length) == ""
