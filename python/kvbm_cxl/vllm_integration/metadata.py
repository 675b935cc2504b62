# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side tells the workers each step, and what they tell it."""

from dataclasses import dataclass, field, replace

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.lora.request import LoRARequest


@dataclass
class Blocks:
    """Consecutive blocks of one request: their keys in the pool, and where they lie in the KV cache."""

    request_id: str
    keys: list[bytes]
    block_ids: list[int]
    """Numbers of vLLM's blocks; where one of these is several blocks in the pool, `Group.places`."""
    parent: bytes | None = None
    """Key of the block before the first."""
    tail_tokens: int = 0
    """Tokens in the last block where it is a prompt's tail; 0 where all are full."""
    adapter: tuple[int, bytes] | None = None
    """Number and digest of the adapter that shapes them; None without one."""
    group: int = 0
    """Their KV cache group, by its place in `Shape.groups`."""
    is_state: bool = False
    """They hold a state that the next step may overwrite."""
    found: int = 0
    """Leading blocks that the request did not compute: they were in the pool, or in vLLM's own prefix cache."""
    only_audited: bool = False
    """They are compared with those of the pool, and not published."""

    def pieces(self, count: int) -> "list[Blocks]":
        """The same blocks, at most `count` each, for several threads."""
        size, total = max(count, 1), len(self.keys)
        if total <= size:
            return [self]
        return [
            replace(
                self,
                keys=self.keys[start : start + size],
                block_ids=self.block_ids[start : start + size],
                parent=self.keys[start - 1] if start else self.parent,
            )
            for start in range(0, total, size)
        ]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step's orders."""

    step: int
    """Number of the step, counted from 1 without gaps."""
    loads: list[Blocks] = field(default_factory=list)
    saves: list[Blocks] = field(default_factory=list)
    complete: set[str] = field(default_factory=set)
    """Requests all of whose saves must be in the pool, or with `publish_behind` on their way there, when the step ends: the answer to
    prefill leaves after it."""
    grows: set[str] = field(default_factory=set)
    """Requests with a tail in the pool, or on its way there, to whose block this step may add tokens."""
    taken: list[int] = field(default_factory=list)
    """Blocks that requests have been given for this step. What they held before may still be on its way into the pool: that of a request
    which continues without it, since it is outside the window of its layers."""
    preempted: set[str] = field(default_factory=set)
    """Requests whose blocks this step may overwrite."""
    release: set[str] = field(default_factory=set)
    """Finished requests whose blocks vLLM keeps until every worker says that nothing reads them."""
    idle: bool = False
    """The step computes nothing."""
    inquiry: int = 0
    """Number of the inquiry after the weights in memory that workers answer before anything else, 0 for none."""
    audited: set[str] = field(default_factory=set)
    """Requests that compute what the pool has, for the audit."""
    is_isolated: bool = False
    """No block has a name any more that other engines know."""
    adapters: list[LoRARequest] = field(default_factory=list)
    """Adapters that workers load, if they have not, and tell of."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What became of orders."""

    saved_step: int
    """Every save ordered up to this step is over."""
    failed_loads: set[str] = field(default_factory=set)
    """Requests of which a block could not be loaded."""
    corrupt: set[bytes] = field(default_factory=set)
    """Keys of found blocks that are unusable: their bytes differ from the published ones."""
    stored: dict[bytes, int] = field(default_factory=dict)
    """Keys that were published and how many workers did; only with KV events."""
    inquiry: int = 0
    """The inquiry that `weights` answers, 0 where there was none."""
    weights: dict[int, bytes] = field(default_factory=dict)
    """Fingerprints of the weights in memory, by rank."""
    has_differed: bool = False
    """A block of the pool is not what this engine computes."""
    adapters: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """Digests of adapters that were loaded or asked for: by rank, then by the adapter's number."""

    def aggregate(self, other: "WorkerReport") -> "WorkerReport":
        stored = dict(self.stored)
        for key, count in other.stored.items():
            stored[key] = stored.get(key, 0) + count
        failed, corrupt = self.failed_loads | other.failed_loads, self.corrupt | other.corrupt
        newest = max(self.inquiry, other.inquiry)
        weights = {rank: seen for report in (self, other) if report.inquiry == newest for rank, seen in report.weights.items()}
        saved_step = min(self.saved_step, other.saved_step)
        differed = self.has_differed or other.has_differed
        return WorkerReport(saved_step, failed, corrupt, stored, newest, weights, differed, self.adapters | other.adapters)


@dataclass
class WorkerHandshake(KVConnectorHandshakeMetadata):
    """A worker's part of every block, told to the scheduler once at start."""

    namespaces: tuple[tuple[bytes, ...], ...]
    """For each KV cache group the namespaces of this worker's cells of a block (16 bytes each); none where its stage of the pipeline has no
    layer of it."""
    cell_bytes: int
    """Bytes of a cell of the first group that it has layers of."""
    weights: bytes = b""
    """Fingerprint of its weights in memory (16 bytes); empty where there is none."""
    audits: bool = False
    """Whether it can compare blocks of the pool with what it computes."""
    facts: dict[str, str] = field(default_factory=dict)
    """What makes the namespace, for comparison with that of other engines."""
