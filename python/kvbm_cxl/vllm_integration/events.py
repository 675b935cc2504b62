# SPDX-License-Identifier: Apache-2.0
"""KV events of pool blocks, in vLLM's classes, for routers that count prefixes (medium EXTERNAL).

A block is announced when every worker has published its part, and taken back when the pool says that it is gone, whoever published or
evicted it. Routers know blocks by vLLM's whole hash, the pool by its first half, so what was announced is remembered here, with a bound.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import kvbm_cxl

from .keys import block_key
from .log import logger
from .pool_access import PoolAccess

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request

MEDIUM = "EXTERNAL"
_MAX_KNOWN = 1 << 18
_MAX_ORDERED = 1 << 16
_GONE = ("removed", "evicted")


@dataclass(frozen=True)
class Announcement:
    """What a router is told of one block."""

    block_hash: bytes
    parent_hash: bytes | None
    token_ids: tuple[int, ...]
    block_tokens: int
    lora_id: int | None
    lora_name: str | None

    def stored(self) -> "KVCacheEvent":
        from vllm.distributed.kv_events import BlockStored
        from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

        parent = self.parent_hash
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(BlockHash(self.block_hash))],
            parent_block_hash=None if parent is None else maybe_convert_block_hash(BlockHash(parent)),
            token_ids=list(self.token_ids),
            block_size=self.block_tokens,
            lora_id=self.lora_id,
            lora_name=self.lora_name,
            medium=MEDIUM,
        )


def removed(block_hashes: list[bytes]) -> "KVCacheEvent":
    from vllm.distributed.kv_events import BlockRemoved
    from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

    return BlockRemoved(block_hashes=[maybe_convert_block_hash(BlockHash(each)) for each in block_hashes], medium=MEDIUM)


@dataclass
class PoolEvents:
    """Events of one engine. Called by the scheduler's thread."""

    access: PoolAccess
    _ordered: "OrderedDict[bytes, Announcement]" = field(default_factory=OrderedDict)
    _known: "OrderedDict[bytes, bytes]" = field(default_factory=OrderedDict)
    _counts: dict[bytes, int] = field(default_factory=dict)
    _ready: list["KVCacheEvent"] = field(default_factory=list)
    _listening: "kvbm_cxl.Events | None" = None

    def ordered(self, request: "Request", first: int, stop: int, block_tokens: int) -> None:
        """Blocks `first` to `stop` of a request are about to be published."""
        lora = request.lora_request
        for index in range(first, stop):
            block_hash = bytes(request.block_hashes[index])
            self._ordered[block_key(block_hash)] = Announcement(
                block_hash,
                bytes(request.block_hashes[index - 1]) if index else None,
                tuple(request.all_token_ids[index * block_tokens : (index + 1) * block_tokens]),
                block_tokens,
                lora.lora_int_id if lora else None,
                lora.lora_name if lora else None,
            )
        _trim(self._ordered, _MAX_ORDERED)

    def stored(self, stored: Mapping[bytes, int], workers: int) -> None:
        """Workers have published these keys, so many each."""
        for key, count in stored.items():
            count += self._counts.pop(key, 0)
            if count < workers:
                self._counts[key] = count
            elif announcement := self._ordered.pop(key, None):
                self._known[key] = announcement.block_hash
                self._ready.append(announcement.stored())
        _trim(self._known, _MAX_KNOWN)
        _trim(self._counts, _MAX_ORDERED)

    def take(self) -> list["KVCacheEvent"]:
        """Events since the last call."""
        gone = [self._known.pop(key) for key in self._gone() if key in self._known]
        ready, self._ready = self._ready, []
        return [*ready, removed(gone)] if gone else ready

    def _gone(self) -> list[bytes]:
        try:
            if self._listening is None:
                self._listening = self.access.call(lambda cache: cache.subscribe())
            events = self._listening.poll(0)
        except kvbm_cxl.CxlError as error:
            logger.debug("events of the pool: %s", error)
            self._listening = None
            return []
        if any(event.kind == "cleared" for event in events):
            return list(self._known)
        return [bytes(event.key) for event in events if event.kind in _GONE]


def _trim(entries: dict, limit: int) -> None:
    """Forgets the oldest. A block that is forgotten is announced late or not at all; a router then overrates or underrates this pool."""
    while len(entries) > limit:
        del entries[next(iter(entries))]
