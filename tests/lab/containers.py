# SPDX-License-Identifier: Apache-2.0
"""Containers in hosts of the lab, by runc as Docker runs them: files of the host, read-only, and the devices that are named."""

import json
import os
import shutil

from cxl_lab import ROOT
from rack import PATHS, PYTHON, Peer

# Where the checkout and Python are in the container, whose user may not see the folders that they lie in.
CHECKOUT, PREFIX = "/opt/checkout", "/opt/python"
USER = 1000
# That of the device nodes: deploy/host/70-kvbm-cxl.rules.
GROUP = 1100
BUNDLE = "/run/tmp/bundle"
STATE = "/run/tmp/state"

# The host's own files are below a chroot, out of which nothing can be pivoted: the container gets them by a mount. The device node is the
# group's in the container alone, where runc makes it anew, as a device plugin has it made.
PREPARE = r"""
set -e
mount -t cgroup2 none /sys/fs/cgroup 2>/dev/null || grep -q cgroup2 /proc/self/mounts
mkdir -p $1/root $2 && chmod 0755 $1
mountpoint -q $1/root || mount --bind / $1/root
install -d -o $3 -g $3 -m 0700 $2
cat > $1/config.json
stat -c '%t %T' /dev/dax0.0
"""


def runc():
    """The program, of this system or as `make setup-deploy` unpacks it; None where there is none."""
    unpacked = ROOT / ".venv/deploy/tools/root/usr/sbin/runc"
    return shutil.which("runc") or (str(unpacked) if unpacked.is_file() else None)


def settings(words, environment, numbers, device="/dev/dax0.0"):
    """The container's config.json: one device, no capability, another user than root, nothing to become root by."""
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=65536k"]},
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "nodev", "mode=1777"]},
        {"destination": "/tmp", "type": "tmpfs", "source": "tmp", "options": ["nosuid", "nodev", "mode=1777"]},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]},
        {"destination": "/run", "type": "tmpfs", "source": "run", "options": ["nosuid", "mode=755"]},
        {"destination": CHECKOUT, "type": "bind", "source": str(ROOT), "options": ["rbind", "ro"]},
        {"destination": PREFIX, "type": "bind", "source": str(PYTHON.resolve().parents[1]), "options": ["rbind", "ro"]},
        # The host's folder for the state of this identity, as a hostPath is mounted.
        {"destination": "/run/kvbm-cxl", "type": "bind", "source": STATE, "options": ["bind", "rw"]},
    ]
    numbers_of = {"type": "c", "major": numbers[0], "minor": numbers[1]}
    none = {name: [] for name in ("bounding", "effective", "inheritable", "permitted", "ambient")}
    return {
        "ociVersion": "1.0.2",
        "hostname": "container",
        "root": {"path": f"{BUNDLE}/root", "readonly": True},
        "process": {
            "args": [str(word) for word in words],
            "cwd": "/",
            "env": [f"{name}={value}" for name, value in {"PATH": "/usr/bin:/bin", **environment}.items()],
            "user": {"uid": USER, "gid": USER, "additionalGids": [GROUP]},
            "capabilities": none,
            "noNewPrivileges": True,
        },
        "mounts": mounts,
        "linux": {
            "namespaces": [{"type": name} for name in ("pid", "mount", "ipc", "uts", "network")],
            "devices": [{"path": device, **numbers_of, "fileMode": 0o660, "uid": 0, "gid": GROUP}],
            "resources": {"devices": [{"allow": False, "access": "rwm"}, {"allow": True, "access": "rw", **numbers_of}]},
            "maskedPaths": ["/proc/kcore"],
            "readonlyPaths": ["/proc/sys"],
        },
    }


def prepare(host, words, environment):
    """Makes the container's bundle in a host."""
    done = host.run(["stat", "-c", "%t %T", "/dev/dax0.0"])
    numbers = [int(number, 16) for number in done.output.split()]
    bundle = json.dumps(settings(words, environment, numbers))
    started = host.start(["sh", "-c", PREPARE, "sh", BUNDLE, STATE, USER])
    started.write(bundle.encode())
    started.end_input()
    started.finish(60)


def tool(command):
    """The first words of a command of runc."""
    return [runc(), "--root", "/run/tmp/runc", command]


def words(name):
    """How the container is started: its program's input and output are runc's."""
    return [*tool("run"), "--no-pivot", "--bundle", BUNDLE, name]


def start(rack, name):
    """A peer in a container of a host, a host of the pool by itself; it has not joined yet."""
    environment = {
        "PYTHONPATH": os.pathsep.join(f"{CHECKOUT}/{path.relative_to(ROOT)}" for path in PATHS),
        "PYTHONHOME": PREFIX,
        "LD_LIBRARY_PATH": f"{PREFIX}/lib",
        "PYTHONDONTWRITEBYTECODE": "1",
        "CXL_POOL": rack.spec,
        "CXL_MACHINE_ID": f"{name}/container",
        "CXL_STATE_DIR": "/run/kvbm-cxl",
    }
    # Virtual machines are slow.
    options = json.dumps({"join_timeout_ms": 120_000})
    program = [f"{PREFIX}/bin/{PYTHON.resolve().name}", "-S", "-c", "import peer; peer.main()", rack.spec, options]
    prepare(rack[name], program, environment)
    return Peer(rack[name], words(f"peer-{name.lower()}"))


def run(rack, name, *command):
    """Runs a command in a container of a host: what it gave."""
    prepare(rack[name], command, {"CXL_POOL": rack.spec})
    return rack[name].run(words("command"), {}, 300, check=False)
