# SPDX-License-Identifier: Apache-2.0
"""The KV cache in pool memory: vLLM's one allocation lands there, anything else does not."""

import pytest
import torch
from kvbm_cxl.vllm_integration import pool_access
from kvbm_cxl.vllm_integration.config import ConfigError, ConnectorConfig
from kvbm_cxl.vllm_integration.kv_memory import PoolPlacement
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

BLOCKS = 32


@pytest.fixture
def placement(make_pool):
    access = pool_access.acquire(ConnectorConfig.read({"pool": make_pool(size="64M", cells="64K:25%")}))
    yield PoolPlacement(access, BLOCKS, 8)
    access.release()


def test_a_kv_cache_of_vllms_lies_in_the_pool(placement):
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
    page = spec.page_size_bytes
    names = ["layers.0", "layers.1"]
    tensor = KVCacheTensor(2 * BLOCKS * page, names, layer_stride=BLOCKS * page, block_stride=page)
    config = KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(names, spec)])
    with placement:
        caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBHNC)
    (region,) = placement.regions
    memory = region.memory
    assert region.block_count == BLOCKS and memory.len_bytes >= 2 * BLOCKS * page
    assert [cache.data_ptr() - memory.address for cache in caches.values()] == [0, BLOCKS * page]
    for number, cache in enumerate(caches.values()):
        assert not cache.any()
        cache.copy_(torch.arange(cache.numel(), dtype=torch.float32).reshape(cache.shape) + number)
    view = torch.frombuffer(memory, dtype=torch.float32)
    assert view[:3].tolist() == [0, 1, 2] and view[BLOCKS * page // 4].item() == 1


def test_other_allocations_stay_where_they_were(placement):
    with placement:
        small = torch.zeros(100, dtype=torch.int8)
        numbers = torch.zeros(1 << 20, dtype=torch.float32)
        wide = torch.zeros((1 << 20, 2), dtype=torch.int8)
        assert not placement.regions and small.numel() == 100 and numbers.numel() == wide.shape[0] == 1 << 20
        assert torch.zeros(1 << 20, dtype=torch.int8, device="cpu").numel() == 1 << 20
    assert len(placement.regions) == 1
    torch.zeros(1 << 20, dtype=torch.int8)
    assert len(placement.regions) == 1, "only inside"


def test_a_kv_cache_that_was_not_placed_is_an_error(placement):
    with pytest.raises(ConfigError, match="could not be placed"), placement:
        pass
    with pytest.raises(KeyError, match="of vLLM's own"), placement:
        raise KeyError("of vLLM's own")


def test_a_pool_without_room_says_so(placement):
    with pytest.raises(ConfigError, match="zero_copy needs 1073741824 bytes of pool .*--kv-cache-memory-bytes"), placement:
        torch.zeros(1 << 30, dtype=torch.int8)


def test_a_placement_without_a_pool_says_so(make_pool):
    lost = pool_access.PoolAccess("gone", {})
    with pytest.raises(ConfigError, match="pool gone is lost"), PoolPlacement(lost, BLOCKS, 8):
        torch.zeros(1 << 20, dtype=torch.int8)
