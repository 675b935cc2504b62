# SPDX-License-Identifier: Apache-2.0
"""A process of `perf/lmcache_backends.py`: one storage manager of LMCache with its own DAX backend and ours, and chunks to move."""

import time

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.storage_manager import StorageManager

LAYERS, HEAD = 2, 128


class Subject:
    """`arena` is a file of its own for the DAX backend, whose index is in the process; the pool is shared."""

    def __init__(self, pool, arena, chunk_bytes, count, threads):
        tokens = chunk_bytes // (2 * LAYERS * HEAD * 2)
        batch_bytes = count * chunk_bytes
        extra = {
            "storage_plugin.dax.module_path": "lmcache.v1.storage_backend.plugins.dax_backend",
            "storage_plugin.dax.class_name": "DaxBackend",
            "dax.device_path": arena,
            "dax.max_dax_size": 2 * batch_bytes / 2**30,
            "dax.restore_workers": threads,
            # By itself it has a region of 128 MiB or more for each worker, and one worker would have all of a batch.
            "dax.retrieve_staging_slab_bytes": max(batch_bytes, threads * chunk_bytes),
            "storage_plugin.cxl.module_path": "kvbm_cxl.lmcache",
            "storage_plugin.cxl.class_name": "CxlStorageBackend",
            "cxl.pool": pool,
            "cxl.threads": threads,
        }
        memory_gb = 3 * batch_bytes / 2**30
        self._metadata = LMCacheMetadata("perf", 1, 1, 0, 0, torch.float16, (LAYERS, 2, tokens, 1, HEAD), chunk_size=tokens)
        config = {"chunk_size": tokens, "local_cpu": False, "max_local_cpu_size": memory_gb, "storage_plugins": ["dax", "cxl"]}
        self._manager = StorageManager(LMCacheEngineConfig.from_defaults(**config, extra_config=extra), self._metadata, EventManager())
        self._backends = {name: self._manager.storage_backends[name] for name in ("dax", "cxl")}
        self._chunks = [self._manager.allocate(self._metadata.get_shapes(), self._metadata.get_dtypes()) for _ in range(count)]
        for chunk in self._chunks:
            self._words(chunk).random_()
        self._keys = []

    def _words(self, chunk):
        return chunk.raw_data[: chunk.get_size()].view(torch.int64)

    def begin(self, first):
        """A round: every page of every chunk becomes another, and has other names."""
        self._keys = [CacheEngineKey("perf", 1, 0, first + number, torch.float16, {}) for number in range(len(self._chunks))]
        for number, chunk in enumerate(self._chunks):
            self._words(chunk)[::512] = first + number

    def store(self, name):
        """Seconds until every chunk is in the backend."""
        backend, start = self._backends[name], time.perf_counter()
        for task in backend.batched_submit_put_task(self._keys, self._chunks) or ():
            task.result()
        took_s = time.perf_counter() - start
        if backend.batched_contains(self._keys) != len(self._keys):
            raise RuntimeError(f"{name} has not stored every chunk")
        return took_s

    def retrieve(self, name):
        """Seconds until every chunk is in memory of LMCache's. Every byte is compared afterwards."""
        start = time.perf_counter()
        loaded = self._backends[name].batched_get_blocking(self._keys)
        took_s = time.perf_counter() - start
        for number, (one, chunk) in enumerate(zip(loaded, self._chunks, strict=True)):
            if one is None or not torch.equal(self._words(one), self._words(chunk)):
                raise RuntimeError(f"{name}: chunk {number} is {'missing' if one is None else 'wrong'}")
            # What the next load must not find there.
            self._words(one).zero_()
            one.ref_count_down()
        return took_s

    def end(self):
        """Takes the chunks of the round out again."""
        for backend in self._backends.values():
            backend.batched_remove(self._keys)
