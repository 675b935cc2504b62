# SPDX-License-Identifier: Apache-2.0
"""Blocks as adapters handle them: many at once, and never an exception of the pool.

Each block gets a word. Of a store: those of `kvbm_cxl.Outcome`, `too_large`, or the kind of the error that stopped it. Of a load: "" for
a verified hit, else the reason for the miss or the kind of the error. All words are counted.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import kvbm_cxl

from ..vllm_integration.pool_access import PoolAccess, error_kind

HELD = frozenset(("stored", "exists"))
"""Outcomes after which the pool has the block."""
KEPT = HELD | {"busy"}
"""Outcomes after which the pool has the block, or is about to: another host is storing it."""
SKIPPED = frozenset(("busy", "no_cell", "no_hint", "over_quota", "too_large"))
"""Outcomes of a store that are no failure: there is no room now, or another host is about to store the block."""
# A block that fails like this would fail the next time, too, and keeps the right one out.
_UNUSABLE = frozenset(("checksum", "length"))


@dataclass(frozen=True)
class Loaded:
    """What became of a load."""

    reason: str
    """Empty for a hit."""
    len_bytes: int = 0

    def __bool__(self) -> bool:
        return not self.reason


@dataclass
class Blocks:
    """The blocks of a pool. All methods may be called from any thread, and may take as long as the pool does."""

    access: PoolAccess
    _counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def store(
        self,
        namespace: "kvbm_cxl.Namespace",
        keys: Sequence[bytes],
        data: Sequence["kvbm_cxl.Memory"],
        sizes: Sequence[int],
        parents: Sequence[bytes | None] | None = None,
    ) -> list[str]:
        """Stores blocks, each from memory of `sizes[i]` bytes; one word for each."""
        pool = self.access.pool
        largest = pool.cell_bytes[-1] if pool else 0
        fits = [place for place, size in enumerate(sizes) if not largest or size <= largest]
        words = ["too_large"] * len(keys)

        def publish(cache: "kvbm_cxl.Cache") -> list[str]:
            some = None if parents is None else [parents[place] for place in fits]
            return cache.publish_all(namespace, [keys[place] for place in fits], [data[place] for place in fits], parents=some)

        for place, word in zip(fits, self._try(publish, len(fits)), strict=True):
            words[place] = word
        self._count("store", words)
        return words

    def store_rows(
        self, namespace: "kvbm_cxl.Namespace", keys: Sequence[bytes], layout: "kvbm_cxl.BlockLayout", rows: Sequence[int]
    ) -> list[str]:
        """Stores blocks of one length: row `rows[i]` of `layout` under `keys[i]`; one word for each."""
        pool = self.access.pool
        if pool and layout.block_bytes > pool.cell_bytes[-1]:
            words = ["too_large"] * len(keys)
        else:
            words = self._try(lambda cache: cache.publish_blocks(namespace, keys, layout, rows), len(keys))
        self._count("store", words)
        return words

    def load(self, namespace: "kvbm_cxl.Namespace", keys: Sequence[bytes], into: Sequence["kvbm_cxl.Memory"]) -> list[Loaded]:
        """Loads blocks, each to memory that may be longer; one answer for each. A block that is damaged, or is longer, is evicted."""

        def pull(cache: "kvbm_cxl.Cache") -> list[Loaded]:
            return [Loaded(found.reason or "", found.len_bytes) for found in cache.pull_all(namespace, keys, into)]

        found = [word if isinstance(word, Loaded) else Loaded(word) for word in self._try(pull, len(keys))]
        return self._finish_load(namespace, keys, found)

    def load_rows(
        self, namespace: "kvbm_cxl.Namespace", keys: Sequence[bytes], layout: "kvbm_cxl.BlockLayout", rows: Sequence[int]
    ) -> list[Loaded]:
        """Loads blocks of one length: `keys[i]` to row `rows[i]` of `layout`, no row twice. A row that is no hit may hold anything."""

        def pull(cache: "kvbm_cxl.Cache") -> list[str]:
            return [reason or "" for reason in cache.pull_blocks(namespace, keys, layout, rows)]

        found = [Loaded(word, 0 if word else layout.block_bytes) for word in self._try(pull, len(keys))]
        return self._finish_load(namespace, keys, found)

    def _finish_load(self, namespace: "kvbm_cxl.Namespace", keys: Sequence[bytes], found: list[Loaded]) -> list[Loaded]:
        if unusable := [key for key, word in zip(keys, found, strict=True) if word.reason in _UNUSABLE]:
            self.evict(namespace, unusable)
        self._count("load", [word.reason or "hit" for word in found])
        return found

    def pin(self, namespace: "kvbm_cxl.Namespace", keys: Sequence[bytes]) -> list["kvbm_cxl.Pins | None"]:
        """Pins of the blocks that are there, None for the others."""
        tried = self._try(lambda cache: cache.pin_all(namespace, keys), len(keys))
        pins = [pin if isinstance(pin, kvbm_cxl.Pins) else None for pin in tried]
        self._count("lookup", ["hit" if pin else "miss" for pin in pins])
        return pins

    def has(self, namespace: "kvbm_cxl.Namespace", keys: Sequence[bytes]) -> list[bool]:
        """Which blocks are there."""
        found = [word is True for word in self._try(lambda cache: cache.has(namespace, keys), len(keys))]
        self._count("lookup", ["hit" if hit else "miss" for hit in found])
        return found

    def is_there(self, namespace: "kvbm_cxl.Namespace", key: bytes) -> bool:
        """Whether one block is there, not counted: for callers that cannot wait and ask for very many."""
        try:
            return self.access.call(lambda cache: cache.lookup(namespace, key)) is not None
        except kvbm_cxl.CxlError:
            return False

    def evict(self, namespace: "kvbm_cxl.Namespace", keys: Sequence[bytes]) -> list[bool]:
        """Evicts blocks that are not pinned; True for those that are gone."""
        return [word is True for word in self._try(lambda cache: cache.evict_all(namespace, keys), len(keys))]

    def clear(self, namespace: "kvbm_cxl.Namespace") -> bool:
        """Evicts the blocks of a namespace that are not pinned. False where the pool cannot be reached."""
        return self._try(lambda cache: [cache.clear(namespace)] and [True], 1) == [True]

    def counts(self) -> dict[str, dict[str, int]]:
        """How often which word was said, by call."""
        with self._lock:
            counts = dict(self._counts)
        by_call: dict[str, dict[str, int]] = {"store": {}, "load": {}, "lookup": {}}
        for (call, word), count in sorted(counts.items()):
            by_call[call][word] = count
        return by_call

    def health(self) -> dict[str, Any]:
        """Whether there is a pool and which, and what `counts` says: what consumers show of their adapters."""
        pool = self.access.pool
        return {"is_healthy": pool is not None, "pool_uuid": pool.uuid if pool else None, "counts": self.counts()}

    def pin_count(self) -> int:
        """Blocks that this process has pinned."""
        (count,) = self._try(lambda cache: [cache.pinned()], 1)
        return count if isinstance(count, int) else 0

    def _try(self, call, count: int) -> list:
        """The list that `call` returns, or as many times the kind of its failure."""
        if not count:
            return []
        try:
            return self.access.call(call)
        except kvbm_cxl.CxlError as error:
            # A handler of logs may keep the error, and must not keep the consumer's memory with it.
            error.__traceback__ = None
            return [error_kind(error)] * count

    def _count(self, call: str, words: list[str]) -> None:
        with self._lock:
            self._counts.update((call, word) for word in words)


def leading(found: Sequence[Any]) -> int:
    """How many of the first ones are there, in the order of a prefix."""
    return next((place for place, one in enumerate(found) if not one), len(found))
