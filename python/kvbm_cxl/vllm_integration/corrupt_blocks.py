# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: blocks of the pool that workers found corrupt, until they are evicted."""

import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from .block_names import BlockNames
from .limits import trim
from .pool_access import PoolAccess

if TYPE_CHECKING:
    import kvbm_cxl


@dataclass
class CorruptBlocks:
    """Keys of blocks that have to be evicted. Lookups end before the first of them."""

    access: PoolAccess
    names: BlockNames
    _keys: dict[bytes, None] = field(default_factory=dict)
    """Oldest first. One that is forgotten fails one more load."""
    _evicting: threading.Thread | None = None
    """One at a time. What it does not come to is evicted when a lookup meets it."""

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: set[bytes]) -> None:
        """Workers found these corrupt. Has them evicted, on a thread: that may wait for locks of the pool."""
        self._keys.update(dict.fromkeys(keys))
        trim(self._keys)
        self._evict(list(keys))

    def intact(self, keys: list[bytes]) -> list[bytes]:
        """The keys up to the first whose block was found corrupt and is still in the pool: every load of it would fail, and while it is
        there the right block cannot be published. Its owner is asked to evict it, and does so once no reader has it pinned."""
        for index, key in enumerate(keys):
            if key in self._keys and not self._is_gone(key):
                self._evict([key])
                return keys[:index]
        return keys

    def _is_gone(self, key: bytes) -> bool:
        if self.access.call(lambda cache: self._places(cache, key)):
            return False
        self._keys.pop(key, None)
        return True

    def _places(self, cache: "kvbm_cxl.Cache", key: bytes) -> list["kvbm_cxl.Namespace"]:
        return [namespace for namespace in self.names.all_namespaces if any(cache.has(namespace, [key]))]

    def _evict(self, keys: list[bytes]) -> None:
        if self._evicting is None or not self._evicting.is_alive():
            self._evicting = self.access.failures.start_thread("kvbm-cxl-evict", "evicting corrupt blocks", lambda: self._evict_all(keys))

    def _evict_all(self, keys: list[bytes]) -> None:
        def evict(cache: "kvbm_cxl.Cache", key: bytes) -> None:
            for namespace in self._places(cache, key):
                cache.evict(namespace, key)

        for key in keys:
            self.access.call(partial(evict, key=key))
