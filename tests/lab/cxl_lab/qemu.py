# SPDX-License-Identifier: Apache-2.0
"""The virtual machine of a host: its command line for each mode of the shared memory.

Facts behind the flags: the processor is emulated (`-accel tcg`), because only then is CXL memory handled access by access, which loses
`lock`-prefixed operations of different hosts as CXL 2.0 does; a region refuses to come up where the guest sees a hypervisor; the emulated
clocks are too uneven for the kernel's checks of timers. A fifth of what a boot takes would go to the kernel's tests of its ciphers and to
its own write protection.
"""

import platform
from dataclasses import dataclass
from pathlib import Path

from . import FOLDER, LabError
from .ethernet import address_of

# Modes: how many devices, and processors of a host. With nvdimm the emulator takes the memory for ordinary memory: coherent, with atomics.
MODES = {"cxl": (1, 1), "cxl-two": (2, 1), "cxl-interleaved": (2, 1), "cxl-pmem": (1, 1), "nvdimm": (1, 2)}
# Modes in which the first host writes into the memory what the drivers of the others have to find when they are loaded.
FIRST_ALONE = ("cxl-pmem", "nvdimm")
# A serial port beside the agent's, which the others get when that is there.
GO = {"driver": "virtserialport", "bus": "serial.0", "nr": 2, "name": "go", "id": "go"}
LABEL_BYTES = 256 * 1024
KERNEL_WORDS = "console=ttyS0 panic=-1 quiet no_timer_check tsc=unstable clocksource=hpet cryptomgr.notests rodata=off rdinit=/init"


def waits(mode: str, number: int) -> bool:
    """Whether the host of this number loads no drivers of the shared memory before it has the port GO."""
    return mode in FIRST_ALONE and number != 1


@dataclass(frozen=True)
class Machine:
    """What a virtual host is made of. Descriptors are those of this process, which QEMU inherits."""

    name: str
    number: int
    mode: str
    device_bytes: int
    memory_mb: int
    memories: tuple[int, ...]
    labels: int | None
    monitor: int
    channel: int
    ethernet: int | None
    log: Path
    agent: Path

    def descriptors(self) -> tuple[int, ...]:
        """All that QEMU inherits."""
        maybe = (*self.memories, self.labels, self.monitor, self.channel, self.ethernet)
        return tuple(number for number in maybe if number is not None)

    def command(self, folder: Path = FOLDER) -> list[str]:
        """QEMU and its arguments. Raises LabError where the lab is not set up."""
        root = folder / "root"
        if not (folder / "initrd.gz").is_file():
            raise LabError(f"no lab in {folder}: `make setup-lab` sets it up (Debian packages on {platform.machine()}, nothing installed)")
        libraries = f"{root}/usr/lib/x86_64-linux-gnu:{root}/lib/x86_64-linux-gnu"
        # With the libraries of its own release, loader and all: what this system has does not matter.
        command = [f"{root}/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2", "--library-path", libraries, f"{root}/usr/bin/qemu-system-x86_64"]
        command += ["-L", f"{root}/usr/share/qemu", "-L", f"{root}/usr/share/seabios", "-accel", "tcg", "-cpu", "max,-hypervisor"]
        command += ["-smp", str(MODES[self.mode][1]), "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
        command += ["-chardev", f"socket,id=monitor,fd={self.monitor}", "-mon", "chardev=monitor,mode=control"]
        command += ["-serial", f"file:{self.log}"]
        command += self._memory() + self._agent() + self._ethernet()
        command += ["-fsdev", "local,id=files,path=/,security_model=none,readonly=on,multidevs=remap"]
        command += ["-device", "virtio-9p-pci,fsdev=files,mount_tag=files,bus=pcie.0"]
        words = {"mode": self.mode, "name": self.name, "agent": self.agent, "tools": root}
        address = address_of(self.number) if self.ethernet is not None else ""
        words |= {"bytes": self.device_bytes, "first": int(self.number == 1), "waits": int(waits(self.mode, self.number))}
        words["address"] = address
        append = " ".join([KERNEL_WORDS, *(f"lab_{name}={value}" for name, value in words.items())])
        return [*command, "-kernel", f"{folder}/kernel", "-initrd", f"{folder}/initrd.gz", "-append", append]

    def _memory(self) -> list[str]:
        objects = []
        for index, descriptor in enumerate(self.memories):
            backend = f"memory-backend-file,id=memory{index},share=on,mem-path=/proc/self/fd/{descriptor},size={self.device_bytes}"
            objects += ["-object", backend]
        if self.mode == "nvdimm":
            machine = ["-M", "q35,nvdimm=on", "-m", f"{self.memory_mb}M,slots=2,maxmem={self.memory_mb + 8192}M"]
            return [*machine, *objects, "-device", "nvdimm,id=device0,memdev=memory0,unarmed=off"]
        windows = {
            "cxl-two": "cxl-fmw.0.targets.0=cxl.0,cxl-fmw.0.size=4G,cxl-fmw.1.targets.0=cxl.1,cxl-fmw.1.size=4G",
            "cxl-interleaved": "cxl-fmw.0.targets.0=cxl.0,cxl-fmw.0.targets.1=cxl.1,cxl-fmw.0.size=4G,cxl-fmw.0.interleave-granularity=256",
        }
        window = windows.get(self.mode, "cxl-fmw.0.targets.0=cxl.0,cxl-fmw.0.size=4G")
        arguments = ["-M", f"q35,cxl=on,{window}", "-m", f"{self.memory_mb}M", *objects]
        kind, label = "volatile-memdev", ""
        if self.mode == "cxl-pmem":
            kind, label = "persistent-memdev", ",lsa=labels"
            arguments += ["-object", f"memory-backend-file,id=labels,share=on,mem-path=/proc/self/fd/{self.labels},size={LABEL_BYTES}"]
        # Errors that the link cannot correct are masked by default: no program would hear of them.
        arguments += ["-global", "cxl-type3.x-pcie-err-unc-mask=off"]
        for index in range(len(self.memories)):
            arguments += ["-device", f"pxb-cxl,bus_nr={12 + 40 * index},bus=pcie.0,id=cxl.{index}"]
            arguments += ["-device", f"cxl-rp,port=0,bus=cxl.{index},id=port{index},chassis=0,slot={2 + index}"]
            arguments += ["-device", f"cxl-type3,bus=port{index},{kind}=memory{index}{label},id=device{index},sn={0x51 + index}"]
        return arguments

    def _agent(self) -> list[str]:
        arguments = ["-device", "virtio-serial-pci,id=serial,max_ports=3,bus=pcie.0", "-chardev", f"socket,id=channel,fd={self.channel}"]
        return [*arguments, "-device", "virtserialport,bus=serial.0,nr=1,chardev=channel,name=lab"]

    def _ethernet(self) -> list[str]:
        if self.ethernet is None:
            return []
        card = f"virtio-net-pci,netdev=ethernet,bus=pcie.0,mac=52:54:00:00:00:{self.number:02x},romfile="
        return ["-netdev", f"dgram,id=ethernet,local.type=fd,local.str={self.ethernet}", "-device", card]
