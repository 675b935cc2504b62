# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: one object for vLLM's scheduler, over lookups, saving, and corrupt blocks.

A request's way: `matched` looks up the longest cached prefix and pins it (`lookups`); `allocated` turns the pinned lookup into a load;
`step` hands loads and saves to the workers; `report` ends loads and unpins; `finished` keeps blocks that are still being read (`saving`).
Blocks looked up but not allocated are unpinned at the end of the step and looked up again, so that pins only wait for copies, never for
memory. A request whose prefix is being loaded for another one waits for that: vLLM then has the blocks itself, once. While it is not known
which weights or which adapter the workers have in memory (`block_names`), requests wait, and nothing is published.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .block_names import BlockNames
from .config import ConnectorConfig
from .corrupt_blocks import CorruptBlocks
from .diagnosis import Reasons
from .events import PoolEvents
from .groups import Shape
from .keys import Hasher
from .lookups import Lookups
from .metadata import StepMetadata, WorkerHandshake, WorkerReport
from .pool_access import PoolAccess
from .recording import Recording
from .request_state import RequestState
from .saving import Saving, taken_blocks
from .second_level import SecondLevel
from .stats import CxlStats, Tally

if TYPE_CHECKING:
    import kvbm_cxl
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class SchedulerSide:
    """See the module. Called by vLLM's scheduler, from one thread."""

    config: ConnectorConfig
    access: PoolAccess
    shape: Shape
    is_producer: bool
    is_consumer: bool
    events: PoolEvents | None = None
    tally: Tally = field(default_factory=Tally)
    reads: bool = True
    """False: the engine computes whole prompts, and nothing is looked up."""
    hasher: Hasher | None = None
    """Hashes requests in blocks of the pool, where vLLM's are others."""
    second: SecondLevel | None = None
    _tracked: dict[str, RequestState] = field(default_factory=dict)
    _step: int = 0

    def __post_init__(self) -> None:
        reasons = Reasons()
        self.names = BlockNames(self.access, self.shape, self.tally, self.hasher)
        self.corrupt = CorruptBlocks(self.access, self.names)
        self.recording = Recording.begin(self.config, self.names, self.access.failures)
        self.lookups = Lookups(
            self.config,
            self.access,
            self.names,
            self.tally,
            reasons,
            self.corrupt,
            self.is_producer,
            self.reads,
            self.recording,
            self.second,
        )
        self.saving = Saving(self.config, self.names, reasons, self.is_producer, self.is_consumer, self.events, self.recording)

    def handshake(self, workers: Mapping[Any, WorkerHandshake]) -> None:
        """Learns the namespaces of all workers; before that, nothing is found."""
        self.names.handshake(workers)
        self.lookups.audited.is_on = any(worker.audits for worker in workers.values())

    @property
    def namespaces(self) -> list["kvbm_cxl.Namespace"]:
        """Those of the cells of a block."""
        return self.names.namespaces

    @property
    def workers(self) -> int:
        """Workers with blocks of their own."""
        return self.names.workers

    # A request's way

    def match(self, request: "Request", computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed_tokens` (whole blocks that vLLM has itself) that can be loaded, and that they are loaded during the
        forward pass. None: ask again in the next step.
        """
        return self.lookups.match(self._track(request), computed_tokens)

    def note_allocation(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """vLLM admitted the request, and will have `external_tokens` of it loaded."""
        self.lookups.note_allocation(self._track(request), blocks, external_tokens)

    def _track(self, request: "Request") -> RequestState:
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.request is not request:
            if tracked:
                self.lookups.unpin(tracked)
            tracked = self._tracked[request.request_id] = RequestState(request)
        return tracked

    def finish(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        """The request is over. True: vLLM must keep its blocks until every worker has released it."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False, None
        self.lookups.unpin(tracked)
        return self.saving.finish(tracked)

    # Each step

    def step(self, output: "SchedulerOutput") -> StepMetadata:
        """The orders of a step that was just scheduled."""
        self._step += 1
        idle = output.total_num_scheduled_tokens == 0
        orders = StepMetadata(self._step, self.lookups.take_loads(), preempted=set(output.preempted_req_ids or ()), idle=idle)
        orders.inquiry = self.names.era.step(computes=not idle or bool(orders.loads))
        if self.events:
            self.events.are_readable = not self.names.era.name
        self.saving.order(self._tracked, output, orders)
        orders.adapters = self.names.adapters.take_wanted()
        orders.is_isolated = self.names.era.is_isolated
        if self.saving.reads_blocks:
            orders.taken = taken_blocks(output, orders.loads, self.shape)
        self.tally.gauge("pinned_blocks", self.lookups.pinned)
        if pool := self.access.pool:
            self.tally.gauge("pool_info", 1, pool.uuid)
        return orders

    def report(self, output: "KVConnectorOutput") -> None:
        """What the workers of a step report."""
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self.names.learn(report, self._tracked)
            self.saving.note_saved(report.saved_step)
            for request_id in report.failed_loads:
                if tracked := self._tracked.get(request_id):
                    # vLLM may ask again for the same blocks, which would fail again.
                    tracked.load_failed = True
            if self.events:
                self.events.note_stored(report.stored, self.workers)
        for request_id in output.finished_recving or ():
            if tracked := self._tracked.get(request_id):
                self.lookups.unpin(tracked)
        if isinstance(report, WorkerReport) and report.corrupt:
            self.corrupt.add(report.corrupt)

    # What the engine does meanwhile (`engine_watch`)

    def weights_may_change(self, why: str) -> None:
        self.names.era.suspect(why)

    def adapters_may_change(self) -> None:
        self.names.adapters.forget()

    def local_cache_was_reset(self) -> None:
        self.names.local_reset()

    def reset(self) -> bool:
        """vLLM resets the connector's cache: weights may have changed in place. Blocks stay in the pool, under names that this
        engine uses again only with the same weights in memory."""
        self.names.era.suspect("a reset of the connector")
        return True

    def take_stats(self) -> CxlStats | None:
        for reason, count in self.access.failures.take_counts().items():
            self.tally.count("thread_errors", reason, count)
        if self.recording:
            self.recording.count_in(self.tally)
        if self.second:
            self.second.count_in(self.tally)
        return self.tally.take()

    def close(self) -> None:
        """Unpins everything, and ends the record."""
        for tracked in self._tracked.values():
            self.lookups.unpin(tracked)
        self._tracked.clear()
        if self.recording:
            self.recording.close()
            self.recording = self.lookups.recording = self.saving.recording = None
