# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: what a request's blocks are called in the pool, with the weights and the adapter in the workers' memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import kvbm_cxl

from .adapters import KnownAdapters
from .diagnosis import hash_seed
from .groups import Shape
from .keys import Hasher, Rehashed, group_keys, name_variant, of_group, tail_key
from .metadata import WorkerHandshake, WorkerReport
from .pool_access import PoolAccess
from .request_state import RequestState
from .sessions import Session
from .stats import Tally
from .weights import Era

if TYPE_CHECKING:
    from vllm.v1.request import Request

# Stale hashes of streaming sessions that are remembered, 16 MiB.
_MAX_STALE = 1 << 18


@dataclass
class BlockNames:
    """Namespaces, keys, and whether a request's blocks have any."""

    access: PoolAccess
    shape: Shape
    tally: Tally
    hasher: Hasher | None = None
    """Hashes requests in blocks of the pool, where vLLM's are others."""
    by_group: list[list["kvbm_cxl.Namespace"]] = field(default_factory=list)
    """For each KV cache group those of all cells of a block, of workers with blocks of their own."""
    workers: int = 0
    """Workers with cells of their own of the first group."""
    _stale: set[bytes] = field(default_factory=set)
    """Hashes under which vLLM's own prefix cache may hold blocks of other tokens."""
    _facts: dict[str, str] = field(default_factory=dict)
    """What shapes the names of this engine's blocks, besides what may change."""

    def __post_init__(self) -> None:
        self.era, self.adapters = Era(self.tally), KnownAdapters(self.tally)

    def handshake(self, workers: Mapping[Any, WorkerHandshake]) -> None:
        """Learns the namespaces of all workers. Ranks with the same heads have the same one; stages of a pipeline have none for a group
        whose layers are elsewhere."""
        in_order = [workers[rank] for rank in sorted(workers)]
        by_group = [dict.fromkeys(filter(None, group)) for group in zip(*(each.namespaces for each in in_order))]
        # A group without a namespace would count as found in every lookup.
        self.by_group = (
            [[kvbm_cxl.Namespace.from_bytes(cell) for cells in group for cell in cells] for group in by_group] if all(by_group) else []
        )
        self.workers = len(by_group[0]) if self.by_group else 0
        self.era.handshake(each.weights for each in in_order)
        self.adapters.handshake(len(in_order))
        self._facts = dict(in_order[0].facts) if in_order else {}

    @property
    def namespaces(self) -> list["kvbm_cxl.Namespace"]:
        """Those of the first group."""
        return self.by_group[0] if self.by_group else []

    @property
    def all_namespaces(self) -> list["kvbm_cxl.Namespace"]:
        """Those of every group."""
        return [namespace for group in self.by_group for namespace in group]

    def has_names(self, tracked: RequestState) -> bool | None:
        """Whether a request's blocks have names in the pool. None: it is not known yet, and the workers are asked in the next step."""
        if not self.era.is_known:
            return None
        if self.hasher is not None and tracked.session is not None:
            return False  # Which of its tokens are replaced is known by vLLM's own hashes alone.
        lora = tracked.request.lora_request
        if lora is None:
            return True
        content = self.adapters.content(lora)
        if content is None:
            return None
        if tracked.adapter and content != tracked.adapter and tracked.has_begun:
            tracked.stale = True
        tracked.adapter = content
        return bool(content)

    def may_publish(self, tracked: RequestState) -> bool:
        """Whether all blocks of a request were computed with the weights and the adapter that its keys name."""
        if not self.has_names(tracked) or tracked.stale or not self.era.publishes or self._has_too_many_stale:
            return False
        if self._stale and not self._stale.isdisjoint(tracked.hashes):
            return False
        lora = tracked.request.lora_request
        return lora is None or self.adapters.may_publish(lora, tracked.adapter)

    def look_at(self, session: Session) -> None:
        """Learns of a streaming session's hash that stands for other tokens by now."""
        if session.stale is not None and not self._has_too_many_stale:
            self._stale.add(session.stale)

    @property
    def _has_too_many_stale(self) -> bool:
        """None of the stale hashes may be forgotten before vLLM's prefix cache is reset. At the bound, nothing more is published."""
        return len(self._stale) >= _MAX_STALE

    def local_reset(self) -> None:
        """vLLM emptied its own prefix cache."""
        self.era.local_reset()
        self.adapters.local_reset()
        self._stale.clear()

    def _with_hashes(self, tracked: RequestState) -> "Request | Rehashed":
        """A request with the hashes of its blocks in the pool."""
        if self.hasher is None:
            return tracked.request
        if tracked.rehashed is None:
            tracked.rehashed = Rehashed(tracked.request, self.hasher)
        tracked.rehashed.update()
        return tracked.rehashed

    def hashed_tokens(self, tracked: RequestState) -> int:
        """Leading tokens of a request whose blocks have names."""
        hashes = tracked.hashes if self.hasher is None else self._with_hashes(tracked).block_hashes
        return len(hashes) * self.shape.hash_tokens

    def keys(self, tracked: RequestState, first: int, stop: int, position: int = 0) -> list[bytes]:
        """Keys of full blocks of the group at `position`, as far as their tokens are hashed."""
        hashes = self.shape.groups[position].block_tokens // self.shape.hash_tokens
        stop = min(stop, self.hashed_tokens(tracked) // self.shape.groups[position].block_tokens)
        return [self._name(key, tracked, position) for key in group_keys(self._with_hashes(tracked), first, stop, hashes)]

    def tail(self, tracked: RequestState, position: int = 0) -> bytes:
        """The key of the tail of a request's prompt."""
        return self._name(tail_key(self._with_hashes(tracked), self.shape.hash_tokens), tracked, position)

    def _name(self, key: bytes, tracked: RequestState, position: int) -> bytes:
        return of_group(name_variant(key, self.era.name, tracked.adapter), position)

    def parent(self, tracked: RequestState, block: int, position: int = 0) -> bytes | None:
        """The key of the block before `block`."""
        return self.keys(tracked, block - 1, block, position)[0] if block else None

    def facts(self, tracked: RequestState) -> dict[str, str]:
        """What shapes the names of a request's blocks, and which pool they are in."""
        pool = self.access.pool
        now = {"weights": self.era.name.hex(), "adapter": tracked.adapter.hex(), "seed": hash_seed()}
        return {**self._facts, **now, **({"pool": pool.uuid} if pool else {}), "namespace": str(self.namespaces[0])}

    def learn(self, report: WorkerReport, requests: Mapping[str, RequestState]) -> None:
        """Takes weights and adapters in the workers' memory from a report."""
        replaced = self.adapters.learn(report.adapters)
        others = self.era.answers(report.inquiry, report.weights)
        if report.has_differed:
            others |= self.era.isolate()
        for tracked in requests.values():
            lora = tracked.request.lora_request
            if tracked.has_begun and (others or (lora is not None and lora.lora_int_id in replaced)):
                tracked.stale = True
