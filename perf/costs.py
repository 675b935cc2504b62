# SPDX-License-Identifier: Apache-2.0
"""What single requests say of a machine's costs, as `cxl-plan` takes them, and requests as it reads them."""

import hashlib
import json
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy


@dataclass(frozen=True)
class Single:
    """A request that had the machine for itself. Times in seconds: prefill's computing; everything that moved its blocks, to prefill, to
    the pool and to decode; until the first token."""

    cached: int
    computed: int
    prefill_s: float
    moved_s: float
    ttft_s: float


@dataclass(frozen=True)
class Moved:
    """What the connectors counted of all single requests: bytes and seconds of each way, and how long loads went unnoticed, each."""

    pulled_bytes: int
    pulled_s: float
    published_bytes: int
    published_s: float
    noticed_s: float
    loads: int


def prefill_costs(singles: Sequence[Single]) -> dict[str, float]:
    """Least squares of prefill's time over tokens computed and their contexts. Raises ValueError where tokens take no time."""
    tokens = numpy.array([each.computed for each in singles], float)
    contexts = tokens * numpy.array([each.cached + each.computed / 2 for each in singles])
    times = numpy.array([each.prefill_s for each in singles])
    for columns in ([numpy.ones_like(tokens), tokens, contexts], [numpy.ones_like(tokens), tokens]):
        solved = numpy.linalg.lstsq(numpy.stack(columns, axis=1), times, rcond=None)[0]
        # A cost below nothing is none; the other two are fitted without it.
        if solved[1] > 0 and (len(columns) == 2 or solved[2] > 0):
            break
    else:
        raise ValueError(f"prefill's time does not grow with its tokens: {list(solved)}")
    attention = solved[1] / solved[2] if len(solved) == 3 else 0
    return {
        "model.fixed_ms": max(solved[0], 0) * 1e3,
        "model.prefill_tokens_per_s": 1 / solved[1],
        "model.attention_tokens": attention,
    }


def costs(singles: Sequence[Single], moved: Moved) -> dict[str, float]:
    """Numbers of a rack, by name. Raises ValueError where there are too few requests, or nothing was moved."""
    if len(singles) < 4 or not (moved.pulled_s and moved.published_s and moved.loads):
        raise ValueError(f"{len(singles)} single requests that moved {moved} tell no costs")
    read_gb_s, write_gb_s = moved.pulled_bytes / moved.pulled_s / 1e9, moved.published_bytes / moved.published_s / 1e9
    outside = [each.ttft_s - each.prefill_s - each.moved_s for each in singles]
    return {
        **prefill_costs(singles),
        "model.overhead_ms": max(statistics.median(outside), 0) * 1e3,
        "device.read_gb_s": read_gb_s,
        "device.write_gb_s": write_gb_s,
        "device.device_gb_s": max(read_gb_s, write_gb_s),
        # Once for each transfer: until the engine has seen that it is over.
        "device.latency_ns": moved.noticed_s / moved.loads * 1e9,
        "device.block_latencies": 0,
    }


def compute_s(rack: dict[str, float], tokens: int) -> float:
    """What prefill takes for a prompt of which nothing was found, by a rack's costs."""
    attention = rack["model.attention_tokens"]
    dearer = 1 + tokens / 2 / attention if attention else 1
    return rack["model.fixed_ms"] / 1e3 + tokens / rack["model.prefill_tokens_per_s"] * dearer


def ids(prompt: Sequence[int], block_tokens: int) -> list[int]:
    """A number for each block of a prompt, which says all that is in front of it too."""
    found, digest = [], hashlib.sha256()
    for start in range(0, len(prompt), block_tokens):
        digest.update(json.dumps(prompt[start : start + block_tokens]).encode())
        found.append(int.from_bytes(digest.digest()[:6]))
    return found


def write_trace(path: Path, prompts: Sequence[Sequence[int]], times_s: Sequence[float], max_tokens: int, block_tokens: int) -> None:
    """Requests as `cxl-plan` reads them; times to a millisecond."""
    lines = [
        {"timestamp": round(at * 1e3), "input_length": len(prompt), "output_length": max_tokens, "hash_ids": ids(prompt, block_tokens)}
        for prompt, at in zip(prompts, times_s, strict=True)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def planned(program: Path, trace: Path, rack: dict[str, float], block_tokens: int) -> dict:
    """What `cxl-plan` says of a pool for one instance. Raises RuntimeError."""
    command = [str(program), "run", str(trace), "--json", "--preset", "this-machine", "--block-tokens", str(block_tokens)]
    command += ["--system", "pool", "--routing", "least-loaded"]
    command += [part for name, value in rack.items() for part in ("--set", f"{name}={value:.9g}")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    (row,) = json.loads(done.stdout)["rows"]
    return row
