# SPDX-License-Identifier: Apache-2.0
"""The storage plugin of LMCache within an engine's process.

The engine's threads give chunks to be stored, which threads of the plugin do, and wait for those that they load. A pool that is full, lost
or not there at start is one without hits, and no error: the engine computes.
"""

import asyncio
import logging
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.abstract_backend import AllocatorBackendInterface, StoragePluginInterface

from ..consumers.blocks import HELD, SKIPPED, Blocks, Loaded, leading
from ..consumers.names import by_namespace
from ..consumers.pins import Held, release
from ..options import ConfigError, ThreadOptions
from ..vllm_integration.pool_access import acquire
from .chunks import Chunks, name_of
from .shapes import memory_of

if TYPE_CHECKING:
    import kvbm_cxl

logger = logging.getLogger("lmcache.kvbm_cxl")
_WHO = "LMCache's storage plugin CxlStorageBackend"
_PREFIX = "cxl."
# A store is divided among threads from twice so much on: less is over before another thread has begun.
_STRETCH_BYTES = 2 << 20
# How long a load waits for a store to give its memory back, where there is no other.
_STORE_WAIT_S = 5.0


@dataclass(frozen=True)
class PluginOptions(ThreadOptions):
    """The options of the storage plugin."""

    who: ClassVar[str] = _WHO

    replica: str = ""
    """Partition of keys that engines with the same text share. Default: all engines share one."""


