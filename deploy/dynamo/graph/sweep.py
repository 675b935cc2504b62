# SPDX-License-Identifier: Apache-2.0
"""Ends every process of a graph and removes what they leave, from what a file says of them: also after the launcher itself was killed.

Each child leads a session of its own, which its own children stay in, so the sessions name all processes. Shared memory has no owner that
could be asked once its process is gone: what the processes map is written down while they live.
"""

import json
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

SHM = "/dev/shm/"
# What vLLM and UCX put there, under names that they made up. Everything else in /dev/shm has an owner that removes it.
LEFTOVERS = ("psm_", "sem.mp-", "ucx_shm_", "torch_", "vllm")
TIMEOUT_S = 15


@dataclass(frozen=True)
class Process:
    """One line of /proc: `started` in ticks since the machine came up, which tells a process from a later one of the same number."""

    pid: int
    session: int
    started: int
    zombie: bool


def process(pid: int) -> Process | None:
    """A process, or None where there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return Process(pid, int(fields[3]), int(fields[19]), fields[0] in "ZX")


def members(sessions: dict[int, int]) -> list[Process]:
    """Living processes of these sessions, each given as its leader and when that started. One with another leader now is not ours."""
    found = []
    for name in os.listdir("/proc"):
        entry = process(int(name)) if name.isdigit() else None
        if entry is None or entry.zombie or entry.session not in sessions:
            continue
        leader = process(entry.session)
        if leader is None or leader.started == sessions[entry.session]:
            found.append(entry)
    return found


def segments(pid: int) -> set[str]:
    """Files of /dev/shm that a process maps and that its libraries made there.

    Compared by inode: the map of the process that made a semaphore has the name that it was made under, which is not the one that stays.
    """
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return set()
    inodes = {int(line.split()[4]) for line in maps.splitlines() if SHM in line}
    return {entry.path for entry in os.scandir(SHM) if entry.name.startswith(LEFTOVERS) and entry.inode() in inodes} if inodes else set()


class Record:
    """What there is to sweep, in a file that outlives the launcher."""

    def __init__(self, file: Path, folder: Path):
        self.file, self.sessions, self.segments, self.paths = file, {}, set(), {str(folder)}

    @classmethod
    def read(cls, file: Path) -> "Record | None":
        """The record that a launcher wrote, or None where it has swept already."""
        try:
            said = json.loads(file.read_text())
        except FileNotFoundError:
            return None
        record = cls(file, file.parent)
        record.sessions = {int(leader): started for leader, started in said["sessions"].items()}
        record.segments, record.paths = set(said["segments"]), set(said["paths"])
        return record

    def write(self) -> None:
        """Whole or not at all: the watcher may read it at any moment."""
        said = {"sessions": self.sessions, "segments": sorted(self.segments), "paths": sorted(self.paths)}
        draft = self.file.with_suffix(".new")
        draft.write_text(json.dumps(said))
        draft.replace(self.file)

    def add_session(self, leader: int) -> None:
        """A child that leads a session."""
        entry = process(leader)
        if entry is not None:
            self.sessions[leader] = entry.started
            self.write()

    def add_path(self, path: Path | str) -> None:
        """A file or folder to remove in the end."""
        self.paths.add(str(path))
        self.write()

    def look(self, sessions: dict[int, int] | None = None) -> list[Process]:
        """The living processes, after what they map was noted."""
        living = members(self.sessions if sessions is None else sessions)
        found = set().union(*(segments(entry.pid) for entry in living)) - self.segments
        if found:
            self.segments |= found
            self.write()
        return living


def _signal(living: list[Process], number: int) -> None:
    for entry in living:
        try:
            os.kill(entry.pid, number)
        except ProcessLookupError:
            pass


def kill(record: Record, sessions: dict[int, int] | None = None, timeout_s: float = TIMEOUT_S) -> list[int]:
    """SIGKILL to every process of the sessions until none is left; the numbers of those that did not end in time.

    They are stopped before, so that none makes a segment between the look at its map and its end.
    """
    deadline = time.monotonic() + timeout_s
    while living := members(record.sessions if sessions is None else sessions):
        _signal(living, signal.SIGSTOP)
        _signal(record.look(sessions), signal.SIGKILL)
        if time.monotonic() > deadline:
            return [entry.pid for entry in living]
        time.sleep(0.02)
    return []


def sweep(record: Record) -> list[int]:
    """Kills living processes and removes noted files; returns the ids of processes that did not end."""
    left = kill(record)
    for path in sorted(record.segments) + sorted(record.paths):
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            Path(path).unlink(missing_ok=True)
    return left
