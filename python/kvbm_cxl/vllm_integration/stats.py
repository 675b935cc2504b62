# SPDX-License-Identifier: Apache-2.0
"""Counters of the connector, for vLLM's log and for Prometheus.

Prometheus names begin with `vllm:kvbm_cxl_`: of an engine's metrics Dynamo's endpoint passes on those that begin with `vllm:`. Blocks are
counted per worker: with tensor parallelism a block of tokens is one block of each.
"""

import threading
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

PREFIX = "vllm:kvbm_cxl_"

# name -> (label, its values known beforehand, documentation)
COUNTERS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "published_blocks": (
        "outcome",
        ("stored", "exists", "busy", "no_cell", "no_hint", "over_quota", "other_adapter", "no_lock", "timeout", "lost"),
        "Blocks handed to the pool.",
    ),
    "audited_blocks": (
        "result",
        ("same", "different", "absent", "not_comparable"),
        "Blocks of the pool compared with this engine's own computation for the same tokens.",
    ),
    "pulled_blocks": (
        "result",
        ("hit", "absent", "changed", "checksum", "other_adapter", "isolated"),
        "Blocks requested from the pool: hits, and misses by reason.",
    ),
    "bytes": ("direction", ("published", "pulled"), "Bytes copied into and out of the pool."),
    "prompt_tokens": ("source", ("pulled", "reused", "computed"), "Prompt tokens by where their KV came from at first admission."),
    "lookups": ("result", ("full", "partial", "none", "skipped", "deferred", "error"), "Lookups of requests, by result."),
    "handovers": ("result", ("complete", "short", "foreign"), "Requests from prefill, by how many of its published blocks were found."),
    "loads": ("result", ("complete", "failed", "cancelled"), "Loads of requests."),
    "weights": (
        "found",
        ("unchanged", "changed", "unknown"),
        "Possible replacements of weights in memory, by the result of the fingerprint.",
    ),
    "adapters": ("state", ("unknown", "replaced"), "LoRA adapters without a digest, or replaced under their name while the engine ran."),
    "descriptions": (
        "outcome",
        ("stored", "exists", "too_long", "no_cell", "no_hint", "over_quota", "busy", "missed", "damaged"),
        "Descriptions of blocks for routers, published and read.",
    ),
    "announced_blocks": ("change", ("stored", "removed"), "Blocks of all engines that were announced to routers, or withdrawn."),
    "recorded_entries": ("outcome", ("written", "dropped", "failed"), "Requests and publishes for the record of `record_dir`."),
    "second_level": (
        "outcome",
        ("demoted", "promoted", "missed", "dropped", "trimmed", "failed"),
        "Blocks of the second level (`l2`), by outcome, and failed calls of its store.",
    ),
    "thread_errors": (
        "reason",
        ("lost", "timeout", "other"),
        "Errors of the connector's background threads, by kind; the log has each.",
    ),
}
# name -> (labels, documentation)
GAUGES: dict[str, tuple[tuple[str, ...], str]] = {
    "pinned_blocks": ((), "Blocks that loads of this engine hold in the pool."),
    "isolated": ((), "1 after a block of the pool differed from this engine's own: it shares no block until it restarts."),
    "pool_info": (("pool",), "Always 1; the label is the UUID of the pool that the engine uses."),
}
TIMES = {
    "lookup_seconds": "Duration of a request's lookup.",
    "pull_seconds": "Duration of a request's load, from its start to the last verified block.",
    "noticed_seconds": "Time from the end of a request's load until the engine polled it.",
    "fingerprint_seconds": "Duration of a fingerprint of a worker's weights in memory.",
    "audit_seconds": "Duration of the comparison of one block of the pool.",
    "publish_seconds": "Duration of publishing a batch of blocks, including waits.",
}
# 10 us to 10 s.
_BUCKETS = tuple(base * scale for scale in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1) for base in (1, 2, 5)) + (10,)


@dataclass
class CxlStats(KVConnectorStats):
    """Counts since the last time: `counters` and `gauges` by "name/label value", and `times` as lists of seconds."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = {"counters": {}, "gauges": {}, "times": {}}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> "CxlStats":
        counters, times = self.data["counters"], self.data["times"]
        for name, value in other.data["counters"].items():
            counters[name] = counters.get(name, 0) + value
        self.data["gauges"].update(other.data["gauges"])
        for name, seconds in other.data["times"].items():
            times.setdefault(name, []).extend(seconds)
        return self

    def reduce(self) -> dict[str, int | float]:
        reduced: dict[str, int | float] = dict(self.data["counters"]) | dict(self.data["gauges"])
        for name, seconds in self.data["times"].items():
            if seconds:
                reduced[f"{name}_count"] = len(seconds)
                reduced[f"{name}_mean"] = round(sum(seconds) / len(seconds), 6)
                reduced[f"{name}_max"] = round(max(seconds), 6)
        return reduced


class Tally:
    """Counts for one side of the connector; any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = CxlStats()

    def count(self, name: str, label: str, value: int | float = 1) -> None:
        if value:
            with self._lock:
                counters = self._stats.data["counters"]
                key = f"{name}/{label}"
                counters[key] = counters.get(key, 0) + value

    def gauge(self, name: str, value: int | float, label: str = "") -> None:
        with self._lock:
            self._stats.data["gauges"][f"{name}/{label}" if label else name] = value

    def time(self, name: str, seconds: float) -> None:
        with self._lock:
            self._stats.data["times"].setdefault(name, []).append(seconds)

    def take(self) -> CxlStats | None:
        """Counts since the last call, or None."""
        with self._lock:
            if self._stats.is_empty():
                return None
            taken, self._stats = self._stats, CxlStats()
            return taken


class CxlPromMetrics(KVConnectorPromMetrics):
    """The same counters as Prometheus metrics of each engine."""

    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, gauge, histogram = metric_types[Counter], metric_types[Gauge], metric_types[Histogram]
        self._counters = {
            name: counter(name=PREFIX + name, documentation=text, labelnames=[*labelnames, label])
            for name, (label, _, text) in COUNTERS.items()
        }
        self._gauges = {
            name: gauge(name=PREFIX + name, documentation=text, labelnames=[*labelnames, *labels], multiprocess_mode="mostrecent")
            for name, (labels, text) in GAUGES.items()
        }
        self._times = {
            name: histogram(name=PREFIX + name, documentation=text, buckets=_BUCKETS, labelnames=labelnames)
            for name, text in TIMES.items()
        }
        # Counters that have not counted yet show as 0 instead of not at all.
        for engine in per_engine_labelvalues.values():
            for name, (_, values, _) in COUNTERS.items():
                for value in values:
                    self._counters[name].labels(*engine, value)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data["counters"].items():
            name, _, label = key.partition("/")
            if metric := self._counters.get(name):
                metric.labels(*engine, label).inc(value)
        for key, value in transfer_stats_data["gauges"].items():
            name, *labels = key.split("/", 1)
            if metric := self._gauges.get(name):
                metric.labels(*engine, *labels).set(value)
        for name, seconds in transfer_stats_data["times"].items():
            if metric := self._times.get(name):
                bound = metric.labels(*engine)
                for value in seconds:
                    bound.observe(value)
