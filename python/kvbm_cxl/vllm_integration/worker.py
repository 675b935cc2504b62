# SPDX-License-Identifier: Apache-2.0
"""The worker's side: copies between the KV cache and the pool.

Loads run on threads, beside the forward pass; vLLM schedules a request when its load is over. In a step that computes nothing the engine's
own thread copies as well, since it would only wait for the others. Saves are handed to threads when a step has computed their blocks, and
chunks of a long prompt are published while the next chunk is computed. Only the step that completes a prompt for a decode worker waits for
them, with `publish_behind` until every host sees them coming. Copying layer by layer beside
the computation of later layers was slower on a GPU, and hooks within the forward pass rule out whole graphs.

Whatever goes wrong with a copy is an outcome of its blocks: a save that is counted, a load that is reported to vLLM.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import kvbm_cxl

from . import devices
from .adapters import LoadedAdapters
from .attached import Attached, AttachedGroup
from .audit import Audit, FoundBlocks, group_audit
from .config import ConfigError, ConnectorConfig
from .diagnosis import facts_of
from .failures import error_kind
from .geometry import Cutter, GeometryError, Pieces, cache_tensors, cell_parts
from .groups import Group, Shape, shape_of, specs_of
from .identity import namespace_fields
from .jobs import CopyTimeout, Loads, Saves
from .keys import parents
from .log import logger
from .metadata import Blocks, StepMetadata, WorkerHandshake, WorkerReport
from .movers import PublishBatch, mover_for
from .pool_access import PoolAccess
from .save_job import SaveJob, SaveOutcome
from .second_level import SecondLevel
from .shards import Shards, replicas_of, shards_of
from .stats import CxlStats, Tally
from .support import clears_first
from .token_places import pieces_of_cells, writer_of
from .weights import WeightsInMemory

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from .save_job import AuditOfBatch


# Bytes that one thread copies before another may take over: large enough to make its overhead vanish.
_SAVE_JOB_BYTES = 8 << 20
# The same of loads: a load is of use only when it is complete, and the pool's own threads share the work of each. An engine without
# computation is held up by one of these, some milliseconds.
_LOAD_JOB_BYTES = 16 << 20
# Outcomes after which every host can pull a block.
_THERE = ("stored", "exists")
# Of the silence after which a host is suspected: so long a step waits for cells at least. It waits longer where it computed for longer, so
# that a pool whose locks do not come makes no request take more than twice its time.
LEAST_PATIENCE = 0.1
# A step without computation waits this long for a copy to end, instead of coming round again at once.
_IDLE_WAIT_S = 0.002


@dataclass
class WorkerSide:
    """See the module. Called by vLLM's worker, from one thread."""

    vllm_config: "VllmConfig"
    kv_cache_config: "KVCacheConfig"
    config: ConnectorConfig
    access: PoolAccess
    tally: Tally = field(default_factory=Tally)
    worker: Any | None = None
    """vLLM's worker, where it was found: it has the model and the adapters."""
    second: SecondLevel | None = None
    _attached: Attached | None = None
    _orders: StepMetadata | None = None
    _begun_s: float = 0.0
    """When the step began."""
    _saved_step: int = 0
    """Latest step whose saves were handed to threads. With speculative decoding vLLM asks for a step's report before that."""
    _waiting: set[str] = field(default_factory=set)
    """Released requests for which a save is still under way."""
    _tails: dict[str, list[int]] = field(default_factory=dict)
    """vLLM's blocks with each request's tail that is published, or on its way, with no token behind it yet."""
    _states: list[int] = field(default_factory=list)
    """vLLM's blocks with the states that the last step had published."""
    _clears_first: bool = field(default=False, init=False)
    """See `support.clears_first`."""
    _failed_blocks: set[int] = field(default_factory=set)
    _failed_loads: set[str] = field(default_factory=set)
    _audit: Audit | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Of what threads add to:"""
    _stored: Counter[bytes] = field(default_factory=Counter)
    _corrupt: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        limits = (self.config.workers, self.config.max_inflight_bytes, self.config.copy_timeout_ms)
        self._saves = Saves(*limits, self.access.failures, self.access.bind_worker)
        self._suspect_s = self.access.pool.suspect_ms / 1000 if self.access.pool else 1.0
        self._saves.patience_s = self._suspect_s * LEAST_PATIENCE
        self._loads = Loads(self.config.workers, self.access.failures, self.access.bind_worker)
        self._weights = WeightsInMemory(self.worker, self.tally)
        self._adapters = LoadedAdapters(getattr(getattr(self.worker, "model_runner", None), "lora_manager", None))

    # At start

    def attach(self, kv_caches: Mapping[str, "torch.Tensor"]) -> None:
        """Takes the KV cache that vLLM made: geometry, namespaces, and whether the pool has cells for such blocks."""
        attached, devices_of = [], set()
        shape = shape_of(self.vllm_config, self.kv_cache_config, self.config.stored_block_tokens)
        shards = self._shards(shape)
        fields = namespace_fields(self.vllm_config, self.kv_cache_config, self.config, shape, shards)
        for group in shape.groups:
            if not group.layer_names:
                attached.append(None)
                continue
            tensors = cache_tensors(kv_caches, group.layer_names)
            devices_of.add(tensors[0][1].device)
            attached.append(self._attach_group(group, tensors, [kvbm_cxl.Namespace(**each) for each in fields[group.index]]))
        if len(devices_of) != 1:
            raise GeometryError(f"the KV cache lies on several devices: {sorted(map(str, devices_of))}")
        if pool := self.access.pool:
            # Now, before the engine has requests to answer. The scheduler's process copies no blocks.
            pool.map_ahead()
        device = devices_of.pop()
        if device.type == "cuda":
            self._open_gpu(device.index or 0)
        self._clears_first = clears_first(self.vllm_config, self.kv_cache_config)
        self._attached = Attached(attached, device, shards.publishes, facts_of(next(iter(fields.values()))[0]))
        if self.config.audit:
            # Loads under way may bring what is not this engine's.
            self._audit = Audit(self.access, self.tally, self._attached.facts, self._loads.fail_all)
        self._weights.before_warm_up()
        if self.second:
            self.second.begin_demoting()

    def _open_gpu(self, number: int) -> None:
        """Has the GPU reach the pool from the start. Where the driver does not let it, blocks go through a CPU, if that is allowed."""
        try:
            reach = self.access.open_gpu(number)
        except kvbm_cxl.CxlError as error:
            if error_kind(error) == "lost":
                return
            raise ConfigError(f"CxlConnector cannot use GPU {number} with pool {self.config.pool}: {error}") from error
        logger.info(
            "CxlConnector: GPU %d reaches %d bytes of pool %s itself, DMA is %s",
            number,
            reach.registered_bytes,
            self.config.pool,
            reach.dma,
        )

    def _shards(self, shape: Shape) -> Shards:
        """Which heads this rank has, of all groups."""
        tp_size, rank = self._ranks()
        own = [group for group in shape.groups if group.layer_names]
        names = [name for group in own for name in group.layer_names]
        model = self.worker.get_model() if self.worker is not None and tp_size > 1 else None
        replicas = replicas_of(self.kv_cache_config.kv_tp_replicas, model, names)
        specs = [spec for group in own for spec in specs_of(self.kv_cache_config.kv_cache_groups[group.index].kv_cache_spec)]
        heads = [getattr(spec, "num_kv_heads", 1) for spec in specs]
        if self.config.stored_tp and shape.has_states:
            raise ConfigError("CxlConnector: states of recurrent layers cannot be divided by heads; leave stored_tp out")
        return shards_of(tp_size, rank, replicas, heads, self.config.stored_tp)

    def _attach_group(
        self, group: Group, tensors: "list[tuple[str, torch.Tensor]]", namespaces: "list[kvbm_cxl.Namespace]"
    ) -> AttachedGroup:
        block_count = self.kv_cache_config.num_blocks
        cells = self._cells(group, tensors, block_count, len(namespaces))
        cell_bytes = cells[0][0].block_bytes
        self._check_cells(cell_bytes)
        mover = mover_for(self.access, list(zip(namespaces, cells)))
        logger.info(
            "CxlConnector: %d blocks, each in %d cells of %d bytes, namespace %s, pool %s",
            block_count,
            len(namespaces) * group.slices,
            cell_bytes,
            namespaces[0],
            self.config.pool,
        )
        audit = None
        if self.config.audit:
            spec = self.kv_cache_config.kv_cache_groups[group.index].kv_cache_spec
            audit = group_audit(self.vllm_config, spec, group, tensors, block_count)
        if audit is not None:
            cells = self._cells(group, audit.scratch, 1, len(namespaces))
            audit.read_by(mover_for(self.access, list(zip(namespaces, cells))), namespaces[0])
        return AttachedGroup(tuple(namespaces), mover, cell_bytes, group.slices, audit)

    def _cells(
        self, group: Group, tensors: "list[tuple[str, torch.Tensor]]", block_count: int, shards: int
    ) -> list[tuple[kvbm_cxl.BlockLayout, ...]]:
        """For each shard of the heads and each slice of the tokens, where such a cell of a block lies in these tensors."""
        owner = [tensor for _, tensor in tensors]
        device = devices.check(owner[0].device)
        return [
            tuple(
                kvbm_cxl.BlockLayout(
                    [(part.address, part.stride_bytes, part.len_bytes) for part in parts], block_count, owner=owner, device=device
                )
                for parts in of_shard
            )
            for of_shard in cell_parts(tensors, block_count, shards, group.slices, self._cut_page(shards))
        ]

    def _cut_page(self, shards: int) -> Cutter:
        """How pages are cut, asked once for each kind of layer."""
        known: dict[tuple, list[list[Pieces]]] = {}

        def cut(name: str, tensor: "torch.Tensor", slices: int) -> list[list[Pieces]]:
            writer = writer_of(self.vllm_config, name)
            kind = (writer.name, writer.head_size, writer.head_size_v, tensor.dtype, tensor.shape[1:], tensor.stride()[1:], slices)
            if kind not in known:
                known[kind] = pieces_of_cells(tensor[:1], writer, shards, slices)
            return known[kind]

        return cut

    def _check_cells(self, block_bytes: int) -> None:
        pool = self.access.pool
        cells = list(pool.cell_bytes) if pool else []
        if pool and block_bytes > max(cells, default=0):
            raise ConfigError(
                f"a block of this model takes {block_bytes} bytes, the cells of pool {self.config.pool} have {cells or 'none'}: "
                f"format it with cells that hold it (`cxlctl format --cells {-(-block_bytes // 65536) * 64}K:75%`), "
                "or give vLLM a smaller --block-size"
            )

    def _ranks(self) -> tuple[int, int]:
        """Tensor-parallel ranks, and which one this is."""
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        return self.vllm_config.parallel_config.tensor_parallel_size, get_tensor_model_parallel_rank()

    def handshake(self) -> WorkerHandshake | None:
        attached = self._attached
        if attached is None:
            return None
        # The first fingerprint, against which those after a change are held: the weights are loaded, and nothing has been computed yet.
        namespaces = tuple(tuple(map(bytes, group.namespaces)) if group else () for group in attached.groups)
        audits = self._audit is not None and any(group.audit for group in attached.own)
        return WorkerHandshake(namespaces, attached.own[0].cell_bytes, self._weights.look(), audits, attached.facts)

    # Each step, in this order

    def before_overwrite(self, orders: StepMetadata) -> None:
        """Ends the saves whose blocks the step may write to: those that other requests were given, tails, which fill up token by token,
        and states. Looks at weights and adapters, where the scheduler's side has to know of them."""
        if self._weights.answer(orders.inquiry):
            # Blocks of other weights must not be taken for loaded. Which weights these are says the next step's lookup.
            self._loads.fail_all()
        for adapter in orders.adapters:
            self._adapters.ensure(adapter)
        # These blocks alone: the others of a long prompt may take longer than the step.
        states, self._states = self._states, []
        grown = [self._tails.pop(request) for request in self._tails.keys() & (orders.grows | orders.preempted)]
        self._saves.wait_blocks(chain(orders.taken, states, *grown))
        self._saves.wait(orders.preempted)

    def start_loads(self, orders: StepMetadata) -> None:
        self._orders, self._begun_s = orders, time.monotonic()
        attached = self._attached
        if attached is None:
            return
        if not orders.loads:
            return
        after = devices.mark(attached.device)
        jobs: dict[str, list] = {}
        for blocks in orders.loads:
            jobs.setdefault(blocks.request_id, []).extend(self._load_jobs(attached, blocks, after))
        *_, last = jobs
        for request_id, of_request in jobs.items():
            # The last one's: by then all others are on their way.
            self._loads.submit(request_id, of_request, here=orders.idle and request_id == last)

    def _load_jobs(self, attached: Attached, blocks: Blocks, after: "devices.After") -> list[tuple[list[int], Callable[[], set[int]]]]:
        group = attached.groups[blocks.group]
        if group is None:
            return [([], set)]
        is_isolated = self._audit is not None and self._audit.has_differed and not self._orders.is_isolated
        if is_isolated or not self._has_adapter(blocks):
            self.tally.count("pulled_blocks", "isolated" if is_isolated else "other_adapter", len(blocks.keys))
            ids = group.of_vllm(blocks.block_ids)
            return [(ids, lambda failed=frozenset(ids): set(failed))]
        return [self._load_job(group, piece, after) for piece in _pieces(blocks, _LOAD_JOB_BYTES // group.block_bytes)]

    def _has_adapter(self, blocks: Blocks) -> bool:
        """Whether the adapter that shapes these blocks is the one in memory. vLLM loads adapters again by itself, from files that may be
        others by then."""
        return blocks.adapter is None or self._adapters.is_loaded(*blocks.adapter)

    def _load_job(self, attached: AttachedGroup, blocks: Blocks, after: "devices.After"):
        def load() -> set[int]:
            results = self._pull(attached, blocks, after)
            return set(attached.of_vllm(block_id for block_id, reason in zip(blocks.block_ids, results) if reason is not None))

        return attached.of_vllm(blocks.block_ids), load

    def _pull(self, attached: AttachedGroup, blocks: Blocks, after: "devices.After") -> list[str | None]:
        """The reason of each block's miss, None for hits."""
        try:
            results = attached.mover.pull(blocks.keys, blocks.block_ids, after)
        except kvbm_cxl.CxlError as error:
            self.access.failures.report("pulling blocks", error, f"{len(blocks.keys)} of request {blocks.request_id}", count=False)
            results = [error_kind(error)] * len(blocks.keys)
            if isinstance(error, kvbm_cxl.TimeoutError_):
                self._check_settled(len(blocks.keys))
        hits = results.count(None)
        self.tally.count("pulled_blocks", "hit", hits)
        self.tally.count("bytes", "pulled", hits * attached.block_bytes)
        if hits < len(results):
            self._count_misses(attached, blocks.keys, results)
        return results

    def _check_settled(self, blocks: int) -> None:
        """A copy of a GPU that did not end in time may still write to its blocks, which vLLM would give away. Raises `CopyTimeout` where
        the end does not come."""
        try:
            if self.access.call(lambda cache: cache.is_settled(timeout_ms=self.config.copy_timeout_ms)):
                return
        except kvbm_cxl.CxlError as error:
            self.access.failures.report("waiting for the end of a copy", error, count=False)
        raise CopyTimeout(f"CxlConnector: the GPU may still write to {blocks} blocks whose load took too long; see `cxlctl doctor --gpu`")

    def _count_misses(self, attached: AttachedGroup, keys: list[bytes], results: list[str | None]) -> None:
        for reason, count in Counter(filter(None, results)).items():
            self.tally.count("pulled_blocks", reason, count)
        for key, reason in zip(keys, results):
            if reason == "checksum":
                logger.error("block %s of namespace %s has a wrong checksum", key.hex(), attached.namespaces[0])
                with self._lock:
                    self._corrupt.add(key)

    def save(self, orders: StepMetadata) -> None:
        """Has the step's blocks published, and waits for those that must be there when it ends."""
        self._orders, self._saved_step = orders, orders.step
        self._saves.patience_s = max(time.monotonic() - self._begun_s, self._suspect_s * LEAST_PATIENCE)
        attached = self._attached
        if attached is None:
            return
        if orders.saves and attached.publishes:
            after = devices.mark(attached.device)
            # The next step waits for states: the copies of other blocks do not stand before them.
            for blocks in sorted(orders.saves, key=lambda blocks: not blocks.is_state):
                if not self._has_adapter(blocks):
                    self.tally.count("published_blocks", "other_adapter", len(blocks.keys))
                    continue
                group = attached.groups[blocks.group]
                if group is None:
                    continue
                if blocks.tail_tokens:
                    self._tails.setdefault(blocks.request_id, []).extend(group.of_vllm(blocks.block_ids))
                if blocks.is_state:
                    self._states += group.of_vllm(blocks.block_ids)
                audit = self._audit_of(group, blocks, orders)
                for piece in _pieces(blocks, _SAVE_JOB_BYTES // group.block_bytes):
                    self._saves.submit((piece.request_id, orders.step), self._save_job(group, piece, after, audit))
        if self._clears_first:
            self._saves.wait_all()
        elif self.config.publish_behind:
            self._saves.wait_announced(orders.complete)
        else:
            self._saves.wait(orders.complete)

    def _audit_of(self, group: AttachedGroup, blocks: Blocks, orders: StepMetadata) -> "AuditOfBatch | None":
        """What compares those of the blocks that their request computed in full."""
        computed = frozenset(blocks.keys[blocks.found : len(blocks.keys) - (blocks.tail_tokens > 0)])
        if self._audit is None or not computed:
            return None
        return partial(self._audit.look, group.audit, computed, blocks.request_id in orders.audited)

    def _save_job(
        self,
        group: AttachedGroup,
        blocks: Blocks,
        after: "devices.After",
        audit: "AuditOfBatch | None" = None,
    ) -> SaveJob:
        batch = PublishBatch(blocks.keys, blocks.block_ids, parents(blocks.parent, blocks.keys))
        record = partial(self._saved, group.block_bytes)
        if blocks.only_audited:
            return SaveJob(FoundBlocks(), batch, group.block_bytes, after, lambda _: None, self.access.failures, group.slices, audit)
        return SaveJob(group.mover, batch, group.block_bytes, after, record, self.access.failures, group.slices, audit)

    def _saved(self, block_bytes: int, saved: SaveOutcome) -> None:
        """Counts what a job published, on the job's thread."""
        self.tally.time("publish_seconds", saved.took_s)
        for outcome, count in Counter(saved.outcomes).items():
            self.tally.count("published_blocks", outcome, count)
        self.tally.count("bytes", "published", saved.outcomes.count("stored") * block_bytes)
        if self.config.events:
            with self._lock:
                self._stored.update(key for key, outcome in zip(saved.keys, saved.outcomes) if outcome in _THERE)

    def ended(self, finished: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose blocks may be freed after saving, and those whose load is over. `finished`: vLLM wants no more of these."""
        orders = self._orders
        self._saves.give_up_late(max(self._suspect_s, self._saves.patience_s))
        self._loads.cancel(finished)
        for request in finished:  # vLLM keeps their blocks until they are saved.
            self._tails.pop(request, None)
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

    def take_failed_requests(self) -> set[str]:
        """Requests of which such blocks are."""
        self._failed_blocks = set()
        return set(self._failed_loads)

    def report(self) -> WorkerReport:
        failed, self._failed_loads = self._failed_loads, set()
        with self._lock:
            stored, self._stored = self._stored, Counter()
            corrupt, self._corrupt = self._corrupt, set()
        report = WorkerReport(self._saves.done_step(self._saved_step), failed, corrupt, dict(stored))
        report.has_differed = self._audit is not None and self._audit.has_differed
        rank = getattr(self.worker, "rank", 0)
        if self._orders and self._weights.answered(self._orders.inquiry):
            report.inquiry, report.weights = self._orders.inquiry, {rank: self._weights.latest}
        if adapters := self._adapters.take_changed():
            report.adapters = {rank: adapters}
        return report

    def take_stats(self) -> CxlStats | None:
        self.access.failures.count_in(self.tally)
        if self.second:
            self.second.count_in(self.tally)
        return self.tally.take()

    def close(self) -> None:
        """Ends all copies."""
        self._saves.close()
        self._loads.close()


def _pieces(blocks: Blocks, count: int) -> Iterable[Blocks]:
    """The same blocks in pieces of `count` for several threads."""
    size = max(count, 1)
    for start in range(0, len(blocks.keys), size):
        stop = start + size
        parent = blocks.keys[start - 1] if start else blocks.parent
        part = Blocks(blocks.request_id, blocks.keys[start:stop], blocks.block_ids[start:stop], parent, blocks.tail_tokens)
        yield replace(part, only_audited=blocks.only_audited)
