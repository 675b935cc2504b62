#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What moving KV blocks costs a Dynamo graph: CxlConnector without `publish_behind`, the same with it (its default), NixlConnector over our
plugin, NixlConnector over UCX, in turn.

Each connector gets the same graph (two prefill workers, one decode worker, round robin, the tiny model, the same CPU-only shims) and the
same requests. Three parts:
- static inputs as TraCT section 5.1 has them, as far as 4096 positions allow: prompts of 1500 and 3000 tokens, unlike each other, three
  tokens of output, one request at a time: bytes, transfer time and time to first token of the hand-over alone;
- shared prefixes: a prefix of 3000 tokens with two endings, so that round robin sends them to different prefill workers: the second one
  has to compute the prefix again, or finds it in the pool;
- a workload of the shape of TraCT's table 1, scaled to the positions there are, several clients at once: throughput, and what was written.

Transfer time is what the connectors' own metrics say of reads by decode, in both cases from the order of a read until it is over as the
connector knows it, with the engine's way there and back left out:
- ours (`kvbm_cxl_pull_seconds`) begins when the worker is given the order and ends when the last block is verified: pins, flushes, copy and
  checksums are in it. The lookup before it (`kvbm_cxl_lookup_seconds`) is not, nor that the engine is told (`kvbm_cxl_noticed_seconds`);
- NIXL's (`nixl_xfer_time_seconds`) begins when the worker posts the read and ends when NIXL finds it complete: it looks when the post
  ends and whenever the engine asks. Reads between processes of one machine are mostly over when the post returns (compare
  `nixl_post_time_seconds`), which then holds up the engine; for the others the wait for the engine to ask is in the figure. The preparation
  of descriptors and the handshake are not in it. Nothing is verified.
`transfer_time_noticed_vs_ucx` adds to ours the time until the engine was told. A hand-over through the pool copies twice:
`transfer_and_publish_time_vs_ucx` adds what prefill took to publish, of which NIXL has no counterpart: its blocks stay where they are
until decode has read them. `ttft_..._behind_vs_before` is the time to the first token with prefill's answer behind its copies, by that with
the answer in front of them. `transfer_time_vs_memcpy` has the machine's own ceiling for one thread: memcpy out of /dev/shm, of as many
bytes at a time as a request has, from lines that are in no cache. UCX's progress thread pauses as the shims for few cores have it, which
can make its time longer than elsewhere.

Bytes to decode depend on what decode has itself when a request comes. With several clients, requests with a prefix in common arrive while
the first of them is still being read: CxlConnector waits for that and reads the prefix once, NixlConnector reads it for each.

A request counts only if decode computed nothing of it, and if all connectors answered it with the same text. On few cores, times from end
to end are mostly scheduling: they are comparable within a run only.
"""

import argparse
import json
import math
import mmap
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "deploy" / "dynamo"))

from graph import counters  # noqa: E402
from graph.counters import COMPUTED, PULLED, REUSED, Counts  # noqa: E402
from graph.errors import GraphError  # noqa: E402
from graph.graph import Graph  # noqa: E402
from graph.model import BLOCK_TOKENS  # noqa: E402
from graph.options import Options  # noqa: E402

# What each is called here: the graph's connector, and options of it.
CONNECTORS: dict[str, tuple[str, dict]] = {
    "cxl": ("cxl", {"publish_behind": False}),
    "cxl-behind": ("cxl", {"publish_behind": True}),
    "nixl-cxl": ("nixl-cxl", {}),
    "nixl-ucx": ("nixl-ucx", {}),
}
VOCABULARY = range(300, 2000)
STATIC_TOKENS, STATIC_OUTPUT = (1500, 3000), 3
PREFIX_TOKENS, ENDING_TOKENS = 3000, 150
# Table 1 of TraCT, workload A: input 4449 (2424), unique 1073 (1549); scaled so that nearly all of it fits.
SCALE, INPUT, UNIQUE, OUTPUT, LONGEST = 0.4, (4449, 2424), (1073, 1549), 8, 3900
FAMILIES, CLIENTS = 2, 3
# Beyond the last-level cache of any one machine that this is likely to run on.
CEILING_BYTES = 1 << 30


class Wrong(Exception):
    """A result that must not be timed."""


def tokens(generator: random.Random, count: int) -> list[int]:
    """A prompt that is like no other."""
    return [generator.choice(VOCABULARY) for _ in range(count)]


@dataclass(frozen=True)
class Requests:
    """The same for every connector."""

    static: dict[int, list[list[int]]]
    shared: list[tuple[list[int], list[int]]]
    mixed: list[list[int]]

    @classmethod
    def make(cls, seed: int, repeats: int, mixed: int) -> "Requests":
        """`repeats` prompts of each static length and prefixes, `mixed` of the workload."""
        generator = random.Random(seed)
        static = {length: [tokens(generator, length) for _ in range(repeats)] for length in STATIC_TOKENS}
        prefixes = [tokens(generator, PREFIX_TOKENS) for _ in range(repeats)]
        shared = [tuple(prefix + tokens(generator, ENDING_TOKENS) for _ in range(2)) for prefix in prefixes]
        families = [tokens(generator, LONGEST) for _ in range(FAMILIES)]
        return cls(static, shared, [_of_table_1(generator, families) for _ in range(mixed)])


def _of_table_1(generator: random.Random, families: list[list[int]]) -> list[int]:
    """An input and its unique part, normally distributed and cut off; what is not unique is a family's common beginning."""
    length = min(max(generator.gauss(*(SCALE * number for number in INPUT)), BLOCK_TOKENS), LONGEST)
    unique = min(max(generator.gauss(*(SCALE * number for number in UNIQUE)), 1), length)
    return generator.choice(families)[: int(length - unique)] + tokens(generator, max(int(unique), 1))


