# SPDX-License-Identifier: Apache-2.0
"""Requests that come at their times whether others were answered or not, to a graph of which the answers are known, and what its workers
count meanwhile."""

import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "deploy" / "dynamo"))

from graph import counters  # noqa: E402
from graph.counters import OURS, Sample  # noqa: E402

# Why a block was not taken: its bytes are not those that were published.
DAMAGED = "checksum"


class Wrong(Exception):
    """A result that must not be timed."""


@dataclass(frozen=True)
class Seen:
    """What one worker has counted. Times in seconds, over all requests: first_s from when the worker has them until their first token;
    queue_s of it in the engine's queue, lookups and loads in it; prefill_s of it from when the engine begins to compute. damaged: blocks
    whose bytes were wrong."""

    counts: counters.Counts
    first_s: float
    queue_s: float
    prefill_s: float
    lookup_s: float
    loads: int
    damaged: int

    @classmethod
    def of(cls, page: str) -> "Seen":
        """Of a page of metrics."""
        sample = Sample.parse(page)
        return cls(
            counters.of_sample(sample),
            sample.sum("vllm:time_to_first_token_seconds_sum"),
            sample.sum("vllm:request_queue_time_seconds_sum"),
            sample.sum("vllm:request_prefill_time_seconds_sum"),
            sample.sum(f"{OURS}lookup_seconds_sum"),
            int(sample.sum(f"{OURS}pull_seconds_count")),
            int(sample.sum(f"{OURS}pulled_blocks_total", result=DAMAGED)),
        )

    def __sub__(self, other: "Seen") -> "Seen":
        return Seen(*(getattr(self, each.name) - getattr(other, each.name) for each in fields(self)))


class Asked:
    """A graph that is asked, with the answers that it has to give."""

    def __init__(self, graph, texts: dict[tuple[int, ...], str], max_tokens: int) -> None:
        self.graph, self.texts, self.max_tokens = graph, texts, max_tokens

    def ask(self, prompt: list[int]):
        """The graph's answer. Raises GraphError, Wrong."""
        answer = self.graph.ask(prompt, self.max_tokens)
        if answer.text != self.texts[tuple(prompt)]:
            raise Wrong(f"{answer.text!r} is not the answer {self.texts[tuple(prompt)]!r} of one engine alone")
        return answer

    def seen(self) -> dict[str, Seen]:
        """By worker. Raises GraphError."""
        return {name: Seen.of(self.graph.metrics(name)) for name in self.graph.workers}

    def spent(self, work: Callable, requests: int):
        """What `work` gives, and what each worker counted of its requests. Raises GraphError, Wrong."""
        before, counted = self.seen(), counters.read(self.graph)
        given = work()
        counters.wait_settled(self.graph, counted, requests)
        return given, {name: seen - before[name] for name, seen in self.seen().items()}


@dataclass(frozen=True)
class Served:
    """One request. Seconds: when it was to come; how much later it was sent; from when it was to come until its first token; until its last
    one, from the beginning of the run."""

    due_s: float
    late_s: float
    ttft_s: float
    ended_s: float


def served(ask: Callable, prompts: Sequence[list[int]], times_s: Sequence[float]) -> list[Served]:
    """Asks each prompt at its time; in their order. Raises what `ask` raises."""
    began = time.monotonic()

    def at_its_time(prompt: list[int], due_s: float) -> Served:
        threading.Event().wait(max(began + due_s - time.monotonic(), 0))
        late_s = time.monotonic() - began - due_s
        answer = ask(prompt)
        return Served(due_s, late_s, late_s + answer.ttft_s, due_s + late_s + answer.total_s)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(at_its_time, prompts, times_s))


def arrivals(count: int, apart_s: float, seed: int) -> list[float]:
    """Times at random, whole milliseconds, so far apart on average (Poisson). Another distance moves the same times apart."""
    choose, now_s, times_s = random.Random(seed), 0.0, []
    for _ in range(count):
        times_s.append(round(now_s, 3))
        now_s += choose.expovariate(1 / apart_s)
    return times_s


def percentile(values: Sequence[float], percent: int) -> float:
    """As `cxl-plan` has it: the smallest value that so many do not exceed."""
    return sorted(values)[max(-(-len(values) * percent // 100) - 1, 0)]