class CxlStorageBackend(StoragePluginInterface):
    """Chunks of an engine in a pool that hosts share. Any thread may call any method."""

    def __init__(
        self,
        dst_device: str = "cpu",
        config: LMCacheEngineConfig | None = None,
        metadata: LMCacheMetadata | None = None,
        local_cpu_backend: AllocatorBackendInterface | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        given = {name.removeprefix(_PREFIX): value for name, value in (config.extra_config or {}).items() if name.startswith(_PREFIX)}
        options = PluginOptions.read(given)
        if config.use_layerwise:
            raise ConfigError(f"{_WHO} stores chunks of all layers: it cannot be used with use_layerwise")
        self._chunks = Chunks(config, metadata, options.namespace, options.replica)
        self._access = acquire(options, must_open=False)
        self._blocks = Blocks(self._access)
        self._threads = options.threads
        self._stores = ThreadPoolExecutor(options.threads, "kvbm-cxl-lmcache-store", self._access.bind_worker)
        self._loads = ThreadPoolExecutor(options.threads, "kvbm-cxl-lmcache-load", self._access.bind_worker)
        self._storing: dict[CacheEngineKey, Future] = {}
        self._pins = Held()
        # Those of a lookup whose load follows, by the lookup.
        self._looked_up: dict[str, list["kvbm_cxl.Pins"]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def __str__(self) -> str:
        return type(self).__name__

    def get_allocator_backend(self) -> AllocatorBackendInterface:
        if self.local_cpu_backend is None:
            raise RuntimeError(f"{_WHO} has no memory to load to: this process of LMCache has none")
        return self.local_cpu_backend

    # Stores

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        with self._lock:
            return key in self._storing

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[CacheEngineKey], None] | None = None,
    ) -> list[Future] | None:
        """Has chunks stored; never waits for the pool. Futures of stretches in order, each with one word for each of its chunks."""
        with self._lock:
            fresh = {key: one for key, one in zip(keys, objs, strict=True) if key not in self._storing}
            if not fresh or self._closed:
                return None
            tasks = []
            for some in self._stretches(list(fresh), sum(one.get_size() for one in fresh.values()) // _STRETCH_BYTES):
                for key in some:
                    fresh[key].ref_count_up()
                # The task removes its keys under the lock, so that they are there first.
                tasks.append(self._stores.submit(self._store, some, [fresh[key] for key in some], on_complete_callback))
                self._storing.update(dict.fromkeys(some, tasks[-1]))
        return tasks

    def _stretches(self, some: list, most: int) -> list[list]:
        """As many stretches of like length as there are threads, `most` at most."""
        step = max(1, -(-len(some) // max(1, min(self._threads, most))))
        return [some[first : first + step] for first in range(0, len(some), step)]

    def _store(
        self, keys: list[CacheEngineKey], objects: list[MemoryObj], told: Callable[[CacheEngineKey], None] | None
    ) -> list[str]:
        words = ["failed"] * len(keys)
        try:
            for place, is_chunk in enumerate(self._chunks.has(objects)):
                if not is_chunk:
                    words[place] = "other_layout"
            fit = [place for place, word in enumerate(words) if word == "failed"]
            for namespace, some in by_namespace(self._chunks.namespaces([keys[place] for place in fit])):
                places = [fit[number] for number in some]
                sizes = [objects[place].get_size() for place in places]
                memory = [memory_of(objects[place]) for place in places]
                stored = self._blocks.store(namespace, [name_of(keys[place]) for place in places], memory, sizes)
                for place, word in zip(places, stored, strict=True):
                    words[place] = word
        except Exception as error:
            self._report("storing chunks", error)
        finally:
            with self._lock:
                for key in keys:
                    self._storing.pop(key, None)
            for one in objects:
                one.ref_count_down()
        if failures := set(words) - HELD - SKIPPED:
            logger.warning("%d chunks were not all stored: %s", len(keys), ", ".join(sorted(failures)))
        if told:
            self._tell(told, [key for key, word in zip(keys, words, strict=True) if word in HELD])
        return words

    def _tell(self, told: Callable[[CacheEngineKey], None], keys: list[CacheEngineKey]) -> None:
        for key in keys:
            try:
                told(key)
            except Exception as error:
                self._report("telling of a stored chunk", error)

    # Lookups

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        return self.batched_contains([key], pin) == 1

    def pin(self, key: CacheEngineKey) -> bool:
        return self.contains(key, pin=True)

    def unpin(self, key: CacheEngineKey) -> bool:
        pins = self._pins.take([key])
        release(pins)
        return bool(pins)

    def batched_contains(self, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """How many leading chunks are there; with `pin` these are pinned."""
        if not pin:
            return leading(self._find(keys, self._blocks.has))
        pins = self._pin_leading(keys)
        self._pins.add(zip(keys, pins, strict=False))
        return len(pins)

    async def batched_async_contains(self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False) -> int:
        """The same. Blocks stay pinned until `batched_get_non_blocking` of the same lookup has loaded it."""
        if not pin:
            return await asyncio.to_thread(self.batched_contains, keys)
        pins = await asyncio.to_thread(self._pin_leading, keys)
        with self._lock:
            self._looked_up.setdefault(lookup_id, []).extend(pins)
        return len(pins)

    def _pin_leading(self, keys: list[CacheEngineKey]) -> list["kvbm_cxl.Pins"]:
        """Pins of the leading chunks that are there."""
        found = self._find(keys, self._blocks.pin)
        count = leading(found)
        release(pin for pin in found[count:] if pin)
        return found[:count]

    def _find(self, keys: list[CacheEngineKey], find: Callable[..., list]) -> list:
        """What `find` says of each chunk; None for all after a failure."""
        found: list = [None] * len(keys)
        try:
            for namespace, places in by_namespace(self._chunks.namespaces(keys)):
                for place, one in zip(places, find(namespace, [name_of(keys[place]) for place in places]), strict=True):
                    found[place] = one
        except Exception as error:
            self._report("looking for chunks", error)
        return found

    # Loads

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: list[CacheEngineKey]) -> list[MemoryObj | None]:
        """Each chunk in memory of LMCache's, which the caller gives back; None for a miss."""
        objects = self._allocate(len(keys))
        first, *others = self._stretches(list(zip(keys, objects, strict=False)), len(objects)) or [[]]
        with self._lock:
            tasks = None if self._closed else [self._loads.submit(self._load, some) for some in others]
        if tasks is None:
            _give_back(objects)
            return [None] * len(keys)
        loaded = [self._load(first), *(task.result() for task in tasks)]
        found = [one for some in loaded for one in some]
        return found + [None] * (len(keys) - len(found))

    async def batched_get_non_blocking(
        self, lookup_id: str, keys: list[CacheEngineKey], transfer_spec: Any = None
    ) -> list[MemoryObj]:
        """The leading chunks that are there."""
        try:
            loaded = await asyncio.to_thread(self.batched_get_blocking, keys)
        finally:
            with self._lock:
                pins = self._looked_up.pop(lookup_id, [])
            release(pins)
        count = leading(loaded)
        _give_back(one for one in loaded[count:] if one)
        return loaded[:count]

    def _allocate(self, count: int) -> list[MemoryObj]:
        """Memory for as many full chunks as there is room for. Where there is none, stores that are under way will give theirs back."""
        objects: list[MemoryObj] = []
        try:
            while len(objects) < count:
                with self._lock:
                    tasks = set(self._storing.values())
                one = self.get_allocator_backend().allocate(*self._chunks.layout(), self._chunks.format, busy_loop=False)
                if one is not None:
                    objects.append(one)
                elif not wait(tasks, _STORE_WAIT_S, FIRST_COMPLETED).done:
                    logger.warning("%d chunks of %d are not loaded: LMCache has no memory for them", count - len(objects), count)
                    break
        except Exception as error:
            self._report("allocating memory for chunks", error)
        return objects

    def _load(self, chunks: list[tuple[CacheEngineKey, MemoryObj]]) -> list[MemoryObj | None]:
        keys, objects = [key for key, _ in chunks], [one for _, one in chunks]
        found: list[MemoryObj | None] = [None] * len(keys)
        left = dict(enumerate(objects))
        try:
            for namespace, places in by_namespace(self._chunks.namespaces(keys)):
                memory = [memory_of(objects[place]) for place in places]
                loaded = self._blocks.load(namespace, [name_of(keys[place]) for place in places], memory)
                for place, block in zip(places, loaded, strict=True):
                    if block.len_bytes == objects[place].get_size() and block:
                        found[place] = left.pop(place)
                    elif block:
                        found[place] = self._shorter(objects[place], block)
        except Exception as error:
            self._report("loading chunks", error)
        _give_back(left.values())
        return found

    def _shorter(self, full: MemoryObj, block: Loaded) -> MemoryObj | None:
        """A chunk that is not full: a copy of its own length."""
        tokens = self._chunks.tokens_in(block.len_bytes)
        if not tokens:
            return None
        one = self.get_allocator_backend().allocate(*self._chunks.layout(tokens), self._chunks.format, busy_loop=False)
        if one is not None:
            memory_of(one)[:] = memory_of(full)[: block.len_bytes]
        return one

    # Everything else

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        return self.batched_remove([key], force) == 1

    def batched_remove(self, keys: list[CacheEngineKey], force: bool = True) -> int:
        """Evicts chunks that no process has pinned; `force` gives up this process's own pins of them. How many are gone that were there."""
        if force:
            release(self._pins.take_all(keys))
        there = [key for key, is_there in zip(keys, self._find(keys, self._blocks.has), strict=True) if is_there]
        return sum(map(bool, self._find(there, self._blocks.evict)))

    def clear(self) -> int:
        """Evicts every chunk under the names that this engine has met, also those that others stored. Their tokens are not known: 0."""
        for namespace in self._chunks.known_namespaces():
            self._blocks.clear(namespace)
        return 0

    def status(self) -> dict[str, Any]:
        """Whether there is a pool, and what became of chunks, by call and outcome."""
        return {**self._blocks.health(), "pinned": len(self._pins)}

    def close(self) -> None:
        """Waits for the stores, and leaves the pool. The chunks stay there."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._stores.shutdown(wait=True)
        self._loads.shutdown(wait=True)
        with self._lock:
            looked_up = [pin for pins in self._looked_up.values() for pin in pins]
            self._looked_up.clear()
        release([*looked_up, *self._pins.take_all()])
        logger.info("storage plugin closed: %s", self._blocks.counts())
        self._access.release()

    def _report(self, what: str, error: Exception) -> None:
        self._access.failures.report(what, error)
        # A handler of logs may keep the error, and must not keep the engine's memory with it.
        traceback.clear_frames(error.__traceback__)


def _give_back(objects: Any) -> None:
    for one in objects:
        one.ref_count_down()
