# SPDX-License-Identifier: Apache-2.0
"""What vLLM, the connector and the pool count, read from the workers' metrics."""

import json
import re
import time
from collections import Counter
from dataclasses import dataclass, field

from .errors import GraphError
from .pool import Pool

SETTLE_S = 10
_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

# Metrics of CxlConnector, and those that vLLM makes of NixlConnector's transfers.
OURS, NIXL = "vllm:kvbm_cxl_", "vllm:nixl_"
COMPUTED, PULLED, REUSED = "local_compute", "external_kv_transfer", "local_cache_hit"
SOURCES = (COMPUTED, PULLED, REUSED)


@dataclass
class Sample:
    """One page of metrics: a list of (name, labels, value)."""

    lines: list[tuple[str, dict[str, str], float]] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str) -> "Sample":
        """Of Prometheus's text format; lines that are none are left out."""
        lines = []
        for line in text.splitlines():
            if match := _LINE.match(line):
                try:
                    lines.append((match[1], dict(_LABEL.findall(match[2] or "")), float(match[3])))
                except ValueError:
                    continue
        return cls(lines)

    def sum(self, name: str, **labels: str) -> float:
        """Of all lines of that name with these labels; 0 without any."""
        wanted = labels.items()
        return sum(value for known, has, value in self.lines if known == name and all(has.get(key) == is_ for key, is_ in wanted))

    def names(self) -> set[str]:
        """Of all metrics."""
        return {name for name, _, _ in self.lines}


@dataclass(frozen=True)
class Counts:
    """Of one worker, or of several added up."""

    requests: int = 0
    failed: int = 0
    tokens: dict = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    published_blocks: int = 0
    published_bytes: int = 0
    published_s: float = 0
    pulled_blocks: int = 0
    pulled_bytes: int = 0
    pulled_s: float = 0
    noticed_s: float = 0
    transfers: int = 0

    def _with(self, other: "Counts", sign: int) -> "Counts":
        def join(name):
            one, two = getattr(self, name), getattr(other, name)
            return {key: one[key] + sign * two[key] for key in one} if isinstance(one, dict) else one + sign * two

        return Counts(**{name: join(name) for name in self.__dataclass_fields__})

    def __add__(self, other: "Counts") -> "Counts":
        return self._with(other, 1)

    def __sub__(self, other: "Counts") -> "Counts":
        return self._with(other, -1)


def of_sample(sample: Sample) -> Counts:
    """What a worker has counted since it started."""
    finished = ("stop", "length")
    return Counts(
        requests=int(sum(sample.sum("vllm:request_success_total", finished_reason=reason) for reason in finished)),
        failed=int(sample.sum("vllm:request_success_total", finished_reason="error")),
        tokens={source: int(sample.sum("vllm:prompt_tokens_by_source_total", source=source)) for source in SOURCES},
        published_blocks=int(sample.sum(f"{OURS}published_blocks_total", outcome="stored")),
        published_bytes=int(sample.sum(f"{OURS}bytes_total", direction="published")),
        published_s=sample.sum(f"{OURS}publish_seconds_sum"),
        pulled_blocks=int(sample.sum(f"{OURS}pulled_blocks_total", result="hit")),
        pulled_bytes=int(sample.sum(f"{OURS}bytes_total", direction="pulled") + sample.sum(f"{NIXL}bytes_transferred_sum")),
        pulled_s=sample.sum(f"{OURS}pull_seconds_sum") + sample.sum(f"{NIXL}xfer_time_seconds_sum"),
        noticed_s=sample.sum(f"{OURS}noticed_seconds_sum"),
        transfers=int(sample.sum(f"{NIXL}bytes_transferred_count")),
    )


def read(graph) -> dict[str, Counts]:
    """By worker, of those that answer."""
    counts = {}
    for name in graph.workers:
        try:
            counts[name] = of_sample(Sample.parse(graph.metrics(name)))
        except GraphError:
            continue  # It has died; what it counted went with it.
    return counts


def of_plugin(pool: Pool) -> Counter:
    """What the NIXL plugins of all hosts have transferred, as they tell the pool twice a second. Raises GraphError."""
    total: Counter = Counter()
    for host in json.loads(pool.run(pool.spec, "nixl", "--json"))["hosts"]:
        total.update(host["counters"])
    return total


def of_role(counts: dict[str, Counts], role: str) -> Counts:
    """Of all prefill or decode workers."""
    return sum((count for name, count in counts.items() if name.startswith(role)), Counts())


def wait_settled(graph, before: dict[str, Counts], requests: int = 1) -> dict[str, Counts]:
    """The counts once both roles have counted so many more requests than `before`: an answer leaves before it is counted.

    Raises GraphError.
    """
    deadline = time.monotonic() + SETTLE_S * graph.options.slowness
    while True:
        after = read(graph)
        seen = {role: of_role(after, role).requests - of_role(before, role).requests for role in ("prefill", "decode")}
        if all(count >= requests for count in seen.values()):
            return after
        if time.monotonic() > deadline:
            raise GraphError(f"{requests} requests were answered, and the workers counted {seen}")
        time.sleep(0.05)
