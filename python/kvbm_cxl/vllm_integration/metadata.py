# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side tells the workers each step, and what they tell it."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass
class Blocks:
    """Consecutive blocks of one request: their keys in the pool, and where they lie in the KV cache."""

    request_id: str
    keys: list[bytes]
    block_ids: list[int]
    parent: bytes | None = None
    """Key of the block before the first."""
    tail_tokens: int = 0
    """Tokens in the last block where it is a prompt's tail; 0 where all are full."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step's orders."""

    step: int
    """Number of the step, counted from 1 without gaps."""
    loads: list[Blocks] = field(default_factory=list)
    saves: list[Blocks] = field(default_factory=list)
    complete: set[str] = field(default_factory=set)
    """Requests all of whose saves must be in the pool when the step ends: the answer to prefill leaves after it."""
    preempted: set[str] = field(default_factory=set)
    """Requests whose blocks this step may overwrite."""
    release: set[str] = field(default_factory=set)
    """Finished requests whose blocks vLLM keeps until every worker says that nothing reads them."""
    writes: list[int] = field(default_factory=list)
    """With the KV cache in the pool: blocks that this step writes to. They must not be lent to anybody while it does."""
    idle: bool = False
    """The step computes nothing."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What became of orders."""

    saved_step: int
    """Every save ordered up to this step is over."""
    failed_loads: set[str] = field(default_factory=set)
    """Requests of which a block could not be loaded."""
    spoilt: set[bytes] = field(default_factory=set)
    """Keys of blocks that are found and cannot be had: they hold something else than was published, or were taken back by their lender."""
    stored: dict[bytes, int] = field(default_factory=dict)
    """Keys that were published and how many workers did; only with KV events."""

    def aggregate(self, other: "WorkerReport") -> "WorkerReport":
        stored = dict(self.stored)
        for key, count in other.stored.items():
            stored[key] = stored.get(key, 0) + count
        failed, spoilt = self.failed_loads | other.failed_loads, self.spoilt | other.spoilt
        return WorkerReport(min(self.saved_step, other.saved_step), failed, spoilt, stored)


@dataclass
class WorkerHello(KVConnectorHandshakeMetadata):
    """A worker's part of every block, told to the scheduler once at start."""

    namespace: bytes
    """Namespace of this worker's blocks (16 bytes)."""
    block_bytes: int
    """Bytes of one of them."""
