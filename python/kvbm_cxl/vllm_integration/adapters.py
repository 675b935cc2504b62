# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters by content.

vLLM's hashes name an adapter by its name and path, so that an adapter whose files are replaced, or another one of the same name on another
host, would meet the blocks of the first. A worker digests the files of every adapter as it loads them, and tells the scheduler's side,
which makes the digest part of the keys of requests with it. It is the digest of the loaded adapter: files that change afterwards, or while
they are read, do not belong to it. An adapter without a digest (its files are gone, it was loaded from tensors) shares nothing.

A request with an adapter that the workers have not told of waits one step, in which they load it.
"""

import hashlib
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import limits
from .file_digests import FileDigests, State, state_of
from .log import logger
from .stats import Tally

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

# What vLLM reads of an adapter's folder.
_FILES = ("adapter_config.json", "adapter_model.*", "new_embeddings.*")
UNKNOWN = b""
"""Digest of an adapter that has none."""


@dataclass
class Digests:
    """Digests of adapters' folders."""

    _files: FileDigests = field(default_factory=FileDigests)

    def of_folder(self, folder: Path) -> bytes:
        """A digest (16 bytes) over names and contents of an adapter's files; `UNKNOWN` where they cannot be read."""
        try:
            files = _files(folder)
            return self._files.of_names_and_contents(files) if files else UNKNOWN
        except OSError as error:
            logger.info("adapter in %s: %s", folder, error)
            return UNKNOWN


def _files(folder: Path) -> list[Path]:
    return sorted({path for pattern in _FILES for path in folder.glob(pattern) if path.is_file()})


def _states(folder: Path) -> list[tuple[str, State]] | None:
    try:
        return [(path.name, state_of(path)) for path in _files(folder)]
    except OSError:
        return None


class LoadedAdapters:
    """A worker's side: what vLLM's manager of adapters has loaded, by content."""

    def __init__(self, manager: Any | None) -> None:
        """`manager`: vLLM's `WorkerLoRAManager`, whose loading is watched from here on; None for an engine without adapters."""
        self._manager = manager
        self._digests = Digests()
        self._loaded: dict[int, bytes] = {}
        self._changed: dict[int, bytes] = {}
        self._asked: set[int] = set()
        self._arriving: Any = None
        if manager is None:
            return
        self._load = manager._load_adapter
        manager._load_adapter = self._watched_load
        models = manager._adapter_manager
        self._add = models.add_adapter
        models.add_adapter = self._watched_add

    def _watched_load(self, request: "LoRARequest") -> Any:
        folder, before, content = self._content(request)
        loaded = self._load(request)
        if content != UNKNOWN and (folder is None or _states(folder) != before):
            logger.warning("CxlConnector: the files of adapter %r changed while vLLM loaded them: it shares no blocks", request.lora_name)
            content = UNKNOWN
        self._arriving = loaded
        self._note(request.lora_int_id, content)
        return loaded

    def _watched_add(self, adapter: Any) -> Any:
        if adapter is not self._arriving:  # Made of tensors, by other means than the files of a request.
            self._note(adapter.id, UNKNOWN)
        self._arriving = None
        return self._add(adapter)

    def _content(self, request: "LoRARequest") -> tuple[Path | None, list[tuple[str, State]] | None, bytes]:
        """The adapter's folder, the state of its files, and a digest of all that makes its weights."""
        from vllm.lora.utils import get_adapter_absolute_path

        if getattr(request, "tensorizer_config_dict", None):  # Up to vLLM 0.31: from another place than its folder.
            return None, None, UNKNOWN
        try:
            folder = Path(get_adapter_absolute_path(request.lora_path))
        except Exception as error:  # A hub that does not answer, a path that does not exist: loading reports it.
            logger.info("adapter %r: %s", request.lora_name, error)
            return None, None, UNKNOWN
        before = _states(folder)
        files = self._digests.of_folder(folder)
        if files == UNKNOWN or _states(folder) != before:
            return folder, before, UNKNOWN
        dtype = getattr(getattr(self._manager, "lora_config", None), "lora_dtype", None)
        how = f"{request.is_3d_lora_weight}/{dtype}".encode()
        return folder, before, hashlib.sha256(files + how).digest()[:16]

    def _note(self, adapter_id: int, content: bytes) -> None:
        if len(self._loaded) >= limits.MAX_REMEMBERED:
            there = self._manager.list_adapters() if self._manager is not None else ()
            self._loaded = {known: digest for known, digest in self._loaded.items() if known in there}
        self._loaded[adapter_id] = self._changed[adapter_id] = content

    def ensure(self, request: "LoRARequest") -> None:
        """Has an adapter loaded that is not, as vLLM would before it computes with it, and tells of it."""
        self._asked.add(request.lora_int_id)
        if self._manager is None:
            self._changed[request.lora_int_id] = UNKNOWN
            return
        if request.lora_int_id in self._manager.list_adapters():
            self._changed[request.lora_int_id] = self._loaded.get(request.lora_int_id, UNKNOWN)
            return
        try:
            with _without_activation(self._manager._adapter_manager):
                self._manager.add_adapter(request)
        except Exception as error:  # Its requests fail with the same error when vLLM loads it for them.
            logger.info("adapter %r: %s", request.lora_name, error)
            self._note(request.lora_int_id, UNKNOWN)

    def is_loaded(self, adapter_id: int, content: bytes) -> bool:
        """Whether the adapter in memory is the one with this digest."""
        return content != UNKNOWN and self._loaded.get(adapter_id) == content

    def take_changed(self) -> dict[int, bytes]:
        """Adapters that were loaded or asked for since the last call. Those that vLLM warms up with are gone again by then."""
        changed, self._changed = self._changed, {}
        asked, self._asked = self._asked, set()
        there = self._manager.list_adapters() if changed and self._manager is not None else changed
        return {adapter_id: content for adapter_id, content in changed.items() if adapter_id in there or adapter_id in asked}


