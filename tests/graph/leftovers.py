# SPDX-License-Identifier: Apache-2.0
"""What a graph could leave behind on this machine."""

import os
import time
from pathlib import Path

def processes_with(marker):
    """Numbers of living processes in whose environment or command line `marker` stands."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            said = Path(f"/proc/{name}/environ").read_bytes() + Path(f"/proc/{name}/cmdline").read_bytes()
            state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if marker.encode() in said and state not in "ZX":
            found.append(int(name))
    return found


def made_by(marker):
    """What these processes map in /dev/shm, but for what all processes of this machine share; their folders, and their pool."""
    made = set()
    for pid in processes_with(marker):
        try:
            maps, environment = Path(f"/proc/{pid}/maps").read_text(), Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        # By inode: a semaphore is mapped under another name than the one that stays.
        inodes = {int(line.split()[4]) for line in maps.splitlines() if " /dev/shm/" in line}
        made |= {file.path for file in os.scandir("/dev/shm") if file.is_file() and file.inode() in inodes}
        said = {name: value.decode() for name, _, value in (entry.partition(b"=") for entry in environment)}
        if b"DYN_SYSTEM_PORT" in said:
            made |= {os.path.dirname(said[b"TMPDIR"])} | ({said[b"CXL_POOL"]} if b"CXL_POOL" in said else set())
    return made


def there(paths):
    """Those that exist."""
    return {path for path in paths if os.path.exists(path)}


def wait_for(condition, timeout_s=180, what="", pause_s=0.05):
    """Until it is true; fails where it does not become so in time. What then was wrong is text, or called for."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, (what() if callable(what) else what) or "not in time"
        time.sleep(pause_s)
