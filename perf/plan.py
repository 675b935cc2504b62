#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether `cxl-plan` says in advance how long first tokens take: its plan of a workload beside the same workload on a Dynamo graph.

A graph of one prefill and one decode worker with the tiny model, KV blocks through the pool. First, costs: requests one at a time, of
several lengths, without hits and with a beginning that lies in the pool alone, tell what computing, pulling, publishing and everything
else take (`perf/costs.py`); these are the numbers of a rack, and nothing of the workload is in them. Then the workload: other prompts, with
beginnings in common by Zipf's law, come at random times whether others were answered or not (open loop, Poisson), so fast that single
requests of its lengths without hits would keep the prefill worker busy for `--load` of the time. `cxl-plan` is given the rack and the
same requests at the same times.

A time to the first token begins when the request was to come. Every answer has to be that of one engine alone, and every block that was
pulled is verified. `..._measured_over_planned`: 1 is a plan that came true. On few cores other programs' work is in the times.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "deploy" / "dynamo"))

import costs  # noqa: E402
import workload  # noqa: E402
from graph.counters import COMPUTED  # noqa: E402
from graph.errors import GraphError  # noqa: E402
from graph.graph import Graph  # noqa: E402
from graph.model import BLOCK_TOKENS  # noqa: E402
from graph.options import Options  # noqa: E402
from graph.reference import Reference  # noqa: E402
from openloop import Asked, Seen, Wrong, arrivals, percentile, served  # noqa: E402

COLD_TOKENS, COLD_EACH = (200, 400, 800, 1200, 1600, 2200, 3000), 3
# Beginnings that come back, and what differs behind them.
PREFIX_TOKENS, PREFIX_EACH, ENDING_TOKENS = (512, 1024, 2048), 2, 200
MAX_TOKENS = 4
# An engine's own cache: so small that beginnings come from the pool as well.
CACHE_BLOCKS = 64
WITHIN = 0.15
READY_TIMEOUT_S = 900


def single(asked: Asked, prompt: list[int]) -> tuple[costs.Single, dict[str, Seen]]:
    """Asks with nothing else going on; what it took, and what each worker counted of it."""
    answer, spent = asked.spent(lambda: asked.ask(prompt), 1)
    computed = spent["prefill-0"].counts.tokens[COMPUTED]
    moved_s = sum(each.counts.pulled_s + each.counts.noticed_s for each in spent.values()) + spent["prefill-0"].counts.published_s
    return costs.Single(len(prompt) - computed, computed, spent["prefill-0"].prefill_s, moved_s, answer.ttft_s), spent


def single_prompts(generator: random.Random) -> list[list[int]]:
    """Beginnings, then prompts like no other, which drive them out of the engine's own cache, then the beginnings with other endings."""
    beginnings = [workload.tokens(generator, length) for length in PREFIX_TOKENS for _ in range(PREFIX_EACH)]
    cold = [workload.tokens(generator, length) for _ in range(COLD_EACH) for length in COLD_TOKENS]
    return [*beginnings, *cold, *(each + workload.tokens(generator, ENDING_TOKENS) for each in beginnings)]


def measured_costs(asked: Asked, prompts: list[list[int]]) -> tuple[dict[str, float], list[costs.Single]]:
    """The rack's costs, and what they were made of."""
    singles, all_spent = [], []
    for prompt in prompts:
        found, spent = single(asked, prompt)
        singles.append(found)
        all_spent += spent.values()
    counts = [each.counts for each in all_spent]
    hits = [each for each in singles if each.cached]
    if len(hits) < len(PREFIX_TOKENS) * PREFIX_EACH:
        raise Wrong(f"{len(hits)} single requests found something")
    moved = costs.Moved(
        sum(each.pulled_bytes for each in counts),
        sum(each.pulled_s for each in counts),
        sum(each.published_bytes for each in counts),
        sum(each.published_s for each in counts),
        sum(each.noticed_s for each in counts),
        sum(each.loads for each in all_spent),
    )
    return costs.costs(singles, moved), singles


