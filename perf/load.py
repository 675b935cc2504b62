#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An open loop over rates: what a pool does to times to the first token and to requests a second, beside NIXL over UCX.

    load.py [--write perf]

Two Dynamo graphs, each of one prefill and one decode worker with the tiny model and small caches of their own, take turns. One passes KV
blocks through a pool in which prefill finds beginnings of prompts (CxlConnector), the other from worker to worker (NixlConnector over UCX),
with the engine's own cache alone. Requests come at random times whether others were answered or not (Poisson): for each offered load the
same prompts at the same times for every system. Load 1 is what keeps the prefill worker busy all the time when nothing is found, by what
single requests of these lengths take it. Prompts have three lengths and beginnings in common by Zipf's law; those of one load have nothing
in common with those of another, so that each load meets a pool without them (`pool`). Later the same requests come once more
(`pool again`).

A time to the first token begins when the request was to come. Its parts are means of a run, from what the workers count:
- wait: from when prefill has the request until it computes, without lookup and pull: for the step under way and in the engine's queue;
- lookup, pull: in the pool, by prefill, until the engine was told;
- compute: prefill's steps until the first token, those of others in the same steps;
- hand-over: from when decode has the request until it has the blocks, for which it waits for prefill's publish, looks up and pulls;
- decode: its first step;
- rest: everything outside of the workers (the client, the frontend, the ways between them), and what the client was late.

Every answer has to be that of one engine alone, no block may have other bytes than were published, and decode may compute nothing. The 99th
percentile of fewer than 100 requests is their longest. On few cores the workers, the client and other programs share the time.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "perf"), str(ROOT / "deploy" / "dynamo")]

import load_runs  # noqa: E402
import workload  # noqa: E402
from graph.counters import COMPUTED  # noqa: E402
from graph.errors import GraphError  # noqa: E402
from load_runs import AGAIN, POOL, UCX, Run  # noqa: E402
from openloop import Asked, Wrong, arrivals, served  # noqa: E402

# Tokens of a prompt, and how often each length comes.
LENGTHS = {800: 3, 1600: 2, 3000: 1}
ALONE_EACH = 3
# The last one is more than either graph can do when a pool is empty.
RATES = (0.3, 0.5, 0.7, 0.9, 1.1, 2.0)
BLOCK_TOKENS = 128
MAX_TOKENS = 4
# An engine's own cache: two of the longest prompts and a half, so that beginnings come from elsewhere as well.
CACHE_BLOCKS = 64
# Three times what the tiny model needs: nothing is evicted.
POOL_BYTES_PER_TOKEN, LEAST_POOL_BYTES = 12 << 10, 1 << 30
READY_TIMEOUT_S = 900
# Which graph answers in each pass over the same requests.
SYSTEMS = {POOL: "cxl", UCX: "nixl-ucx", AGAIN: "cxl"}


@dataclass(frozen=True)
class Load:
    """Prompts of one offered load; when they come, in parts of what lies between two of them on average."""

    offered: float
    prompts: list[list[int]]
    times: list[float]

    def times_s(self, compute_s: dict[int, float]) -> list[float]:
        """By what prefill takes for a prompt of each length: seconds from the beginning."""
        apart_s = statistics.mean(compute_s[len(prompt)] for prompt in self.prompts) / self.offered
        return [at * apart_s for at in self.times]


def sweep(rates: Sequence[float], requests: int, families: int, seed: int) -> list[Load]:
    """The same lengths, families and order of times for each rate, other tokens."""
    times = arrivals(requests, 1, seed)
    return [
        Load(rate, workload.of_lengths(requests, families, LENGTHS, BLOCK_TOKENS, seed, number), times) for number, rate in enumerate(rates)
    ]


