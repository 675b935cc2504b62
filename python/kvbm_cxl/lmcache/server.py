# SPDX-License-Identifier: Apache-2.0
"""The L2 adapter of LMCache's multi-process server.

LMCache's controllers give tasks and take results; threads of the adapter's own do the work. The pool evicts by itself, and the adapter
tells LMCache of it. A pool that is lost is a cache without hits: the server continues, its status says that the adapter is not healthy, and
the pool is opened again as soon as it can be.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from ..consumers.blocks import HELD, SKIPPED, Blocks
from ..consumers.ledger import Entry, Ledger
from ..consumers.names import by_namespace, key_of
from ..consumers.pins import Held, release
from ..consumers.tasks import Tasks
from ..options import ThreadOptions, number
from ..vllm_integration.pool_access import acquire
from .shapes import FLAT, Namespaces, memory_of, shape_of, shape_of_object

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryTags

logger = logging.getLogger("lmcache.kvbm_cxl")
_WHO = "LMCache's adapter CxlL2Adapter"
_DELETE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ServerOptions(ThreadOptions):
    """The options of the adapter."""

    who: ClassVar[str] = _WHO

    capacity_bytes: int = number(0, 0)
    """Capacity of the tier for LMCache's own eviction (`"eviction"`). 0: only the pool evicts."""


