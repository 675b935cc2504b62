# SPDX-License-Identifier: Apache-2.0
"""The second level below the pool, for the connectors of a process: blocks about to be evicted are kept, and come back on a hit.

Workers keep copies of the blocks that they published, before their evictor takes them. A lookup that ends before the prompt does has what
continues it brought back, once for each request, and the request waits in vLLM's queue until that has ended, at most `l2_wait_ms`; what
comes later is there for the next one. Whatever is wrong with the store, the request is computed.
"""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from kvbm_cxl.l2 import Demoter, Level2, open_store

from ..options import ConfigError
from .block_names import BlockNames
from .config import ConnectorConfig
from .groups import Kind, Shape
from .pool_access import PoolAccess
from .request_state import PinnedLookup, RequestState
from .stats import Tally

# Counts of a level by what the connector calls them: its names, or beginnings of them.
_OUTCOMES = {"demoted": "demoted", "promoted": "promoted", "trimmed": "trimmed", "errors": "failed"}
_BEGINNINGS = {"missed_": "missed", "dropped_": "dropped"}
_BYTES = "_bytes"


@dataclass
class SecondLevel:
    """One level of a process. Every `acquire` needs a `release`. All methods may be called from any thread."""

    name: str
    level: Level2
    access: PoolAccess
    wait_s: float
    _users: int = 1
    _demoter: Demoter | None = None
    _counted: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin_demoting(self) -> None:
        """Keeps copies of this process's blocks from now on."""
        with self._lock:
            if self._demoter is None:
                self._demoter = Demoter(self.access.call, self.level)

    def is_coming(self, tracked: RequestState) -> bool:
        """Whether blocks of a request are on their way back, and it waits for them."""
        if tracked.promotion is None:
            return False
        if tracked.promotion.has_ended or time.monotonic() >= tracked.promoted_until_s:
            tracked.promotion = None
            return False
        return True

    def brings(self, tracked: RequestState, lookup: PinnedLookup, names: BlockNames) -> bool:
        """Brings back the blocks after the found prefix of a request, at its first call; returns whether any come."""
        if tracked.was_promoted or lookup.tail_tokens:
            return False
        tracked.was_promoted = True
        block_tokens = names.shape.groups[0].block_tokens
        keys = names.keys(tracked, lookup.tokens // block_tokens, names.hashed_tokens(tracked) // block_tokens)
        tracked.promotion = self.level.promote(self.access.call, [bytes(namespace) for namespace in names.namespaces], keys)
        tracked.promoted_until_s = time.monotonic() + self.wait_s
        return tracked.promotion is not None

    def count_in(self, tally: Tally) -> None:
        """Moves the counts since the last call into `tally`, whichever connector of the process asks."""
        counted: Counter[str] = Counter()
        for name, count in self.level.counts().items():
            outcome = _OUTCOMES.get(name) or next((to for begin, to in _BEGINNINGS.items() if name.startswith(begin)), None)
            if outcome and not name.endswith(_BYTES):
                counted[outcome] += count
        with self._lock:
            news, self._counted = counted - self._counted, counted
        for outcome, count in news.items():
            tally.count("second_level", outcome, count)

    def release(self) -> None:
        """One user less; the last one ends the level's threads."""
        with _registry_lock:
            self._users -= 1
            if self._users:
                return
            _registry.pop(self.name, None)
        if self._demoter is not None:
            self._demoter.close()
        self.level.close()


_registry: dict[str, SecondLevel] = {}
_registry_lock = threading.Lock()


def check(config: ConnectorConfig, shape: Shape) -> None:
    """Raises `ConfigError` where a level is wanted for a model that it cannot serve."""
    if config.l2 and [group.kind for group in shape.groups] != [Kind.FULL]:
        raise ConfigError("CxlConnector: l2 serves models with one KV cache group, of full attention; leave l2 out")


def acquire(config: ConnectorConfig, access: PoolAccess) -> SecondLevel | None:
    """The level that the options name, one for all connectors of this process; None where they name none.

    Raises `ConfigError` where there is no such store: a folder that cannot be made, a URL that fsspec does not know.
    """
    if not config.l2:
        return None
    name = f"{config.pool} {config.l2}"
    with _registry_lock:
        if known := _registry.get(name):
            known._users += 1
            return known
        try:
            level = Level2(open_store(config.l2), max_bytes=config.l2_max_bytes)
        except Exception as error:  # Whatever a store of fsspec's raises.
            raise ConfigError(f"CxlConnector cannot use l2 {config.l2!r}: {type(error).__name__}: {error}") from error
        made = _registry[name] = SecondLevel(name, level, access, config.l2_wait_ms / 1000)
        return made
