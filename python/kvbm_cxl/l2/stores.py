# SPDX-License-Identifier: Apache-2.0
"""Where objects lie: a folder, or whatever fsspec has a file system for. Paths are relative to the store, with slashes.

Any call may be made from any thread, may take for ever, and may raise anything: the callers take every exception for a store that fails.
"""

import errno
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

# A file that its writer did not finish, and will not any more.
_UNFINISHED_S = 3600.0
_PART = ".part"
# A folder whose bytes NIXL moves.
_NIXL = "nixl+posix://"


@dataclass(frozen=True)
class Stored:
    """An object as a listing tells of it."""

    path: str
    len_bytes: int
    written_s: float
    """When it was written, or last promoted; seconds since 1970, 0 where the store does not tell."""


class Store(Protocol):
    """What a level needs of a store."""

    def listing(self) -> Iterator[Stored]:
        """Every object."""

    def read(self, path: str) -> bytes:
        """A whole object. Raises FileNotFoundError."""

    def write(self, path: str, parts: Sequence[Any]) -> None:
        """Writes an object of these parts, over another one of its path."""

    def delete(self, path: str) -> None:
        """Deletes an object. One that is gone is no error."""

    def note_use(self, path: str) -> None:
        """Notes a use, where the store can tell of it later."""


class LocalStore:
    """A folder: of a local disk, or of a file system that hosts share. Made where it is missing.

    A file gets its name once it is complete. It is not brought to the disk by force: what a power failure leaves of it is found out by its
    checksum.
    """

    def __init__(self, folder: str) -> None:
        self._root = Path(folder)
        self._root.mkdir(parents=True, exist_ok=True)
        self._device = self._root.stat().st_dev
        self._numbers = itertools.count()

    def listing(self) -> Iterator[Stored]:
        """Every object. What writers that died have left is removed."""
        self._check_mount()
        folders = [self._root]
        while folders:
            folder = folders.pop()
            try:
                entries = list(os.scandir(folder))
            except FileNotFoundError:
                continue
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                    continue
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if entry.name.endswith(_PART):
                    if time.time() - found.st_mtime > _UNFINISHED_S:
                        Path(entry.path).unlink(missing_ok=True)
                else:
                    yield Stored(Path(entry.path).relative_to(self._root).as_posix(), found.st_size, found.st_mtime)

    def read(self, path: str) -> bytes:
        return (self._root / path).read_bytes()

    def write(self, path: str, parts: Sequence[Any]) -> None:
        target = self._root / path
        unfinished = target.with_name(f".{target.name}.{os.uname().nodename}.{os.getpid()}.{next(self._numbers)}{_PART}")
        try:
            file = open(unfinished, "xb", buffering=0)
        except FileNotFoundError:
            # Never on the folder below a file system that is no longer mounted.
            self._check_mount()
            target.parent.mkdir(parents=True, exist_ok=True)
            file = open(unfinished, "xb", buffering=0)
        try:
            with file:
                self._fill(file, parts)
            os.replace(unfinished, target)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()
            raise

    def _fill(self, file: FileIO, parts: Sequence[Any]) -> None:
        """Writes all of it to an empty file."""
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[file.write(rest) :]

    def delete(self, path: str) -> None:
        (self._root / path).unlink(missing_ok=True)

    def note_use(self, path: str) -> None:
        with suppress(OSError):
            os.utime(self._root / path)

    def _check_mount(self) -> None:
        try:
            is_there = self._root.stat().st_dev == self._device
        except FileNotFoundError:
            is_there = False
        if not is_there:
            raise OSError(errno.ENODEV, "the file system of the second level is gone: mount it again, or end its use", str(self._root))


class FsspecStore:
    """A folder or bucket that fsspec reaches by its URL."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise ValueError(f"{url}: a store by URL needs fsspec, and what it needs for this kind: pip install 'kvbm-cxl[l2]'") from error
        self._fs, root = url_to_fs(url)
        self._root = root.rstrip("/")

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}"

    def listing(self) -> Iterator[Stored]:
        """Every object, as the store tells now."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return
        for path, info in found.items():
            yield Stored(path[len(self._root) :].lstrip("/"), int(info.get("size") or 0), _written_s(info))

    def read(self, path: str) -> bytes:
        return self._fs.cat_file(self._path(path))

    def write(self, path: str, parts: Sequence[Any]) -> None:
        data = b"".join(parts)
        try:
            self._fs.pipe_file(self._path(path), data)
        except FileNotFoundError:
            self._fs.makedirs(self._path(path).rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(self._path(path), data)

    def delete(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(path))

    def note_use(self, path: str) -> None:
        """Nothing: an object store has no time that could be set."""


def _written_s(info: dict[str, Any]) -> float:
    for name in ("mtime", "LastModified", "last_modified", "created"):
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0


def open_store(target: str) -> Store:
    """The store of a folder's path, of a folder by NIXL ("nixl+posix:///mnt/kv"), or of a URL as fsspec takes it ("s3://bucket/folder").
    Raises ValueError and what the store raises."""
    if target.startswith(_NIXL):
        from .nixl_store import NixlStore

        return NixlStore(target.removeprefix(_NIXL))
    return FsspecStore(target) if "://" in target else LocalStore(target)