class CxlL2AdapterConfig(L2AdapterConfigBase):
    """The `adapter_params` of the plugin."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options

    @classmethod
    def from_dict(cls, d: dict) -> "CxlL2AdapterConfig":
        return cls(ServerOptions.read(d))

    @classmethod
    def help(cls) -> str:
        return (
            "CXL pool (kvbm-cxl), adapter_params:\n"
            "- pool (str): devices, as /dev/dax0.0; left out: CXL_POOL of the environment\n"
            "- namespace (str): whatever else tells objects apart: weights, engine, serializer (optional)\n"
            "- threads (int): threads that copy, for each direction (optional, 2)\n"
            "- checksums (bool): compare a checksum of each object that is loaded (optional, true)\n"
            "- capacity_bytes (int): where LMCache is to evict, too (optional, 0)\n"
            "- cache (dict): options of the pool's cache (optional)"
        )


class CxlL2Adapter(L2AdapterInterface):
    """LMCache's second tier in a pool that hosts share. Any thread may call any method; none but `delete` waits for the pool."""

    def __init__(self, config: CxlL2AdapterConfig, l1_memory_desc: L1MemoryDesc | None = None) -> None:
        super().__init__(max_capacity_bytes=config.options.capacity_bytes)
        self._access = acquire(config.options)
        self._blocks = Blocks(self._access)
        self._namespaces = Namespaces(config.options.namespace)
        self._notifiers = [create_event_notifier() for _ in range(3)]
        self._store_efd, self._lookup_efd, self._load_efd = self._notifiers
        threads, bind = config.options.threads, self._access.bind_worker
        self._stores: Tasks[L2StoreResult] = Tasks("lmcache-store", threads, self._store_efd.notify, bind)
        self._lookups: Tasks[Bitmap] = Tasks("lmcache-lookup", threads, self._lookup_efd.notify, bind)
        self._loads: Tasks[Bitmap] = Tasks("lmcache-load", threads, self._load_efd.notify, bind)
        # What takes pins back and evicts, in order.
        self._later = ThreadPoolExecutor(1, "kvbm-cxl-lmcache-later")
        self._pins = Held()
        self._ledger = Ledger(self._access, self._notify_evicted)

    def get_store_event_fd(self) -> int:
        return self._store_efd.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookup_efd.fileno()

    def get_load_event_fd(self) -> int:
        return self._load_efd.fileno()

    # Stores

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        return self._stores.submit(lambda: self._store(keys, objects), lambda: L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.take_all()

    def _store(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2StoreResult:
        stored_bytes, failures = 0, set()
        namespaces = [self._namespaces.of(key, shape_of_object(one)) for key, one in zip(keys, objects, strict=True)]
        for namespace, places in by_namespace(namespaces):
            names = [key_of(keys[place].chunk_hash) for place in places]
            sizes = [objects[place].get_size() for place in places]
            memory = [memory_of(objects[place]) for place in places]
            entries = {(namespace, name): Entry(keys[place], size) for name, place, size in zip(names, places, sizes, strict=True)}
            words = self._ledger.store(entries, partial(self._blocks.store, namespace, names, memory, sizes), self._notify_stored)
            stored_bytes += sum(size for size, word in zip(sizes, words, strict=True) if word == "stored")
            failures.update(set(words) - HELD - SKIPPED)
        if failures:
            logger.warning("%d objects were not all stored: %s", len(keys), ", ".join(sorted(failures)))
        return L2StoreResult(not failures, stored_bytes)

    def _notify_stored(self, entries: list[Entry]) -> None:
        self._notify_keys_stored([entry.what for entry in entries], [entry.len_bytes for entry in entries])

    def _notify_evicted(self, entries: list[Entry]) -> None:
        self._notify_keys_deleted([entry.what for entry in entries], [entry.len_bytes for entry in entries])

    # Lookups, each of which locks what it finds

    def submit_lookup_and_lock_task(self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]) -> int:
        return self._lookups.submit(lambda: self._lookup(keys, group_layout_descs), lambda: Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.take(task_id)

    def _lookup(self, keys: list[ObjectKey], descriptions: dict[int, MemoryLayoutDesc]) -> Bitmap:
        shapes = {group: shape_of(one.shapes, one.dtypes) for group, one in (descriptions or {}).items()}
        found = Bitmap(len(keys))
        left = [(place, self._namespaces.to_look_in(key, shapes.get(key.object_group_id, ()))) for place, key in enumerate(keys)]
        while left := [(place, namespaces) for place, namespaces in left if namespaces]:
            missed = []
            for namespace, some in by_namespace([namespaces[0] for _, namespaces in left]):
                places = [left[number][0] for number in some]
                pins = self._blocks.pin(namespace, [key_of(keys[place].chunk_hash) for place in places])
                hits = [(place, pin) for place, pin in zip(places, pins, strict=True) if pin]
                self._pins.add((keys[place], pin) for place, pin in hits)
                for place, _ in hits:
                    found.set(place)
                missed += [(left[number][0], left[number][1][1:]) for number, pin in zip(some, pins, strict=True) if not pin]
            left = missed
        return found

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        if released := self._pins.take(keys):
            self._later.submit(release, released)

    # Loads

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        return self._loads.submit(lambda: self._load(keys, objects), lambda: Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.take(task_id)

    def _load(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> Bitmap:
        found, hits = Bitmap(len(keys)), []
        shapes = [shape_of_object(one) for one in objects]
        for namespace, places in by_namespace([self._namespaces.of(key, shape) for key, shape in zip(keys, shapes, strict=True)]):
            names = [key_of(keys[place].chunk_hash) for place in places]
            loaded = self._blocks.load(namespace, names, [memory_of(objects[place]) for place in places])
            for place, block in zip(places, loaded, strict=True):
                is_whole = block.len_bytes == objects[place].get_size()
                if not block or not (is_whole or shapes[place] == FLAT):
                    continue
                if not is_whole:
                    # The serializer made less than it had room for.
                    objects[place].set_used_size(block.len_bytes)
                found.set(place)
                hits.append(keys[place])
        if hits:
            self._notify_keys_accessed(hits)
        return found

    # Everything else

    def get_memory_tags(self) -> "MemoryTags":
        """From LMCache 0.5.7 on: the memory that holds the objects, which other hosts share."""
        from lmcache.v1.distributed.api import MemoryResidency, MemorySegment, MemoryTags

        return MemoryTags(MemorySegment.CXL, MemoryResidency.REMOTE)

    def delete(self, keys: list[ObjectKey]) -> None:
        try:
            self._later.submit(self._delete, keys).result(_DELETE_TIMEOUT_S)
        except TimeoutError:  # LMCache's thread of evictions does not expect an error.
            logger.warning("the deletion of %d objects takes longer than %d s, and continues", len(keys), _DELETE_TIMEOUT_S)

    def _delete(self, keys: list[ObjectKey]) -> None:
        namespaces = [self._namespaces.to_look_in(key, ()) for key in keys]
        for namespace in {one for some in namespaces for one in some}:
            names = [key_of(key.chunk_hash) for key, some in zip(keys, namespaces, strict=True) if namespace in some]
            gone = self._blocks.evict(namespace, names)
            # Reported before this returns. The pool reports it as well, of entries that are removed by then.
            entries = self._ledger.take((namespace, name) for name, is_gone in zip(names, gone, strict=True) if is_gone)
            if entries:
                self._notify_evicted(entries)

    def list_l2_keys(self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None) -> KeyListPage:
        """The keys that this server stored and the pool still has. The pool has no names of other servers' keys, only digests of them."""
        if page_size <= 0:
            raise ValueError(f"page_size is {page_size}; it must be positive")
        if cursor is not None and not cursor.isdecimal():
            raise ValueError(f"cursor is {cursor!r}, which no page named")
        first = int(cursor or 0)
        entries = [entry for entry in self._ledger.entries() if model_name is None or entry.what.model_name == model_name]
        page = tuple(KeyEntry(entry.what.to_encoded_object_key(), entry.len_bytes) for entry in entries[first : first + page_size])
        return KeyListPage(page, str(first + page_size) if first + page_size < len(entries) else None)

    def report_status(self) -> dict:
        return {
            **self._blocks.health(),
            "type": type(self).__name__,
            "pool": self._access.spec,
            "locked_key_count": len(self._pins),
            "stored_object_count": len(self._ledger.entries()),
            "current_size_bytes": self.get_usage().total_bytes_used,
        }

    def close(self) -> None:
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.close()
        self._later.shutdown(wait=True)
        self._ledger.close()
        release(self._pins.take_all())
        self._access.release()
        for notifier in self._notifiers:
            notifier.close()
