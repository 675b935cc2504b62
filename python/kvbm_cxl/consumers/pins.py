# SPDX-License-Identifier: Apache-2.0
"""Pins by what the consumer calls a block: it may lock one as often as it likes, and unlocks it as often."""

import threading
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import kvbm_cxl


@dataclass
class Held:
    """Pins that this process holds. May be called from any thread."""

    _pins: defaultdict[Hashable, list["kvbm_cxl.Pins"]] = field(default_factory=lambda: defaultdict(list))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, pins: Iterable[tuple[Hashable, "kvbm_cxl.Pins"]]) -> None:
        """One more pin of each of these blocks."""
        with self._lock:
            for what, pin in pins:
                self._pins[what].append(pin)

    def take(self, whats: Iterable[Hashable]) -> list["kvbm_cxl.Pins"]:
        """One pin of each of these blocks that has any; the caller releases them."""
        taken = []
        with self._lock:
            for what in whats:
                if pins := self._pins.get(what):
                    taken.append(pins.pop())
                    if not pins:
                        del self._pins[what]
        return taken

    def take_all(self, whats: Iterable[Hashable] | None = None) -> list["kvbm_cxl.Pins"]:
        """Every pin of these blocks, or of all blocks; the caller releases them."""
        with self._lock:
            whats = list(self._pins) if whats is None else whats
            return [pin for what in whats for pin in self._pins.pop(what, ())]

    def __len__(self) -> int:
        """Blocks with a pin."""
        with self._lock:
            return len(self._pins)


def release(pins: Iterable["kvbm_cxl.Pins"]) -> None:
    """Releases pins."""
    for pin in pins:
        pin.release()
