# SPDX-License-Identifier: Apache-2.0
"""SHA-256 of whole files, taken once on a machine.

A result is kept below the state directory of the pool, by the file's path, size, inode and times, so that an engine that starts again, and
the other ranks of a node, read no weights twice. Of processes that need the same file one reads it, the others wait or take another file.
Files in the cache of the Hugging Face hub have their digest as their name.

A file that was written within `_FRESH_NS` before it was read is not kept: it could be written once more without a change of its times.
"""

import fcntl
import hashlib
import json
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .limits import MAX_REMEMBERED, trim
from .log import logger

State = tuple[int, int, int, int, int]
"""Device, inode, size in bytes, and times of the last change of content and of anything, in nanoseconds."""

_FOLDER = "file-digests"
_READ_BYTES = 4 << 20
_FRESH_NS = 2_000_000_000
_MAX_THREADS = 16
# Another process reads the file. Beyond this time, for its size, this one no longer relies on it.
_POLL_S, _PATIENCE_S, _LEAST_BYTES_S = 0.02, 60.0, 50 << 20
# .../models--OWNER--NAME/blobs/SHA256, as the hub names files of Git LFS.
_BLOB = re.compile(r"[0-9a-f]{64}")


class FileChangedError(OSError):
    """A file was written while it was read."""


def state_of(path: Path) -> State:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def state_folder() -> Path | None:
    """Where results are kept: below the folder in which the pool has its state (CXL_STATE_DIR). None where it is not this user's alone, or
    cannot be made."""
    base = Path(os.environ.get("CXL_STATE_DIR") or f"/dev/shm/cxl-pool-{os.geteuid()}")
    try:
        if not base.is_absolute():
            return None
        for folder in (base, base / _FOLDER):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
                return None
    except OSError:
        return None
    return base / _FOLDER


@dataclass
class FileDigests:
    """Digests of files, remembered while a file keeps its state."""

    _known: dict[str, tuple[State, bytes]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of_files(self, paths: Sequence[Path]) -> list[bytes]:
        """The digest (32 bytes) of each file, read by several threads. Raises `OSError`."""
        # Large files first: the last one to end is then a small one.
        order = sorted(paths, key=lambda path: -path.stat().st_size)
        threads = max(min(len(order), len(os.sched_getaffinity(0)), _MAX_THREADS), 1)
        with ThreadPoolExecutor(threads, "kvbm-cxl-digest") as pool:
            # Those that another process is reading come last: by then it may have read them.
            first = dict(zip(order, pool.map(lambda path: self._of_file(path, waits=False), order)))
            rest = [path for path, found in first.items() if found is None]
            first.update(zip(rest, pool.map(self.of_file, rest)))
        return [first[path] for path in paths]

    def of_names_and_contents(self, paths: Sequence[Path]) -> bytes:
        """One digest (16 bytes) over the names and contents of all files, in their order. Raises `OSError`."""
        total = hashlib.sha256()
        for path, digest in zip(paths, self.of_files(paths), strict=True):
            total.update(path.name.encode() + b"\0" + digest)
        return total.digest()[:16]

    def of_file(self, path: Path) -> bytes:
        """The digest (32 bytes) of a file. Raises `OSError`."""
        return self._of_file(path, waits=True)

    def _of_file(self, path: Path, waits: bool) -> bytes | None:
        """The same; None where another process is reading it and `waits` is false."""
        if blob := _hub_digest(path):
            return blob
        path, before = path.resolve(), state_of(path)
        with self._lock:
            known = self._known.get(str(path))
        if known and known[0] == before:
            return known[1]
        with _entry(path, before, waits) as entry:
            if entry is None:
                return None
            found = entry.read() or self._read(path, before, entry)
        return found

    def _read(self, path: Path, before: State, entry: "_Entry") -> bytes:
        started_ns, found = time.time_ns(), hashlib.sha256()
        with path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                found.update(data)
        if state_of(path) != before:
            raise FileChangedError(f"{path} was written while it was read")
        if started_ns - max(before[3:]) >= _FRESH_NS:
            entry.write(found.digest())
            with self._lock:
                self._known[str(path)] = before, found.digest()
                trim(self._known, MAX_REMEMBERED)
        return found.digest()


def _hub_digest(path: Path) -> bytes | None:
    """The digest by which the Hugging Face hub names a file, where `path` is a link into its cache."""
    if not path.is_symlink():
        return None
    blob = path.resolve(strict=True)
    is_blob = _BLOB.fullmatch(blob.name) and blob.parent.name == "blobs" and blob.parent.parent.name.startswith("models--")
    return bytes.fromhex(blob.name) if is_blob else None


@dataclass
class _Entry:
    """The stored digest of one file, and the lock of the process that reads it."""

    path: Path
    state: State
    descriptor: int = -1
    """-1: nothing is kept."""

    def read(self) -> bytes | None:
        """The digest, if it is that of the file as it is now."""
        if self.descriptor < 0:
            return None
        try:
            kept = json.loads(os.pread(self.descriptor, 1 << 16, 0))
            if kept["path"] == str(self.path) and tuple(kept["state"]) == self.state:
                found = bytes.fromhex(kept["sha256"])
                return found if len(found) == hashlib.sha256().digest_size else None
        except (ValueError, TypeError, KeyError):  # Empty, or left half-written.
            pass
        return None

    def write(self, digest: bytes) -> None:
        if self.descriptor < 0:
            return
        text = json.dumps({"path": str(self.path), "state": self.state, "sha256": digest.hex()})
        try:
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, text.encode(), 0)
        except OSError as error:
            logger.info("the digest of %s is not kept: %s", self.path, error)


@contextmanager
def _entry(path: Path, state: State, waits: bool) -> Iterator[_Entry | None]:
    """The entry of a file, locked. None where another process has it and `waits` is false."""
    descriptor = _open_entry(path)
    entry = _Entry(path, state, descriptor)
    if descriptor < 0:
        yield entry
        return
    try:
        deadline_s = time.monotonic() + _PATIENCE_S + state[2] / _LEAST_BYTES_S
        while not _lock_entry(descriptor) and not entry.read() and time.monotonic() < deadline_s:
            if not waits:
                yield None
                return
            time.sleep(_POLL_S)
        yield entry
    finally:
        os.close(descriptor)


def _open_entry(path: Path) -> int:
    folder = state_folder()
    if folder is None:
        return -1
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:32]
    try:
        _prune(folder)
        return os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        logger.info("the digest of %s is not kept: %s", path, error)
        return -1


def _lock_entry(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _prune(folder: Path) -> None:
    """Removes the older half of too many results. Who has one of them open only reads its file once more."""
    entries = list(os.scandir(folder))
    if len(entries) > MAX_REMEMBERED:
        for each in sorted(entries, key=lambda entry: entry.stat(follow_symlinks=False).st_mtime)[: len(entries) // 2]:
            Path(each.path).unlink(missing_ok=True)
