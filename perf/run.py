#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a benchmark of perf/programs.toml, checks that its last line is `RATIOS {json}`, and with --record keeps it: perf/records has the
latest run of each benchmark and machine, perf/SUMMARY.md an item of each. Earlier records are in the history.

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
import textwrap
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PERF = ROOT / "perf"
HEADING = """# Latest figures

The latest recorded run of each benchmark on each machine; `make perf-NAME RECORD=1` adds one. [What each ratio means](README.md).
Compare ratios of one machine only. The record has all ratios, the commit and the output.

"""
# The ratios that the summary shows; of a benchmark that is not listed, the first ones.
MAIN_RATIOS = {
    "perf-copy": ("publish_1m_over_nt_copy", "pull_1m_over_best_safe_loop", "gather_over_safe_copy_per_piece"),
    "perf-load": (
        "ttft_mean_ucx_over_pool_middle",
        "ttft_p99_ucx_over_pool_middle",
        "ttft_mean_first_over_again_middle",
        "answered_ucx_over_pool_highest",
        "answered_first_over_again_highest",
    ),
    "perf-nixl": ("read_4k_vs_ucx", "write_4k_vs_ucx", "read_1m_vs_ucx", "write_1m_vs_ucx", "staged_1m_vs_tcp"),
    "perf-paper": ("dense_write_llama_3_1_8b", "dense_read_llama_3_1_8b", "pull_16_over_256_tokens", "nand_ahead_8", "slides_wall"),
    "perf-pool": ("publish_1m_vs_bare", "pull_64k_vs_bare", "pull_1m_vs_bare", "lookup64_vs_fetch", "pull_1m_vs_ucx"),
    "perf-routing": ("prefill_work_without_over_with_pool_round_robin", "prefill_work_round_robin_over_kv_with_pool"),
    "perf-serve": ("transfer_time_vs_ucx", "transfer_and_publish_time_vs_ucx", "prefill_tokens_vs_ucx", "ttft_shared_prefix_vs_ucx"),
    "perf-ssd": (
        "ssd_cliff",
        "ssd_degree_8_over_0",
        "ssd_told_over_best_degree",
        "ssd_told_over_best_degree_random",
        "ssd_told_with_degree_8_over_best_degree_random",
    ),
    "perf-trace": (
        "found_over_planned_mooncake_conversation",
        "found_over_planned_mooncake_synthetic",
        "pool_over_own_prefix_aware_mooncake_conversation",
        "pool_over_own_prefix_aware_mooncake_synthetic",
        "leaf_lru_over_lru_mooncake_synthetic",
    ),
    "perf-tier": ("put_and_get_64_of_1024k_vs_ucx", "put_and_get_1_of_64k_vs_ucx", "lookup_1000_over_memcpy_1m"),
}
MOST_RATIOS = 5


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
    """CPU model, cores that this process may use, kernel."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "kernel": f"{platform.system()} {platform.release()}"}


def revision():
    """Commit of the checkout, marked where files differ from it; of a kit that of the checkout which made it."""
    if (stamp := Path(__file__).with_name("commit")).exists():
        return stamp.read_text().strip()
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def write_record(folder, name, command, ratios, printed, date, machine):
    """Writes the record of a run to the folder; returns its path."""
    known = {"name": name, "date": date.strftime("%Y-%m-%dT%H:%MZ"), "commit": revision(), "machine": machine}
    path = folder / f"{date:%Y-%m-%dT%H%MZ}-{name}.json"
    record = known | {"command": shlex.join(map(str, command)), "ratios": ratios, "printed": printed}
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return path


def keep(name, command, ratios, printed, date):
    """Writes the record of a run in the place of the earlier one of this machine, and the summary; returns the record's path."""
    folder = PERF / "records"
    folder.mkdir(parents=True, exist_ok=True)
    path = write_record(folder, name, command, ratios, printed, date, machine())
    latest = {path for path, _ in latest_records().values()}
    for superseded in set(folder.glob("*.json")) - latest:
        superseded.unlink()
    write_summary()
    return path


def latest_records():
    """Path and content of the latest record, by benchmark and machine."""
    latest = {}
    for path in sorted((PERF / "records").glob("*.json")):
        record = json.loads(path.read_text())
        of = record["machine"]
        latest[record["name"], ", ".join([of["cpu"], f"{of['cores']} cores", *([of["gpu"]] if "gpu" in of else [])])] = path, record
    return latest


