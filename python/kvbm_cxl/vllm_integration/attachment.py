# SPDX-License-Identifier: Apache-2.0
"""A worker's KV cache, once vLLM has made it: the places of its blocks, their namespaces, and the movers that copy them."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import kvbm_cxl

from ..options import ConfigError
from .audit import Audit, GroupAudit, group_audit
from .config import ConnectorConfig
from .diagnosis import facts_of
from .failures import error_kind
from .geometry import Cutter, GeometryError, Pieces, cache_tensors, cell_parts
from .groups import Group, Shape, blocks_of, shape_of, specs_of
from .identity import namespace_fields
from .log import logger
from .movers import Mover, check_device, mover_for
from .pool_access import PoolAccess
from .shards import Shards, replicas_of, shards_of
from .token_places import pieces_of_cells, writer_of

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

Tensors = "list[tuple[str, torch.Tensor]]"


@dataclass
class AttachedGroup:
    """The blocks of one KV cache group of this worker."""

    namespaces: tuple["kvbm_cxl.Namespace", ...]
    """Of the cells that a block lies in."""
    mover: Mover
    cell_bytes: int
    slices: int
    """Blocks in the pool that make one of vLLM's."""
    audit: GroupAudit | None = None
    """What compares its blocks; None where that cannot be done."""

    def __post_init__(self) -> None:
        self.block_bytes = self.cell_bytes * len(self.namespaces)
        """Bytes of a block in the pool, over its cells."""

    def of_vllm(self, block_ids: Iterable[int]) -> list[int]:
        """Numbers of the blocks of vLLM that these lie in."""
        return list(block_ids) if self.slices == 1 else blocks_of(block_ids, self.slices)


@dataclass
class Attachment:
    """Facts that are known once vLLM has made its KV cache."""

    groups: list[AttachedGroup | None]
    """In the order of `Shape.groups`; None for a group of which this stage of the pipeline has no layer."""
    device: "torch.device"
    publishes: bool
    """Of ranks with the same heads, one publishes."""
    facts: dict[str, str]
    audit: Audit | None = None

    @property
    def own(self) -> list[AttachedGroup]:
        """Those of which this stage has layers."""
        return [group for group in self.groups if group]


@dataclass
class Attacher:
    """Makes the `Attachment` of a worker: geometry, namespaces, and whether the pool has cells for such blocks."""

    vllm_config: "VllmConfig"
    kv_cache_config: "KVCacheConfig"
    config: ConnectorConfig
    access: PoolAccess
    worker: Any | None
    """vLLM's worker, where it was found: it has the model."""

    def attach(self, kv_caches: Mapping[str, "torch.Tensor"]) -> Attachment:
        """Takes the KV cache that vLLM made. Raises `ConfigError`, `GeometryError`."""
        groups, devices_of = [], set()
        shape = shape_of(self.vllm_config, self.kv_cache_config, self.config.stored_block_tokens)
        shards = self._shards(shape)
        fields = namespace_fields(self.vllm_config, self.kv_cache_config, self.config, shape, shards)
        for group in shape.groups:
            if not group.layer_names:
                groups.append(None)
                continue
            tensors = cache_tensors(kv_caches, group.layer_names)
            devices_of.add(tensors[0][1].device)
            groups.append(self._group(group, tensors, tuple(kvbm_cxl.Namespace(**each) for each in fields[group.index])))
        if len(devices_of) != 1:
            raise GeometryError(f"the KV cache lies on several devices: {sorted(map(str, devices_of))}")
        if pool := self.access.pool:
            self._warn_of_large_cells({group.cell_bytes for group in groups if group}, pool.cell_bytes)
            # Now, before the engine has requests to answer. The scheduler's process copies no blocks.
            pool.map_ahead()
        device = devices_of.pop()
        if device.type == "cuda":
            open_gpu(self.access, device.index or 0)
        return Attachment(groups, device, shards.publishes, facts_of(next(iter(fields.values()))[0]))

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

    def _ranks(self) -> tuple[int, int]:
        """Tensor-parallel ranks, and which one this is."""
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        return self.vllm_config.parallel_config.tensor_parallel_size, get_tensor_model_parallel_rank()

    def _group(self, group: Group, tensors: Tensors, namespaces: "tuple[kvbm_cxl.Namespace, ...]") -> AttachedGroup:
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
        return AttachedGroup(namespaces, mover, cell_bytes, group.slices, audit)

    def _cells(self, group: Group, tensors: Tensors, block_count: int, shards: int) -> list[tuple[kvbm_cxl.BlockLayout, ...]]:
        """For each shard of the heads and each slice of the tokens, where such a cell of a block lies in these tensors."""
        owner = [tensor for _, tensor in tensors]
        device = check_device(owner[0].device)
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

    def _warn_of_large_cells(self, blocks: Collection[int], cells: Collection[int]) -> None:
        """Logs which blocks fill less than half of the cells that they get, and the size that cells should have. `blocks`: bytes of those
        of each group. `cells`: bytes of the pool's cells."""
        taken = {size: min((cell for cell in cells if cell >= size), default=size) for size in blocks}
        wasted = {size: cell for size, cell in taken.items() if 2 * size < cell}
        if wasted:
            logger.warning(
                "CxlConnector: blocks of %s bytes take cells of %s bytes of pool %s: %d %% of these cells stays unused. "
                "Format the pool with cells of %d bytes (`cxlctl format --cells %d:SHARE`)",
                sorted(wasted),
                sorted(set(wasted.values())),
                self.config.pool,
                100 - 100 * max(wasted) // wasted[max(wasted)],
                max(wasted),
                -(-max(wasted) // 64) * 64,
            )


def open_gpu(access: PoolAccess, number: int) -> None:
    """Has the GPU reach the pool from the start. Where the driver does not let it, blocks go through a CPU, if that is allowed."""
    try:
        reach = access.open_gpu(number)
    except kvbm_cxl.CxlError as error:
        if error_kind(error) == "lost":
            return
        raise ConfigError(f"CxlConnector cannot use GPU {number} with pool {access.spec}: {error}") from error
    logger.info(
        "CxlConnector: GPU %d reaches %d bytes of pool %s itself, DMA is %s", number, reach.registered_bytes, access.spec, reach.dma
    )