@dataclass
class Measured:
    """Of one connector."""

    texts: list[str] = field(default_factory=list)
    static_bytes: int = 0
    static_s: float = 0
    static_noticed_s: float = 0
    static_published_s: float = 0
    ttft: dict[int, list[float]] = field(default_factory=dict)
    ttft_first: list[float] = field(default_factory=list)
    ttft_second: list[float] = field(default_factory=list)
    mixed_s: float = 0
    mixed: dict[str, Counts] = field(default_factory=dict)
    mixed_tokens: int = 0

    @property
    def s_per_gb(self) -> float:
        """Transfer time of the static inputs."""
        return self.static_s / self._gb

    @property
    def noticed_s_per_gb(self) -> float:
        """The same until the engine was told."""
        return (self.static_s + self.static_noticed_s) / self._gb

    @property
    def published_s_per_gb(self) -> float:
        """The same with what prefill took to publish them."""
        return (self.static_s + self.static_published_s) / self._gb

    @property
    def _gb(self) -> float:
        return self.static_bytes / 1e9


def _spent(graph: Graph, before: dict[str, Counts], requests: int) -> dict[str, Counts]:
    after = counters.wait_settled(graph, before, requests)
    return {name: count - before.get(name, Counts()) for name, count in after.items()}


def _ask(graph: Graph, prompt: list[int], output: int, measured: Measured):
    """One request alone: its answer, and what the roles spent on it. Raises Wrong where decode computed any of it."""
    before = counters.read(graph)
    answer = graph.ask(prompt, output)
    spent = _spent(graph, before, 1)
    prefill, decode = counters.of_role(spent, "prefill"), counters.of_role(spent, "decode")
    if decode.tokens[COMPUTED] or decode.failed or prefill.failed:
        raise Wrong(f"{graph.options.connector}: decode computed {decode.tokens[COMPUTED]} of {len(prompt)} tokens, failed {decode.failed}")
    measured.texts.append(answer.text)
    return answer, prefill, decode


def _static(graph: Graph, requests: Requests, measured: Measured) -> None:
    for length, prompts in requests.static.items():
        for prompt in prompts:
            answer, prefill, decode = _ask(graph, prompt, STATIC_OUTPUT, measured)
            measured.ttft.setdefault(length, []).append(answer.ttft_s)
            measured.static_bytes += decode.pulled_bytes
            measured.static_s += decode.pulled_s
            measured.static_noticed_s += decode.noticed_s
            measured.static_published_s += prefill.published_s


