# SPDX-License-Identifier: Apache-2.0
"""Which blocks the store has, as far as this process knows: what it found when it last looked through the store, and what it did since."""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from .objects import HEADER_BYTES, BlockName
from .stores import Stored


class Index:
    """Names and lengths of objects, the one written or used last at the end. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes_of: OrderedDict[BlockName, int] = OrderedDict()
        self._total_bytes = 0
        self._since: dict[BlockName, int | None] | None = None
        """Objects added, used or removed (None) since a listing of the store began."""
        self._used_s: dict[BlockName, float] = {}
        """When objects were promoted, in seconds since 1970: not every store notes a use."""

    def __len__(self) -> int:
        return len(self._bytes_of)

    def __contains__(self, name: BlockName) -> bool:
        return name in self._bytes_of

    @property
    def total_bytes(self) -> int:
        """Bytes of all objects."""
        return self._total_bytes

    def look_through(self, listing: Iterable[Stored]) -> None:
        """Takes over what a store has. Raises what the listing raises, and knows what it knew before then."""
        with self._lock:
            self._since = {}
            used_s = dict(self._used_s)
            # Of two objects with the same time the one that was younger stays so: clocks of file systems tick slowly.
            place = {name: number for number, name in enumerate(self._bytes_of)}
        try:
            named = ((BlockName.of_path(each.path), each) for each in listing)
            # A file shorter than a header is no block, and its size does not count.
            found = [(name, each) for name, each in named if name and each.len_bytes >= HEADER_BYTES]
            found.sort(key=lambda pair: (max(pair[1].written_s, used_s.get(pair[0], 0.0)), place.get(pair[0], len(place))))
            bytes_of = OrderedDict((name, each.len_bytes) for name, each in found)
            with self._lock:
                since, self._since = self._since or {}, None
                self._bytes_of, self._total_bytes = bytes_of, sum(bytes_of.values())
                self._used_s = {name: at_s for name, at_s in self._used_s.items() if name in bytes_of or name in since}
                for name, len_bytes in since.items():
                    self._remove(name)
                    if len_bytes is not None:
                        self._add(name, len_bytes)
        finally:
            with self._lock:
                self._since = None

    def add(self, name: BlockName, len_bytes: int) -> None:
        """An object was written."""
        with self._lock:
            self._note(name, len_bytes)
            self._remove(name)
            self._add(name, len_bytes)

    def remove(self, name: BlockName) -> None:
        """An object is gone."""
        with self._lock:
            self._note(name, None)
            self._used_s.pop(name, None)
            self._remove(name)

    def note_use(self, name: BlockName) -> None:
        """An object was promoted, and the store has noted that if it does."""
        with self._lock:
            if name in self._bytes_of:
                self._note(name, self._bytes_of[name])
                self._used_s[name] = time.time()
                self._bytes_of.move_to_end(name)

    def take_oldest_beyond(self, limit_bytes: int) -> BlockName | None:
        """The object that was longest unused, where all of them have more than `limit_bytes`; it counts no more. None: they have not."""
        with self._lock:
            if self._total_bytes <= limit_bytes or not self._bytes_of:
                return None
            name = next(iter(self._bytes_of))
            self._note(name, None)
            self._used_s.pop(name, None)
            self._remove(name)
            return name

    def leading(self, namespaces: Sequence[bytes], keys: Sequence[bytes]) -> int:
        """How many leading blocks of a chain are there, in every namespace."""
        for count, key in enumerate(keys):
            if not all(BlockName(namespace, key) in self._bytes_of for namespace in namespaces):
                return count
        return len(keys)

    def _note(self, name: BlockName, len_bytes: int | None) -> None:
        if self._since is not None:
            # At the end: the order of these is that of their ages.
            self._since.pop(name, None)
            self._since[name] = len_bytes

    def _add(self, name: BlockName, len_bytes: int) -> None:
        self._bytes_of[name] = len_bytes
        self._total_bytes += len_bytes

    def _remove(self, name: BlockName) -> None:
        self._total_bytes -= self._bytes_of.pop(name, 0)
