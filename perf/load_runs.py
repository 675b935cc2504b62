# SPDX-License-Identifier: Apache-2.0
"""What a run of `perf/load.py` is: one system, one offered load. Its figures, its parts, as lines of a table and of a file, and ratios."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from openloop import Seen, Served, Wrong, percentile

from graph.counters import COMPUTED, PULLED, REUSED

POOL, AGAIN, UCX = "pool", "pool again", "ucx"
# What a request's time to the first token is made of, in their order.
PARTS = ("wait", "lookup", "pull", "compute", "hand-over", "decode", "rest")
# What stands together where one number is to say it.
GROUPS = {"waiting": ("wait",), "computing": ("compute", "decode"), "moving": ("lookup", "pull", "hand-over")}
PERCENTS = (50, 90, 99)
# More than this part of the time counted twice is an error of the counting.
TOLERANCE = 0.05


@dataclass(frozen=True)
class Run:
    """tokens: of each prompt; parts: of a request, mean seconds that add up to its time to the first token; beside: mean seconds that lie
    within parts, or behind the answer; found: prompt tokens by where prefill had them from."""

    system: str
    offered: float
    offered_per_s: float
    tokens: tuple[int, ...]
    requests: tuple[Served, ...]
    parts: dict[str, float]
    beside: dict[str, float]
    found: dict[str, int]

    @property
    def ttft_s(self) -> list[float]:
        """Of each request."""
        return [each.ttft_s for each in self.requests]

    @property
    def mean_s(self) -> float:
        """Time to the first token."""
        return statistics.mean(self.ttft_s)

    @property
    def achieved_per_s(self) -> float:
        """Requests, from when the first was to come until all were answered."""
        return len(self.requests) / max(each.ended_s for each in self.requests)

    @property
    def found_share(self) -> float:
        """Of all prompt tokens, those that prefill did not compute."""
        return 1 - self.found[COMPUTED] / sum(self.tokens)

    def of_length(self, tokens: int) -> float:
        """Mean time to the first token of prompts of one length."""
        return statistics.mean(each.ttft_s for each, count in zip(self.requests, self.tokens, strict=True) if count == tokens)


def breakdown(prefill: Seen, decode: Seen, ttft_s: Sequence[float]) -> tuple[dict[str, float], dict[str, float]]:
    """Parts of a request, and what lies beside them. Raises Wrong where the workers counted more time than passed."""
    count, mean_s = len(ttft_s), statistics.mean(ttft_s)
    lookup_s, pull_s = prefill.lookup_s, prefill.counts.pulled_s + prefill.counts.noticed_s
    known = {
        # For the step under way, which the engine does not count as its queue, and in the queue.
        "wait": prefill.first_s - prefill.prefill_s - lookup_s - pull_s,
        "lookup": lookup_s,
        "pull": pull_s,
        "compute": prefill.prefill_s,
        # Until decode has the blocks: what it waits, looks up and pulls.
        "hand-over": decode.first_s - decode.prefill_s,
        "decode": decode.prefill_s,
    }
    parts = {name: seconds / count for name, seconds in known.items()}
    parts["rest"] = mean_s - sum(parts.values())
    short = {name: seconds for name, seconds in parts.items() if seconds < -TOLERANCE * mean_s}
    if short:
        raise Wrong(f"parts of a request of {mean_s:.3f} s take less than no time: {short}")
    beside = {
        "queue": prefill.queue_s,
        "publish": prefill.counts.published_s,
        "decode's lookup": decode.lookup_s,
        "decode's pull": decode.counts.pulled_s + decode.counts.noticed_s,
    }
    return parts, {name: seconds / count for name, seconds in beside.items()}


def made(
    system: str,
    offered: float,
    prompts: Sequence[Sequence[int]],
    times_s: Sequence[float],
    requests: Sequence[Served],
    spent: Mapping[str, Seen],
) -> Run:
    """A run of what was measured. Raises Wrong where it is not what was to be measured."""
    prefill, decode = spent["prefill-0"], spent["decode-0"]
    for name, seen in spent.items():
        if seen.damaged or seen.counts.failed:
            raise Wrong(f"{system}: {name} found {seen.damaged} blocks with wrong bytes, and {seen.counts.failed} requests failed")
    if decode.counts.tokens[COMPUTED]:
        raise Wrong(f"{system}: decode computed {decode.counts.tokens[COMPUTED]} tokens, which were to be handed over")
    if len(requests) != len(prompts):
        raise Wrong(f"{system}: {len(prompts)} requests, and {len(requests)} answers")
    parts, beside = breakdown(prefill, decode, [each.ttft_s for each in requests])
    per_s = len(prompts) / times_s[-1]
    return Run(system, offered, per_s, tuple(map(len, prompts)), tuple(requests), parts, beside, dict(prefill.counts.tokens))


def table(runs: Sequence[Run]) -> list[str]:
    """For people: times, then parts."""
    heads = ("system", "load", "asked /s", "answered /s", "mean", *(f"P{percent}" for percent in PERCENTS), "found", "of it in the pool")
    lines = [_row(heads), "|---" * len(heads) + "|"]
    for run in runs:
        times = [run.mean_s, *(percentile(run.ttft_s, percent) for percent in PERCENTS)]
        found = max(run.found[PULLED] + run.found[REUSED], 1)
        rates = f"{run.offered_per_s:.2f}", f"{run.achieved_per_s:.2f}"
        shares = f"{run.found_share:.2f}", f"{run.found[PULLED] / found:.2f}"
        lines.append(_row((run.system, run.offered, *rates, *(f"{each * 1e3:.0f} ms" for each in times), *shares)))
    beside = tuple(runs[0].beside)
    heads = ("system", "load", *PARTS, *(f"({name})" for name in beside))
    lines += ["", "mean ms of a request; what stands in brackets lies within the others, or behind the answer"]
    lines += [_row(heads), "|---" * len(heads) + "|"]
    for run in runs:
        lines.append(_row((run.system, run.offered, *(f"{each * 1e3:.1f}" for each in (*run.parts.values(), *run.beside.values())))))
    return lines


def _row(cells: Sequence) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def ratios(runs: Sequence[Run]) -> dict[str, float]:
    """A_over_B above 1: the second system is faster, or answers more. What a request spends on something, of its time to the first token.
    At the middle one of the loads, and at the highest."""
    by = {(run.system, run.offered): run for run in runs}
    loads = sorted({run.offered for run in runs})
    found = {}
    for where, load in (("middle", loads[(len(loads) - 1) // 2]), ("highest", loads[-1])):
        pool, again, ucx = (by[system, load] for system in (POOL, AGAIN, UCX))
        for name, one, other in (("ucx_over_pool", ucx, pool), ("ucx_over_again", ucx, again), ("first_over_again", pool, again)):
            found[f"ttft_mean_{name}_{where}"] = one.mean_s / other.mean_s
            found[f"ttft_p99_{name}_{where}"] = percentile(one.ttft_s, 99) / percentile(other.ttft_s, 99)
            found[f"answered_{name}_{where}"] = other.achieved_per_s / one.achieved_per_s
        found[f"compute_ucx_over_pool_{where}"] = ucx.parts["compute"] / pool.parts["compute"]
        for name, run in (("pool", pool), ("again", again), ("ucx", ucx)):
            for group, parts in GROUPS.items():
                found[f"{group}_of_ttft_{name}_{where}"] = sum(run.parts[part] for part in parts) / run.mean_s
        for tokens in sorted(set(pool.tokens)):
            found[f"ttft_{tokens}_ucx_over_again_{where}"] = ucx.of_length(tokens) / again.of_length(tokens)
    return {name: round(value, 4) for name, value in found.items()}
