# SPDX-License-Identifier: Apache-2.0
"""A second level below the pool: blocks that are about to be evicted are kept in a file system or an object store, and come back on a hit.

`Demoter` watches a process's own coldest blocks and hands copies to `Level2`; `Level2.promote` brings back what continues a chain.
Whatever is wrong with the store or an object of it is a miss. docs/internals/l2.md has the design, docs/operating/l2.md its use.
"""

from .demoter import Demoter
from .level import Level2, Promotion
from .objects import DamagedObject
from .stores import LocalStore, Store, open_store

__all__ = ["DamagedObject", "Demoter", "Level2", "LocalStore", "Promotion", "Store", "open_store"]
