#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times NIXL transfers between two processes: backend CXL beside UCX (as it chooses, and over tcp) and POSIX, in one run.

Every transfer is timed alone: its post, and asking for its state until it is done. Its request is made before, its bytes are compared
after, with no clock running; one wrong byte ends the run. All sides take turns, a few transfers each, round after round, so that what the
machine does meanwhile hits all of them. The baseline of each ratio is named in it; ratios are of medians, above 1 means that CXL is faster.

    ucx, tcp       ordinary memory on both sides, UCX with what it chooses (shared memory, process_vm_readv) and with UCX_TLS=tcp
    posix          ordinary memory and a file in memory
    pool           ordinary memory here, the pool there, coherence mode software; `hw` mode hardware
    both           the pool on both sides, mode software
    staged         ordinary memory on both sides, staged through the pool, mode software; `hw_staged` mode hardware
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "nixl"), str(ROOT / "perf")]

import numpy  # noqa: E402
import wheels  # noqa: E402
from hosts import Host  # noqa: E402
from pool_api import FORMAT_COHERENT, PoolHandle, format_pool  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
LISTS = [(64, 4 * KIB), (64, 64 * KIB), (128, 20 * KIB), (1024, 4 * KIB), (1024, 20 * KIB)]
# Slots of the other process are used as often as Zipf's law says (Beluga, experiment 3).
SKEWED, SKEWED_SIZES, ZIPF_EXPONENT = "skewed", [16 * KIB, 64 * KIB], 0.99
CALL_TIMEOUT_S = 300


def name_of(length):
    return f"{length // MIB}m" if length >= MIB else f"{length // KIB}k"


class Side:
    """Two processes with agents of one backend, and the working sets in them."""

    def __init__(self, run, backend, environment=None, flags=None):
        self.run, self.backend, self.seeds, self.addresses = run, backend, {}, {}
        environment = dict(environment or {})
        if flags is not None:
            file = run.folder / f"pool-{flags}"
            format_pool(f"{file},size={4 * run.set_bytes // MIB + 512}M", flags)
            environment["CXL_POOL"] = str(file)
            # This process has the seat without which no host can join.
            self.pool = PoolHandle(str(file))
        self.hosts = [Host(run.folder, wheels.DEFAULT, environment, program=ROOT / "perf" / "nixl_agent.py") for _ in range(2)]
        for host, name in zip(self.hosts, ("here", "there"), strict=True):
            host.agent(name, backend)
            if flags is not None:
                host.open_pool(str(file))

    def buffers(self, where, ends):
        """A working set to read from and one to write to, in memory of one kind, at each of these ends."""
        for end in ends:
            for use in ("from", "to"):
                key, seed = f"{where}-{use}", len(self.seeds) + 1
                self.addresses[end, key] = self.hosts[end].call(
                    "buffer", key, where, self.run.set_bytes, seed, call_timeout_s=CALL_TIMEOUT_S
                )
                self.seeds[end, key] = seed

    def introduce(self):
        here, there = self.hosts
        here.add(there.metadata())
        there.add(here.metadata())

    def pause(self):
        """UCX's progress threads use all the processor time that there is, also while there is nothing to do: not at others' expense."""
        if self.backend == "UCX":
            for host in self.hosts:
                host.signal(signal.SIGSTOP)

    def resume(self):
        if self.backend == "UCX":
            for host in self.hosts:
                host.signal(signal.SIGCONT)

    def stop(self):
        for host in self.hosts:
            host.discard()


