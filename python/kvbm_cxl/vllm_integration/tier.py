# SPDX-License-Identifier: Apache-2.0
"""The pool as a secondary tier of vLLM's `TieringOffloadingSpec`: type `cxl`.

vLLM's offloading connector copies chunks of the KV cache between the GPU and its primary tier in host memory; this tier copies them
between that memory and the pool. The engines of a rack share the pool's chunks without knowing of each other.

vLLM's scheduler calls everything here and must not wait: stores and loads run on threads, and each job ends exactly once. A lookup reads
the index in the pool, which takes a microsecond and no lock. The pool evicts by itself; a pool that is lost is one without hits, until it
can be opened again.
"""

from .. import versions

versions.check_imported("vllm")  # Before imports that another version may lack.

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

import kvbm_cxl

from ..consumers.blocks import KEPT, Blocks
from ..consumers.names import key_of, namespace_of
from ..consumers.tasks import Tasks
from ..options import ConfigError, ThreadOptions
from . import tier_engine, tier_stats
from .log import logger
from .pool_access import acquire
from .tier_events import TierEvents
from .tier_names import chunk_fields

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

_WHO = "vLLM's tier cxl"


@dataclass(frozen=True)
class TierOptions(ThreadOptions):
    """The options of the tier."""

    who: ClassVar[str] = _WHO

    model_id: str = ""
    """Name of the weights in the pool. Default: a digest of all bytes of their files, as with CxlConnector."""
    adapters_by_name: bool = False
    """With LoRA adapters: trust an adapter's name and path instead of its content. Without it the tier refuses engines with adapters."""
    locality: str = ""
    """`LOCAL` or `REMOTE`: locality of the pool for tier filters and events. Default: neither."""
    enable_kv_events: bool = False
    """If vLLM publishes KV events: also publish those of chunks that this engine stored, and of their evictions."""

    def check(self) -> None:
        known = [one.value for one in Locality]
        if self.locality and self.locality not in known:
            raise ConfigError(f"{self.who}: locality is {self.locality!r}; it takes {' or '.join(known)}")


@dataclass(frozen=True)
class _Done:
    """The end of a job."""

    success: bool
    """Every chunk of it is where it belongs."""
    good: tuple[OffloadKey, ...] = ()
    """Of a load: the chunks that came."""
    bad: tuple[OffloadKey, ...] = ()
    """Of a load: those that did not."""
    request: str = ""
    """Of a load: whose it was."""
    seconds: float | None = None
    len_bytes: int | None = None


