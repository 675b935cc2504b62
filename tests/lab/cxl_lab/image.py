# SPDX-License-Identifier: Apache-2.0
"""The initial file system of a virtual host: busybox, kernel modules and the scripts in `guest/`, packed as the kernel wants it.

`python image.py ROOT OUT`: ROOT is what `scripts/setup-lab` unpacked.
"""

import gzip
import lzma
import re
import stat
import subprocess
import sys
from pathlib import Path

GUEST = Path(__file__).resolve().parents[1] / "guest"
DEVDAX = ("device_dax",)
CXL = ("cxl_acpi", "cxl_pci", "cxl_mem", "cxl_port", "dax_cxl", *DEVDAX)
PMEM = ("libnvdimm", "nd_btt", "nd_pmem", "dax_pmem", *DEVDAX)
# What each mode needs beside what these depend on; a list is a file in /mod that says in which order to load.
GROUPS = {
    "base": ("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay", "hwpoison_inject"),
    "ethernet": ("virtio_net",),
    "cxl": CXL,
    "cxl-two": CXL,
    "cxl-interleaved": CXL,
    "cxl-pmem": (*PMEM[:1], *CXL, "cxl_pmem", *PMEM[1:]),
    "nvdimm": ("nfit", *PMEM),
}


def module_files(root: Path) -> dict[str, Path]:
    """Every module of the unpacked kernel by its name, with underscores."""
    return {path.name.split(".ko")[0].replace("-", "_"): path for path in root.glob("lib/modules/*/kernel/**/*.ko*")}


def module_bytes(path: Path) -> bytes:
    """An uncompressed module: busybox loads no other."""
    data = path.read_bytes()
    return lzma.decompress(data) if path.suffix == ".xz" else data


def depends(module: bytes) -> list[str]:
    """What a module says of itself that it needs."""
    names = re.search(rb"(?:^|\0)depends=([^\0]*)\0", module)
    return [name.replace("-", "_") for name in names[1].decode().split(",") if name] if names else []


def load_order(names: tuple[str, ...], files: dict[str, Path]) -> dict[str, bytes]:
    """These modules and what they depend on, each after what it needs. What is not there is compiled into the kernel."""
    order: dict[str, bytes] = {}

    def add(name: str) -> None:
        if name in order or name not in files:
            return
        module = module_bytes(files[name])
        for needed in depends(module):
            add(needed)
        order[name] = module

    for name in names:
        add(name)
    return order


def archive(files: dict[str, tuple[int, bytes]]) -> bytes:
    """A cpio archive in the kernel's format (Documentation/driver-api/early-userspace/buffer-format.rst): path -> (mode, content)."""
    parts = []
    for number, (path, (mode, content)) in enumerate([*files.items(), ("TRAILER!!!", (0, b""))], 1):
        name = path.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name), 0)
        header = b"070701" + b"".join(b"%08X" % field for field in fields)
        for part in (header + name, content):
            parts.append(part + bytes(-len(part) % 4))
    return b"".join(parts)


def image(root: Path) -> bytes:
    """The compressed archive."""
    files = module_files(root)
    program, folder = stat.S_IFREG | 0o755, stat.S_IFDIR | 0o755
    content = {"bin": (folder, b""), "mod": (folder, b""), "bin/busybox": (program, (root / "bin" / "busybox").read_bytes())}
    for group, names in GROUPS.items():
        order = load_order(names, files)
        content[f"mod/{group}"] = (program, "".join(f"{name}\n" for name in order).encode())
        content |= {f"mod/{name}.ko": (program, module) for name, module in order.items()}
    content |= {path.name: (program, path.read_bytes()) for path in sorted(GUEST.iterdir())}
    return gzip.compress(archive(content), 1, mtime=0)


def kernel(root: Path) -> bytes:
    """The kernel without its compression, which the emulated processor would undo slowly at every boot; as it is where that fails."""
    data = next(root.glob("boot/vmlinuz-*")).read_bytes()
    unpackers = ((b"\xfd7zXZ\0", ["xz", "-dc"]), (b"\x28\xb5\x2f\xfd", ["zstd", "-dcq"]))
    for magic, command in unpackers:
        for found in re.finditer(re.escape(magic), data):
            try:
                plain = subprocess.run(command, input=data[found.start() :], capture_output=True, check=False).stdout
            except OSError:
                continue
            if plain.startswith(b"\x7fELF"):
                return plain
    return data


def main(root: Path, out: Path) -> None:
    """Writes `initrd.gz` and `kernel` into the folder `out`."""
    (out / "initrd.gz").write_bytes(image(root))
    (out / "kernel").write_bytes(kernel(root))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
