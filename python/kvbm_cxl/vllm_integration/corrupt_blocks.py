# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: blocks of the pool that workers found corrupt, until they are evicted."""

from dataclasses import dataclass, field

import kvbm_cxl

from .block_names import BlockNames
from .bounded import trim
from .log import logger
from .pool_access import PoolAccess


@dataclass
class CorruptBlocks:
    """Keys of blocks that have to be evicted. Lookups end before the first of them."""

    access: PoolAccess
    names: BlockNames
    _keys: dict[bytes, None] = field(default_factory=dict)
    """Oldest first. One that is forgotten fails one more load."""

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: set[bytes]) -> None:
        """Workers found these corrupt. Has them evicted."""
        self._keys.update(dict.fromkeys(keys))
        trim(self._keys)
        for key in keys & self._keys.keys():
            try:
                self._is_evicted(key)
            except kvbm_cxl.CxlError as error:
                logger.warning("evicting corrupt block %s: %s", key.hex(), error)

    def intact(self, keys: list[bytes]) -> list[bytes]:
        """The keys up to the first whose block was found corrupt and is still in the pool: every load of it would fail, and while it is
        there the right block cannot be published. Its owner is asked to evict it, and does so once no reader has it pinned."""
        for index, key in enumerate(keys):
            if key in self._keys and not self._is_evicted(key):
                return keys[:index]
        return keys

    def _is_evicted(self, key: bytes) -> bool:
        def evict(cache: "kvbm_cxl.Cache") -> bool:
            there = [namespace for namespace in self.names.all_namespaces if any(cache.has(namespace, [key]))]
            for namespace in there:
                cache.evict(namespace, key)
            return not there

        gone = self.access.call(evict)
        if gone:
            del self._keys[key]
        return gone