@contextmanager
def _without_activation(models: Any):
    """Adapters are loaded, and get no slot on the device: the step under way may need all of them."""
    mine = models.__dict__.get("activate_adapter")
    models.activate_adapter = lambda adapter_id: True
    try:
        yield
    finally:
        if mine is None:
            del models.activate_adapter
        else:
            models.activate_adapter = mine


@dataclass
class KnownAdapters:
    """The scheduler's side: digests of adapters as the workers told them."""

    tally: Tally
    _ranks: int = 0
    _told: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """By the adapter's number, then by rank."""
    _sure: set[int] = field(default_factory=set)
    """Adapters of which every rank has told since any may have been loaded or removed."""
    _wanted: dict[int, "LoRARequest"] = field(default_factory=dict)
    _local: dict[tuple[str, str], bytes] = field(default_factory=dict)
    """Digests with which blocks were computed that vLLM may have itself, by what vLLM's hashes call the adapter."""
    _mixed: set[tuple[str, str]] = field(default_factory=set)
    _warned: dict[str, None] = field(default_factory=dict)

    def handshake(self, ranks: int) -> None:
        self._ranks = ranks

    def content(self, request: "LoRARequest") -> bytes | None:
        """The digest of a request's adapter, `UNKNOWN` where it has none. None: it is not known yet, and is asked for in the next step."""
        if request.lora_int_id not in self._sure:
            self.want(request)
            return None
        found = set(self._told[request.lora_int_id].values())
        if len(found) > 1 or UNKNOWN in found:
            if request.lora_name not in self._warned:
                self._warned[request.lora_name] = None
                limits.trim(self._warned)
                self.tally.count("adapters", "unknown")
                logger.warning(
                    "CxlConnector: adapter %r (%s) is known by name alone: its files cannot be read, changed while they were, differ "
                    "between ranks, or it was loaded from memory. Its requests share no blocks through the pool",
                    request.lora_name,
                    request.lora_path,
                )
            return UNKNOWN
        return found.pop()

    def may_publish(self, request: "LoRARequest", content: bytes) -> bool:
        """Whether new blocks may be published: not while vLLM may have blocks itself that another adapter of this name computed."""
        name = request.lora_name, request.lora_path
        if len(self._local) >= limits.MAX_REMEMBERED and name not in self._local:
            return False  # None of these may be forgotten before the reset, and there is no room to remember this one.
        if self._local.setdefault(name, content) != content:
            if name not in self._mixed:
                self._mixed.add(name)
                self.tally.count("adapters", "replaced")
                logger.warning(
                    "CxlConnector: adapter %r was replaced under its name: its requests publish nothing until vLLM's own prefix cache is "
                    "reset (reset_prefix_cache)",
                    request.lora_name,
                )
        return name not in self._mixed

    def local_reset(self) -> None:
        """vLLM emptied its own prefix cache."""
        self._local.clear()
        self._mixed.clear()

    def forget(self) -> None:
        """Adapters may have been loaded or removed."""
        self._sure.clear()

    def want(self, request: "LoRARequest") -> None:
        """Has the workers load an adapter in the next step, if they have not, and tell of it."""
        self._wanted[request.lora_int_id] = request

    def take_wanted(self) -> list["LoRARequest"]:
        wanted, self._wanted = self._wanted, {}
        return list(wanted.values())

    def learn(self, by_rank: Mapping[int, Mapping[int, bytes]]) -> set[int]:
        """What workers say, by rank, then by the adapter's number. Returns adapters that are others than before."""
        replaced = set()
        for adapter_id in {each for adapters in by_rank.values() for each in adapters}:
            now = {rank: adapters[adapter_id] for rank, adapters in by_rank.items() if adapter_id in adapters}
            before = self._told.get(adapter_id, {})
            if any(before.get(rank, content) != content for rank, content in now.items()):
                replaced.add(adapter_id)
                before = {}
            self._told.pop(adapter_id, None)
            self._told[adapter_id] = {**before, **now}
            while len(self._told) > limits.MAX_REMEMBERED:
                oldest = next(iter(self._told))
                del self._told[oldest]
                self._sure.discard(oldest)
            if self._ranks and len(now) == self._ranks:
                self._sure.add(adapter_id)
            else:  # Some rank has another one, or none, for all that is known.
                self._sure.discard(adapter_id)
        return replaced
