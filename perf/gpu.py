#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Verifies and times the path between a GPU and the pool on a machine with an NVIDIA GPU, in 6 minutes at most.

    python3 gpu.py                  in the unpacked kit of `make gpu-kit`; needs no network. --look: is there a GPU?

Each part is a process of its own with its own time limit. A part that fails or hangs is reported, and the next one runs: the program always
ends with a table of figures, a record for perf/records, and the ratios. It exits with 1 if a part failed.

`..._of_link` is a rate divided by that of copies between pinned memory and the GPU in the same part; `..._summed_over_plain` is the cost of
checksums. `pool_over_pinned_to_gpu` is the bandwidth of plain copies of 1 MiB out of the registered pool divided by that out of pinned
memory. Ratios of the other parts: gpu_queued.py, gpu_serving.py, gpu_worker.py, gpu_nixl.py.
"""

import argparse
import datetime
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import gpu_driver  # noqa: E402
import run  # noqa: E402

TOTAL_S = 360
# Part -> seconds at most, module, function.
PARTS = {
    "program": (40, "gpu_blocks", "test_program"),
    "truth": (25, "gpu_blocks", "truth"),
    "processes": (25, "gpu_blocks", "two_processes"),
    "blocks": (60, "gpu_blocks", "blocks_of_a_model"),
    "serving": (100, "gpu_serving", "measure"),
    "nixl": (60, "gpu_nixl", "measure"),
    "shapes": (25, "gpu_blocks", "shapes"),
    "memory": (15, "gpu_blocks", "plain_memory"),
    "steps": (20, "gpu_queued", "measure"),
    "connector": (30, "gpu_worker", "measure"),
    "computing": (15, "gpu_blocks", "computing"),
    "memcheck": (60, "gpu_blocks", "memcheck"),
    "racecheck": (60, "gpu_blocks", "racecheck"),
}


class Report:
    """What the parts said, for the table, the record and the ratios."""

    def __init__(self):
        self.ratios, self.rows, self.parts, self.printed, self.failed = {}, [], [], [], []

    def take(self, name, outcome, lines):
        """Of a part that found a wrong byte no figure counts."""
        for line in lines:
            kind, _, rest = line.partition(" ")
            if kind == "RATIO" and "WRONG" not in outcome:
                self.ratios |= json.loads(rest)
            elif kind == "ROW" and "WRONG" not in outcome:
                self.rows.append(json.loads(rest))
            elif kind not in ("RATIO", "ROW", "LEFT_OUT"):
                self.say(f"  {line}")
        self.parts.append((f"part {name}", outcome[:100], ""))
        self.say(f"{name}: {outcome}")

    def say(self, line):
        self.printed.append(line)
        print(line, flush=True)

    def table(self):
        rows = [("figure", "measured", "aim"), *self.rows, *self.parts]
        widths = [max(len(str(row[column])) for row in rows) for column in range(3)]
        lines = ["| " + " | ".join(f"{cell!s:{width}}" for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
        return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def ended(process, limit_s):
    """How a part ended, within its limit or killed with all that it started."""
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        status = None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if status is None:
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:  # In the driver, where no signal reaches it.
            return f"FAILED: did not end in {limit_s:.0f} s, and cannot be killed"
        return f"FAILED: did not end in {limit_s:.0f} s"
    return "done" if status == 0 else f"FAILED: {signal.Signals(-status).name if status < 0 else f'exit {status}'}"


def _output():
    return tempfile.TemporaryFile("w+", errors="replace")


def run_part(name, limit_s, arguments, report):
    """Runs a part in a process of its own, with its output in files that no one has to read in time."""
    start = time.monotonic()
    command = [sys.executable, sys.argv[0], f"--part={name}", *arguments]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with _output() as out, _output() as errors:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, env=environment, start_new_session=True)
        outcome = ended(process, limit_s)
        out.seek(0)
        errors.seek(0)
        lines, said = out.read().splitlines(), errors.read().strip()
    left_out = [line.partition(" ")[2] for line in lines if line.startswith("LEFT_OUT ")]
    if outcome == "done" and left_out:
        outcome = f"left out: {left_out[-1]}"
    elif outcome != "done":
        report.failed.append(name)
        outcome += f": {said.splitlines()[-1][-300:]}" if said else ""
        lines += said[-3000:].splitlines()
    report.take(name, outcome if outcome.startswith("left") else f"{outcome} ({time.monotonic() - start:.1f} s)", lines)


def measure_all(arguments, pool, scale):
    """Runs each part, then prints the table, writes the record, and prints the ratios. Returns the exit status."""
    report, date, end = Report(), datetime.datetime.now(datetime.timezone.utc), time.monotonic() + TOTAL_S * scale - 10
    # In a process of its own, like all that calls the driver.
    command = [sys.executable, sys.argv[0], "--look"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    outcome, gpu = ended(process, 30 * scale), process.stdout.read().strip()
    print(gpu or f"the CUDA driver {outcome}", flush=True)
    if outcome != "done":
        return 0 if gpu.startswith("skipped") else 1
    for name, (limit_s, *_) in PARTS.items():
        limit_s = min(limit_s * scale, end - time.monotonic())
        if limit_s > 0:
            run_part(name, limit_s, arguments, report)
            pool.unlink(missing_ok=True)
        else:
            report.take(name, f"left out: {TOTAL_S * scale} s are over", [])
    for line in ("", *report.table()):
        report.say(line)
    machine = run.machine() | {"gpu": gpu}
    path = run.write_record(Path(os.environ.get("OUT") or "."), "perf-gpu", sys.argv, report.ratios, report.printed, date, machine)
    print(f"record: {path}; to keep it, copy it to perf/records and run perf/run.py --summary")
    print("RATIOS " + json.dumps(report.ratios))
    return 1 if report.failed else 0


def main():
    parser = argparse.ArgumentParser(description="The path between a GPU and the pool, verified and timed.")
    parser.add_argument("--look", action="store_true", help="name the GPU, and exit with 1 if there is none")
    parser.add_argument("--pool", type=Path, default=Path("/dev/shm/kvbm-cxl-perf-gpu"), help="a file that is made and removed")
    parser.add_argument("--dry", action="store_true", help="small sizes, and tensors of the CPU if PyTorch has no CUDA")
    parser.add_argument("--part", choices=PARTS, help="only this part, in this process")
    parser.add_argument("others", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    arguments = [f"--pool={options.pool}", *(["--dry"] if options.dry else [])]
    if options.look:
        try:
            return print(gpu_driver.Gpu().describe())
        except gpu_driver.NoGpu as reason:
            print(f"skipped: no GPU to use: {reason}")
            return 1
    if not options.part:
        # A dry run is on a machine that others use, without a GPU.
        return measure_all(arguments, options.pool, 20 if options.dry else 1)
    import gpu_bench

    _, module, function = PARTS[options.part]
    try:
        getattr(importlib.import_module(module), function)(gpu_bench.Bench(options, arguments))
    except (gpu_bench.LeftOut, gpu_driver.NoGpu) as reason:
        print(f"LEFT_OUT {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
