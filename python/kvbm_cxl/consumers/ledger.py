# SPDX-License-Identifier: Apache-2.0
"""Blocks that this process stored and the pool still has; the consumer hears of their eviction.

The pool reports evictions of this process's blocks as they happen. After a loss of events, or of the pool, the ledger looks again.
Blocks of other processes, and those of an earlier life of this one, are not in it.
"""

import threading
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field

import kvbm_cxl

from ..vllm_integration.pool_access import PoolAccess, PoolLost

_LOOK_MS = 200
_RETRY_S = 0.5

Place = tuple["kvbm_cxl.Namespace", bytes]


@dataclass(frozen=True)
class Entry:
    """A block as the consumer knows it."""

    what: Hashable
    len_bytes: int


@dataclass
class Ledger:
    """Entries by namespace and key. `gone` is called, on the ledger's thread, with those that the pool no longer has."""

    access: PoolAccess
    gone: Callable[[list[Entry]], None]
    _entries: dict[Place, Entry] = field(default_factory=dict)
    _stored: set[Place] = field(default_factory=set)
    """Those reported as stored. The others are about to be."""
    _lock: threading.RLock = field(default_factory=threading.RLock)
    """Held during the report, so that the consumer hears of no eviction before the store."""
    _closed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._listen, name="kvbm-cxl-ledger", daemon=True)
        self._thread.start()

    def store(self, entries: dict[Place, Entry], store: Callable[[], list[str]], stored: Callable[[list[Entry]], None]) -> list[str]:
        """Runs the store of blocks, which returns a word for each. `stored` gets those that the pool took and has not evicted since. They
        are written down before the store, so that an eviction right after it finds them."""
        with self._lock:
            fresh = {place: entry for place, entry in entries.items() if place not in self._entries}
            self._entries.update(fresh)
        words = ["failed"] * len(entries)
        try:
            words = store()
        finally:
            took = [place for place, word in zip(entries, words, strict=True) if word == "stored"]
            with self._lock:
                for place in fresh.keys() - set(took):
                    self._entries.pop(place, None)
                # A block that was evicted and stored again before the pool reported it was reported as stored already.
                there = [place for place in took if place in self._entries and place not in self._stored]
                self._stored.update(there)
                if there:
                    stored([self._entries[place] for place in there])
        return words

    def take(self, places: Iterable[Place]) -> list[Entry]:
        """Removes blocks; returns those that were reported as stored."""
        taken = []
        with self._lock:
            for place in places:
                entry = self._entries.pop(place, None)
                if entry and place in self._stored:
                    self._stored.remove(place)
                    taken.append(entry)
        return taken

    def entries(self) -> list[Entry]:
        """Blocks reported as stored, oldest first."""
        with self._lock:
            return [entry for place, entry in self._entries.items() if place in self._stored]

    def close(self) -> None:
        """Ends the thread. Blocks stay in the pool."""
        self._closed.set()
        self._thread.join()

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                events = self.access.call(lambda cache: cache.subscribe())
                # Whatever was evicted before there was a listener.
                self._look_again()
                while not self._closed.is_set() and self.access.pool is not None:
                    self._follow(events.poll(_LOOK_MS))
            except PoolLost:
                pass  # Told by the access.
            except Exception as error:  # Also of the consumer, which must not end the thread.
                self.access.failures.report("following what the pool evicts", error)
            if self.access.pool is None:
                with self._lock:
                    self._strike(list(self._entries))
            self._closed.wait(_RETRY_S)

    def _follow(self, events: list["kvbm_cxl.Event"]) -> None:
        gone: set[Place] = set()
        for event in events:
            if event.kind == "lost":
                self._look_again()
            elif event.kind in ("removed", "evicted"):
                gone.add((event.namespace, event.key))
            elif event.kind == "cleared":
                with self._lock:
                    gone.update(place for place in self._entries if place[0] == event.namespace)
        self._strike_missing(gone)

    def _look_again(self) -> None:
        with self._lock:
            places = list(self._stored)
        self._strike_missing(places)

    def _strike_missing(self, places: Collection[Place]) -> None:
        """Strikes out those that the pool does not have: one that was evicted may have been stored again since."""
        for namespace in {namespace for namespace, _ in places}:
            keys = [key for other, key in places if other == namespace]
            with self._lock:
                found = self.access.call(lambda cache, namespace=namespace, keys=keys: cache.has(namespace, keys))
                self._strike([(namespace, key) for key, is_there in zip(keys, found, strict=True) if not is_there])

    def _strike(self, places: Iterable[Place]) -> None:
        with self._lock:
            if entries := self.take(places):
                self.gone(entries)
