# SPDX-License-Identifier: Apache-2.0
"""The worker's side: copies between the KV cache and the pool.

Loads run on threads, beside the forward pass; vLLM schedules a request when its load is over. In a step that computes nothing the engine's
own thread copies as well, since it would only wait for the others. Saves are handed to threads when a step has
computed their blocks, and chunks of a long prompt are published while the next chunk is computed. Only the step that completes a prompt
for a decode worker waits for them. Layer by layer would win nothing on top of that: a block is one object of the pool with all its layers,
of a prompt only the last chunk's copy is not hidden behind computation already, and hooks within the forward pass rule out whole graphs.

Whatever goes wrong with a copy is an outcome of its blocks: a save that is counted, a load that is reported to vLLM.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import kvbm_cxl

from . import devices
from .config import ConfigError, ConnectorConfig
from .geometry import block_parts, cache_tensors
from .identity import namespace_fields
from .jobs import Loads, Saves
from .keys import parents
from .kv_memory import PoolPlacement
from .log import logger
from .metadata import Blocks, StepMetadata, WorkerHello, WorkerReport
from .movers import Mover, Publication, mover_for
from .pool_access import PoolAccess, error_kind
from .stats import CxlStats, Tally

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


# Bytes that one thread copies before another may take over: large enough to make its overhead vanish.
_SAVE_JOB_BYTES = 8 << 20
# The same of loads: nobody finds a part of one, and the pool's own threads share the work of each. An engine without computation is held up
# by one of these, some milliseconds.
_LOAD_JOB_BYTES = 16 << 20
# Room for pieces of a block in pool memory, for each layer of the model: whatever order of dimensions the engine chooses.
_PARTS_PER_LAYER = 64
# Outcomes after which every host can pull a block.
_THERE = ("stored", "lent", "exists")
# Misses of blocks that lookups go on finding: they fail whoever loads them, until somebody evicts them.
_SPOILT = ("checksum", "taken_back")
# A step without computation waits this long for a copy to end, instead of coming round again at once.
_IDLE_WAIT_S = 0.002


@dataclass
class _Attached:
    """What is known once vLLM has made its KV cache."""

    namespace: "kvbm_cxl.Namespace"
    mover: Mover
    block_bytes: int
    device: "torch.device"
    publishes: bool
    """Of ranks with the same heads, one publishes."""


@dataclass
class WorkerSide:
    """See the module. Called by vLLM's worker, from one thread."""

    vllm_config: "VllmConfig"
    kv_cache_config: "KVCacheConfig"
    config: ConnectorConfig
    access: PoolAccess
    tally: Tally = field(default_factory=Tally)
    _attached: _Attached | None = None
    _placement: PoolPlacement | None = None
    _orders: StepMetadata | None = None
    _waiting: set[str] = field(default_factory=set)
    """Released requests for which a save is still under way."""
    _tails: set[str] = field(default_factory=set)
    """Requests whose tail the last step had published."""
    _failed_blocks: set[int] = field(default_factory=set)
    _failed_loads: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Of what threads add to:"""
    _stored: Counter[bytes] = field(default_factory=Counter)
    _spoilt: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._saves = Saves(self.config.workers, self.config.max_inflight_bytes, self.config.copy_timeout_ms)
        self._loads = Loads(self.config.workers)

    # At start

    def memory_context(self) -> AbstractContextManager[PoolPlacement] | None:
        """Where vLLM allocates its KV cache; None leaves it to vLLM."""
        if not self.config.zero_copy:
            return None
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            raise ConfigError("CxlConnector: zero_copy is for CPUs; memory of a GPU cannot lie in the pool")
        (group,) = self.kv_cache_config.kv_cache_groups
        parts = min(len(group.layer_names) * _PARTS_PER_LAYER, 0xFFFF)
        self._placement = PoolPlacement(self.access, self.kv_cache_config.num_blocks, parts)
        return self._placement

    def attach(self, kv_caches: Mapping[str, "torch.Tensor"]) -> None:
        """Takes the KV cache that vLLM made: geometry, namespace, and whether the pool has cells for such blocks."""
        (group,) = self.kv_cache_config.kv_cache_groups
        tensors = cache_tensors(kv_caches, group.layer_names)
        device = tensors[0].device
        block_count = self.kv_cache_config.num_blocks
        parts = [(part.address, part.stride_bytes, part.len_bytes) for part in block_parts(tensors, block_count)]
        layout = kvbm_cxl.BlockLayout(parts, block_count, owner=tensors, device=devices.check(device))
        region = self._region()
        if region is None:
            self._check_cells(layout.block_bytes)
        if pool := self.access.pool:
            # Now, while nobody waits for an answer. The scheduler's process copies no blocks.
            pool.map_ahead()
        rank = self._rank()
        namespace = kvbm_cxl.Namespace(**namespace_fields(self.vllm_config, self.kv_cache_config, self.config, rank))
        publishes = rank % self.kv_cache_config.kv_tp_replicas == 0
        mover = mover_for(self.config, self.access, namespace, layout, region)
        self._attached = _Attached(namespace, mover, layout.block_bytes, device, publishes)
        logger.info(
            "CxlConnector: %d blocks of %d bytes in %d parts, namespace %s, pool %s",
            block_count,
            layout.block_bytes,
            len(parts),
            namespace,
            self.config.pool,
        )

    def _region(self) -> "kvbm_cxl.LentRegion | None":
        """The memory of the pool that vLLM put its KV cache into."""
        if not self.config.zero_copy:
            return None
        regions = self._placement.regions if self._placement else []
        if len(regions) != 1:
            raise ConfigError(f"zero_copy: vLLM allocated its KV cache in {len(regions)} pieces instead of one; leave zero_copy out")
        return regions[0]

    def _check_cells(self, block_bytes: int) -> None:
        pool = self.access.pool
        cells = list(pool.cell_bytes) if pool else []
        if pool and block_bytes > max(cells, default=0):
            raise ConfigError(
                f"a block of this model takes {block_bytes} bytes, the cells of pool {self.config.pool} have {cells or 'none'}: "
                f"format it with cells that hold it (`cxlctl format --cells {-(-block_bytes // 65536) * 64}K:75%`), "
                "or give vLLM a smaller --block-size"
            )

    @staticmethod
    def _rank() -> int:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        return get_tensor_model_parallel_rank()

    def hello(self) -> WorkerHello | None:
        attached = self._attached
        return WorkerHello(bytes(attached.namespace), attached.block_bytes) if attached else None

    # Each step, in this order

    def before_overwrite(self, orders: StepMetadata) -> None:
        """Ends the saves whose blocks the step may write to: those of preempted requests, and tails, which fill up token by token."""
        tails, self._tails = self._tails, set()
        self._saves.wait(orders.preempted | tails)
        if self._attached is not None and orders.writes:
            self.tally.count("taken_back_blocks", "written", self._attached.mover.before_writes(orders.writes))

    def start_loads(self, orders: StepMetadata) -> None:
        self._orders = orders
        attached = self._attached
        if attached is None or not orders.loads:
            return
        ready = devices.fence(attached.device)
        last = orders.loads[-1]
        for blocks in orders.loads:
            jobs = [self._load_job(attached, piece, ready) for piece in self._pieces(attached, blocks, _LOAD_JOB_BYTES)]
            # The last one's: by then all others are on their way.
            self._loads.submit(blocks.request_id, jobs, here=orders.idle and blocks is last)

    def _pieces(self, attached: _Attached, blocks: Blocks, len_bytes: int) -> Iterable[Blocks]:
        """The same blocks in pieces of `len_bytes` for several threads."""
        size = max(len_bytes // attached.block_bytes, 1)
        for start in range(0, len(blocks.keys), size):
            stop = start + size
            parent = blocks.keys[start - 1] if start else blocks.parent
            yield Blocks(blocks.request_id, blocks.keys[start:stop], blocks.block_ids[start:stop], parent, blocks.tail_tokens)

    def _load_job(self, attached: _Attached, blocks: Blocks, ready: devices.Fence):
        def load() -> set[int]:
            ready()
            results = self._pull(attached, blocks)
            return {block_id for block_id, reason in zip(blocks.block_ids, results) if reason is not None}

        return blocks.block_ids, load

    def _pull(self, attached: _Attached, blocks: Blocks) -> list[str | None]:
        """The reason of each block's miss, None for hits."""
        try:
            results = attached.mover.pull(blocks.keys, blocks.block_ids)
        except kvbm_cxl.CxlError as error:
            logger.warning("pulling %d blocks of request %s: %s", len(blocks.keys), blocks.request_id, error)
            results = [error_kind(error)] * len(blocks.keys)
        hits = results.count(None)
        self.tally.count("pulled_blocks", "hit", hits)
        self.tally.count("bytes", "pulled", hits * attached.block_bytes)
        if hits < len(results):
            self._count_misses(attached, blocks.keys, results)
        return results

    def _count_misses(self, attached: _Attached, keys: list[bytes], results: list[str | None]) -> None:
        for reason, count in Counter(filter(None, results)).items():
            self.tally.count("pulled_blocks", reason, count)
        for key, reason in zip(keys, results):
            if reason == "checksum":
                logger.error("block %s of namespace %s has a wrong checksum", key.hex(), attached.namespace)
            if reason in _SPOILT:
                with self._lock:
                    self._spoilt.add(key)

    def save(self, orders: StepMetadata) -> None:
        """Has the step's blocks published, and waits for those that must be there when it ends."""
        self._orders = orders
        attached = self._attached
        if attached is None:
            return
        if orders.saves and attached.publishes:
            ready = devices.fence(attached.device)
            self._tails = {blocks.request_id for blocks in orders.saves if blocks.tail_tokens}
            for blocks in orders.saves:
                for piece in self._pieces(attached, blocks, _SAVE_JOB_BYTES):
                    self._submit_save(attached, orders.step, piece, ready)
        self._saves.wait(orders.complete)

    def _submit_save(self, attached: _Attached, step: int, blocks: Blocks, ready: devices.Fence) -> None:
        len_bytes = len(blocks.keys) * attached.block_bytes
        chain = parents(blocks.parent, blocks.keys)

        def begin(places: list[int]) -> Callable[[], None]:
            keys, block_ids = [blocks.keys[at] for at in places], [blocks.block_ids[at] for at in places]
            publication = self._begin(attached, keys, block_ids, [chain[at] for at in places], blocks.tail_tokens > 0)

            def publish() -> None:
                started_s = time.monotonic()
                ready()
                outcomes = self._publish(publication, keys)
                self.tally.time("publish_seconds", time.monotonic() - started_s)
                for outcome, count in Counter(outcomes).items():
                    self.tally.count("published_blocks", outcome, count)
                self.tally.count("bytes", "published", outcomes.count("stored") * attached.block_bytes)
                if self.config.events:
                    with self._lock:
                        self._stored.update(key for key, outcome in zip(keys, outcomes) if outcome in _THERE)

            return publish

        self._saves.submit((blocks.request_id, step), blocks.keys, len_bytes, begin)

    def _begin(
        self, attached: _Attached, keys: list[bytes], block_ids: list[int], chain: list[bytes | None], is_tail: bool
    ) -> Publication:
        """What publishes the blocks, or gives the reason why it cannot as their outcome."""
        try:
            return attached.mover.begin(keys, block_ids, chain, is_tail)
        except kvbm_cxl.CxlError as error:
            logger.warning("publishing %d blocks: %s", len(keys), error)
            outcomes = [error_kind(error)] * len(keys)
            return lambda: outcomes

    def _publish(self, publication: Publication, keys: list[bytes]) -> list[str]:
        """The outcome of each block."""
        try:
            return publication()
        except kvbm_cxl.CxlError as error:
            logger.warning("publishing %d blocks: %s", len(keys), error)
            return [error_kind(error)] * len(keys)

    def ended(self, finished: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose blocks may be freed after saving, and those whose load is over. `finished`: vLLM wants no more of these."""
        orders = self._orders
        self._loads.cancel(finished)
        idle_s = _IDLE_WAIT_S if orders is not None and orders.idle else 0.0
        if orders is not None:
            self._waiting |= orders.release
        if idle_s and self._waiting:
            self._saves.wait_any(idle_s)
        saved = {request for request in self._waiting if not self._saves.busy(request)}
        self._waiting -= saved
        loaded = set()
        for load in self._loads.take_done(0.0 if saved else idle_s):
            loaded.add(load.request_id)
            self.tally.time("pull_seconds", load.ended_s - load.started_s)
            self.tally.time("noticed_seconds", time.monotonic() - load.ended_s)
            self.tally.count("loads", "cancelled" if load.cancelled else "failed" if load.failed_blocks else "complete")
            if load.failed_blocks:
                self._failed_blocks |= load.failed_blocks
                self._failed_loads.add(load.request_id)
        return saved, loaded

    def take_failed_blocks(self) -> set[int]:
        """Blocks that hold nothing although a load was to fill them, of the loads that `ended` has just reported."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def report(self) -> WorkerReport:
        step = self._orders.step if self._orders else 0
        failed, self._failed_loads = self._failed_loads, set()
        with self._lock:
            stored, self._stored = self._stored, Counter()
            spoilt, self._spoilt = self._spoilt, set()
        return WorkerReport(self._saves.done_step(step), failed, spoilt, dict(stored))

    def take_stats(self) -> CxlStats | None:
        return self.tally.take()

    def close(self) -> None:
        """Ends all copies."""
        self._saves.close()
        self._loads.close()
