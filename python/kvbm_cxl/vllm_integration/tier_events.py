# SPDX-License-Identifier: Apache-2.0
"""KV events of a tier: chunks that this engine stored in the pool, and those of them that the pool evicted.

Of chunks that other engines stored there are none: this engine would not hear of their evictions, so routers would believe in them for
ever. CxlConnector's events tell of all blocks of its pool.
"""

import threading
from collections.abc import Callable, Sequence

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey

import kvbm_cxl

from ..consumers.ledger import Entry, Ledger
from .pool_access import PoolAccess


class TierEvents:
    """Events until vLLM takes them. Any thread may call any method."""

    def __init__(self, access: PoolAccess, tier_type: str, medium: Medium, locality: Locality | None) -> None:
        self._tier_type, self._medium, self._locality = tier_type, medium, locality
        self._events: list[OffloadingEvent] = []
        self._lock = threading.Lock()
        self._ledger = Ledger(access, lambda entries: self._add(entries, removed=True))

    def of_store(
        self,
        namespace: "kvbm_cxl.Namespace",
        names: Sequence[bytes],
        keys: Sequence[OffloadKey],
        len_bytes: int,
        store: Callable[[], list[str]],
    ) -> list[str]:
        """Runs a store of chunks of `len_bytes` each, and tells of those that the pool took."""
        entries = {(namespace, name): Entry(key, len_bytes) for name, key in zip(names, keys, strict=True)}
        return self._ledger.store(entries, store, lambda entries: self._add(entries, removed=False))

    def _add(self, entries: Sequence[Entry], removed: bool) -> None:
        keys = [entry.what for entry in entries]
        # vLLM keeps what it knows of a chunk as long as a removal is expected.
        event = OffloadingEvent(keys, self._medium, removed, self._locality, self._tier_type, removal_expected=not removed)
        with self._lock:
            self._events.append(event)

    def take(self) -> list[OffloadingEvent]:
        """Those since the last call."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Ends its thread."""
        self._ledger.close()
