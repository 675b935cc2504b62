# SPDX-License-Identifier: Apache-2.0
"""The KV cache of a model that vLLM's CPU build cannot run: vLLM makes the model without weights, and of its layers the real
`KVCacheConfig` and its memory. Prefill and decode of such a cache are the connector's own two sides, with block tables that the test
chooses.
"""

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import engines  # noqa: F401  How vLLM is set up for tests.
import torch
from kvbm_cxl.vllm_integration import CONNECTOR_NAME, pool_access, register
from kvbm_cxl.vllm_integration.config import ConnectorConfig
from kvbm_cxl.vllm_integration.groups import Kind, shape_of
from kvbm_cxl.vllm_integration.scheduler import SchedulerSide
from kvbm_cxl.vllm_integration.worker import WorkerSide
from vllm import EngineArgs, SamplingParams
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.hashing import sha256
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig
from vllm.v1.request import Request
from vllm.v1.worker.utils import allocate_kv_cache

MEMORY_BYTES = 24 << 20


class Layout:
    """A model's configuration, and its KV cache as vLLM lays it out."""

    def __init__(self, vllm_config, model: torch.nn.Module, memory_bytes: int) -> None:
        self.vllm_config, self.model = vllm_config, model
        specs = {}
        for name, layer in vllm_config.compilation_config.static_forward_context.items():
            spec = layer.get_kv_cache_spec(vllm_config) if isinstance(layer, AttentionLayerBase) else None
            if isinstance(spec, AttentionSpec):
                spec = layer.get_attn_backend().customize_spec(spec)
            if spec:
                specs[name] = spec
        resolve_kv_cache_layout(vllm_config, [["LBHNC", "BLHNC"]], specs.values())
        (self.kv_cache_config,) = get_kv_cache_configs(vllm_config, [specs], [memory_bytes])
        self.kv_cache_config.kv_cache_layout = vllm_config.cache_config.kv_cache_layout

    def memory(self) -> dict[str, torch.Tensor]:
        """A KV cache, one tensor for each layer, all of one allocation."""
        layout = self.vllm_config.cache_config.get_resolved_kv_cache_layout()
        return allocate_kv_cache(self.kv_cache_config, torch.device("cpu"), layout)


@contextmanager
def layout_of(model: str, memory_bytes: int = MEMORY_BYTES, tp: int = 1, **options) -> Iterator[Layout]:
    """The layout of the model in a folder, on the first of `tp` ranks; `options` are vLLM's."""
    register()
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096, "dtype": "bfloat16", "seed": 0, **options}
    transfer = KVTransferConfig(kv_connector=CONNECTOR_NAME, kv_role="kv_both")
    # Without memory, like all that is made here: not for a later model.
    kept = dict(rotary_embedding._ROPE_DICT)
    # An engine that ran in this process before leaves its groups of ranks.
    cleanup_dist_env_and_memory()
    with tempfile.TemporaryDirectory() as rendezvous:
        config = EngineArgs(model=model, kv_transfer_config=transfer, **settings).create_engine_config()
        try:
            with set_current_vllm_config(config):
                init_distributed_environment(1, 0, f"file://{rendezvous}/ranks", 0, "gloo")
                initialize_model_parallel()
                # One process builds what one of several ranks has.
                config.parallel_config.tensor_parallel_size = get_tp_group().world_size = tp
                with torch.device("meta"):
                    made = initialize_model(config)
                current_platform.update_block_size_for_backend(config)
                yield Layout(config, made, memory_bytes)
        finally:
            cleanup_dist_env_and_memory()
            rotary_embedding._ROPE_DICT.clear()
            rotary_embedding._ROPE_DICT.update(kept)


def raw(kv_caches: dict[str, torch.Tensor]) -> torch.Tensor:
    """All bytes of a KV cache."""
    storage = next(iter(kv_caches.values())).untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class Driven:
    """Both sides of the connector over a KV cache full of random numbers, with block tables for one request."""

    def __init__(self, layout: Layout, pool: str, seed: int, *, is_producer: bool, **options) -> None:
        self.layout, self.choose = layout, random.Random(seed)
        config = ConnectorConfig.read({"pool": pool, "model_id": "a model", "window_every_tokens": 1 << 20, "audit": False, **options})
        self.access = pool_access.acquire(config)
        self.kv_caches = layout.memory()
        memory = raw(self.kv_caches)
        memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
        self.worker = WorkerSide(layout.vllm_config, layout.kv_cache_config, config, self.access)
        self.worker.attach(self.kv_caches)
        self.shape = shape_of(layout.vllm_config, generate_scheduler_kv_cache_config([layout.kv_cache_config]))
        self.scheduler = SchedulerSide(config, self.access, self.shape, is_producer, not is_producer)
        self.scheduler.handshake({(0, 0): self.worker.handshake()})
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(self.shape.hash_tokens, sha256)

    def request(self, name: str, token_ids: list[int]) -> Request:
        return Request(name, token_ids, SamplingParams(), None, block_hasher=self._hasher)

    def tables(self, tokens: int) -> tuple[list[int], ...]:
        """A block table for each of vLLM's groups. No block is in two of them: groups lie over one another in memory."""
        groups = self.layout.kv_cache_config.kv_cache_groups
        counts = [-(-tokens // group.kv_cache_spec.block_size) for group in groups]
        free = self.choose.sample(range(1, self.layout.kv_cache_config.num_blocks), sum(counts))
        return tuple([free.pop() for _ in range(count)] for count in counts)

    def publish(self, asked: Request) -> tuple[list[int], ...]:
        """Publishes a prompt as if it had just been computed; where its blocks lie."""
        tokens, tables = asked.num_tokens, self.tables(asked.num_tokens)
        boundary = tokens // self.shape.align_tokens * self.shape.align_tokens
        states = [
            (group.index, tables[group.index][boundary // group.block_tokens - 1], boundary)
            for group in self.shape.groups
            if group.kind is Kind.STATE
        ]
        self.scheduler.match(asked, 0)
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens, output.total_num_scheduled_tokens = {asked.request_id: tokens}, tokens
        offloads = {asked.request_id: states} if states else {}
        output.kv_connector_block_state = KVConnectorBlockState({asked.request_id}, lambda _: tables, offloads)
        orders = self.scheduler.step(output)
        orders.complete.add(asked.request_id)
        self._run(orders)
        return tables

    def load(self, asked: Request) -> tuple[int, tuple[list[int], ...]]:
        """Finds and loads a prompt: how many tokens, and where."""
        found, _ = self.scheduler.match(asked, 0)
        tables = self.tables(found)
        self.scheduler.note_allocation(asked, SimpleNamespace(get_block_ids=lambda: tables), found)
        ended = self._run(self._empty_step())
        while asked.request_id not in ended:
            ended |= self._run(self._empty_step())
        assert not self.worker.loader.take_failed_blocks() and not self.worker.loader.failed_requests()
        return found, tables

    def _empty_step(self):
        return self.scheduler.step(SchedulerOutput.make_empty())

    def _run(self, orders) -> set[str]:
        self.worker.before_overwrite(orders)
        self.worker.start_loads(orders)
        self.worker.save(orders)
        _, loaded = self.worker.take_finished(set())
        return loaded

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()
        self.access.release()


def blocks_of(cache: torch.Tensor, config: KVCacheConfig, block_id: int) -> torch.Tensor:
    """What a layer has of a block of vLLM's block tables."""
    ratio = cache.shape[0] // config.num_blocks
    return cache[block_id * ratio : (block_id + 1) * ratio]