class Line:
    """What is measured under one name: a side, and where its memory lies at either end."""

    def __init__(self, side, name, near, far):
        self.side, self.name, self.near, self.far = side, name, near, far

    def places(self, pattern, length, total):
        """Slots of both ends in an order that no prefetcher follows; none twice, but there where the pattern is skewed."""
        random, slots = self.side.run.random, self.side.run.set_bytes // length
        far = random.permutation(slots)
        if pattern == SKEWED:
            shares = 1 / numpy.arange(1, slots + 1) ** ZIPF_EXPONENT
            return random.permutation(slots)[:total], far[random.choice(slots, total, p=shares / shares.sum())]
        return random.permutation(slots)[:total], far[:total]

    def measure(self, operation, length, pieces, count):
        """Times in ns of verified transfers."""
        operation, _, pattern = operation.partition(" ")
        near, far = self.places(pattern, length, pieces * count)
        uses = ("to", "from") if operation == "READ" else ("from", "to")
        keys = f"{self.near}-{uses[0]}", f"{self.far}-{uses[1]}"
        here, there = self.side.hosts
        remote, peer = (self.side.addresses[1, keys[1]], far, *self.memory(keys[1])), self.peer
        here.touch(keys[0], call_timeout_s=CALL_TIMEOUT_S)
        self.owner(there).touch(keys[1], call_timeout_s=CALL_TIMEOUT_S)
        times = here.measure(operation, length, pieces, count, (keys[0], near), remote, peer, call_timeout_s=CALL_TIMEOUT_S)
        if operation == "READ":
            wrong = here.verify(keys[0], length, near, self.side.seeds[1, keys[1]], far, call_timeout_s=CALL_TIMEOUT_S)
        else:
            # Of a slot that was written more than once, the last write counts.
            last = sorted({int(slot): index for index, slot in enumerate(far)}.values())
            near, far = near[last], far[last]
            wrong = self.owner(there).verify(keys[1], length, far, self.side.seeds[0, keys[0]], near, call_timeout_s=CALL_TIMEOUT_S)
        if wrong:
            raise SystemExit(f"perf-nixl: {self.name}: {operation}: {wrong}")
        return times

    peer = "there"

    def memory(self, _):
        return "DRAM", 0

    def owner(self, there):
        return there


class FileLine(Line):
    """POSIX: the far end is a file of the same agent."""

    peer = "here"

    def memory(self, key):
        return "FILE", self.side.descriptors[key]

    def owner(self, _):
        return self.side.hosts[0]


