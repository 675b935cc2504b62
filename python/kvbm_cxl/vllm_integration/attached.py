# SPDX-License-Identifier: Apache-2.0
"""What a worker knows once vLLM has made its KV cache: where blocks lie, under which namespaces, and what copies them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .audit import GroupAudit
from .groups import blocks_of
from .movers import Mover

if TYPE_CHECKING:
    import kvbm_cxl
    import torch


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

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in the pool, over its cells."""
        return self.cell_bytes * len(self.namespaces)

    def of_vllm(self, block_ids: Iterable[int]) -> list[int]:
        """Numbers of the blocks of vLLM that these lie in."""
        return blocks_of(block_ids, self.slices)


@dataclass
class Attached:
    """What is known once vLLM has made its KV cache."""

    groups: list[AttachedGroup | None]
    """In the order of `Shape.groups`; None for a group of which this stage of the pipeline has no layer."""
    device: "torch.device"
    publishes: bool
    """Of ranks with the same heads, one publishes."""
    facts: dict[str, str]

    @property
    def own(self) -> list[AttachedGroup]:
        """Those of which this stage has layers."""
        return [group for group in self.groups if group]

    @property
    def namespace(self) -> "kvbm_cxl.Namespace":
        """The first of its first group."""
        return self.own[0].namespaces[0]

    @property
    def mover(self) -> Mover:
        """That of its first group: of all blocks, where the KV cache lies in the pool."""
        return self.own[0].mover
