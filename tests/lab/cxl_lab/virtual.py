# SPDX-License-Identifier: Apache-2.0
"""A host that is a virtual machine."""

import socket
import time
from pathlib import Path

from . import LabError
from .agent import Agent
from .ethernet import Hub
from .host import Host, agent_program, environment, spawn
from .qemu import GO, Machine, waits
from .qmp import Qmp


class VirtualHost(Host):
    """QEMU with Linux in it, the machine's files at their places (what is written to them stays in this host), and /dev/dax*."""

    def __init__(self, name: str, number: int, lab, folder: Path, memory_mb: int, hub: Hub | None):
        super().__init__(name, number, folder)
        self.lab, self.memory_mb, self.hub = lab, memory_mb, hub
        self.qmp: Qmp | None = None
        self.boots = 0

    @property
    def log(self) -> Path:
        """What it wrote on its serial line since it was booted last."""
        return self.folder / f"{self.name}.{self.boots}.serial.log"

    def begin(self) -> None:
        """Starts QEMU."""
        self._down()
        self.boots += 1
        self._monitor, monitor = socket.socketpair()
        ours, channel = socket.socketpair()
        ethernet = self.hub.plug(self.name) if self.hub else None
        machine = Machine(
            name=self.name,
            number=self.number,
            mode=self.lab.mode,
            device_bytes=self.lab.device_bytes,
            memory_mb=self.memory_mb,
            memories=tuple(self.lab.memories),
            labels=self.lab.labels,
            monitor=monitor.fileno(),
            channel=channel.fileno(),
            ethernet=ethernet.fileno() if ethernet else None,
            log=self.log,
            agent=agent_program(),
        )
        with (self.folder / f"{self.name}.{self.boots}.qemu.log").open("wb") as output:
            self.machine = spawn(machine.command(), machine.descriptors(), output)
        for end in (monitor, channel, *([ethernet] if ethernet else [])):
            end.close()
        self._agent = Agent(self.name, ours, environment(self.name), str(self.lab.root))

    def ready(self, timeout_s: float) -> None:
        """Waits for the agent. Where it waits for what the first host writes, that is there now."""
        began = time.monotonic()
        try:
            self.qmp = Qmp(self._monitor)
            if waits(self.lab.mode, self.number):
                self.qmp.execute("device_add", **GO)
        except LabError as error:
            raise LabError(f"{self}: QEMU does not start: {error}\n{self.story()}") from error
        if not self.agent.ready(timeout_s):
            raise LabError(f"{self}: not up after {time.monotonic() - began:.0f} s\n{self.story()}")
        self.devices = [f"/dev/dax{index}.0" for index in range(2 if self.lab.mode == "cxl-two" else 1)]

    def story(self) -> str:
        """The end of its serial line's log, and what QEMU said."""
        logs = [self.log, self.folder / f"{self.name}.{self.boots}.qemu.log"]
        return "\n".join(f"{log}:\n{log.read_text(errors='replace')[-3000:]}" for log in logs if log.exists())

    def pause(self) -> None:
        """All its processors stop."""
        self.qmp.execute("stop")

    def resume(self) -> None:
        """They go on."""
        self.qmp.execute("cont")

    def unplug(self, device: int = 0) -> None:
        """Its memory device is pulled out while it is in use. Not in mode nvdimm."""
        self.qmp.execute("device_del", id=f"device{device}")

    def link_error(self, device: int = 0) -> None:
        """An error that the CXL link cannot correct: the kernel takes the device away."""
        header = [index for index in range(3, 35)]
        error = {"type": "cache-address-parity", "header": header}
        self.qmp.execute("cxl-inject-uncorrectable-errors", path=f"/machine/peripheral/device{device}", errors=[error])

    def _down(self) -> None:
        super()._down()
        if self.qmp:
            self.qmp.close()
            self.qmp = None