def _shared(graph: Graph, requests: Requests, measured: Measured) -> None:
    """The first of each pair is computed; the second comes to the other prefill worker."""
    for first, second in requests.shared:
        answer, prefill, _ = _ask(graph, first, STATIC_OUTPUT, measured)
        if prefill.tokens[COMPUTED] != len(first):
            raise Wrong(f"{graph.options.connector}: a prompt that is like no other was found in a cache: {prefill.tokens}")
        measured.ttft_first.append(answer.ttft_s)
        answer, prefill, _ = _ask(graph, second, STATIC_OUTPUT, measured)
        pulled = PREFIX_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS if graph.options.connector == "cxl" else 0
        if prefill.tokens[REUSED] or prefill.tokens[PULLED] != pulled:
            raise Wrong(f"{graph.options.connector}: the second request was not the other worker's, or did not pull: {prefill.tokens}")
        measured.ttft_second.append(answer.ttft_s)


def _mixed(graph: Graph, requests: Requests, measured: Measured) -> None:
    """All of the workload from several clients; throughput, and what was computed and written for it."""
    before, began = counters.read(graph), time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(lambda prompt: graph.ask(prompt, OUTPUT), requests.mixed))
    measured.mixed_s = time.monotonic() - began
    spent = _spent(graph, before, len(requests.mixed))
    measured.mixed = {role: counters.of_role(spent, role) for role in ("prefill", "decode")}
    measured.mixed_tokens = sum(map(len, requests.mixed))
    measured.texts += [answer.text for answer in answers]
    failed = sum(count.failed for count in measured.mixed.values())
    if failed or measured.mixed["decode"].tokens[COMPUTED]:
        raise Wrong(f"{graph.options.connector}: {failed} failed, decode computed {measured.mixed['decode'].tokens[COMPUTED]} tokens")


def measure(connector: str, requests: Requests, state: Path) -> Measured:
    """Runs a graph with this connector through all parts. Raises GraphError and Wrong."""
    measured = Measured()
    kind, extra = CONNECTORS[connector]
    options = Options(prefill=2, decode=1, connector=kind, connector_config=extra, state=state / connector)
    with Graph(options, lambda line: print(f"[{connector}] {line}", file=sys.stderr, flush=True)) as graph:
        graph.wait_until_ready()
        # Both prefill workers have met the decode worker, and compiled what they compile, before anything is timed.
        for number in range(2):
            _ask(graph, tokens(random.Random(f"warm {number}"), STATIC_TOKENS[0]), STATIC_OUTPUT, Measured())
        _static(graph, requests, measured)
        _shared(graph, requests, measured)
        _mixed(graph, requests, measured)
    return measured


