# SPDX-License-Identifier: Apache-2.0
"""LMCache's L2 adapter as the tests use it: LMCache's plugin loader makes it, and its own memory objects carry the bytes."""

import hashlib
import select

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig, _create_plugin_adapter
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd
from peers import payload

BLOCK_BYTES = 2 * 2 * 64 * 64 * 2
# Each shapes the bytes of an object: under another one nothing may be found.
VARIATIONS = {
    "model": {"model": "other"},
    "rank": {"kv_rank": 1 << 24 | 1},
    "group": {"group": 1},
    "salt": {"salt": "tenant"},
    "chunk size": {"tokens": 32},
    "type of the same size": {"dtype": "bfloat16"},
    "layout of the same size": {"hidden": 128, "tokens": 32},
    "what the operator names": {"options": {"namespace": "weights of May"}},
}


class Listener(L2AdapterListener):
    def __init__(self):
        self.stored, self.accessed, self.deleted = [], [], []

    def on_l2_keys_stored(self, keys, sizes):
        self.stored += keys

    def on_l2_keys_accessed(self, keys):
        self.accessed += keys

    def on_l2_keys_deleted(self, keys):
        self.deleted += keys


class Subject:
    def __init__(self, pool, model="model", kv_rank=1 << 24, group=0, salt="", tokens=64, hidden=64, dtype="float16", flat=0, options=None):
        parameters = {"pool": pool, "cache": {"low_water_percent": 0, "high_water_percent": 1}, **(options or {})}
        specification = {"module_path": "kvbm_cxl.lmcache", "class_name": "CxlL2Adapter", "adapter_params": parameters}
        self.adapter = _create_plugin_adapter(PluginL2AdapterConfig.from_dict(specification))
        self.listener = Listener()
        self.adapter.register_listener(self.listener)
        self.key = lambda name: ObjectKey(hashlib.sha256(name.encode()).digest(), model, kv_rank, group, salt)
        self.group, self.shape, self.dtype = group, torch.Size([2, 2, tokens, hidden]), getattr(torch, dtype)
        self.told = MemoryLayoutDesc([self.shape], [self.dtype])
        # As a serializer has it: a flat buffer, of which lookups are told nothing.
        self.flat = flat

    def memory(self, data: bytes | None = None):
        shape, dtype = (torch.Size([self.flat]), torch.uint8) if self.flat else (self.shape, self.dtype)
        len_bytes = shape.numel() * dtype.itemsize
        raw = torch.zeros(len_bytes, dtype=torch.uint8)
        meta = MemoryObjMetadata(shape, dtype, 0, len_bytes, 1, fmt=MemoryFormat.KV_2LTD, shapes=[shape], dtypes=[dtype])
        made = TensorMemoryObj(raw, meta, parent_allocator=None)
        if data is not None:
            made.set_used_size(len(data))
            memoryview(made.byte_array).cast("B")[:] = data
        return made

    def _wait(self, fd, ready):
        while (result := ready()) is None:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            assert poll.poll(120_000), "the adapter did not signal the end of a task"
            consume_fd(fd)
        return result

    def len_bytes(self):
        return self.flat - 1000 if self.flat else self.shape.numel() * self.dtype.itemsize

    def begin_store(self, names):
        objects = [self.memory(payload(name, self.len_bytes())) for name in names]
        return self.adapter.submit_store_task([self.key(name) for name in names], objects)

    def store(self, names):
        """Whether the task succeeded, and how many bytes it stored."""
        task, done = self.begin_store(names), {}

        def ended():
            done.update(self.adapter.pop_completed_store_tasks())
            return done.get(task)

        result = self._wait(self.adapter.get_store_event_fd(), ended)
        return [result.is_successful(), result.bytes_transferred()]

    def lock(self, names):
        task = self.adapter.submit_lookup_and_lock_task([self.key(name) for name in names], {self.group: self.told})
        found = self._wait(self.adapter.get_lookup_and_lock_event_fd(), lambda: self.adapter.query_lookup_and_lock_result(task))
        return [found.test(place) for place in range(len(names))]

    def unlock(self, names):
        self.adapter.submit_unlock([self.key(name) for name in names])

    def found(self, names):
        found = self.lock(names)
        self.unlock([name for name, is_found in zip(names, found) if is_found])
        return found

    def load(self, names):
        """Which are hits. Every byte of a hit is compared."""
        objects = [self.memory() for _ in names]
        task = self.adapter.submit_load_task([self.key(name) for name in names], objects)
        found = self._wait(self.adapter.get_load_event_fd(), lambda: self.adapter.query_load_result(task))
        hits = [found.test(place) for place in range(len(names))]
        for name, one, hit in zip(names, objects, hits):
            assert not hit or bytes(one.byte_array) == payload(name, self.len_bytes()), f"wrong bytes for {name}"
        return hits

    def delete(self, names):
        self.adapter.delete([self.key(name) for name in names])

    def status(self):
        usage = self.adapter.get_usage()
        told = {kind: len(getattr(self.listener, kind)) for kind in ("stored", "accessed", "deleted")}
        return {**self.adapter.report_status(), "usage": usage.total_bytes_used, "by_salt": dict(usage.bytes_by_cache_salt), "told": told}

    def listed(self, page_size=100):
        listed, cursor = [], None
        while True:
            page = self.adapter.list_l2_keys(page_size=page_size, cursor=cursor)
            listed += [entry.key.chunk_hash_hex for entry in page.entries]
            cursor = page.next_page_token
            if cursor is None:
                return listed

    def close(self):
        self.adapter.close()
