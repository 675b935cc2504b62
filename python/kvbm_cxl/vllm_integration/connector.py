# SPDX-License-Identifier: Apache-2.0
"""`CxlConnector`: the hooks of vLLM's connector interface, each handed to the side that it belongs to."""

from .. import versions

versions.check_imported("vllm")  # Before imports that another version may lack.

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from ..options import ConfigError
from . import engine_watch, pool_access, second_level, support
from .config import ConnectorConfig
from .events import PoolEvents
from .failures import ThreadError
from .groups import shape_of
from .keys import hasher_of
from .log import logger
from .metadata import StepMetadata, WorkerHandshake
from .publisher import Outlet
from .scheduler import SchedulerSide
from .stats import CxlPromMetrics, CxlStats, Tally
from .weights import worker_of_this_call
from .worker import WorkerSide

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # vLLM 0.31 and 0.32 do not split hits by source.
    CacheHitSource = None

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from .metadata import WorkerReport


class CxlConnector(KVConnectorBase_V1, SupportsHMA):
    """A prefix cache in CXL shared memory, and the hand-over from prefill to decode by way of it."""

    # vLLM 0.33 counts hits by source: the pool is memory of the host.
    _cache_hit_source = CacheHitSource and CacheHitSource.HOST

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        config = ConnectorConfig.read(transfer.kv_connector_extra_config)
        has_events = vllm_config.kv_events_config is not None and vllm_config.kv_events_config.enable_kv_cache_events
        shape = shape_of(vllm_config, kv_cache_config, config.stored_block_tokens)
        config = replace(config, events=config.events and has_events)
        if config.events and any(group.slices > 1 for group in shape.groups):
            logger.warning("CxlConnector announces no blocks to routers with stored_block_tokens: routers know blocks of vLLM's size")
            config = replace(config, events=False)
        support.check(vllm_config, kv_cache_config)
        second_level.check(config, shape)
        self._is_hybrid = len(kv_cache_config.kv_cache_groups) > 1
        self._access = pool_access.acquire(config)
        try:
            self._second = second_level.acquire(config, self._access)
        except ConfigError:
            self._access.release()
            raise
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            caches, takes_hits = support.caches_states(kv_cache_config), support.takes_hits(vllm_config)
            if caches and not takes_hits:
                logger.warning(
                    "CxlConnector looks nothing up in the pool: vLLM computes the whole prompt of every request here (a pooling engine "
                    "with prefix caching or chunked prefill off)"
                )
            if not caches:
                logger.warning(
                    "CxlConnector shares no block of this model: vLLM keeps no states of its recurrent layers at the ends of blocks. "
                    "Start it with --enable-prefix-caching --mamba-cache-mode align"
                )
            events, tally = None, Tally()
            if config.events:
                outlet = Outlet()
                if vllm_config.kv_events_config.publisher == "zmq":
                    outlet.expect()
                events = PoolEvents(config, self._access, outlet, tally)
            self._scheduler = SchedulerSide(
                config,
                self._access,
                shape,
                transfer.is_kv_producer and caches,
                transfer.is_kv_consumer,
                events,
                tally,
                reads=takes_hits and caches,
                hasher=hasher_of(vllm_config, kv_cache_config, shape.hash_tokens),
                second=self._second,
            )
            engine_watch.watch_calls(engine_watch.engine_of_this_call(), self._scheduler)
        else:
            worker = worker_of_this_call()
            self._worker = WorkerSide(vllm_config, kv_cache_config, config, self._access, worker=worker, second=self._second)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a request that was preempted after its last step has its blocks in the pool; that step waited for them."""
        return False

    def shutdown(self) -> None:
        """Ends copies, unpins, and closes the pool with the process's last connector."""
        if self._scheduler is not None and self._scheduler.events:
            self._scheduler.events.close()
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()
        second, self._second = self._second, None
        if second is not None:
            second.release()
        access, self._access = self._access, None
        if access is not None:
            access.release()

    # Worker

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        self._worker.attach(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Sleep mode of vLLM 0.33. Nothing is registered again on waking: the KV cache keeps its addresses."""
        self._worker.end_copies()

    def get_handshake_metadata(self) -> WorkerHandshake | None:
        return self._worker.handshake()

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        self._worker.before_overwrite(kv_connector_metadata)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        self._worker.start_loads(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: requests run when they are loaded. A block that is read while it is loaded may turn out to be a miss."""

    def save_kv_layer(self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: "AttentionMetadata", **kwargs: Any) -> None:
        """Nothing: blocks are published whole, when the step has computed them."""

    def wait_for_save(self) -> None:
        self._worker.save(self._get_connector_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._worker.take_finished(finished_req_ids)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        saved, loaded = self._worker.take_finished(finished_req_ids)
        # vLLM can tell which request a block is of only where there is one group.
        return KVConnectorTransferResults(saved, loaded, self._worker.loader.failed_requests() if self._is_hybrid else set())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._is_hybrid else self._worker.loader.take_failed_blocks()

    def build_connector_worker_meta(self) -> "WorkerReport":
        return self._worker.report()

    # Scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        engine_watch.watch_resets(kv_cache_manager, self._scheduler)
        if events := self._scheduler.events:
            engine_watch.watch_cleared(kv_cache_manager, events.note_cleared)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], WorkerHandshake]) -> None:
        self._scheduler.handshake(metadata)
        if events := self._scheduler.events:
            cell_bytes = max((worker.cell_bytes for worker in metadata.values()), default=0)
            events.begin(self._scheduler.namespaces, cell_bytes, self._scheduler.shape.groups[0].block_tokens)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self._scheduler.note_allocation(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        self._scheduler.report(connector_output)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finish(request)

    def request_finished_all_groups(self, request: "Request", block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finish(request)

    def reset_cache(self) -> bool:
        return self._scheduler.reset()

    def take_events(self) -> Iterable["KVCacheEvent"]:
        return self._scheduler.events.take() if self._scheduler.events else ()

    # Both

    @property
    def last_error(self) -> ThreadError | None:
        """The latest error of the connector's background threads in this process, or None."""
        return self._access.failures.last_error if self._access else None

    def get_kv_connector_stats(self) -> CxlStats | None:
        return (self._scheduler or self._worker).take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> CxlStats:
        return CxlStats(data=data) if data else CxlStats()

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues) -> CxlPromMetrics:
        return CxlPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
