# SPDX-License-Identifier: Apache-2.0
"""The KV cache in pool memory: vLLM's one allocation lands there, anything else does not."""

import kvbm_cxl
import pytest
import torch
from engines import engine
from kvbm_cxl.vllm_integration.config import ConfigError
from kvbm_cxl.vllm_integration.kv_memory import kv_cache_in_pool
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache


@pytest.fixture
def joined(make_pool):
    with kvbm_cxl.Pool(make_pool(size="64M", cells="512K:25%")) as pool:
        yield pool


def test_a_kv_cache_of_vllms_lies_in_the_pool(joined):
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
    blocks, page = 32, spec.page_size_bytes
    names = ["layers.0", "layers.1"]
    tensor = KVCacheTensor(2 * blocks * page, names, layer_stride=blocks * page, block_stride=page)
    config = KVCacheConfig(blocks, [tensor], [KVCacheGroupSpec(names, spec)])
    with kv_cache_in_pool(joined) as placement:
        caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBHNC)
    (memory,) = placement.memories
    assert memory.len_bytes >= 2 * blocks * page
    assert [cache.data_ptr() - memory.address for cache in caches.values()] == [0, blocks * page]
    for number, cache in enumerate(caches.values()):
        assert not cache.any()
        cache.copy_(torch.arange(cache.numel(), dtype=torch.float32).reshape(cache.shape) + number)
    view = torch.frombuffer(memory, dtype=torch.float32)
    assert view[:3].tolist() == [0, 1, 2] and view[blocks * page // 4].item() == 1


def test_other_allocations_stay_where_they_were(joined):
    with kv_cache_in_pool(joined) as placement:
        small = torch.zeros(100, dtype=torch.int8)
        numbers = torch.zeros(1 << 20, dtype=torch.float32)
        wide = torch.zeros((1 << 20, 2), dtype=torch.int8)
        assert not placement.memories and small.numel() == 100 and numbers.numel() == wide.shape[0] == 1 << 20
        assert torch.zeros(1 << 20, dtype=torch.int8, device="cpu").numel() == 1 << 20
    assert len(placement.memories) == 1
    torch.zeros(1 << 20, dtype=torch.int8)
    assert len(placement.memories) == 1, "only inside"


def test_a_kv_cache_that_was_not_placed_is_an_error(joined):
    with pytest.raises(ConfigError, match="could not be placed"), kv_cache_in_pool(joined):
        pass


def test_a_pool_without_room_says_so(joined):
    with pytest.raises(ConfigError, match="zero_copy needs 1073741824 bytes of pool .*--kv-cache-memory-bytes"), kv_cache_in_pool(joined):
        torch.zeros(1 << 30, dtype=torch.int8)


def test_an_engine_has_its_kv_cache_placed(model, make_pool):
    """And is refused, as long as nothing can publish from there."""
    with pytest.raises((ConfigError, RuntimeError), match="cannot publish from there"):
        with engine(model, "kv_both", make_pool(cells="512K:25%"), extra={"zero_copy": True}):
            pass