def memcpy_s_per_gb(len_bytes: int) -> float:
    """What one thread needs to copy out of shared memory, `len_bytes` at a time, each byte once. Raises Wrong where they did not arrive."""
    parts = CEILING_BYTES // len_bytes
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(parts * len_bytes)
        with mmap.mmap(file.fileno(), parts * len_bytes) as memory:
            source = numpy.frombuffer(memory, numpy.uint8).reshape(parts, len_bytes)
            source.view(numpy.uint64)[:] = numpy.random.default_rng(1).integers(0, 1 << 63, (parts, len_bytes // 8), numpy.uint64)
            into = numpy.ones_like(source)  # Its pages are there, as those of a KV cache are.
            times = []
            for part in range(parts):
                began = time.perf_counter()
                into[part] = source[part]
                times.append(time.perf_counter() - began)
            if not numpy.array_equal(source, into):
                raise Wrong("memcpy: what was copied is not what was there")
            del source
    return statistics.median(times) / len_bytes * 1e9


def report(connector: str, measured: Measured) -> None:
    """Lines for people."""
    prefill, decode = measured.mixed["prefill"], measured.mixed["decode"]
    static = ", ".join(f"{length}: {statistics.median(times) * 1e3:.0f} ms" for length, times in measured.ttft.items())
    print(f"{connector}")
    print(f"  static    {measured.static_bytes / 1e6:.1f} MB to decode, {measured.s_per_gb * 1e3:.0f} ms per GB; first token {static}")
    if measured.static_noticed_s:
        noticed, published = measured.noticed_s_per_gb * 1e3, measured.published_s_per_gb * 1e3
        print(f"            until noticed {noticed:.0f} ms per GB, with publishing {published:.0f} ms per GB")
    times = [f"{statistics.median(part) * 1e3:.0f} ms" for part in (measured.ttft_first, measured.ttft_second)]
    print(f"  prefix    of {PREFIX_TOKENS} tokens: first token {times[0]}, at the other prefill worker {times[1]}")
    print(
        f"  workload  {measured.mixed_tokens} prompt tokens in {measured.mixed_s:.1f} s; prefill computed {prefill.tokens[COMPUTED]}, "
        f"pulled {prefill.tokens[PULLED]}, reused {prefill.tokens[REUSED]}; published "
        f"{prefill.published_bytes / 1e6:.1f} MB; to decode {decode.pulled_bytes / 1e6:.1f} MB"
    )


def ratios(by: dict[str, Measured], memcpy_s: float) -> dict[str, float]:
    """UCX's figure by ours: above 1 ours is faster, or moves less. `memcpy_s`: for a GB."""
    ours, behind, plugin, ucx = (by[name] for name in CONNECTORS)
    block_bytes = ours.mixed["prefill"].published_bytes / max(ours.mixed["prefill"].published_blocks, 1)
    # What was computed has to be written once, whole blocks and a tail for each request, and nothing else.
    missed_blocks = ours.mixed["prefill"].tokens[COMPUTED] / BLOCK_TOKENS + ours.mixed["prefill"].requests
    median = statistics.median
    return {
        "transfer_time_vs_ucx": ucx.s_per_gb / ours.s_per_gb,
        "transfer_time_vs_memcpy": memcpy_s / ours.s_per_gb,
        "transfer_time_noticed_vs_ucx": ucx.s_per_gb / ours.noticed_s_per_gb,
        "transfer_and_publish_time_vs_ucx": ucx.s_per_gb / ours.published_s_per_gb,
        "transfer_time_nixl_cxl_vs_ucx": ucx.s_per_gb / plugin.s_per_gb,
        "bytes_vs_ucx": ucx.mixed["decode"].pulled_bytes / ours.mixed["decode"].pulled_bytes,
        "written_of_missed": ours.mixed["prefill"].published_bytes / (missed_blocks * block_bytes),
        "ttft_static_1500_vs_ucx": median(ucx.ttft[1500]) / median(ours.ttft[1500]),
        "ttft_static_3000_vs_ucx": median(ucx.ttft[3000]) / median(ours.ttft[3000]),
        "ttft_static_1500_behind_vs_before": median(ours.ttft[1500]) / median(behind.ttft[1500]),
        "ttft_static_3000_behind_vs_before": median(ours.ttft[3000]) / median(behind.ttft[3000]),
        "ttft_shared_prefix_vs_ucx": median(ucx.ttft_second) / median(ours.ttft_second),
        "ttft_recomputed_vs_cached": median(ours.ttft_first) / median(ours.ttft_second),
        "throughput_shared_vs_ucx": ucx.mixed_s / ours.mixed_s,
        "prefill_tokens_vs_ucx": ucx.mixed["prefill"].tokens[COMPUTED] / ours.mixed["prefill"].tokens[COMPUTED],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=6, help="prompts of each static length, and shared prefixes (6)")
    parser.add_argument("--mixed", type=int, default=30, help="requests of the workload (30)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", type=Path, default=ROOT / "target" / "serve" / "perf")
    said = parser.parse_args()
    requests = Requests.make(said.seed, said.repeats, said.mixed)
    try:
        by = {connector: measure(connector, requests, said.state) for connector in CONNECTORS}
        if any(measured.texts != by["cxl"].texts for measured in by.values()):
            raise Wrong("the connectors' texts differ")
        memcpy_s = memcpy_s_per_gb(by["cxl"].static_bytes // sum(map(len, requests.static.values())) // 8 * 8)
    except (GraphError, Wrong) as error:
        print(f"perf-serve: {error}", file=sys.stderr)
        return 1
    for connector, measured in by.items():
        report(connector, measured)
    print(f"memcpy out of /dev/shm, one thread: {memcpy_s * 1e3:.0f} ms per GB")
    found = ratios(by, memcpy_s)
    print("RATIOS " + json.dumps({name: round(value, 3) for name, value in found.items() if math.isfinite(value)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
