# SPDX-License-Identifier: Apache-2.0
"""Some hosts on one memory."""

import os
import shutil
import tempfile
import time
from pathlib import Path

from . import ROOT, LabError
from .ethernet import Hub
from .host import Host
from .namespace import Anchor, NamespaceHost
from .qemu import LABEL_BYTES, MODES
from .virtual import VirtualHost

NAMES = "ABCD"
MIB = 1 << 20
# CXL windows and regions come in such units.
UNIT_MB = 256
BOOT_TIMEOUT_S = 180
NAMESPACES = "namespaces"
ALL_MODES = (*MODES, NAMESPACES)


def shared_memory(name: str, len_bytes: int) -> int:
    """Memory that has no name in any file system: when the last process that has it ends, it is gone. Its descriptor."""
    descriptor = os.memfd_create(name)
    os.ftruncate(descriptor, len_bytes)
    return descriptor


class Lab:
    """`with Lab(hosts=2, mode="cxl") as lab: lab["A"].run([...])`. Hosts are called A, B, C, D.

    - `mode`: one of `qemu.MODES`, or `namespaces` for hosts that are no virtual machines;
    - `size_mb`: of each memory device, in units of 256;
    - `memory_mb`: of each virtual host;
    - `ethernet`: with a network between the hosts;
    - `folder`: where logs go; a temporary one without, which is removed in the end unless an exception ends the lab.

    Raises LabError where the lab is not set up or a host does not come up; logs are kept then, and named.
    """

    def __init__(self, hosts=2, mode="cxl", size_mb=UNIT_MB, memory_mb=512, ethernet=False, folder: Path | str | None = None):
        if not 1 <= hosts <= len(NAMES):
            raise LabError(f"{hosts} hosts: a lab has 1 to {len(NAMES)}")
        if mode not in ALL_MODES:
            raise LabError(f"no mode {mode!r}: there are {', '.join(ALL_MODES)}")
        if size_mb <= 0 or size_mb % UNIT_MB:
            raise LabError(f"devices of {size_mb} MiB: they come in units of {UNIT_MB}")
        self.mode, self.device_bytes, self.root = mode, size_mb * MIB, ROOT
        self.memories: list[int] = []
        self.labels = self._anchor = self._hub = None
        self._temporary = folder is None
        self.folder = Path(folder or tempfile.mkdtemp(prefix="cxl-lab-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        numbered = list(enumerate(NAMES[:hosts], 1))
        if mode == NAMESPACES:
            self._anchor = Anchor(self.device_bytes, ethernet)
            self.hosts: list[Host] = [NamespaceHost(name, number, self._anchor, self.folder, ROOT, ethernet) for number, name in numbered]
            return
        self.memories = [shared_memory(f"cxl-lab-{index}", self.device_bytes) for index in range(MODES[mode][0])]
        self.labels = shared_memory("cxl-lab-labels", LABEL_BYTES) if mode == "cxl-pmem" else None
        self._hub = Hub() if ethernet else None
        self.hosts = [VirtualHost(name, number, self, self.folder, memory_mb, self._hub) for number, name in numbered]

    def __getitem__(self, name: str) -> Host:
        for host in self.hosts:
            if host.name == name:
                return host
        raise LabError(f"no host {name}: there are {', '.join(host.name for host in self.hosts)}")

    def boot(self, *names: str, timeout_s: float = BOOT_TIMEOUT_S) -> None:
        """Boots these hosts, or all, side by side; the first of the lab is ready before the others."""
        hosts = sorted((self[name] for name in names) if names else self.hosts, key=lambda host: host.number)
        deadline = time.monotonic() + timeout_s
        for host in hosts:
            host.begin()
        for host in hosts:
            host.ready(max(deadline - time.monotonic(), 1))

    def keep_memory(self) -> list[Path]:
        """Copies what is in the memory now into files beside the logs, for `cxlctl --pool FILE`; not that of namespaces."""
        kept = []
        for index, descriptor in enumerate(self.memories):
            kept.append(self.folder / f"memory-{index}")
            with open(kept[-1], "wb") as copy:
                for offset in range(0, self.device_bytes, MIB):
                    if any(piece := os.pread(descriptor, MIB, offset)):
                        copy.seek(offset)
                        copy.write(piece)
                copy.truncate(self.device_bytes)
        return kept

    def close(self, keep_logs: bool = False) -> None:
        """Ends all hosts, and the memory with them."""
        for host in self.hosts:
            host.kill()
        if self._hub:
            self._hub.close()
            self._hub = None
        if self._anchor:
            self._anchor.close()
            self._anchor = None
        for descriptor in (*self.memories, *([self.labels] if self.labels is not None else [])):
            os.close(descriptor)
        self.memories, self.labels = [], None
        if self._temporary and not keep_logs:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self):
        try:
            self.boot()
        except BaseException:
            self.close(keep_logs=True)
            raise
        return self

    def __exit__(self, kind, error, trace):
        self.close(keep_logs=kind is not None)
