# SPDX-License-Identifier: Apache-2.0
"""HiCache's storage backend as the tests use it: SGLang's factory makes it, and SGLang's own host pools have the pages."""

import hashlib

import sglang_modules

sglang_modules.reach()

import torch  # noqa: E402
from peers import payload  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402

PAGES, LAYERS, HEADS, HEAD_SIZE, PAGE_TOKENS = 32, 2, 2, 32, 16
PAGE_BYTES = 2 * LAYERS * HEADS * HEAD_SIZE * PAGE_TOKENS * 2
# Each shapes the bytes of a page, or says whose they are: under another one nothing may be found.
VARIATIONS = {
    "model": {"model_name": "other"},
    "tensor rank": {"tp_rank": 1, "tp_size": 2},
    "number of tensor ranks": {"tp_size": 2},
    "pipeline rank": {"pp_rank": 1, "pp_size": 2},
    "number of pipeline ranks": {"pp_size": 2},
    "context rank": {"attn_cp_rank": 1, "attn_cp_size": 2},
    "number of context ranks": {"attn_cp_size": 2},
    "tokens of a page over decode contexts": {"logical_page_size": 4 * PAGE_TOKENS},
    "heads split for other ranks": {"tp_lcm_size": 2, "should_split_heads": True},
    "type of the same size": {"dtype": "bfloat16"},
    "layout": {"layout": "layer_first"},
    "layout of the same pieces": {"layout": "page_first_direct"},
    "tokens of a page": {"page_tokens": 32},
    "layers and heads of the same size": {"layers": 4, "heads": 1},
    "format of its own": {"format": "packed"},
    "what the operator names": {"options": {"namespace": "weights of May"}},
}
POLICIES = {"all": PoolHitPolicy.ALL_PAGES, "trailing": PoolHitPolicy.TRAILING_PAGES, "groups": PoolHitPolicy.BLOCK_GROUPS}


def host_pool(layout="page_first", dtype="float16", layers=LAYERS, heads=HEADS, page_tokens=PAGE_TOKENS):
    """SGLang's host pool of a model with attention of several heads."""
    kind, none = getattr(torch, dtype), torch.zeros(layers, dtype=torch.uint64)
    device = [torch.zeros(page_tokens, heads, HEAD_SIZE, dtype=kind) for _ in range(2 * layers)]
    buffers = KVBuffers(k=tuple(device[:layers]), v=tuple(device[layers:]), k_data_ptrs=none, v_data_ptrs=none, layout=KVBufferLayout.NHD)
    info = MHABufferInfo(
        buffers=buffers,
        page_size=page_tokens,
        head_num=heads,
        head_dim=HEAD_SIZE,
        v_head_dim=HEAD_SIZE,
        dtype=kind,
        device=torch.device("cpu"),
    )
    sizes = {"host_to_device_ratio": 1.0, "host_size": 0, "page_size": page_tokens, "host_token_capacity": PAGES * page_tokens}
    sizes |= {"device_capacity_tokens": page_tokens, "start_layer": 0, "end_layer": layers}
    return MHATokenToKVPoolHost(info, layout=layout, pin_memory=False, **sizes)


class Subject:
    def __init__(
        self,
        pool,
        layout="page_first",
        dtype="float16",
        layers=LAYERS,
        heads=HEADS,
        page_tokens=PAGE_TOKENS,
        format=None,
        sidecars=(),
        interface_v1=1,
        options=None,
        **config,
    ):
        shape = {"layout": layout, "dtype": dtype, "layers": layers, "heads": heads, "page_tokens": page_tokens}
        self.host, self.page_tokens = host_pool(**shape), page_tokens
        self.host.storage_format_tag = format
        named = {"backend_name": "kvbm-cxl", "module_path": "kvbm_cxl.sglang", "class_name": "CxlHiCache", "interface_v1": interface_v1}
        extra = {**named, "pool": pool, "cache": {"low_water_percent": 0, "high_water_percent": 1}, **(options or {})}
        ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
        fixed = {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": layout == "page_first"}
        described = HiCacheStorageConfig(**{**ranks, **fixed, "model_name": "model", **config}, extra_config=extra)
        # As SGLang attaches a backend.
        self.storage = StorageBackendFactory.create_backend("dynamic", described, self.host)
        self.storage.register_mem_pool_host(self.host)
        self.sidecars = {name: host_pool(**shape) for name in sidecars}
        for name, host in self.sidecars.items():
            self.storage.register_mem_host_pool_v2(host, PoolName(name))
        self.storage.on_host_pools_registered()

    def _key(self, name):
        return hashlib.sha256(name.encode()).hexdigest()

    def _indices(self, count, first=0):
        return torch.arange(first * self.page_tokens, (first + count) * self.page_tokens)

    def _fill(self, host, page, data):
        host.set_from_flat_data_page(page * self.page_tokens, torch.frombuffer(bytearray(data), dtype=host.dtype))

    def _data(self, host, page):
        return bytes(host.get_data_page(page * self.page_tokens, flat=True).contiguous().view(torch.uint8).numpy())

    def _bytes(self):
        return self.host.get_dummy_flat_data_page().nbytes

    def store(self, names):
        """Which pages were stored."""
        for page, name in enumerate(names):
            self._fill(self.host, page, payload(name, self._bytes()))
        return self.storage.batch_set_v1([self._key(name) for name in names], self._indices(len(names)))

    def found(self, names):
        """How many leading pages are there."""
        return self.storage.batch_exists([self._key(name) for name in names])

    def load(self, names):
        """Which pages are hits. Every byte of them is compared."""
        first = PAGES - len(names)
        for page in range(first, PAGES):
            self._fill(self.host, page, bytes(self._bytes()))
        hits = self.storage.batch_get_v1([self._key(name) for name in names], self._indices(len(names), first))
        for page, (name, hit) in enumerate(zip(names, hits), first):
            assert not hit or self._data(self.host, page) == payload(name, self._bytes()), f"wrong bytes for {name}"
        return hits

    def store_beside(self, pool, names):
        """The same for a pool beside that of the KV cache."""
        host = self.sidecars[pool]
        for page, name in enumerate(names):
            self._fill(host, page, payload(f"{pool}/{name}", self._bytes()))
        transfer = PoolTransfer(name=PoolName(pool), keys=[self._key(name) for name in names], host_indices=self._indices(len(names)))
        return self.storage.batch_set_v2([transfer])[PoolName(pool)]

    def load_beside(self, pool, names):
        host, first = self.sidecars[pool], PAGES - len(names)
        indices = self._indices(len(names), first)
        transfer = PoolTransfer(name=PoolName(pool), keys=[self._key(name) for name in names], host_indices=indices)
        hits = self.storage.batch_get_v2([transfer])[PoolName(pool)]
        for page, (name, hit) in enumerate(zip(names, hits), first):
            assert not hit or self._data(host, page) == payload(f"{pool}/{name}", self._bytes()), f"wrong bytes for {name}"
        return hits

    def prefix(self, names, **policies):
        """What of a prefix all pools have: its pages, how far each pool reaches, and where it may end. `pool="trailing 2"`."""
        transfers = []
        for pool, policy in policies.items():
            policy, _, pages = policy.partition(" ")
            transfers.append(PoolTransfer(name=PoolName(pool), hit_policy=POLICIES[policy], keys=[""] * int(pages or 0)))
        found = self.storage.batch_exists_v2([self._key(name) for name in names], transfers)
        return [found.kv_hit_pages, {str(name): pages for name, pages in found.extra_pool_hit_pages.items()}, found.restorable_prefix_pages]

    def status(self):
        return self.storage.status()

    def close(self):
        self.storage.close()
