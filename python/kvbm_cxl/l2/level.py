# SPDX-License-Identifier: Apache-2.0
"""The second level as one process uses it: threads that write, read and delete objects, and what they may have at one time.

No call of this module waits for the store. What a queue has no room for, or the store is not fit for, is dropped and counted: a block that
is not kept is computed again.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import kvbm_cxl

from .health import Health
from .index import Index
from .objects import HEADER_BYTES, BlockName, DamagedObject, header, payload_of
from .stores import Store

logger = logging.getLogger("kvbm_cxl")
_T = TypeVar("_T")
CallCache = Callable[[Callable[["kvbm_cxl.Cache"], _T]], _T]
"""Runs an operation on the cache of this process."""

# Blocks of a chain that are read before they are published together.
_BATCH = 8
# Chains that wait to be promoted.
_PROMOTIONS = 256
# A listing takes at most this part of a thread's time.
_LISTING_PART = 0.1
# A promoted block without room in the pool is tried again, this often and this long; afterwards promotions pause for a time.
_ROOM_AGAIN_S, _ROOM_S, _NO_ROOM_S = 0.02, 0.5, 10.0
# An error that repeats is logged again after this time.
_LOG_AGAIN_S = 60.0
# Threads end within this time when their store answers; else they are left to end with the process.
_CLOSE_S = 5.0


@dataclass
class Promotion:
    """Blocks on their way back into the pool."""

    namespaces: tuple[bytes, ...]
    keys: tuple[bytes, ...]
    blocks: int = 0
    """Blocks of the chain that came, in every namespace."""
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more of it comes."""
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Waits for its end; whether that has come."""
        return self._ended.wait(timeout_s)


@dataclass
class _Demotion:
    name: BlockName
    parent: bytes | None
    payload: bytearray


class Level2:
    """See the module.

    max_bytes: what the store may hold; those unused for longest go. queue_bytes: copies that wait to be written. threads: calls of the
    store at one time. refresh_s: how often the store is looked through for what others wrote. slow_s: a call that takes longer counts as
    failed, and while one does the store is let alone. Raises InvalidError for numbers that cannot be.
    """

    def __init__(
        self,
        store: Store,
        *,
        max_bytes: int,
        queue_bytes: int = 256 << 20,
        threads: int = 4,
        refresh_s: float = 10.0,
        slow_s: float = 2.0,
    ) -> None:
        for name, value in (("max_bytes", max_bytes), ("queue_bytes", queue_bytes), ("threads", threads), ("slow_s", slow_s)):
            if value <= 0:
                raise kvbm_cxl.InvalidError(f"{name} of a second level is {value}; it must be more than 0")
        self._store, self._max_bytes, self._queue_bytes, self._refresh_s = store, max_bytes, queue_bytes, refresh_s
        self._index = Index()
        self._health = Health(slow_s)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._demotions: deque[_Demotion] = deque()
        self._promotions: deque[tuple[Promotion, CallCache]] = deque()
        self._queued_bytes = 0
        self._coming: set[BlockName] = set()
        """Blocks that wait to be written, or are being written."""
        self._is_closed = False
        self._no_room_until_s = 0.0
        self._end = threading.Event()
        self._counts: Counter[str] = Counter()
        self._logged_s: dict[str, float] = {}
        self._threads = [
            threading.Thread(target=target, name=f"kvbm-cxl-l2-{number}", daemon=True)
            for number, target in enumerate([self._refresh_all, *[self._serve] * threads])
        ]
        for thread in self._threads:
            thread.start()

    # Demotion

    def wants(self, name: BlockName, len_bytes: int) -> bool:
        """Whether a block is worth a copy: it is not there nor on its way, there is room, and the store is fit. Drops are counted."""
        if name in self._index or name in self._coming:
            return False
        if not self._health.is_good():
            self._count("dropped_unfit")
        elif len_bytes + HEADER_BYTES > self._max_bytes:
            self._count("dropped_large")
        elif self._queued_bytes + len_bytes > self._queue_bytes:
            self._count("dropped_full")
        else:
            return True
        return False

    def demote(self, name: BlockName, parent: bytes | None, payload: bytearray) -> bool:
        """Has a copy of a block written, unless it is not wanted any more. The caller does not use `payload` afterwards."""
        if not self.wants(name, len(payload)):
            return False
        with self._work:
            if self._is_closed:
                return False
            self._coming.add(name)
            self._queued_bytes += len(payload)
            self._demotions.append(_Demotion(name, parent, payload))
            self._work.notify()
        return True

    def _write(self, demotion: _Demotion) -> None:
        name, payload = demotion.name, demotion.payload
        try:
            if not self._health.is_good():
                self._count("dropped_unfit")
                return
            len_bytes = HEADER_BYTES + len(payload)
            while oldest := self._index.take_oldest_beyond(self._max_bytes - len_bytes):
                self._delete(oldest)
                self._count("trimmed")
            with self._health.call():
                self._store.write(name.path, [header(name, demotion.parent, payload), payload])
            self._index.add(name, len_bytes)
            self._count("demoted")
            self._count("demoted_bytes", len(payload))
        except Exception as error:
            self._note_failure("writing", error)
        finally:
            with self._lock:
                self._coming.discard(name)
                self._queued_bytes -= len(payload)

    # Promotion

    def leading(self, namespaces: Sequence[bytes], keys: Sequence[bytes]) -> int:
        """How many leading blocks of a chain the store has, as far as this process knows; none while it is not fit."""
        return self._index.leading(namespaces, keys) if keys and self._health.is_good() else 0

    def promote(self, call: CallCache, namespaces: Sequence[bytes], keys: Sequence[bytes]) -> Promotion | None:
        """Has the leading blocks of a chain brought back that the store has in every namespace; None where it has none of them, or too many
        chains wait. `call` is used on a thread of this level."""
        count = self.leading(namespaces, keys)
        if not count:
            return None
        promotion = Promotion(tuple(namespaces), tuple(keys[:count]))
        with self._work:
            if self._is_closed or len(self._promotions) >= _PROMOTIONS:
                self._counts["dropped_promotions"] += 1
                return None
            self._promotions.append((promotion, call))
            self._work.notify()
        return promotion

    def _bring(self, promotion: Promotion, call: CallCache) -> None:
        try:
            for start in range(0, len(promotion.keys), _BATCH):
                wanted = promotion.keys[start : start + _BATCH]
                came = min(self._bring_batch(call, namespace, wanted) for namespace in promotion.namespaces)
                promotion.blocks += came
                if came < len(wanted) or self._is_closed:
                    return
        except Exception as error:
            self._note_failure("promoting", error)
        finally:
            promotion._ended.set()

    def _bring_batch(self, call: CallCache, namespace: bytes, keys: Sequence[bytes]) -> int:
        """Reads blocks and publishes them; how many leading ones of them are in the pool."""
        ns = kvbm_cxl.Namespace.from_bytes(namespace)
        there = call(lambda cache: cache.has(ns, keys))
        read: list[tuple[bytes, bytes | None, memoryview]] = []
        for key, is_there in zip(keys, there):
            if is_there:
                continue
            found = self._read(BlockName(namespace, key))
            if found is None:
                break
            read.append((key, *found))
        self._publish(call, ns, read)
        return call(lambda cache: cache.lookup_chain(ns, keys))

    def _publish(self, call: CallCache, ns: "kvbm_cxl.Namespace", blocks: Sequence[tuple[bytes, bytes | None, memoryview]]) -> None:
        """Publishes blocks: key, parent, payload. A host whose cells are all in use may get another host's within some rounds of that one's
        service, so what finds no room is tried again for a while; but not by each chain in turn, where there is none for long."""
        left, began = list(blocks), time.monotonic()
        may_wait = began >= self._no_room_until_s
        while left:
            keys, parents, payloads = zip(*left)
            outcomes = call(lambda cache: cache.publish_all(ns, keys, payloads, parents=parents))
            for (_, _, payload), outcome in zip(left, outcomes):
                if outcome == "stored":
                    self._count("promoted")
                    self._count("promoted_bytes", len(payload))
            left = [block for block, outcome in zip(left, outcomes) if outcome not in ("stored", "exists")]
            if left and not (may_wait and time.monotonic() - began < _ROOM_S and not self._end.wait(_ROOM_AGAIN_S)):
                self._no_room_until_s = time.monotonic() + _NO_ROOM_S
                for _ in left:
                    self._count("dropped_no_room")
                return

    def _read(self, name: BlockName) -> tuple[bytes | None, memoryview] | None:
        """The parent and payload of a block. None: a miss, which is counted; an object that is no good is deleted."""
        if not self._health.is_good():
            self._count("missed_unfit")
            return None
        try:
            with self._health.call():
                data = self._store.read(name.path)
            found = payload_of(data, name)
            # In this order: a listing that has the time before the use has begun before the index hears of it.
            self._store.note_use(name.path)
            self._index.note_use(name)
            return found
        except FileNotFoundError:
            self._count("missed_absent")
        except DamagedObject as damaged:
            self._count(f"missed_{damaged.damage}")
            self._log("damaged", f"object {name.path} of the second level is not the block that was written ({damaged}); it is deleted")
            self._delete(name)
        except Exception as error:
            # It may be there all the same: the next look through the store tells.
            self._note_failure("reading", error)
        self._index.remove(name)
        return None

    def _delete(self, name: BlockName) -> None:
        try:
            with self._health.call():
                self._store.delete(name.path)
        except Exception as error:
            self._note_failure("deleting", error)

    # Threads

    def _serve(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._is_closed or self._promotions or self._demotions)
                if self._is_closed:
                    return
                # A request waits for the one, and nothing for the other.
                promotion = self._promotions.popleft() if self._promotions else None
                demotion = None if promotion else self._demotions.popleft()
            if promotion:
                self._bring(*promotion)
            elif demotion:
                self._write(demotion)

    def _refresh_all(self) -> None:
        while not self._is_closed:
            began = time.monotonic()
            try:
                self._index.look_through(self._store.listing())
                self._count("refreshed")
            except Exception as error:
                self._note_failure("looking through", error)
            took_s = time.monotonic() - began
            # Not on the condition of the others: work that wakes one of them would be lost on this thread.
            self._end.wait(max(self._refresh_s, took_s / _LISTING_PART))

    # Counts

    def _count(self, name: str, value: int = 1) -> None:
        with self._lock:
            self._counts[name] += value

    def _note_failure(self, doing: str, error: Exception) -> None:
        self._count("errors")
        self._log(doing, f"{doing} the second level failed: {type(error).__name__}: {error}")

    def _log(self, what: str, message: str) -> None:
        now = time.monotonic()
        with self._lock:
            if now - self._logged_s.get(what, -_LOG_AGAIN_S) < _LOG_AGAIN_S:
                return
            self._logged_s[what] = now
        logger.warning("kvbm-cxl: %s", message)

    def count_dropped(self, name: str) -> None:
        """A block was dropped before it came here."""
        self._count(f"dropped_{name}")

    def counts(self) -> dict[str, int]:
        """Counts so far, and `objects`, `object_bytes`, `queued_bytes` now; docs/operating/l2.md explains each."""
        with self._lock:
            counts = dict(self._counts)
            queued_bytes = self._queued_bytes
        return {**counts, "objects": len(self._index), "object_bytes": self._index.total_bytes, "queued_bytes": queued_bytes}

    def close(self) -> None:
        """Ends the threads. What waits to be written is dropped, promotions end. A thread whose call does not return is left."""
        with self._work:
            if self._is_closed:
                return
            self._is_closed = True
            dropped, promotions = len(self._demotions), list(self._promotions)
            self._demotions.clear()
            self._promotions.clear()
            self._counts["dropped_closed"] += dropped
            self._work.notify_all()
        self._end.set()
        for promotion, _ in promotions:
            promotion._ended.set()
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
