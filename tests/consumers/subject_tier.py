# SPDX-License-Identifier: Apache-2.0
"""The tier as the tests use it: vLLM's own spec makes it from a configuration, and vLLM's own manager of tiers gives it work.

What a GPU would have put in the primary tier is written there by the test.
"""

import hashlib
import os
import time
import uuid

from kvbm_cxl.vllm_integration import register
from kvbm_cxl.vllm_integration.tier_stats import TIER_PREFIX
from peers import payload
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

BLOCK_BYTES, PRIMARY_CHUNKS = 32768, 64
PARALLEL = {"tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, "rank": 0}
# Each shapes the bytes of a chunk, or which tokens are in it: under another one nothing may be found.
VARIATIONS = {
    "model": {"options": {"model_id": "another"}},
    "type": {"dtype": "bfloat16"},
    "tokens of a hash": {"tokens_per_hash": 8},
    "tokens of a block": {"tokens_per_block": 32},
    "blocks of a chunk": {"blocks_per_chunk": 2, "block_bytes": BLOCK_BYTES // 2},
    "tensor parallelism": {"parallel": {"tp_size": 2}},
    "pipeline parallelism": {"parallel": {"pp_size": 2}},
    "prefill context parallelism": {"parallel": {"pcp_size": 2}},
    "decode context parallelism": {"parallel": {"dcp_size": 2}},
    "rank": {"parallel": {"rank": 1}},
    "layers": {"layers": ["layer.0"]},
    "groups": {"groups": 2},
    "bytes of a row": {"block_bytes": 2 * BLOCK_BYTES},
    "one copy for all ranks": {"replicated": True},
    "canonical format": {"canonical": "LBNHC"},
    "another canonical format": {"canonical": "LBHNC"},
    "what the operator names": {"options": {"namespace": "engine of May"}},
}


class Subject:
    def __init__(
        self,
        pool,
        dtype="float16",
        tokens_per_hash=16,
        tokens_per_block=16,
        blocks_per_chunk=1,
        block_bytes=BLOCK_BYTES,
        parallel=None,
        layers=("layer.0", "layer.1"),
        groups=1,
        replicated=False,
        canonical=None,
        events=False,
        model="no/such-model",
        options=None,
    ):
        register()
        tier = {"type": "cxl", "pool": pool, "model_id": "model", "cache": {"low_water_percent": 0, "high_water_percent": 1}}
        row_bytes = -(-block_bytes * blocks_per_chunk // 4096) * 4096
        extra = {"cpu_bytes_to_use": PRIMARY_CHUNKS * row_bytes, "secondary_tiers": [{**tier, **(options or {})}]}
        described = [OffloadingGroupConfig(tokens_per_block, tuple(layers), number) for number in range(groups)]
        config = OffloadingConfig(
            groups=tuple(described),
            worker_kv_bytes_per_block=block_bytes,
            enable_kv_cache_events=events,
            extra_config=extra,
            engine_id=f"kvbm-cxl-test-{uuid.uuid4().hex[:12]}",
            model=OffloadingModelConfig(model, dtype),
            cache=OffloadingCacheConfig(tokens_per_hash, blocks_per_chunk),
            parallel=OffloadingParallelConfig(
                **{**PARALLEL, **(parallel or {})},
                world_size=1,
                data_parallel_index=0,
                data_parallel_size=1,
                data_parallel_rank_local=None,
                is_parallelism_agnostic=True,
            ),
            replicated_layout=replicated,
            canonical_layout=canonical is not None,
            kv_cache_layout=canonical,
        )
        self.manager = TieringOffloadingSpec(config).get_manager()
        # Nothing of the primary tier stays when this process is killed.
        region = self.manager.primary_tier._mmap_region
        os.unlink(region.mmap_path)
        region._creator = False
        self.tier = self.manager.secondary_tiers[0]
        self.row_bytes = self.tier.block_size_bytes
        self.group = 0
        self._requests, self._counted = 0, {}

    def key(self, name):
        return make_offload_key(hashlib.sha256(name.encode()).digest(), self.group)

    def _rows(self):
        """The primary tier's memory, as bytes in a row."""
        return self.manager.primary_tier.get_kv_memoryview().cast("B")

    def request(self):
        self._requests += 1
        context = ReqContext(f"request {self._requests}")
        self.manager.on_new_request(context)
        return context

    def step(self):
        """The end of a step of vLLM's scheduler."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self, seconds=300):
        """Steps until no job is under way."""
        end = time.monotonic() + seconds
        while self.step() or self.manager.has_pending_work():
            assert time.monotonic() < end, "jobs without end"
            time.sleep(0.002)

    def begin_store(self, names):
        """As a request that computed these chunks, and whose copies to the primary tier have ended."""
        context = self.request()
        prepared = self.manager.prepare_store([self.key(name) for name in names], context)
        assert prepared is not None and len(prepared.keys_to_store) == len(names)
        with self._rows() as rows:
            for name, chunk in zip(names, prepared.store_spec.chunk_ids):
                start = int(chunk) * self.row_bytes
                rows[start : start + self.row_bytes] = payload(name, self.row_bytes)
        self.manager.complete_store(prepared.keys_to_store, context)
        self.manager.on_request_finished(context)

    def store(self, names):
        """What became of the chunks, by outcome."""
        before = self.counts("stored_chunks")
        for first in range(0, len(names), PRIMARY_CHUNKS // 2):
            self.forget()
            self.begin_store(names[first : first + PRIMARY_CHUNKS // 2])
            self.settle()
        after = self.counts("stored_chunks")
        return {outcome: count - before.get(outcome, 0) for outcome, count in after.items() if count != before.get(outcome, 0)}

    def found(self, names):
        """Which chunks the tier says it has."""
        context = self.request()
        found = [self.tier.lookup(self.key(name), context) is LookupResult.HIT for name in names]
        self.manager.on_request_finished(context)
        return found

    def look(self, context, names):
        """What vLLM is told, a step later, of chunks that a request wants."""
        said = [self.manager.lookup(self.key(name), context) for name in names]
        self.step()
        return said

    def forget(self):
        """Empties the primary tier, so that what is loaded next comes from the pool."""
        self.manager.reset_cache()

    def load(self, names):
        """Which chunks come from the pool to the primary tier. Every byte of them is compared."""
        hits = []
        for first in range(0, len(names), PRIMARY_CHUNKS // 2):
            self.forget()
            hits += self._load(names[first : first + PRIMARY_CHUNKS // 2])
        return hits

    def _load(self, names):
        context, end, said = self.request(), time.monotonic() + 300, [None]
        while not set(said) <= {LookupResult.HIT, LookupResult.MISS}:
            assert time.monotonic() < end, "a request that waits without end"
            said = self.look(context, names)
            time.sleep(0.002)
        hits = [one is LookupResult.HIT for one in said]
        there = [name for name, hit in zip(names, hits) if hit]
        keys = [self.key(name) for name in there]
        chunks = self.manager.prepare_load(keys, context).chunk_ids
        with self._rows() as rows:
            for name, chunk in zip(there, chunks):
                start = int(chunk) * self.row_bytes
                assert bytes(rows[start : start + self.row_bytes]) == payload(name, self.row_bytes), f"wrong bytes for {name}"
        self.manager.complete_load(keys, context)
        self.manager.on_request_finished(context)
        return hits

    def counts(self, name):
        """What the tier has counted in all under a name, by its label's value."""
        for metric, by_value in self.tier._stats.take()._values.items():
            for labels, count in by_value.items():
                place = metric.removeprefix(TIER_PREFIX), "".join(labels)
                self._counted[place] = count if not labels else self._counted.get(place, 0) + count
        return {value: count for (metric, value), count in self._counted.items() if metric == name}

    def close(self):
        self.manager.shutdown()
