# SPDX-License-Identifier: Apache-2.0
"""The papers' experiments on a rack that need not exist: cxl-plan with the papers' own numbers. Prefill alone is simulated (PAPERS.md)."""

import functools
import json
import subprocess
import tempfile
from pathlib import Path

from . import traces

PLAN = Path(__file__).resolve().parents[2] / "target/release/cxl-plan"
# TraCT: DeepSeek-R1-Distill-Llama-8B, 128 KiB of KV a token; assumed: an A6000 computes 5,000 tokens a second. One prefill worker, no KV
# in HBM.
TRACT = ("--preset", "tract", "--set", "model.kv_kib_per_token=128", "--set", "model.prefill_tokens_per_s=5000")
TRACT += ("--set", "rack.instances=1", "--set", "rack.hbm_gib=0", "--set", "rack.disaggregated=1")
# Beluga: Qwen-32B, 256 KiB a token, 16 instances with 28.3 GB for KV each; 900 tokens a second is what vLLM alone does in table 5
# (0.96 requests of 15,000 tokens on 16 instances).
BELUGA = ("--set", "model.kv_kib_per_token=256", "--set", "model.prefill_tokens_per_s=900", "--set", "rack.instances=16")
BELUGA += ("--set", "rack.hbm_gib=26", "--set", "rack.pool_gib=2048")


def run(requests, *arguments, block_tokens=traces.BLOCK_TOKENS):
    """What cxl-plan answers for these requests: its rows."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write(traces.lines(requests))
        file.flush()
        command = [PLAN, "run", file.name, "--json", "--block-tokens", str(block_tokens), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise RuntimeError(f"cxl-plan ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)["rows"]


def by_system(requests, *arguments, routing="least-loaded", systems="own,pool", **more):
    """The row of each system."""
    return {row["system"]: row for row in run(requests, *arguments, "--system", systems, "--routing", routing, **more)}


@functools.cache
def hand_over(tokens):
    """TraCT figure 5 without a cache: mean time to the first token over the network by that over the pool, and each in ms."""
    rows = by_system(traces.static(tokens, 200, 2 * tokens / 5000), *TRACT, "--set", "rack.dram_gib=0")
    own, pool = rows["own"]["ttft"]["mean_s"], rows["pool"]["ttft"]["mean_s"]
    return own / pool, own * 1000, pool * 1000


def tract(requests, **more):
    """TraCT figures 7 to 10: system -> row. No cache (none), as NIXL; 48 GB of own DRAM (own), as LMCache; a pool of 48 GB (pool)."""
    cached = by_system(requests, *TRACT, "--set", "rack.dram_gib=44.7", "--set", "rack.pool_gib=44.7", **more)
    return {"none": by_system(requests, *TRACT, "--set", "rack.dram_gib=0", systems="own", **more)["own"], **cached}


@functools.cache
def workload(name, per_second):
    """The same with workload A, B or C at a rate, as `traces.tract` makes it."""
    return tract(traces.tract(*traces.TRACT_UNIQUE[name], 1500, per_second))


def served(row):
    """Requests a second that were answered."""
    return row["counts"]["requests_in"] / row["span_s"]


@functools.cache
def populate_and_hit(preset="beluga", tokens=15_000, prompts=400):
    """Beluga table 5, at a rate above what is served: system -> (row of the first run, row of both). Without reuse: own DRAM of no size."""
    computing_s = prompts * tokens / 900 / 16
    first, second = traces.twice(tokens, prompts, 0.02, begins_s=2 * computing_s + 60)
    arguments = ("--preset", preset, *BELUGA, "--set", "rack.dram_gib=0")
    return {name: (by_system(first, *arguments)[name], by_system(first + second, *arguments)[name]) for name in ("own", "pool")}


def second_run_s(pair):
    """What a prompt of the second run takes, without its wait in the queue: reading and computing, in seconds."""
    first, both = pair
    count, total = (row["counts"]["requests_in"] for row in pair)
    return sum((both["breakdown"][name] * total - first["breakdown"][name] * count) / (total - count) for name in ("read_s", "compute_s"))


@functools.cache
def nand(gib, read_ahead):
    """CXL-SSD figures 1 and 2: bandwidth of retrieving a working set, in MB/s."""
    arguments = ["--preset", "cxl-ssd", "--set", f"nand.read_ahead={read_ahead}", "--set", "rack.instances=1", "--set", "rack.hbm_gib=0"]
    arguments += ["--set", "rack.dram_gib=0", "--set", "model.kv_kib_per_token=0.5", "--set", "model.prefill_tokens_per_s=1000000000"]
    (row,) = run(traces.working_set(gib), *arguments, "--system", "pool", "--routing", "least-loaded", block_tokens=256)
    read = row["counts"]["pool_read_bytes"]
    return read / (row["breakdown"]["read_s"] * row["counts"]["requests_in"]) / 1e6


@functools.cache
def slides():
    """The slides: 174K tokens in 40 s, 9.6 GiB/s from the CXL memory; system -> row. `none`: every turn computes everything."""
    arguments = ["--preset", "tract", "--set", "rack.instances=1", "--set", "rack.hbm_gib=0", "--set", "model.kv_kib_per_token=96"]
    arguments += ["--set", "model.prefill_tokens_per_s=4350", "--set", "rack.pool_gib=256", "--set", "rack.disaggregated=0"]
    arguments += [word for name in ("read_gb_s", "write_gb_s", "device_gb_s") for word in ("--set", f"device.{name}=10.3")]
    rows = by_system(traces.slides(), *arguments, "--set", "rack.dram_gib=0")
    return {"none": rows["own"], "pool": rows["pool"]}
