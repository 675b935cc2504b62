# SPDX-License-Identifier: Apache-2.0
"""Counters of the tier, as vLLM's offloading connector takes them from tiers and shows them to Prometheus.

Bytes, seconds, failed jobs, queries and hits are counted by vLLM itself, for each tier (`vllm:kv_offload_tiering_*`).
"""

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

from ..consumers.blocks import Blocks
from .stats import PREFIX

TIER_PREFIX = PREFIX + "tier_"
# name -> (label, its usual values, documentation)
TIER_COUNTERS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "stored_chunks": (
        "outcome",
        ("stored", "exists", "busy", "no_cell", "no_hint", "over_quota", "too_large", "weights", "lost", "fenced"),
        "Chunks that vLLM stored in the tier, by outcome.",
    ),
    "loaded_chunks": (
        "result",
        ("hit", "absent", "changed", "checksum", "length", "lost"),
        "Chunks requested from the pool: hits, and misses by reason.",
    ),
    "looked_up_chunks": ("result", ("hit", "miss"), "Chunks looked up in the pool."),
    "thread_errors": ("reason", ("lost", "timeout", "other"), "Errors of background threads, by kind; the log has each."),
}
TIER_GAUGES = {"pool_is_open": "1 while the engine has the pool, 0 while it is lost."}
_CALLS = {"store": "stored_chunks", "load": "loaded_chunks"}


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """What vLLM is to know of the metrics."""
    found: dict[str, OffloadingMetricMetadata] = {
        TIER_PREFIX + name: OffloadingCounterMetadata(documentation=text, labelnames=(label,))
        for name, (label, _, text) in TIER_COUNTERS.items()
    }
    return found | {TIER_PREFIX + name: OffloadingGaugeMetadata(documentation=text) for name, text in TIER_GAUGES.items()}


@dataclass
class TierStats:
    """Counts since they were last asked for."""

    blocks: Blocks
    _told: Counter[tuple[str, str]] = field(default_factory=Counter)
    _more: Counter[tuple[str, str]] = field(default_factory=Counter)

    def count_refused(self, count: int) -> None:
        """Chunks that were not stored because it is unknown which weights they are of."""
        self._more["stored_chunks", "weights"] += count

    def looked_up(self, found: bool) -> None:
        """A chunk was looked for."""
        self._more["looked_up_chunks", "hit" if found else "miss"] += 1

    def take(self) -> OffloadingConnectorStats:
        """Counts since the last call. Called by the scheduler's thread."""
        stats = OffloadingConnectorStats()
        told = self.blocks.counts()
        now = self._more + Counter({(name, word): count for call, name in _CALLS.items() for word, count in told[call].items()})
        for (name, word), count in (now - self._told).items():
            stats.increase_counter(TIER_PREFIX + name, count, (word,))
        for reason, count in self.blocks.access.failures.take_counts().items():
            stats.increase_counter(TIER_PREFIX + "thread_errors", count, (reason,))
        stats.set_gauge(TIER_PREFIX + "pool_is_open", int(self.blocks.access.pool is not None))
        self._told = now
        return stats
