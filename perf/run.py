#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a perf program, checks that its last line is `RATIOS {json}`, and with --record keeps it in perf/RESULTS.md.

A ratio compares two things measured in the same run, so that it survives a change of machine better than a time does.
Exits with the program's status, or with 1 where there is nothing valid to report.
"""

import argparse
import datetime
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "perf" / "RESULTS.md"
HEADING = """# Recorded runs

Appended by `make perf-NAME RECORD=1`, newest last. What each ratio means: perf/README.md. Compare ratios of one machine only.
"""


def parse_ratios(output):
    """The object of the last line. Raises ValueError where it is missing, malformed, empty, or holds anything but positive numbers."""
    lines = output.rstrip().splitlines()
    if not lines or not lines[-1].startswith("RATIOS "):
        raise ValueError("the last line of the output is not `RATIOS {json}`")
    ratios = json.loads(lines[-1].removeprefix("RATIOS "))
    if not isinstance(ratios, dict) or not ratios:
        raise ValueError("RATIOS holds no object with at least one ratio")
    for name, value in ratios.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            raise ValueError(f"ratio {name!r} is {value!r}: not a positive number, so something was not measured")
    return ratios


def machine():
    """CPU model, cores this process may use, and kernel, in one line."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {platform.system()} {platform.release()}"


def revision():
    """Commit of the checkout, marked where files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def entry(name, command, ratios, date, text):
    """One record, as Markdown; `text` is what the program printed for people."""
    rows = "".join(f"| {key} | {value:.4g} |\n" for key, value in ratios.items())
    return (
        f"\n## {name}, {date}\n\n- command: `{shlex.join(command)}`\n- commit: {revision()}\n- machine: {machine()}\n\n"
        f"| ratio | value |\n|---|---|\n{rows}\n```text\n{text}\n```\n"
    )


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="append the run to perf/RESULTS.md")
    parser.add_argument("--timeout-s", type=float, default=600, help="end a program that takes longer")
    parser.add_argument("name")
    parser.add_argument("command", nargs="+", help="the program and its arguments, after --")
    options = parser.parse_args(arguments)
    try:
        done = subprocess.run(options.command, stdout=subprocess.PIPE, text=True, timeout=options.timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"perf: {options.name}: {error}", file=sys.stderr)
        return 1
    print(done.stdout, end="", flush=True)
    if done.returncode:
        print(f"perf: {options.name}: exit {done.returncode}, nothing recorded", file=sys.stderr)
        return done.returncode if done.returncode > 0 else 1
    try:
        ratios = parse_ratios(done.stdout)
    except ValueError as error:
        print(f"perf: {options.name}: {error}", file=sys.stderr)
        return 1
    if options.record:
        date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        text = "\n".join(done.stdout.rstrip().splitlines()[:-1]).strip()
        known = RESULTS.read_text() if RESULTS.exists() else HEADING
        RESULTS.write_text(known + entry(options.name, options.command, ratios, date, text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
