# SPDX-License-Identifier: Apache-2.0
"""How blocks get from the KV cache into the pool and back.

The worker's threads call a mover with a few blocks at a time; what it does with errors, timing and counting is the worker's. The one here
copies, from and to wherever the layout says that the blocks lie. A KV cache that lies in the pool itself needs another one, which publishes
without a copy and is told which blocks a step will write, so that it can take them back first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import kvbm_cxl

from .config import ConfigError, ConnectorConfig
from .pool_access import PoolAccess


class Mover(Protocol):
    """What the worker needs. `publish` and `pull` are called by several threads at a time and raise `CxlError`."""

    def publish(self, keys: Sequence[bytes], block_ids: Sequence[int], parents: Sequence[bytes | None]) -> list[str]:
        """Publishes blocks; the outcome of each: stored, exists, busy, no_cell, no_hint, over_quota."""

    def pull(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> list[str | None]:
        """Fills blocks; None for each that is there and verified, else the reason why not. Those hold anything."""

    def before_writes(self, block_ids: Sequence[int]) -> None:
        """The engine is about to write to these blocks. Called before anything of the step runs."""


def mover_for(config: ConnectorConfig, access: PoolAccess, namespace: "kvbm_cxl.Namespace", layout: "kvbm_cxl.BlockLayout") -> Mover:
    """The mover for a KV cache that lies where `config` had it placed."""
    if config.zero_copy:
        raise ConfigError("CxlConnector: zero_copy placed the KV cache in the pool, but this build cannot publish from there: leave it out")
    return CopyMover(access, namespace, layout)


@dataclass(frozen=True)
class CopyMover:
    """Copies between the KV cache, in memory of a host or a device, and cells of the pool."""

    access: PoolAccess
    namespace: "kvbm_cxl.Namespace"
    layout: "kvbm_cxl.BlockLayout"

    def publish(self, keys: Sequence[bytes], block_ids: Sequence[int], parents: Sequence[bytes | None]) -> list[str]:
        return self.access.call(lambda cache: cache.publish_blocks(self.namespace, keys, self.layout, block_ids, parents=parents))

    def pull(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> list[str | None]:
        return self.access.call(lambda cache: cache.pull_blocks(self.namespace, keys, self.layout, block_ids))

    def before_writes(self, block_ids: Sequence[int]) -> None:
        """The pool has a copy of its own."""