def main() -> int:
    """0; 1 where an answer was wrong or missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--prefixes", type=int, default=12)
    parser.add_argument("--load", type=float, default=0.4, help="part of the prefill worker's time if nothing were found (0.4)")
    parser.add_argument("--seed", type=int, default=1)
    said = parser.parse_args()
    singles = single_prompts(random.Random(said.seed + 1000))
    prompts = workload.of_table_1(said.requests, said.prefixes, said.seed)
    options = Options(
        state=ROOT / "target" / "serve" / "perf-plan",
        ready_timeout_s=READY_TIMEOUT_S,
        worker_arguments=("--num-gpu-blocks-override", str(CACHE_BLOCKS)),
    )
    try:
        with Graph(options, say=lambda line: None) as graph:
            reference = Reference(graph.model, graph.environment, options.state / "reference", graph.record)
            reference.begin([*singles, *prompts], MAX_TOKENS)
            graph.wait_until_ready()
            texts = dict(zip(map(tuple, [*singles, *prompts]), reference.texts(), strict=True))
            asked = Asked(graph, texts, MAX_TOKENS)
            rack, calibrated = measured_costs(asked, singles)
            # So far apart on average that computing all prompts as a whole would take this part of the time.
            apart_s = statistics.mean(costs.compute_s(rack, len(prompt)) for prompt in prompts) / said.load
            times_s = arrivals(len(prompts), apart_s, said.seed)
            requests, spent = asked.spent(lambda: served(asked.ask, prompts, times_s), len(prompts))
            ttft_s = [each.ttft_s for each in requests]
            graph.check()
            block_bytes = graph.model.block_bytes
    except (GraphError, Wrong, ValueError) as error:
        print(f"perf-plan: {error}", file=sys.stderr)
        return 1
    rack |= {"rack.instances": 1, "rack.disaggregated": 1, "model.kv_kib_per_token": block_bytes / BLOCK_TOKENS / 1024}
    rack |= {"rack.hbm_gib": CACHE_BLOCKS * block_bytes / 2**30, "rack.pool_gib": 0.5}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        costs.write_trace(trace, prompts, times_s, MAX_TOKENS, BLOCK_TOKENS)
        plan = costs.planned(ROOT / "target" / "release" / "cxl-plan", trace, rack, BLOCK_TOKENS)
    report(said, calibrated, rack, prompts, times_s, ttft_s, spent, plan)
    return 0


def report(said, calibrated, rack, prompts, times_s, ttft_s, spent, plan) -> None:
    """Lines for people, and the ratios."""
    prefill, decode = spent["prefill-0"], spent["decode-0"]
    lengths = [len(prompt) for prompt in prompts]
    print(f"costs, of {len(calibrated)} single requests: " + ", ".join(f"{name} {value:.6g}" for name, value in rack.items()))
    print(
        f"workload: {len(prompts)} requests in {times_s[-1]:.1f} s, {statistics.mean(lengths):.0f} tokens each ({min(lengths)} to "
        f"{max(lengths)}), {said.prefixes} beginnings, offered load {said.load}\n"
    )
    found = 1 - prefill.counts.tokens[COMPUTED] / sum(lengths)
    measured = {"mean": statistics.mean(ttft_s), "p50": percentile(ttft_s, 50), "p99": percentile(ttft_s, 99)}
    expected = {name: plan["ttft"][f"{name}_s"] for name in measured}
    print("| first token | measured | planned | measured by planned |\n|---|---|---|---|")
    ratios = {f"ttft_{name}_measured_over_planned": value / expected[name] for name, value in measured.items()}
    for name, value in measured.items():
        print(f"| {name} | {value * 1e3:.0f} ms | {expected[name] * 1e3:.0f} ms | {value / expected[name]:.3f} |")
    print(f"| tokens found | {found:.4f} | {plan['hit_rate']:.4f} | {found / plan['hit_rate']:.3f} |\n")
    count = len(prompts)
    parts = ", ".join(f"{name} {plan['breakdown'][f'{name}_s'] * 1e3:.0f}" for name in ("wait", "read", "compute", "hand_over"))
    moved_s = prefill.counts.pulled_s + prefill.counts.noticed_s
    print(f"a request's time as planned, ms on average: {parts} (with {rack['model.overhead_ms']:.0f} outside of the workers)")
    to_decode_s = decode.counts.pulled_s + decode.counts.noticed_s
    print(
        f"as counted: prefill's steps {prefill.prefill_s / count * 1e3:.0f}, its pulls {moved_s / count * 1e3:.0f}, its publishing "
        f"{prefill.counts.published_s / count * 1e3:.0f}, decode's pulls {to_decode_s / count * 1e3:.0f}"
    )
    outside = [name for name in ("mean", "p50") if abs(ratios[f"ttft_{name}_measured_over_planned"] - 1) > WITHIN]
    print(f"mean and median within {WITHIN:.0%}: " + ("yes" if not outside else f"no, {' and '.join(outside)}"))
    ratios["found_measured_over_planned"] = found / plan["hit_rate"]
    print("RATIOS " + json.dumps({name: round(value, 4) for name, value in ratios.items()}))


if __name__ == "__main__":
    sys.exit(main())
