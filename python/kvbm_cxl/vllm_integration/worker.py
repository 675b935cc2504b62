# SPDX-License-Identifier: Apache-2.0
"""The worker's side: copies between the KV cache and the pool.

`attachment` says where blocks lie, `loader` brings them from the pool, and `saver` publishes them, all during the forward pass. Whatever
goes wrong with a copy is an outcome of its blocks: a save that is counted, a load that is reported to vLLM.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .adapters import LoadedAdapters
from .attachment import Attacher, Attachment
from .audit import Audit
from .config import ConnectorConfig
from .loader import Loader
from .metadata import StepMetadata, WorkerHandshake, WorkerReport
from .pool_access import PoolAccess
from .saver import Saver
from .second_level import SecondLevel
from .stats import CxlStats, Tally
from .support import clears_first
from .weights import WeightsInMemory

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

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
    attachment: Attachment | None = None
    _orders: StepMetadata | None = None

    def __post_init__(self) -> None:
        self.weights = WeightsInMemory(self.worker, self.tally)
        self.adapters = LoadedAdapters(getattr(getattr(self.worker, "model_runner", None), "lora_manager", None))
        self.loader = Loader(self.config, self.access, self.tally, self.adapters)
        self.saver = Saver(self.config, self.access, self.tally, self.adapters)

    # At start

    def attach(self, kv_caches: Mapping[str, "torch.Tensor"]) -> None:
        """Takes the KV cache that vLLM made."""
        attacher = Attacher(self.vllm_config, self.kv_cache_config, self.config, self.access, self.worker)
        attachment = attacher.attach(kv_caches)
        if self.config.audit:
            # Running loads may bring blocks that are not this engine's.
            attachment.audit = Audit(self.access, self.tally, attachment.facts, self.loader.loads.fail_all)
        self.attachment = attachment
        self.saver.clears_first = clears_first(self.vllm_config, self.kv_cache_config)
        self.weights.before_warm_up()
        if self.second:
            self.second.begin_demoting()

    def handshake(self) -> WorkerHandshake | None:
        attachment = self.attachment
        if attachment is None:
            return None
        # The first fingerprint, against which those after a change are held: the weights are loaded, and nothing has been computed yet.
        namespaces = tuple(tuple(map(bytes, group.namespaces)) if group else () for group in attachment.groups)
        audits = attachment.audit is not None and any(group.audit for group in attachment.own)
        return WorkerHandshake(namespaces, attachment.own[0].cell_bytes, self.weights.look(), audits, attachment.facts)

    def end_copies(self) -> None:
        """Before vLLM takes the memory of its KV cache away, which it maps at the same addresses later. Raises `CopyTimeout`."""
        self.loader.loads.end_all()
        self.saver.saves.wait_all()

    # Each step, in this order

    def before_overwrite(self, orders: StepMetadata) -> None:
        """Ends the saves whose blocks the step may write to. Looks at weights and adapters, where the scheduler's side has to know of
        them."""
        if orders.inquiry and self.weights.answer(orders.inquiry):
            # Blocks of other weights must not be taken for loaded. Which weights these are says the next step's lookup.
            self.loader.loads.fail_all()
        for adapter in orders.adapters:
            self.adapters.ensure(adapter)
        self.saver.before_overwrite(orders)

    def start_loads(self, orders: StepMetadata) -> None:
        """Begins a step, and the loads that run during it."""
        self._orders, self.saver.begun_s = orders, time.monotonic()
        if orders.loads and self.attachment:
            self.loader.load(self.attachment, orders)

    def save(self, orders: StepMetadata) -> None:
        """Has the step's blocks published, and waits for those that must be there when it ends."""
        self._orders, self.saver.saved_step = orders, orders.step
        if self.attachment:
            self.saver.save(self.attachment, orders)

    def take_finished(self, finished: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose blocks may be freed after saving, and those whose load is over. `finished`: vLLM wants no more of these."""
        orders = self._orders
        idle_s = _IDLE_WAIT_S if orders is not None and orders.idle else 0.0
        saved = self.saver.take_saved(orders, finished, idle_s)
        return saved, self.loader.take_loaded(finished, 0.0 if saved else idle_s)

    def report(self) -> WorkerReport:
        """What became of orders since the last report."""
        report = WorkerReport(self.saver.done_step(), *self.loader.take_report(), self.saver.take_stored())
        report.has_differed = self.attachment is not None and self.attachment.audit is not None and self.attachment.audit.has_differed
        rank = getattr(self.worker, "rank", 0)
        if self._orders and self.weights.has_answered(self._orders.inquiry):
            report.inquiry, report.weights = self._orders.inquiry, {rank: self.weights.latest}
        if adapters := self.adapters.take_changed():
            report.adapters = {rank: adapters}
        return report

    def take_stats(self) -> CxlStats | None:
        for reason, count in self.access.failures.take_counts().items():
            self.tally.count("thread_errors", reason, count)
        if self.second:
            self.second.count_in(self.tally)
        return self.tally.take()

    def close(self) -> None:
        """Ends all copies."""
        self.saver.saves.close()
        self.loader.loads.close()
