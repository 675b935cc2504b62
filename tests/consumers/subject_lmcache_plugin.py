# SPDX-License-Identifier: Apache-2.0
"""LMCache's storage plugin as the tests use it: LMCache's storage manager loads it, and LMCache's own allocator has the memory."""

import asyncio
import hashlib

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.storage_manager import StorageManager
from peers import payload

CHUNK_BYTES = 2 * 2 * 64 * 64 * 2
# Each shapes the bytes of a chunk, or what its name stands for: under another one nothing may be found.
VARIATIONS = {
    "model": {"model": "other"},
    "ranks": {"ranks": 2},
    "rank": {"ranks": 2, "rank": 1},
    "layers": {"layers": 4},
    "heads of the same size": {"heads": 2, "head": 32},
    "latent attention of the same size": {"mla": True, "layers": 4},
    "chunk size": {"tokens": 32},
    "type of the same size": {"dtype": "bfloat16"},
    "layout of the same size": {"layers": 4, "tokens": 32},
    "tag": {"tags": {"lmcache.tag.tenant": "a"}},
    "hash of tokens": {"hash": "sha256_cbor"},
    "what the operator names": {"options": {"cxl.namespace": "weights of May"}},
    "replica": {"options": {"cxl.replica": "B"}},
}


class Subject:
    def __init__(
        self, pool, model="model", ranks=1, rank=0, layers=2, heads=1, head=64, tokens=64, dtype="float16", tags=None,
        hash="builtin", mla=False, memory_gb=0.05, hot=False, options=None,
    ):  # fmt: skip
        extra = {"storage_plugin.cxl.module_path": "kvbm_cxl.lmcache", "storage_plugin.cxl.class_name": "CxlStorageBackend"}
        extra |= {"cxl.pool": pool, "cxl.cache": {"low_water_percent": 0, "high_water_percent": 1}, **(options or {})}
        config = {"chunk_size": tokens, "local_cpu": hot, "max_local_cpu_size": memory_gb, "storage_plugins": ["cxl"]}
        self.config = LMCacheEngineConfig.from_defaults(**config, extra_config=extra, pre_caching_hash_algorithm=hash)
        shape = (layers, 1 if mla else 2, tokens, heads, head)
        metadata = LMCacheMetadata(model, ranks, ranks, rank, rank, getattr(torch, dtype), shape, use_mla=mla, chunk_size=tokens)
        self.metadata = metadata
        self.manager = StorageManager(self.config, metadata, EventManager())
        self.backend = self.manager.storage_backends.get("cxl")
        self.format = MemoryFormat.KV_MLA_FMT if mla else MemoryFormat.KV_2LTD
        self.tokens = tokens

        def key(name):
            number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
            return CacheEngineKey(model, ranks, rank, number, getattr(torch, dtype), tags or {})

        self.key = key

    def _memory(self, name, tokens):
        one = self.manager.allocate(self.metadata.get_shapes(tokens), self.metadata.get_dtypes(), self.format, busy_loop=False)
        memoryview(one.byte_array).cast("B")[:] = payload(name, one.get_size())
        return one

    def store(self, names, tokens=None):
        """Which chunks the pool has afterwards, as LMCache is told."""
        self.begin_store(names, tokens)
        self.settle()
        return [self.backend.contains(self.key(name)) for name in names]

    def begin_store(self, names, tokens=None):
        """As the engine stores: its own references end with the call."""
        self.manager.batched_put([self.key(name) for name in names], [self._memory(name, tokens) for name in names])

    def put(self, names):
        """By the interface itself: the outcomes, and for which chunks the caller was called."""
        objects, told = [self._memory(name, None) for name in names], []
        (task,) = self.backend.batched_submit_put_task([self.key(name) for name in names], objects, on_complete_callback=told.append)
        words = task.result(120)
        for one in objects:
            one.ref_count_down()
        return [words, [name for name in names if self.key(name) in told]]

    def settle(self):
        for task in set(self.backend._storing.values()):
            task.result(120)

    def found(self, names):
        """How many leading chunks."""
        return self.manager.batched_contains([self.key(name) for name in names], ["cxl"])[0]

    def lock(self, names):
        return self.manager.batched_contains([self.key(name) for name in names], ["cxl"], pin=True)[0]

    def unlock(self, names):
        self.manager.batched_unpin([self.key(name) for name in names], ["cxl"])

    def _hits(self, names, loaded):
        hits = []
        for name, one in zip(names, loaded, strict=True):
            hits.append(0 if one is None else one.get_shape()[self.format.token_dim()])
            if one is not None:
                assert bytes(one.byte_array) == payload(name, one.get_size()), f"wrong bytes for {name}"
                assert [one.get_shape()] == self.metadata.get_shapes(hits[-1]) and one.get_dtype() == self.metadata.kv_dtype
                assert one.get_ref_count() == 1 or self.config.local_cpu
                one.ref_count_down()
        return hits

    def load(self, names):
        """How many tokens of each; 0 for a miss. Every byte is compared."""
        return self._hits(names, self.manager.batched_get([self.key(name) for name in names], "cxl"))

    def load_async(self, names):
        """As LMCache's asynchronous loading does it, on its event loop: what was found and pinned, and what was loaded."""
        keys = [self.key(name) for name in names]

        async def both():
            count = await self.backend.batched_async_contains("lookup", keys, True)
            held = self.backend._blocks.pin_count()
            return count, held, await self.backend.batched_get_non_blocking("lookup", keys)

        count, held, loaded = asyncio.run_coroutine_threadsafe(both(), self.manager.loop).result(120)
        return [count, held, self._hits(names[: len(loaded)], loaded)]

    def remove(self, names, force=True):
        return self.backend.batched_remove([self.key(name) for name in names], force)

    def status(self):
        return {**self.backend.status(), "held": self.backend._blocks.pin_count()}

    def used_bytes(self):
        """What LMCache's allocator has given out."""
        return self.manager.allocator_backend.memory_allocator.pin_allocator.total_allocated_size

    def close(self):
        self.manager.close()