def summary():
    """The text of perf/SUMMARY.md, from the records."""
    rows = []
    for (name, where), (path, record) in sorted(latest_records().items()):
        ratios = record["ratios"]
        main = [key for key in MAIN_RATIOS.get(name, ratios) if key in ratios][:MOST_RATIOS]
        figures = ", ".join(f"`{key}` {ratios[key]:.4g}" for key in main)
        item = f"- [{name}, {record['date'][:10]}](records/{path.name}), {where}: {figures}"
        rows.append(textwrap.fill(item, 160, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) + "\n")
    return HEADING + "".join(rows)


def write_summary():
    """Writes perf/SUMMARY.md."""
    (PERF / "SUMMARY.md").write_text(summary())


def programs():
    """The benchmarks: their entries of programs.toml by name."""
    return tomllib.loads((PERF / "programs.toml").read_text())


def command_of(entry, environment):
    """The program of an entry with its arguments, and the make targets that it needs."""
    needs, command = list(entry.get("needs", [])), list(entry["run"])
    for more in entry.get("with", []):
        if environment.get(more.get("variable", "")) or ("file" in more and (ROOT / more["file"]).exists()):
            needs += more.get("needs", [])
            command += more["run"]
    return needs, [word for part in command for word in expanded(part, environment)]


def expanded(part, environment):
    """The words that stand for an argument. `$NAME` is one word, whatever it holds; `$NAME_ARGS` has several, as a shell reads them."""
    if not part.startswith("$"):
        return [part]
    value = environment.get(part[1:], "")
    return shlex.split(value) if part.endswith("_ARGS") else [value]


def why_not(look):
    """Why a program cannot run on this machine, by the last line of the command `look`; None where it can."""
    looked = subprocess.run(look, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if not looked.returncode:
        return None
    return (looked.stdout.strip().splitlines() or [f"{shlex.join(look)} ends with {looked.returncode}"])[-1]


def run(name, entry, record):
    """Runs a benchmark; returns the exit status."""
    environment = dict(os.environ)
    if (variable := entry.get("given")) and not environment.get(variable):
        return skip(name, f"{variable}= names nothing")
    needs, command = command_of(entry, environment)
    if needs and (status := subprocess.run(["make", "--no-print-directory", *needs], cwd=ROOT, check=False).returncode):
        return status
    if "look" in entry and (reason := why_not(entry["look"])):
        return skip(name, reason)
    environment |= {key: str(ROOT / value) for key, value in entry.get("environment", {}).items()}
    limit_s = entry.get("timeout_s", 600)
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"perf: {name}: {error}", file=sys.stderr)
        return 1
    print(done.stdout, end="", flush=True)
    if done.returncode:
        print(f"perf: {name}: exit {done.returncode}, nothing recorded", file=sys.stderr)
        return done.returncode if done.returncode > 0 else 1
    try:
        ratios = parse_ratios(done.stdout)
    except ValueError as error:
        print(f"perf: {name}: {error}", file=sys.stderr)
        return 1
    if record:
        printed = "\n".join(done.stdout.rstrip().splitlines()[:-1]).strip().splitlines()
        kept = keep(name, command, ratios, printed, datetime.datetime.now(datetime.timezone.utc))
        print(f"perf: recorded in {kept}", file=sys.stderr)
    return 0


def skip(name, reason):
    """Says that nothing ran; that is no failure."""
    print(f"== {name}: SKIPPED, nothing was run: {reason}")
    return 0


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="keep the run in perf/records, and its figures in perf/SUMMARY.md")
    parser.add_argument("--summary", action="store_true", help="run nothing: write perf/SUMMARY.md from the records")
    parser.add_argument("name", nargs="?", help="of the benchmark; without one the benchmarks are listed")
    options = parser.parse_args(arguments)
    known = programs()
    if options.summary:
        write_summary()
    elif not options.name:
        width = max(map(len, known))
        print("".join(f"{name:{width}}  {entry['about']}\n" for name, entry in known.items()), end="")
    elif options.name not in known:
        parser.error(f"there is no benchmark {options.name}; there are {', '.join(known)}")
    else:
        return run(options.name, known[options.name], options.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
