# SPDX-License-Identifier: Apache-2.0
"""What stands beside the papers' figures: each function gives a text, and the ratios in it; rows.toml names them."""

import functools
import json
from pathlib import Path

from . import measured, simulated, traces

RECORDS = Path(__file__).resolve().parents[1] / "records"


@functools.cache
def record(name):
    """The latest record of a benchmark: (its file, ratios)."""
    found = sorted(RECORDS.glob(f"*-{name}.json"))
    if not found:
        raise RuntimeError(f"there is no record of {name}: run make {name} RECORD=1")
    return found[-1].name, json.loads(found[-1].read_text())["ratios"]


def recorded(name, wanted, form):
    """Ours from the latest record: these ratios of it, in a text with places in order. A record gives no ratio of this run."""
    file, ratios = record(name)
    return f"{form.format(*(f'{ratios[key]:.3g}' for key in wanted))} ([record](records/{file}))", {}


def hand_over():
    parts = {tokens: simulated.hand_over(tokens) for tokens in (1500, 3000, 4500, 6000)}
    text = ", ".join(f"{tokens}: {ratio:.2f}" for tokens, (ratio, _, _) in parts.items())
    return f"network by pool, {text}", {"tract_hand_over_6000": parts[6000][0]}


def throughput_no_cache():
    rows = simulated.by_system(traces.static(6000, 300, 0.01), *simulated.TRACT, "--set", "rack.dram_gib=0")
    ratio = simulated.served(rows["pool"]) / simulated.served(rows["own"])
    return f"{ratio:.2f} of the network's requests a second, when both have all that they can do", {"tract_throughput_no_cache": ratio}


def peak_throughput():
    parts, ratios = [], {}
    for name in "ABC":
        rows = simulated.workload(name, 3.0)
        against = {other: simulated.served(rows["pool"]) / simulated.served(rows[other]) for other in ("own", "none")}
        parts.append(f"{name}: {against['own']:.2f} of own DRAM, {against['none']:.2f} of no cache")
        ratios[f"tract_peak_{name.lower()}_over_none"] = against["none"]
    return "; ".join(parts), ratios


def hit_rates():
    rows = {name: simulated.workload(name, 1.0) for name in "ABC"}
    shown = [f"{name}: {row['pool']['hit_rate'] * 100:.0f} %, own DRAM {row['own']['hit_rate'] * 100:.0f} %" for name, row in rows.items()]
    return ", ".join(shown), {}


def first_tokens():
    rows = simulated.workload("A", 1.0)
    mean, tail = (rows["none"]["ttft"][key] / rows["pool"]["ttft"][key] for key in ("mean_s", "p99_s"))
    at_most = simulated.workload("A", 2.0)
    loaded = at_most["none"]["ttft"]["mean_s"] / at_most["pool"]["ttft"]["mean_s"]
    text = f"no cache by pool, A: mean {mean:.2f}, P99 {tail:.2f} at 1 a second; mean {loaded:.2f} at 2, where both queues grow"
    return text, {"tract_ttft_mean_a": mean, "tract_ttft_p99_a": tail}


def breakdown():
    rows = simulated.workload("A", 1.0)

    def of(row):
        found = row["breakdown"]
        return ", ".join(f"{name} {found[key]:.2f}" for name, key in PARTS)

    systems = (("pool", "pool"), ("own", "own DRAM"), ("none", "no cache"))
    return "; ".join(f"{label}: {of(rows[name])}" for name, label in systems) + " s", {}


PARTS = (("wait", "wait_s"), ("read", "read_s"), ("compute", "compute_s"), ("hand-over", "hand_over_s"))


def table_1():
    requests = traces.tract(1073, 1549, 4000, 1.0)
    mean = sum(tokens for _, tokens, _, _ in requests) / len(requests)
    answers = sum(tokens for _, _, tokens, _ in requests) / len(requests)
    return f"our generator: input {mean:.0f}, answer {answers:.0f} tokens on average", {}


@functools.cache
def populate():
    pairs = simulated.populate_and_hit()
    return tuple(simulated.second_run_s(pairs[name]) for name in ("own", "pool"))