class CxlTier(SecondaryTierManager):
    """Chunks of vLLM's primary tier in the pool. The scheduler's thread makes all calls; none waits for the pool but those that must end
    what is under way: `drain_jobs` and `shutdown`."""

    # vLLM 0.31 has no word for memory that hosts share. STORAGE is the one of its two that outlives the engine.
    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: "OffloadingSpec",
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: "BackpressureDetector | None" = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config = TierOptions.read(options)
        self.locality = Locality(config.locality) if config.locality else None
        engine = tier_engine.engine_of_this_call()
        if engine and engine.vllm_config.lora_config is not None and not config.adapters_by_name:
            raise ConfigError(
                f"{_WHO}: this engine has LoRA adapters, and vLLM gives a tier their names and paths, not their content. Set option "
                '"adapters_by_name" to true if no adapter is ever replaced under its name and path, on any host of the pool'
            )
        revision = engine.vllm_config.model_config.revision if engine else None
        self._fields = chunk_fields(offloading_spec, config.model_id, revision, self.block_size_bytes)
        self._fields |= {"extra": config.namespace, "engine": engine.fields() if engine else {}}
        self._weights = tier_engine.Weights(engine)
        self._namespace = self._name_chunks()
        self._access = acquire(config, must_open=False)
        self._blocks = Blocks(self._access)
        self._layout: "kvbm_cxl.BlockLayout | None" = kvbm_cxl.BlockLayout.of_tensors([primary_kv_view])
        self._stats = tier_stats.TierStats(self._blocks)
        self._stores: Tasks[_Done] = Tasks("tier-store", config.threads, begin=self._access.bind_worker)
        self._loads: Tasks[_Done] = Tasks("tier-load", config.threads, begin=self._access.bind_worker)
        self._failed: dict[str, set[OffloadKey]] = {}
        """By request, until it ends: chunks whose load failed. A lookup that still reported them would make the request ask
        for them again without end."""
        self._events = None
        if config.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = TierEvents(self._access, self.tier_type, self.medium, self.locality)
        self._says_that_nothing_fits = True

    def _name_chunks(self) -> "kvbm_cxl.Namespace":
        return namespace_of("vllm-tier", **self._fields, weights=self._weights.name.hex())

    # Lookups

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._failed[req_context.req_id] = set()
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._failed.pop(req_context.req_id, None)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not self._weights.are_named() or key in self._failed.get(req_context.req_id, ()):
            return LookupResult.MISS
        found = self._blocks.is_there(self._namespace, key_of(key))
        self._stats.looked_up(found)
        return LookupResult.HIT if found else LookupResult.MISS

    # Jobs

    def submit_store(self, job_metadata: TransferJob) -> None:
        keys, rows = _chunks(job_metadata)
        if not self._weights.are_named():
            self._stats.count_refused(len(keys))
            self._stores.end(job_metadata.job_id, _Done(False))
            return
        namespace = self._namespace
        self._stores.submit(lambda: self._store(namespace, keys, rows), lambda: _Done(False), job_metadata.job_id)

    def _store(self, namespace: "kvbm_cxl.Namespace", keys: list[OffloadKey], rows: list[int]) -> _Done:
        start, names = perf_counter(), [key_of(key) for key in keys]

        def store() -> list[str]:
            return self._blocks.store_rows(namespace, names, self._layout, rows)

        words = self._events.of_store(namespace, names, keys, self.block_size_bytes, store) if self._events else store()
        if "too_large" in words and self._says_that_nothing_fits:
            self._says_that_nothing_fits = False
            logger.error(
                "%s: a chunk has %d bytes, and the largest cell of pool %s is smaller: nothing is stored. Format it with --cells of that "
                "size, or make chunks smaller (blocks_per_chunk)",
                _WHO,
                self.block_size_bytes,
                self._access.spec,
            )
        len_bytes = words.count("stored") * self.block_size_bytes
        return _Done(set(words) <= KEPT, seconds=perf_counter() - start, len_bytes=len_bytes)

    def submit_load(self, job_metadata: TransferJob) -> None:
        keys, rows = _chunks(job_metadata)
        namespace, request = self._namespace, job_metadata.req_context.req_id
        failed = _Done(False, bad=tuple(keys), request=request)
        self._loads.submit(lambda: self._load(namespace, keys, rows, request), lambda: failed, job_metadata.job_id)

    def _load(self, namespace: "kvbm_cxl.Namespace", keys: list[OffloadKey], rows: list[int], request: str) -> _Done:
        start = perf_counter()
        loaded = self._blocks.load_rows(namespace, [key_of(key) for key in keys], self._layout, rows)
        good = tuple(key for key, one in zip(keys, loaded, strict=True) if one)
        bad = tuple(key for key, one in zip(keys, loaded, strict=True) if not one)
        return _Done(not bad, good, bad, request, perf_counter() - start, len(good) * self.block_size_bytes)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished = {**self._stores.take_all(), **self._loads.take_all()}
        for done in finished.values():
            if done.request in self._failed:
                self._failed[done.request].update(done.bad)
        return [JobResult(job, done.success, done.good or None, done.seconds, done.len_bytes) for job, done in finished.items()]

    def has_pending_work(self) -> bool:
        return not (self._stores.is_idle() and self._loads.is_idle())

    def drain_jobs(self) -> None:
        self._stores.drain()
        self._loads.drain()
        # vLLM drains a tier when it empties its primary one.
        if self._weights.primary_was_reset():
            self._namespace = self._name_chunks()

    # What vLLM is told

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._events.take() if self._events else ()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return tier_stats.definitions()

    def get_stats(self) -> "OffloadingConnectorStats | None":
        return self._stats.take()

    def shutdown(self) -> None:
        """Ends running jobs, and releases vLLM's memory, which vLLM then unmaps. The chunks stay in the pool."""
        if self._layout is None:
            return
        self._stores.close()
        self._loads.close()
        if self._events:
            self._events.close()
        self._layout = None
        self._access.release()


def _chunks(job: TransferJob) -> tuple[list[OffloadKey], list[int]]:
    keys: Collection[OffloadKey] = job.keys
    return list(keys), [int(chunk) for chunk in job.chunk_ids]
