# SPDX-License-Identifier: Apache-2.0
"""The worker's audit: blocks that the pool has are compared with the same blocks as this engine computed them.

Everything that shapes a block has to be in its key. Where something is missing, engines take blocks of each other that are not theirs, and
nothing else shows it. So a share of the blocks that an engine computes, and finds in the pool when it publishes them, is read back. Where
they differ by more than numerics do, one of the two engines has a wrong key, and this one shares no block any more until it is started
again. That the engine computes blocks which the pool has is what `audited_hits` sees to.

The comparison runs on the thread that publishes, which keeps vLLM from changing the block, on the device of the KV cache, with memory for
one block of each group.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import kvbm_cxl
import torch

from ..options import ConfigError
from .block_difference import Difference, LayerRows, difference, limit_of, numbers_of, states_of
from .groups import Group
from .identity import layer_number
from .log import logger
from .metadata import Blocks
from .movers import After, Mover, PublishBatch
from .pool_access import PoolAccess
from .stats import Tally
from .token_places import writer_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec


# Of blocks that were computed and are in the pool: the first ones after a start, and then one in so many.
_FIRST, _EVERY = 64, 256
# Of a request whose hit was left out for the audit: so many of each batch.
_MOST_OF_BATCH = 32


class FoundBlocks:
    """In the place of a mover, for blocks that are in the pool and only compared."""

    def announce(self, batch: PublishBatch) -> None:
        """Nothing comes."""

    def release(self, reservations: None) -> None:
        """Nothing was reserved."""

    def publish(self, batch: PublishBatch, reservations: None, after: After = None) -> list[str]:
        """Nothing is published. Waits for `after` as a copy would."""
        if after is not None:
            after.synchronize()
        return ["exists"] * len(batch.keys)


@dataclass
class GroupAudit:
    """What compares blocks of one KV cache group."""

    tensors: Sequence[torch.Tensor]
    """The KV cache as numbers, one or more for each layer."""
    scratch: list[tuple[str, torch.Tensor]]
    """The same of one block, which blocks from the pool are read into: as vLLM has it, each with its layer."""
    numbers: Sequence[torch.Tensor]
    """These as numbers."""
    layers: Sequence[LayerRows]
    limit: Difference
    block_count: int
    slices: int
    _mover: Mover | None = None
    _namespace: "kvbm_cxl.Namespace | None" = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read_by(self, mover: Mover, namespace: "kvbm_cxl.Namespace") -> None:
        """Blocks are read by `mover`, which fills `scratch`. `namespace`: that of their first cell."""
        self._mover, self._namespace = mover, namespace

    @property
    def namespace(self) -> "kvbm_cxl.Namespace":
        """Of the first cell of each block."""
        return self._namespace

    def difference(self, key: bytes, place: int) -> Difference | None:
        """That of the block at `place` (as `Group.places` has it); None where the pool does not have it any more. Raises `CxlError`."""
        block, part = divmod(place, self.slices)
        with self._lock:
            (reason,) = self._mover.pull([key], [part])
            if reason is not None:
                return None
            here = []
            for tensor in self.tensors:
                pages = tensor.shape[0] // self.block_count
                here.append(tensor[block * pages : (block + 1) * pages])
            return difference(self.layers, here, self.numbers, part, self.slices)


def group_audit(
    vllm_config: "VllmConfig", spec: "KVCacheSpec", group: Group, tensors: list[tuple[str, torch.Tensor]], block_count: int
) -> GroupAudit | None:
    """What compares the blocks of a group; None, with the reason in the log, where their format cannot be read as numbers."""
    model, cache_dtype = vllm_config.model_config, vllm_config.cache_config.cache_dtype
    scratch = scratch_of(tensors, block_count)
    numbers, of_scratch, layers = [], [], []
    for (name, tensor), (_, other) in zip(tensors, scratch):
        of_layer = getattr(spec, "kv_cache_specs", {}).get(name, spec)
        read, found = (_numbers(each, of_layer, cache_dtype) for each in (tensor, other))
        if read is None or found is None:
            logger.warning("CxlConnector: no audit of blocks of group %d: a KV cache of type %s is packed", group.index, cache_dtype)
            return None
        is_first = not group.is_draft and layer_number(name) == 0
        layers += [layer_rows(vllm_config, name, each, of_layer, is_first) for each in read]
        numbers, of_scratch = numbers + read, of_scratch + found
    limit = limit_of(numbers, model.dtype, is_exact=not (model.quantization or model.is_multimodal_model))
    return GroupAudit(numbers, scratch, of_scratch, layers, limit, block_count, group.slices)


def _numbers(tensor: torch.Tensor, spec: "KVCacheSpec", cache_dtype: str) -> list[torch.Tensor] | None:
    """A layer's tensor as numbers: that of attention, or the states of a recurrent layer."""
    if hasattr(spec, "shapes"):
        return states_of(tensor, spec.shapes, spec.dtypes)
    numbers = numbers_of(tensor, cache_dtype)
    return None if numbers is None else [numbers]