def cache_hit():
    own, pool = populate()
    text = f"{own:.1f} s without reuse, {pool:.2f} s with: {own / pool:.0f} times, of prefill without its queue"
    return text, {"beluga_hit_prefill": own / pool}


def interleaving():
    pairs = {name: simulated.populate_and_hit(name) for name in ("beluga", "beluga-one-by-one")}
    one, other = (simulated.second_run_s(pair["pool"]) for pair in pairs.values())
    return f"{other / one:.2f} times as long without", {"beluga_interleaving": other / one}


def lengths():
    parts, ratios = [], {}
    for tokens in (2000, 4000, 8000, 15_000):
        pairs = simulated.populate_and_hit("beluga", tokens, 200)
        own, pool = (simulated.second_run_s(pairs[name]) for name in ("own", "pool"))
        parts.append(f"{tokens}: {own / pool:.0f}")
        ratios[f"beluga_length_{tokens}"] = own / pool
    return "without reuse by pool, " + ", ".join(parts), ratios


def stores():
    ratio = measured.stores()
    return f"stored and flushed takes {ratio:.1f} times as long as past the caches", {"store_and_flush_over_past_caches_16k": ratio}


@functools.cache
def sizes():
    return measured.block_sizes()


def block_sizes():
    found = sizes()
    (write, read), (widest_write, widest_read) = found[16], found[256]
    shown = ", ".join(f"{tokens}: {publish:.1f} and {pull:.1f}" for tokens, (publish, pull) in found.items())
    ratios = {"publish_16_over_256_tokens": write / widest_write, "pull_16_over_256_tokens": read / widest_read}
    by = f"16 by 256 tokens, {write / widest_write:.2f} of the publish and {read / widest_read:.2f} of the pull"
    return f"GB/s published and pulled by tokens of a block, {shown}: {by}", ratios


def dense():
    found = measured.dense()
    parts = [f"{name}: write -{100 - 100 * write:.0f} %, read -{100 - 100 * read:.0f} %" for name, (write, read) in found.items()]
    ratios = {}
    for name, (write, read) in found.items():
        short = name.lower().replace("-", "_").replace(".", "_")
        ratios |= {f"dense_write_{short}": write, f"dense_read_{short}": read}
    return ", ".join(parts), ratios


@functools.cache
def background():
    return measured.background()


def under_load():
    found = background()
    shown = ", ".join(f"{rate} GB/s: {p50:.2f} and {p99:.2f}" for rate, (p50, p99) in found.items())
    most = max(found)
    ratios = {"background_p50": found[most][0] / found[0][0], "background_p99": found[most][1] / found[0][1]}
    return f"P50 and P99 in us by what another process reads, {shown}", ratios


def nand_cliff():
    hit, miss = simulated.nand(4, 0), simulated.nand(8, 0)
    return f"{hit:.0f} MB/s at 4 GiB, {miss:.0f} at 8 GiB: {hit / miss:.0f} times less", {"nand_cliff": hit / miss}


def nand_ahead():
    found = {ahead: simulated.nand(8, ahead) for ahead in (0, 1, 2, 4, 8, 31)}
    shown = ", ".join(f"{ahead}: {rate:.0f}" for ahead, rate in found.items() if ahead != 31)
    text = f"MB/s at 8 GiB by pages ahead, {shown}: {found[8] / found[0]:.1f} times; a whole chunk asked for at once: {found[31]:.0f}"
    return text, {"nand_ahead_8": found[8] / found[0], "nand_chunk_at_once": found[31] / found[0]}


def turns():
    rows = simulated.slides()
    wall = rows["none"]["span_s"] / rows["pool"]["span_s"]
    warm = rows["none"]["breakdown"]["compute_s"]
    # Of 50 turns 10 are cold.
    pool = rows["pool"]["breakdown"]
    turn = (50 * (pool["compute_s"] + pool["read_s"]) - 10 * 40) / 40
    return f"wall clock {wall:.1f}, warm turns {warm / turn:.0f} times ({turn:.1f} s)", {"slides_wall": wall, "slides_warm": warm / turn}
