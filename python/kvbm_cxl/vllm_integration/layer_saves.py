# SPDX-License-Identifier: Apache-2.0
"""Blocks of a GPU that are published layer by layer, beside the forward pass that computes them (`save_layers`).

At the start of a step a thread reserves cells for the blocks that the step completes. Behind each attention layer the engine's thread has
the layer's part of all of them copied, in the order of its stream, and goes on; the copies run beside the next layer. At the end of the
step the rest is queued, and the blocks are committed once all of their parts have arrived. Whatever keeps a part from being queued in time
(cells that are not reserved yet, layers without a hook, as in whole CUDA graphs, or in another order) only has it queued later.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import kvbm_cxl

from .geometry import cell_parts
from .metadata import Blocks
from .movers import CopyMover
from .save_job import NO_LOCK, SaveJob, SaveOutcome

if TYPE_CHECKING:
    import torch

    from .devices import After
    from .jobs import Saves

# Parts of a block but the last one: no two of them share a line of the pool.
_LINE_BYTES = 64
# What became of layers, as counted: queued within the step that computed them, or behind it.
_WITHIN, _BEHIND = "within", "behind"


@dataclass(frozen=True)
class Layers:
    """The blocks of a KV cache group, by layer."""

    names: tuple[str, ...]
    """In the order in which their parts lie in a cell, which is that of the model."""
    layouts: "tuple[kvbm_cxl.BlockLayout, ...]"
    """One for each."""
    device: int
    """Number of the GPU."""

    @classmethod
    def of(cls, tensors: "Sequence[tuple[str, torch.Tensor]]", block_count: int, device: "torch.device") -> "Layers | None":
        """None where parts cannot be copied by themselves: their lengths are no multiples of 64 bytes."""
        names = tuple(dict.fromkeys(name for name, _ in tensors))
        layouts = []
        for wanted in names:
            of_layer = [(name, tensor) for name, tensor in tensors if name == wanted]
            ((parts,),) = cell_parts(of_layer, block_count)
            runs = [(part.address, part.stride_bytes, part.len_bytes) for part in parts]
            layouts.append(kvbm_cxl.BlockLayout(runs, block_count, owner=[tensor for _, tensor in of_layer], device=str(device)))
        if any(layout.block_bytes % _LINE_BYTES for layout in layouts[:-1]):
            return None
        return cls(names, tuple(layouts), device.index or 0)


@dataclass(kw_only=True)
class LayerJob(SaveJob):
    """Publishes a batch of blocks layer by layer. Begun at the start of the step that computes them, before `after` is known; `run` waits
    for `end` or `drop`, one of which has to be called."""

    layers: Layers
    count: Callable[[str], None]
    """Counts a layer, by what became of it."""
    _queued: "kvbm_cxl.QueuedLayers | None" = field(default=None, init=False)
    """Reserved cells, set by the thread that announces."""
    _next: int = field(default=0, init=False)
    """Layers whose parts were queued. Of the engine's thread until `end`, then of the one that runs the job."""
    _over: threading.Event = field(default_factory=threading.Event, init=False)
    _dropped: str | None = field(default=None, init=False)

    @property
    def _mover(self) -> CopyMover:
        """Only blocks that lie in one cell have layers of their own."""
        return self.mover

    def announce(self) -> bool:
        """Reserves cells, which lets every host see that the blocks are coming. Where there is no room to queue them layer by layer they
        are published whole, after the step."""
        mover, batch = self._mover, self.batch
        namespace, len_bytes = mover.namespace, mover.layouts[0].block_bytes
        try:
            self._queued = mover.access.call(
                lambda cache: cache.queue_layers(namespace, batch.keys, len_bytes, self.layers.device, parents=batch.parents, wait_ms=0)
            )
        except (kvbm_cxl.FullError, kvbm_cxl.InvalidError):
            return super().announce()
        except kvbm_cxl.CxlError as error:
            self._fail(error)
        return self._error != kvbm_cxl.TimeoutError_.kind

    def give_up(self) -> None:
        """As of every job. The engine's thread queues nothing of it afterwards."""
        self._dropped = NO_LOCK
        super().give_up()

    def release(self) -> None:
        """Gives back what `announce` reserved, after `give_up`."""
        if self._queued is not None:
            self._queued.release()
        super().release()

    def queue(self, computed: set[str], stream: "torch.cuda.Stream") -> None:
        """Has the parts of the layers of `computed` copied behind what `stream` was given, as far as they follow one another."""
        if self._queued is None or self._error is not None or self._dropped is not None:
            return
        count = self._next
        while count < len(self.layers.names) and self.layers.names[count] in computed:
            count += 1
        try:
            if count > self._next:
                self._mover.access.call(lambda _: self._queue(count, stream))
        except kvbm_cxl.CxlError as error:
            self._fail(error)

    def _queue(self, count: int, after: "torch.cuda.Stream | After") -> None:
        for layout in self.layers.layouts[self._next : count]:
            self._queued.queue(layout, self.batch.block_ids, after=after)
            self.count(_BEHIND if self._over.is_set() else _WITHIN)
            self._next += 1

    def end(self, after: "After") -> None:
        """The step is over: all layers come before `after`."""
        self.after = after
        self._over.set()

    def drop(self, reason: str) -> None:
        """Nothing of it is published, for `reason`."""
        self._dropped = reason
        self._over.set()

    def run(self) -> None:
        """Queues what is left, and waits for the end of all copies."""
        self._over.wait()
        if self._dropped is None and self._queued is None:
            return super().run()
        started_s, outcomes = time.monotonic(), []
        if self._dropped is None and self._error is None:
            try:
                outcomes = self._mover.access.call(lambda _: self._finish())
            except kvbm_cxl.CxlError as error:
                self._fail(error)
        if failed := self._dropped or self._error:
            outcomes = [failed] * len(self.keys)
        if self._queued is not None:
            self._queued.release()
        return self._end(outcomes, started_s)

    def _finish(self) -> list[str]:
        self._queue(len(self.layers.names), self.after)
        ended = self._queued.finish()
        while True:
            try:
                return self._mover.busy_again(self.batch, ended.wait(), self.after)
            except kvbm_cxl.TimeoutError_:
                # The blocks are read, and would be published, until the end is known, which the engine of the GPU bounds.
                if ended.done():
                    raise


@dataclass
class LayerSaves:
    """The jobs of a step. Used by the engine's thread."""

    _jobs: list[tuple[Blocks, LayerJob]] = field(default_factory=list)
    _computed: set[str] = field(default_factory=set)
    """Layers that the step has queued the computation of."""

    def begin(self, blocks: Blocks, job: LayerJob) -> None:
        """Takes on a job for these blocks."""
        self._jobs.append((blocks, job))

    def queue(self, layer_name: str, stream: "Callable[[], torch.cuda.Stream]") -> None:
        """Has the parts of a layer copied that was computed by what `stream()` was given, and those of the layers before it."""
        if not self._jobs:
            return
        self._computed.add(layer_name)
        behind = stream()
        for _, job in self._jobs:
            job.queue(self._computed, behind)

    def end(self, after: "After", drops: Callable[[Blocks], str | None]) -> list[Blocks]:
        """The step is over. `drops` says for which reason, if any, blocks are not to be published. Returns those that there were jobs for,
        each as often."""
        jobs, self._jobs = self._jobs, []
        self._computed.clear()
        for blocks, job in jobs:
            reason = drops(blocks)
            job.end(after) if reason is None else job.drop(reason)
        return [blocks for blocks, _ in jobs]
