#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Cache-oblivious scheduling (Beluga 6.3): what round-robin costs beside kv-aware routing, with the pool and without it.

Four Dynamo graphs in turn, each with two prefill workers, one decode worker and the tiny model: router round-robin or kv, KV blocks through
the pool (CxlConnector) or from worker to worker (NixlConnector over UCX, the baseline). All answer the same requests, with equal texts.
What counts is prompt tokens that prefill computed: on a few cores times tell of scheduling more than of transfers.

Requests have the shape of TraCT's table 1, workload B, at a quarter of its lengths: input 1112 (606) tokens, of which unique 304 (423);
prefixes are chosen by Zipf's law.
"""

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "deploy" / "dynamo"))

import workload
from graph import counters
from graph.counters import COMPUTED, PULLED, REUSED, Counts
from graph.graph import Graph
from graph.options import Options

MAX_TOKENS = 4
READY_TIMEOUT_S = 900
CONFIGURATIONS = [(router, connector) for connector in ("cxl", "nixl-ucx") for router in ("round-robin", "kv")]
WITH, WITHOUT = "with pool", "without pool"


@dataclass(frozen=True)
class Result:
    """Of one graph: tokens of all prompts by where prefill had them from, those computed by each worker, and times to the first token."""

    tokens: dict
    computed: tuple[int, ...]
    ttft_s: tuple[float, ...]
    texts: tuple[str, ...]

    @property
    def work(self) -> int:
        """Prompt tokens that prefill computed."""
        return sum(self.computed)

    @property
    def hit_share(self) -> float:
        """Of all prompt tokens, those that were not computed."""
        return 1 - self.work / sum(self.tokens.values())

    @property
    def imbalance(self) -> float:
        """The busier prefill worker's part of the work, in equal parts."""
        return max(self.computed) / statistics.mean(self.computed)

    @property
    def ttft(self) -> float:
        """Median, in seconds."""
        return statistics.median(self.ttft_s)


def serve(router: str, connector: str, prompts: list[list[int]], at_once: int, state: Path) -> Result:
    """Starts a graph, asks it everything, ends it. Raises GraphError."""
    options = Options(prefill=2, router=router, connector=connector, state=state, ready_timeout_s=READY_TIMEOUT_S)
    # What is recorded tells nothing of this machine's folders.
    with Graph(options, say=lambda line: None) as graph:
        graph.wait_until_ready()
        before = counters.read(graph)
        with ThreadPoolExecutor(at_once) as pool:
            answers = list(pool.map(lambda prompt: graph.ask(prompt, MAX_TOKENS), prompts))
        after = counters.wait_settled(graph, before, len(prompts))
        spent = [after[name] - before.get(name, Counts()) for name in graph.workers if name.startswith("prefill")]
        graph.check()
    tokens = sum(spent, Counts()).tokens
    computed = tuple(count.tokens[COMPUTED] for count in spent)
    return Result(tokens, computed, tuple(answer.ttft_s for answer in answers), tuple(answer.text for answer in answers))


def told(results: dict) -> list[str]:
    """A table for people."""
    heads = ("router", "blocks", "prefill computed", "pulled", "reused", "hit share", "busier worker", "TTFT median", "TTFT mean")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for (router, where), result in results.items():
        tokens = result.tokens
        lines.append(
            f"| {router} | {where} | {result.work} | {tokens[PULLED]} | {tokens[REUSED]} | {result.hit_share:.2f} | {result.imbalance:.2f} "
            f"| {result.ttft * 1e3:.0f} ms | {statistics.mean(result.ttft_s) * 1e3:.0f} ms |"
        )
    return lines


def ratios(results: dict) -> dict[str, float]:
    """Above 1: more work, or later, than with what stands behind `over`."""

    def of(value, one, other):
        return round(value(results[one]) / value(results[other]), 3)

    pairs = {
        "round_robin_over_kv_with_pool": (("round-robin", WITH), ("kv", WITH)),
        "round_robin_over_kv_without_pool": (("round-robin", WITHOUT), ("kv", WITHOUT)),
        "without_over_with_pool_round_robin": (("round-robin", WITHOUT), ("round-robin", WITH)),
        "without_over_with_pool_kv": (("kv", WITHOUT), ("kv", WITH)),
    }
    work = {f"prefill_work_{name}": of(lambda result: result.work, *pair) for name, pair in pairs.items()}
    return work | {f"ttft_{name}": of(lambda result: result.ttft, *pair) for name, pair in pairs.items()}


def main() -> int:
    """0; 1 where a graph answered something else than the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--prefixes", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=3, help="requests under way at a time")
    said = parser.parse_args()
    prompts = workload.of_table_1(said.requests, said.prefixes)
    results = {}
    for router, connector in CONFIGURATIONS:
        began = time.monotonic()
        where = WITH if connector == "cxl" else WITHOUT
        results[router, where] = serve(router, connector, prompts, said.at_once, ROOT / "target" / "serve" / "perf-routing")
        print(f"{router}, {where}: {time.monotonic() - began:.0f} s with start and end", flush=True)
    texts = {result.texts for result in results.values()}
    if len(texts) != 1:
        print("the graphs do not say the same", file=sys.stderr)
        return 1
    lengths = [len(prompt) for prompt in prompts]
    print(
        f"\n{len(prompts)} requests, {sum(lengths)} tokens of prompts ({statistics.mean(lengths):.0f} each, {min(lengths)} to "
        f"{max(lengths)}), {said.prefixes} prefixes, {said.at_once} at a time\n"
    )
    print("\n".join(told(results)))
    print(f"RATIOS {json.dumps(ratios(results))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
