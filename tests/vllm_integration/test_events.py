# SPDX-License-Identifier: Apache-2.0
"""KV events of pool blocks: told when every worker has published its part, taken back when the pool has lost it."""

import time

import kvbm_cxl
import pytest
from kvbm_cxl.vllm_integration import events, pool_access
from kvbm_cxl.vllm_integration.config import ConnectorConfig
from kvbm_cxl.vllm_integration.keys import block_keys
from requests_of_vllm import BLOCK_TOKENS, request, tokens
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

NAMESPACE = kvbm_cxl.Namespace(model="m", dtype="d", layer_count=1, kv_head_count=1, head_size=8, block_tokens=BLOCK_TOKENS, layout="l")


@pytest.fixture
def access(make_pool):
    made = pool_access.acquire(ConnectorConfig.read({"pool": make_pool(size="64M", cells="64K:75%")}))
    yield made
    made.release()


def test_a_block_is_told_when_all_workers_have_it(access):
    told = events.PoolEvents(access)
    asked = request("a", tokens(50))
    keys = block_keys(asked, 0, 3)
    told.ordered(asked, 0, 3, BLOCK_TOKENS)
    told.stored({keys[0]: 2, keys[1]: 1}, workers=2)
    (first,) = told.take()
    assert isinstance(first, BlockStored) and first.medium == "EXTERNAL" and first.block_size == BLOCK_TOKENS
    names = [maybe_convert_block_hash(block_hash) for block_hash in asked.block_hashes]
    assert first.block_hashes == [names[0]] and first.parent_block_hash is None
    assert first.token_ids == list(asked.all_token_ids[:BLOCK_TOKENS])
    told.stored({keys[1]: 1}, workers=2)
    (second,) = told.take()
    assert second.block_hashes == [names[1]] and second.parent_block_hash == names[0]
    assert told.take() == []


def test_a_block_that_is_gone_is_taken_back(access):
    told = events.PoolEvents(access)
    asked = request("a", tokens(50))
    keys = block_keys(asked, 0, 3)
    told.take()  # Listens from here on.
    for key in keys:
        access.call(lambda cache: cache.publish(NAMESPACE, key, key * 9))
    told.ordered(asked, 0, 3, BLOCK_TOKENS)
    told.stored(dict.fromkeys(keys, 1), workers=1)
    assert len(told.take()) == 3
    access.call(lambda cache: cache.evict(NAMESPACE, keys[1]))
    deadline = time.monotonic() + 30
    while not (gone := told.take()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [type(event) for event in gone] == [BlockRemoved]
    assert gone[0].block_hashes == [maybe_convert_block_hash(asked.block_hashes[1])] and gone[0].medium == "EXTERNAL"
    assert told.take() == []


def test_what_is_remembered_is_bounded(access, monkeypatch):
    monkeypatch.setattr(events, "_MAX_ORDERED", 2)
    monkeypatch.setattr(events, "_MAX_KNOWN", 1)
    told = events.PoolEvents(access)
    asked = request("a", tokens(50))
    keys = block_keys(asked, 0, 3)
    told.ordered(asked, 0, 3, BLOCK_TOKENS)
    told.stored(dict.fromkeys(keys, 1), workers=1)
    assert len(told.take()) == 2 and len(told._known) == 1 and len(told._ordered) == 0
