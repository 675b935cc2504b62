# SPDX-License-Identifier: Apache-2.0
"""The storage backend of SGLang's HiCache.

SGLang's threads of backups and prefetches call it, and wait. Pages are copied between SGLang's host pools and the pool; each one that is
loaded is verified. A pool that is full, lost or not there at start is one without hits, and no error: SGLang computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

import kvbm_cxl

from ..consumers.blocks import KEPT, Blocks, leading
from ..consumers.names import key_of
from ..options import AdapterOptions
from ..vllm_integration.pool_access import acquire
from .pages import HostPool

# What SGLang says to itself in the same dictionary.
_OF_SGLANG = frozenset(("backend_name", "module_path", "class_name", "interface_v1"))


@dataclass(frozen=True)
class HiCacheOptions(AdapterOptions):
    """The options of the backend."""

    who: ClassVar[str] = "SGLang's storage backend CxlHiCache"


class CxlHiCache(HiCacheStorage):
    """HiCache's third level in a pool that hosts share. Any thread may call any method."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        options = {name: value for name, value in (storage_config.extra_config or {}).items() if name not in _OF_SGLANG}
        self._options = HiCacheOptions.read(options)
        self._config = storage_config
        self._takes_addresses = bool((storage_config.extra_config or {}).get("interface_v1"))
        self._access = acquire(self._options, must_open=False)
        self._blocks = Blocks(self._access)
        self._pools: dict[str, HostPool] = {}
        self._flat: set["kvbm_cxl.Namespace"] = set()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool_name, host_pool)

    def _register(self, name: str, host: Any) -> None:
        pool = HostPool(name, host, self._config, self._options.namespace)
        if pool.has_memory and (self._takes_addresses or name != PoolName.KV):
            _ = pool.namespace  # A pool that cannot be stored is an error now, and not in a thread later.
        self._pools[name] = pool

    # Pages of the KV cache

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many leading pages are there."""
        pool = self._pools[PoolName.KV]
        if not pool.has_memory:
            return len(keys)
        namespace = pool.namespace if self._takes_addresses else self._flat_namespace(pool.host.get_dummy_flat_data_page().nbytes)
        return leading(self._there(namespace, keys))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._get(self._pools[PoolName.KV], keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._set(self._pools[PoolName.KV], keys, host_indices)

    # Pages of all pools of a hybrid model

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The prefixes of `keys` that every pool can restore, the longest of them, and how far each pool alone reaches."""
        kv_pages = self.batch_exists(keys, extra_info)
        hits = {PoolName.KV: kv_pages} if kv_pages else {}
        restorable = set(range(1, kv_pages + 1))
        for transfer in pool_transfers or []:
            there = self._there(self._pools[transfer.name].namespace, keys[:kv_pages])
            if transfer.hit_policy is PoolHitPolicy.BLOCK_GROUPS:
                # A second form of pages that are there anyway, which holds back none. Nothing in SGLang 0.5.23 has such a pool.
                continue
            if transfer.hit_policy is PoolHitPolicy.TRAILING_PAGES:
                allowed = _windows(there, max(1, len(transfer.keys or ())))
                reaches = max(allowed, default=0)
            else:
                reaches = leading(there)
                allowed = set(range(1, reaches + 1))
            if reaches:
                hits[transfer.name] = reaches
            restorable &= allowed
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {one.name: self._get(self._pools[one.name], one.keys or [], one.host_indices) for one in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {one.name: self._set(self._pools[one.name], one.keys or [], one.host_indices) for one in transfers}

    def _there(self, namespace: "kvbm_cxl.Namespace", keys: Sequence[str]) -> list[bool]:
        return self._blocks.has(namespace, [key_of(key) for key in keys])

    def _get(self, pool: HostPool, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        if not pool.has_memory:
            return [True] * len(keys)
        pages = pool.pages(keys, indices)
        if pages is None:
            return [False] * len(keys)
        len_bytes = sum(pool.piece_bytes)
        loaded = self._blocks.load(pool.namespace, [key_of(key) for key in keys], pages)
        return [bool(one) and one.len_bytes == len_bytes for one in loaded]

    def _set(self, pool: HostPool, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        if not pool.has_memory:
            return [True] * len(keys)
        pages = pool.pages(keys, indices)
        if pages is None:
            return [False] * len(keys)
        sizes = [sum(pool.piece_bytes)] * len(keys)
        return [word in KEPT for word in self._blocks.store(pool.namespace, [key_of(key) for key in keys], pages, sizes)]

    # Pages that SGLang copies to tensors first: without "interface_v1", and for what SGLang asks for one by one.

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        return [self.get(key, target) for key, target in zip(keys, target_locations, strict=True)]

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        (loaded,) = self._blocks.load(self._flat_namespace(target_location.nbytes), [key_of(key)], [target_location])
        return target_location if loaded and loaded.len_bytes == target_location.nbytes else None

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        return all([self.set(key, value) for key, value in zip(keys, values, strict=True)])

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        value = value.contiguous()
        (word,) = self._blocks.store(self._flat_namespace(value.nbytes), [key_of(key)], [value], [value.nbytes])
        return word in KEPT

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def _flat_namespace(self, len_bytes: int) -> "kvbm_cxl.Namespace":
        namespace = self._pools[PoolName.KV].flat_namespace(len_bytes)
        self._flat.add(namespace)
        return namespace

    # Everything else

    def clear(self) -> bool:
        """Evicts the pages of this rank's pools, of all engines of this kind. True where the pool could be reached."""
        there = [pool for name, pool in self._pools.items() if pool.has_memory and (self._takes_addresses or name != PoolName.KV)]
        namespaces = {pool.namespace for pool in there} | self._flat
        return all([self._blocks.clear(namespace) for namespace in namespaces])

    def status(self) -> dict[str, Any]:
        """Whether there is a pool, and what became of pages, by call and outcome."""
        return self._blocks.health()

    def close(self) -> None:
        """Leaves the pool. The pages stay there."""
        access, self._access = self._access, None
        if access is not None:
            access.release()


def _windows(there: Sequence[bool], pages: int) -> set[int]:
    """The prefixes whose last `pages` pages, or as many as they have, are there."""
    return {end for end in range(1, len(there) + 1) if all(there[max(0, end - pages) : end])}