class Run:
    """All sides, and what was measured."""

    def __init__(self, options, folder):
        self.folder, self.set_bytes = folder, options.set_mib * MIB
        self.random = numpy.random.default_rng(20260101)
        self.sides, self.lines, self.times = [], [], {}
        os.environ["TEST_HUGE_PAGES"] = str(int(options.huge_pages))
        os.environ["CXL_MACHINE_ID"], os.environ["CXL_STATE_DIR"] = "perf-nixl", str(folder / "state")

    def side(self, *arguments, **named):
        self.sides.append(Side(self, *arguments, **named))
        return self.sides[-1]

    def set_up(self, wanted):
        """Makes the sides that the wanted lines need."""

        def line(kind, side, name, near, far):
            if name in wanted:
                self.lines.append(kind(side, name, near, far))

        for name, environment in (("ucx", {}), ("tcp", {"UCX_TLS": "tcp"})):
            if name in wanted:
                side = self.side("UCX", environment)
                side.buffers("heap", (0, 1))
                side.introduce()
                line(Line, side, name, "heap", "heap")
        if "posix" in wanted:
            side = self.side("POSIX")
            side.buffers("heap", (0,))
            side.descriptors = {}
            for use, seed in (("from", 11), ("to", 12)):
                path, key = str(self.folder / f"file-{use}"), f"file-{use}"
                side.descriptors[key] = side.hosts[0].file(key, path, self.set_bytes, seed, call_timeout_s=CALL_TIMEOUT_S)
                side.seeds[1, key], side.addresses[1, key] = seed, 0
            line(FileLine, side, "posix", "heap", "file")
        for prefix, flags in (("", 0), ("hw_", FORMAT_COHERENT)):
            names = {"pool": prefix.rstrip("_") or "pool", "both": f"{prefix}both", "staged": f"{prefix}staged"}
            used = [name for name in names.values() if name in wanted]
            if not used:
                continue
            side = self.side("CXL", flags=flags)
            side.buffers("heap", (0, 1) if names["staged"] in wanted else (0,))
            side.buffers("pool", (0, 1) if names["both"] in wanted else (1,))
            side.introduce()
            line(Line, side, names["pool"], "heap", "pool")
            line(Line, side, names["both"], "pool", "pool")
            line(Line, side, names["staged"], "heap", "heap")

    def idle(self, seconds):
        """Processor time that each side's two processes use per second while nothing is under way."""
        shares = {}
        for line in self.lines:
            if line.side in shares:
                continue
            line.side.resume()
            for host in line.side.hosts:
                host.begin("cpu_s", seconds)
            shares[line.side] = line.name, sum(host.end() for host in line.side.hosts) / seconds
            line.side.pause()
        return dict(shares.values())

    def measure(self, cells, rounds, budget_bytes):
        """Each cell is (operation, pieces, length); the operation is READ or WRITE, then " skewed" where it is."""
        for number, (operation, pieces, length) in enumerate(cells, 1):
            total = pieces * length
            most = self.set_bytes // total
            count = max(1, min(64, most, budget_bytes // total))
            for turn in range(rounds + 1):
                for line in self.lines:
                    # Round 0 connects the agents and touches everything once.
                    line.side.resume()
                    times = line.measure(operation, length, pieces, 1 if turn == 0 else count)
                    line.side.pause()
                    if turn:
                        self.times.setdefault((line.name, operation, pieces, length), []).extend(times)
            row = "  ".join(f"{line.name} {self.median(line.name, operation, pieces, length) / 1e3:.1f}" for line in self.lines)
            print(f"[{number}/{len(cells)}] {operation} {pieces} x {name_of(length)}, us: {row}", flush=True)

    def median(self, *key):
        return float(numpy.median(self.times[key]))

    def rows(self):
        """One row per line and cell, for the table."""
        for (name, operation, pieces, length), times in self.times.items():
            median, p99 = numpy.median(times), numpy.percentile(times, 99)
            yield name, operation, pieces, length, len(times), f"{median / 1e3:.2f}", f"{p99 / 1e3:.2f}", f"{pieces * length / median:.3f}"

    def ratio(self, ours, theirs, operation, pieces, length):
        """Their median time by ours, or None where one was not measured."""
        keys = [(name, operation, pieces, length) for name in (theirs, ours)]
        return self.median(*keys[0]) / self.median(*keys[1]) if all(key in self.times for key in keys) else None

    def ratios(self, cells):
        """The ratios by name."""
        found = {}

        def add(name, value):
            if value is not None:
                found[name] = min(round(value, 3), found.get(name, float("inf")))

        for operation, pieces, length in cells:
            shape = name_of(length) if pieces == 1 else f"{pieces}x{name_of(length)}"
            verb = operation.lower().replace(" ", "_")
            add(f"{verb}_{shape}_vs_ucx", self.ratio("pool", "ucx", operation, pieces, length))
            add(f"{verb}_{shape}_vs_posix", self.ratio("pool", "posix", operation, pieces, length))
            add(f"hw_{verb}_{shape}_vs_ucx", self.ratio("hw", "ucx", operation, pieces, length))
            add(f"both_{verb}_{shape}_vs_ucx", self.ratio("both", "ucx", operation, pieces, length))
            # Of READ and WRITE the one that is worse.
            add(f"staged_{shape}_vs_tcp", self.ratio("staged", "tcp", operation, pieces, length))
            add(f"staged_{shape}_vs_ucx", self.ratio("staged", "ucx", operation, pieces, length))
            add(f"hw_staged_{shape}_vs_tcp", self.ratio("hw_staged", "tcp", operation, pieces, length))
        return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = ["ucx", "tcp", "posix", "pool", "both", "staged", "hw", "hw_both", "hw_staged"]
    parser.add_argument("--lines", nargs="+", choices=every, default=[name for name in every if name != "hw_both"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--set-mib", type=int, default=384, help="each working set; more than the last-level cache has")
    parser.add_argument("--budget-mib", type=int, default=32, help="how much a line moves in one turn")
    parser.add_argument("--huge-pages", action="store_true", help="ordinary memory asks for huge pages, on both sides of every line")
    parser.add_argument("--quick", action="store_true", help="few cells and rounds, to see that it works")
    options = parser.parse_args()
    shapes = [(1, length) for length in SIZES] + LISTS
    if options.quick:
        shapes, options.rounds = [(1, 4 * KIB), (1, 64 * KIB), (1, 16 * MIB), (128, 20 * KIB)], 3
    cells = [(operation, *shape) for shape in shapes for operation in ("READ", "WRITE")]
    skewed = SKEWED_SIZES[:1] if options.quick else SKEWED_SIZES
    cells += [(f"{operation} {SKEWED}", 1, length) for length in skewed for operation in ("READ", "WRITE")]
    folder = Path(tempfile.mkdtemp(prefix="kvbm-cxl-perf-", dir="/dev/shm"))
    run = Run(options, folder)
    try:
        run.set_up(options.lines)
        run.measure(cells, options.rounds, options.budget_mib * MIB)
        for name, share in run.idle(2.0).items():
            print(f"idle, the two processes of {name}: {share * 100:.1f} % of one core")
    finally:
        for side in run.sides:
            side.stop()
        shutil.rmtree(folder, ignore_errors=True)
    header = "line", "operation", "pieces", "piece_bytes", "count", "median_us", "p99_us", "gb_per_s"
    print(" | ".join(header))
    for row in run.rows():
        print(" | ".join(map(str, row)))
    found = run.ratios(cells)
    if not found:
        raise SystemExit("perf-nixl: nothing to compare: --lines needs one of CXL and one other")
    print(f"RATIOS {json.dumps(found)}")


if __name__ == "__main__":
    main()
