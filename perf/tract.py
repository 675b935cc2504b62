#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""TraCT's workloads A, B and C, made by AIPerf's synthesizer of a recorded trace, on the rack that TraCT describes: simulated by cxl-plan.

    tract.py FOLDER          a folder with mooncake_conversation.jsonl

The lengths are those of TraCT's table 1 (`perf/paper/synthesize.py`); which requests begin alike is what Mooncake recorded. They come at
random times (Poisson), 1 and 3 a second. Compared are no cache, as NIXL has it, 48 GB of own DRAM, as LMCache, and a pool of 48 GB, for one
prefill worker, with the published latencies and bandwidths: a network at its full rate, and no software's own time.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "perf"))

from paper import simulated, traces  # noqa: E402

TRACE = "mooncake_conversation.jsonl"
BLOCK_TOKENS = 512
TIMEOUT_S = 1200
# By how much a mean may miss that of table 1: what requests share are blocks of 512 tokens.
TOLERANCE = 0.05


class Wrong(Exception):
    """Requests that are not those of the paper."""


def checked(name, found):
    """The lengths that were made, if they are those of table 1."""
    wanted = {"input": traces.TRACT_INPUT[0], "unique": traces.TRACT_UNIQUE[name][0], "answer": traces.TRACT_ANSWER[0]}
    for what, mean in wanted.items():
        if abs(found[what][0] / mean - 1) > TOLERANCE:
            raise Wrong(f"workload {name}: {what} has {found[what][0]:.0f} tokens on average, not {mean}")
    return found


def synthesized(name, trace):
    """The lengths of a workload, and its requests as lines of JSON."""
    command = [sys.executable, ROOT / "perf/paper/synthesize.py", trace, traces.TRACT_UNIQUE[name][0], traces.TRACT_INPUT[0]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".venv/aiperf")}
    command = [str(word) for word in (*command, traces.TRACT_ANSWER[0])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    if done.returncode:
        raise Wrong(f"AIPerf's synthesizer ended with {done.returncode}: {done.stderr[-2000:]}")
    return checked(name, json.loads(done.stderr.splitlines()[-1])), done.stdout.splitlines()


def at_rate(lines, per_second, count):
    """The first requests as `traces.lines` takes them, at random times."""
    source, at, requests = random.Random(1), 0.0, []
    for line in lines[:count]:
        request = json.loads(line)
        at += source.expovariate(per_second)
        requests.append((at, request["input_length"], request["output_length"], request["hash_ids"]))
    return requests


def compared(name, at_one, at_three):
    """The ratios of a workload, from its rows at 1 and 3 requests a second."""
    none, own, pool = (at_one[system] for system in ("none", "own", "pool"))
    served = {system: simulated.served(row) for system, row in at_three.items()}
    found = {
        "hits_pool_over_own": pool["hit_rate"] / own["hit_rate"],
        "ttft_mean_none_over_pool": none["ttft"]["mean_s"] / pool["ttft"]["mean_s"],
        "ttft_p99_none_over_pool": none["ttft"]["p99_s"] / pool["ttft"]["p99_s"],
        "peak_pool_over_none": served["pool"] / served["none"],
        "peak_pool_over_own": served["pool"] / served["own"],
    }
    return {f"{key}_{name.lower()}": ratio for key, ratio in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help=f"where {TRACE} is")
    parser.add_argument("--requests", type=int, default=4000, help="of each workload")
    asked = parser.parse_args()
    trace = asked.folder / TRACE
    if not trace.is_file():
        sys.exit(f"perf-tract: {trace} is not there: name the folder of the recorded traces with TRACES=")
    ratios = {}
    try:
        for name in traces.TRACT_UNIQUE:
            lengths, lines = synthesized(name, trace)
            shown = ", ".join(f"{what} {mean:.0f} ({deviation:.0f})" for what, (mean, deviation) in lengths.items())
            print(f"workload {name}, tokens on average (deviation): {shown}", flush=True)
            rows = {rate: simulated.tract(at_rate(lines, rate, asked.requests), block_tokens=BLOCK_TOKENS) for rate in (1.0, 3.0)}
            for system, row in rows[1.0].items():
                ttft = row["ttft"]
                print(
                    f"   {system}: {row['hit_rate'] * 100:.1f} % found; first token {ttft['mean_s']:.2f} s, P99 {ttft['p99_s']:.2f} s at 1 "
                    f"a second; {simulated.served(rows[3.0][system]):.2f} served a second of 3",
                    flush=True,
                )
            ratios |= compared(name, rows[1.0], rows[3.0])
    except (Wrong, RuntimeError) as error:
        sys.exit(f"perf-tract: {error}")
    print(f"RATIOS {json.dumps({name: round(ratio, 4) for name, ratio in ratios.items()})}")


if __name__ == "__main__":
    main()
