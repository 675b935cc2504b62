# SPDX-License-Identifier: Apache-2.0
"""Finds out at intervals which blocks of one engine are in the pool, for announcements to routers.

Descriptions (`descriptions`) of the blocks that this engine published are published here, too. A block counts as there while its
description and its bytes of every rank are; a description that has outlived its block is evicted by the host that owns it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

import kvbm_cxl

from .descriptions import Description, DescriptionError, decode, description_bytes, description_namespace, encode
from .failures import error_kind
from .keys import block_key
from .log import logger
from .pool_access import PoolAccess
from .stats import Tally

# Descriptions that are read in one round. The first round of a full pool would otherwise delay all announcements.
_AT_ONCE = 1024
# Of these, those that were announced before: they are not urgent.
_REFRESHED = 256
# Kinds of errors after which nothing of the pool is available.
_LOST = frozenset({"lost", "closed", "device_lost", "not_a_pool", "replaced"})


@dataclass
class AnnouncedBlock:
    """A block that was announced to routers."""

    block_hash: bytes
    times: int
    """Routers count how often a block was announced, and need as many announcements of its removal."""


@dataclass
class RoundChanges:
    """What a round has found."""

    stored: list[Description] = field(default_factory=list)
    """Parents before their children."""
    removed: list[bytes] = field(default_factory=list)
    """Whole hashes, each as often as it was announced."""
    is_all: bool = True
    """False: there is more to be found right now."""


class Announcer:
    """Rounds over one engine's blocks. Called by one thread."""

    def __init__(
        self, access: PoolAccess, namespaces: list["kvbm_cxl.Namespace"], block_tokens: int, tally: Tally, at_once: int = _AT_ONCE
    ) -> None:
        self.access = access
        self.namespaces = namespaces
        self.descriptions = description_namespace(namespaces[0], block_tokens)
        self.block_tokens = block_tokens
        self.len_bytes = description_bytes(block_tokens)
        self.tally = tally
        self.at_once = at_once
        self._watched: kvbm_cxl.Cache | None = None
        self._watch: kvbm_cxl.Watch | None = None
        self._told: dict[bytes, AnnouncedBlock] = {}
        self._to_read: dict[bytes, None] = {}
        self._to_refresh = 0.0

    def round(self, published: Iterable[Description]) -> RoundChanges:
        """Describes published blocks, and finds changes. A lost pool has nothing; other errors end the round."""
        published = list(published)
        try:
            return self.access.call(lambda cache: self._round(cache, published))
        except kvbm_cxl.CxlError as error:
            self.access.failures.report("KV events of the pool", error)
            if error_kind(error) not in _LOST:
                return RoundChanges()
        return self.withdraw()

    def again(self) -> None:
        """Has the rounds to come announce every block once more."""
        self._to_read.update(dict.fromkeys(self._told))

    def refresh(self, part: float) -> None:
        """Has the next round announce so large a part of the blocks once more, those first that were announced before the others."""
        self._to_refresh += part * len(self._told)
        count = min(int(self._to_refresh), _REFRESHED, len(self._told))
        # A long pause is not made up for.
        self._to_refresh = (self._to_refresh - count) % 1.0
        for key in list(islice(self._told, count)):
            # At the end, so that the next ones follow.
            self._told[key] = self._told.pop(key)
            self._to_read[key] = None

    def withdraw(self) -> RoundChanges:
        """Takes back everything that was announced. The next round finds everything again."""
        self._watched = self._watch = None
        self._to_read.clear()
        return RoundChanges(removed=self._forget(list(self._told)))

    def _round(self, cache: "kvbm_cxl.Cache", published: list[Description]) -> RoundChanges:
        self._describe(cache, published)
        news = RoundChanges()
        if self._watch is None or self._watched is not cache:
            # A pool that was lost and is opened again.
            news.removed = self._forget(list(self._told))
            self._to_read.clear()
            self._watch, self._watched = cache.watch(self.descriptions, self.len_bytes, companions=self.namespaces), cache
        changes = self._watch.look()
        for key in changes.alone:
            cache.evict(self.descriptions, key)
        for key in changes.removed:
            self._to_read.pop(key, None)
        news.removed += self._forget(changes.removed)
        self._to_read.update(dict.fromkeys(changes.added))
        news.stored = self._read(cache)
        news.is_all = not self._to_read
        return news

    def _describe(self, cache: "kvbm_cxl.Cache", published: list[Description]) -> None:
        keys = [block_key(description.block_hash) for description in published]
        for description, key, known in zip(published, keys, cache.has(self.descriptions, keys)):
            data = None if known else encode(description, self.len_bytes)
            outcome = "exists" if known else "too_long"
            if data is not None:
                parent = description.parent_hash
                try:
                    outcome = cache.publish(self.descriptions, key, data, parent=block_key(parent) if parent else None)
                except kvbm_cxl.FullError as error:
                    outcome = error_kind(error)
            self.tally.count("descriptions", outcome)

    def _read(self, cache: "kvbm_cxl.Cache") -> list[Description]:
        found = []
        into = bytearray(self.len_bytes)
        for key in list(self._to_read)[: self.at_once]:
            del self._to_read[key]
            if not cache.pull(self.descriptions, key, into):
                # It was just evicted, which the next look finds, or it is unavailable.
                self.tally.count("descriptions", "missed")
                continue
            try:
                description = decode(into, key, self.block_tokens)
            except DescriptionError as error:
                logger.warning("description of block %s: %s", key.hex(), error)
                self.tally.count("descriptions", "damaged")
                continue
            told = self._told.setdefault(key, AnnouncedBlock(description.block_hash, 0))
            told.times += 1
            found.append(description)
        self.tally.count("announced_blocks", "stored", len(found))
        return sorted(found, key=lambda description: description.position)

    def _forget(self, keys: list[bytes]) -> list[bytes]:
        gone = [told for key in keys if (told := self._told.pop(key, None))]
        self.tally.count("announced_blocks", "removed", len(gone))
        return [told.block_hash for told in gone for _ in range(told.times)]