@contextlib.contextmanager
def opened(connector: str, prompts: Sequence[list[int]]) -> Iterator[Asked]:
    """A graph that answers, with the answers of one engine alone. Raises GraphError."""
    # vLLM's packages: the rest of this file does without them.
    from graph.graph import Graph
    from graph.options import Options
    from graph.reference import Reference

    options = Options(
        connector=connector,
        state=ROOT / "target" / "serve" / "perf-load",
        pool_bytes=max(LEAST_POOL_BYTES, POOL_BYTES_PER_TOKEN * sum(map(len, prompts))),
        ready_timeout_s=READY_TIMEOUT_S,
        worker_arguments=("--num-gpu-blocks-override", str(CACHE_BLOCKS)),
    )
    with Graph(options, say=lambda line: None) as graph:
        reference = Reference(graph.model, graph.environment, options.state / "reference", graph.record)
        reference.begin(prompts, MAX_TOKENS)
        graph.wait_until_ready()
        yield Asked(graph, dict(zip(map(tuple, prompts), reference.texts(), strict=True)), MAX_TOKENS)
        graph.check()


def alone(asked: Asked, prompts: Sequence[list[int]]) -> dict[int, float]:
    """Median seconds that prefill computes a prompt of each length that has the graph for itself. Raises Wrong where it found anything."""
    took: dict[int, list[float]] = {}
    for prompt in prompts:
        _, spent = asked.spent(lambda prompt=prompt: asked.ask(prompt), 1)
        seen = spent["prefill-0"]
        if seen.counts.tokens[COMPUTED] != len(prompt):
            raise Wrong(f"a prompt of {len(prompt)} tokens that is like no other was found in part: {seen.counts.tokens}")
        took.setdefault(len(prompt), []).append(seen.prefill_s)
    return {tokens: statistics.median(each) for tokens, each in took.items()}


def measure(loads: Sequence[Load], singles: Sequence[list[int]]) -> tuple[list[Run], dict[str, dict[int, float]]]:
    """All runs, and what prefill takes alone in each graph. Raises GraphError, Wrong."""
    prompts, runs = [*singles, *(prompt for load in loads for prompt in load.prompts)], []
    with contextlib.ExitStack() as held:
        # Side by side, so that what one load is in each system lies near in time. An idle graph takes next to nothing of the processors.
        graphs = {connector: held.enter_context(opened(connector, prompts)) for connector in dict.fromkeys(SYSTEMS.values())}
        by_graph = {connector: alone(asked, singles) for connector, asked in graphs.items()}
        # The first graph says what a load is, for all systems.
        compute_s = by_graph[SYSTEMS[POOL]]
        for load in loads:
            times_s = load.times_s(compute_s)
            for system, connector in SYSTEMS.items():
                asked = graphs[connector]
                requests, spent = asked.spent(lambda asked=asked: served(asked.ask, load.prompts, times_s), len(load.prompts))
                run = load_runs.made(system, load.offered, load.prompts, times_s, requests, spent)
                print(f"{system}, load {load.offered}: {run.mean_s * 1e3:.0f} ms on average", flush=True)
                runs.append(run)
    return runs, by_graph


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 where an answer was wrong or missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60, help="of each rate (60)")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, metavar="LOAD", help=f"offered loads {RATES}")
    parser.add_argument("--families", type=int, default=12, help="beginnings in common (12)")
    parser.add_argument("--seed", type=int, default=1)
    said = parser.parse_args(arguments)
    if said.requests < 2 or said.families < 1 or min(said.rates) <= 0 or len(set(said.rates)) < len(said.rates):
        parser.error("at least two requests and one family, and rates above 0, each once")
    waiting = os.getloadavg()[1]
    words = random.Random(f"{said.seed} alone")
    singles = [workload.tokens(words, length) for _ in range(ALONE_EACH) for length in LENGTHS]
    try:
        runs, by_graph = measure(sweep(said.rates, said.requests, said.families, said.seed), singles)
    except (GraphError, Wrong, RuntimeError) as error:
        print(f"perf-load: {error}", file=sys.stderr)
        return 1
    lengths = runs[0].tokens
    mean = statistics.mean(lengths)
    print(f"\n{len(lengths)} requests of each load, {mean:.0f} tokens each, {said.families} beginnings, seed {said.seed}")
    print(f"programs of this machine that wanted to run, on average: {waiting:.1f} before, {os.getloadavg()[1]:.1f} at the end")
    for connector, took in by_graph.items():
        print(f"prefill alone, {connector}: " + ", ".join(f"{tokens} tokens {seconds * 1e3:.0f} ms" for tokens, seconds in took.items()))
    print()
    print("\n".join(load_runs.table(runs)))
    print("RATIOS " + json.dumps(load_runs.ratios(runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