def scratch_of(tensors: Sequence[tuple[str, torch.Tensor]], block_count: int) -> list[tuple[str, torch.Tensor]]:
    """Memory for one block: for each tensor one of the same dimensions, in the same order in memory."""
    found = []
    for name, tensor in tensors:
        order = sorted(range(1, tensor.dim()), key=lambda dim: -tensor.stride(dim))
        sizes = [tensor.shape[0] // block_count, *(tensor.shape[dim] for dim in order)]
        memory = torch.zeros(sizes, dtype=tensor.dtype, device=tensor.device)
        found.append((name, memory.permute([0, *(1 + order.index(dim) for dim in range(1, tensor.dim()))])))
    return found


def layer_rows(vllm_config: "VllmConfig", name: str, tensor: torch.Tensor, spec: "KVCacheSpec", is_first: bool) -> LayerRows:
    """Which numbers of a layer's blocks belong to one token."""
    key_size = getattr(spec, "head_size", 0)
    if not key_size or tensor.dim() != 4:
        return LayerRows.of_state(tensor, is_first)
    writer = None
    try:
        if tensor.device.type == "cpu" and (asked := writer_of(vllm_config, name)).name.startswith("CPU_ATTN"):
            writer = asked
        return LayerRows.of_tokens(tensor, writer, key_size, is_first)
    except ConfigError as error:
        logger.debug("where tokens of layer %s lie: %s", name, error)
        return LayerRows.of_tokens(tensor, None, key_size, is_first)


@dataclass
class Audit:
    """Which blocks of a worker are compared, and what follows. Called by threads that publish."""

    access: PoolAccess
    tally: Tally
    facts: Mapping[str, str]
    """What makes this engine's namespace, for the log."""
    on_difference: Callable[[], None]
    """Called once, when a block has been found to differ."""
    has_differed: bool = False
    """From then on the engine shares nothing."""
    _seen: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of_batch(self, group: GroupAudit | None, blocks: Blocks, is_wanted: bool) -> Callable[[PublishBatch, list[str]], None]:
        """What compares those of the blocks that their request computed in full, once they are published."""
        computed = frozenset(blocks.keys[blocks.found : len(blocks.keys) - (blocks.tail_tokens > 0)])
        return partial(self.look, group, computed, is_wanted)

    def look(self, group: GroupAudit | None, computed: frozenset[bytes], is_wanted: bool, batch: PublishBatch, outcomes: list[str]) -> None:
        """Compares some of the blocks that were `computed` and are in the pool. `is_wanted`: their request is computed for the audit."""
        places = [at for at, (key, outcome) in enumerate(zip(batch.keys, outcomes)) if outcome == "exists" and key in computed]
        if not places:
            return
        chosen = self._choose(places, is_wanted)
        if group is None:
            self.tally.count("audited_blocks", "not_comparable", len(chosen))
            return
        for at in chosen:
            if not self.has_differed:
                self._compare(group, batch.keys[at], batch.block_ids[at])

    def _choose(self, places: list[int], is_wanted: bool) -> list[int]:
        with self._lock:
            first, self._seen = self._seen, self._seen + len(places)
        if is_wanted:
            step = -(-len(places) // _MOST_OF_BATCH)
            return places[::step]
        return [at for number, at in enumerate(places, first) if number < _FIRST or number % _EVERY == 0]

    def _compare(self, group: GroupAudit, key: bytes, place: int) -> None:
        started_s = time.perf_counter()
        try:
            found = group.difference(key, place)
        except kvbm_cxl.CxlError as error:
            self.access.failures.report("reading a block back for the audit", error)
            return
        self.tally.time("audit_seconds", time.perf_counter() - started_s)
        if found is None:
            self.tally.count("audited_blocks", "absent")
        elif not found.exceeds(group.limit):
            self.tally.count("audited_blocks", "same")
        else:
            self.tally.count("audited_blocks", "different")
            self._differs(group, key, found)

    def _differs(self, group: GroupAudit, key: bytes, found: Difference) -> None:
        with self._lock:
            if self.has_differed:
                return
            self.has_differed = True
        logger.error(
            "CxlConnector: block %s of namespace %s in pool %s is not what this engine computed for the same tokens: %s, where numerics "
            "stay below %s. It was published by %s; this engine is %s. No key covers what "
            "differs, or one engine is wrong; the audit cannot tell which. This engine shares no block until it restarts: "
            "see docs/operating/troubleshooting.md",
            key.hex(),
            group.namespace,
            self.access.spec,
            found,
            group.limit,
            self._publisher(group, key),
            self._myself(),
        )
        self.on_difference()

    def _publisher(self, group: GroupAudit, key: bytes) -> str:
        """What the pool knows of it: the host slot that owns the cell."""
        try:
            block = self.access.call(lambda cache: cache.lookup(group.namespace, key))
        except kvbm_cxl.CxlError as error:
            return f"a host that is unknown ({error})"
        return f"the host of slot {block.owner} (`cxlctl hosts` names its machine and process)" if block else "a host that has left"

    def _myself(self) -> str:
        pool = self.access.pool
        place = f"slot {pool.slot}, incarnation {pool.incarnation}, " if pool else ""
        return place + ", ".join(f"{name} {value}" for name, value in sorted(self.facts.items()))
