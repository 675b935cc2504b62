# SPDX-License-Identifier: Apache-2.0
"""Where the processes of a graph run: on this machine, or on the two hosts of a lab (tests/lab), which share a memory and an Ethernet.

In a lab, prefill workers run on host A, with the frontend and etcd, and decode workers on host B. What a host's servers listen on is
offered at the same ports of this machine's 127.0.0.1, so that a client need not know.
"""

import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import pool
from .errors import GraphError
from .options import ROOT, Options
from .processes import Child
from .sweep import Record

if TYPE_CHECKING:
    from .model import Model

LAB = ROOT / "tests" / "lab"
POOL_MB = 1024
# Two vLLM workers and their engines in a host, and the files that they write.
MEMORY_MB = 7168
BOOT_TIMEOUT_S = 300
CXLCTL_TIMEOUT_S = 120
KILLED = -9


class ThisMachine:
    """All processes are children of this one."""

    def __init__(self, options: Options, record: Record):
        self.options, self.record = options, record

    def make_pool(self, model: "Model") -> pool.Pool:
        """The pool that the options name, or one in /dev/shm. Raises GraphError."""
        return pool.make(self.options, model, self.record.add_path)

    def address(self, name: str) -> str:
        """The IP address of the host that a process runs on."""
        return "127.0.0.1"

    def child(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, ports: Sequence[int] = ()) -> Child:
        """Starts a process; `ports`: those of 127.0.0.1 that it will listen on."""
        return Child(name, command, environment, log, self.record)

    def end(self) -> None:
        """Nothing to do: the processes are ended by the code that started them."""


class LabChild:
    """A process in a host of a lab; what `processes.Child` is on this machine."""

    def __init__(self, name: str, process, log: Path):
        self.name, self.process, self.log = name, process, log
        self.expected_to_end = False
        self._copied = threading.Thread(target=self._copy, name=f"log of {name}", daemon=True)
        self._copied.start()

    def _copy(self) -> None:
        with self.log.open("ab") as log:
            for _, piece in self.process.follow():
                log.write(piece)
                log.flush()
            if self.process.refused:
                log.write(self.process.refused.encode())

    def status(self) -> int | None:
        """None while it runs; its exit status, negative for a signal, as if killed where its host is gone."""
        if self.process.status is None and (self.process.refused or self.process.agent.gone):
            return KILLED
        return self.process.status

    tail, text = Child.tail, Child.text

    def ask_to_end(self) -> None:
        """Tells it to end in its own way."""
        self.expected_to_end = True
        self.signal(signal.SIGTERM)

    def signal(self, number: int) -> None:
        """Sends a signal to it and its children."""
        if self.status() is None:
            self.process.signal(number)

    def kill(self) -> list[int]:
        """Ends it and its children; whatever would not end goes with its host."""
        self.expected_to_end = True
        self.signal(signal.SIGKILL)
        return []


class InLab:
    """Two hosts, virtual machines (`lab`) or namespaces of this machine (`namespaces`), which boot when this is made. Raises GraphError."""

    def __init__(self, options: Options, logs: Path, say):
        sys.path.insert(0, str(LAB))
        from cxl_lab import LabError
        from cxl_lab.forward import Forward
        from cxl_lab.lab import Lab

        self.options, self._error, self._forward, self._forwards = options, LabError, Forward, {}
        mode = "cxl" if options.hosts == "lab" else "namespaces"
        say(f"booting hosts A (prefill) and B (decode), {mode}")
        try:
            self.lab = Lab(2, mode, POOL_MB, MEMORY_MB, ethernet=True, folder=logs / "hosts")
            try:
                self.lab.boot(timeout_s=BOOT_TIMEOUT_S)
            except BaseException:
                self.lab.close()
                raise
        except LabError as error:
            raise GraphError(str(error)) from error
        device = self.lab["A"].devices[0]
        self.spec = device if options.hosts == "lab" else f"{device},size={POOL_MB}M"

    def make_pool(self, model: "Model") -> pool.Pool:
        """A pool in the memory that the hosts share. Raises GraphError."""
        return pool.make_in_lab(self.options, model, self)

    def host(self, name: str):
        """The host that a process of this name runs on."""
        return self.lab["B" if "decode" in name else "A"]

    def address(self, name: str) -> str:
        """Its IP address on the lab's Ethernet."""
        return self.host(name).address

    def child(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, ports: Sequence[int] = ()) -> LabChild:
        """Starts a process; `ports`: those of its 127.0.0.1 that shall be reached at this machine's. Raises GraphError."""
        try:
            for port in ports:
                self._forwards[port] = self._forward(self.host(name), port)
            # Who and where a host is says the lab.
            own = self.host(name).agent.environment
            told = {variable: value for variable, value in environment.items() if variable not in own or variable == "PATH"}
            return LabChild(name, self.host(name).start(command, told), log)
        except (self._error, OSError) as error:
            raise GraphError(f"{name}: {error}") from error

    def cxlctl(self, spec: str, *arguments: str) -> str:
        """What a command of cxlctl prints on host A. Raises GraphError."""
        try:
            return self.lab["A"].run([pool.cxlctl_path(), *arguments], {"CXL_POOL": spec}, CXLCTL_TIMEOUT_S).output
        except self._error as error:
            raise GraphError(f"cxlctl {' '.join(arguments)} on {spec}: {error}") from error

    def end(self) -> None:
        """The hosts end, with all that runs in them, and the memory with them."""
        for forward in self._forwards.values():
            forward.close()
        self.lab.close()
