#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes perf/PAPERS.md: every figure and table of the papers that this project follows, their numbers, and ours beside them.

    papers.py [--write perf]

Ours are measured here, on this machine; taken from the latest records of other benchmarks; or simulated by cxl-plan with the papers' own
numbers. What needs hardware says so. The ratios of the last line are those that were measured or simulated here.
"""

import argparse
import json
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from paper import ours, simulated  # noqa: E402

PAPERS = {
    "TraCT": "TraCT: disaggregated serving over CXL shared memory",
    "Beluga": "Beluga: a CXL-based memory pool for KV caches",
    "CXL-SSD": "CXL-SSD-accelerated KV cache offloading for LMCache",
    "Slides": "LMCache on CXL memory (joint slides of Lablup and XCENA)",
}


# What else a row has, by how ours was got: a row with a word that is not read would say "-".
SOURCES = {
    "recorded": {"record", "ratios", "form"},
    "measured": {"function"},
    "simulated": {"function"},
    "needs hardware": set(),
}
COMMON = {"paper", "where", "what", "theirs", "how", "differs"}


def ours_of(row):
    """The text of ours, and the ratios that this run measured or simulated."""
    if row.keys() != COMMON | SOURCES[row["how"]]:
        raise ValueError(f"row {row['where']!r}, {row['what']!r}: {row['how']} has {', '.join(sorted(COMMON | SOURCES[row['how']]))}")
    if "record" in row:
        return ours.recorded(row["record"], row["ratios"], row["form"])
    return getattr(ours, row["function"])() if "function" in row else ("-", {})


def table(paper, rows):
    """The rows of a paper as Markdown, and their ratios."""
    lines = [f"## {PAPERS[paper]}\n", "| | what | theirs | how | ours | what differs |", "|---|---|---|---|---|---|"]
    ratios = {}
    for row in rows:
        text, found = ours_of(row)
        ratios |= found
        print(f"   {paper}, {row['where']}: {text}", flush=True)
        cells = row["where"], row["what"], row["theirs"], row["how"], text, row["differs"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n", ratios


def draw(path):
    """What the CXL-SSD paper draws in its figure 2, simulated; returns nothing."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "kvbm-cxl", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    sizes = (1, 2, 3, 4, 5, 6, 7, 8)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for ahead in (0, 1, 2, 4, 8, 31):
        name = {0: "none", 31: "whole chunk"}.get(ahead, str(ahead))
        left.plot(sizes, [simulated.nand(gib, ahead) for gib in sizes], marker="o", markersize=3, label=name)
    left.set(yscale="log", xlabel="working set, GiB", ylabel="MB/s retrieved", title="CXL-SSD, pages read ahead (simulated)")
    left.legend(title="pages ahead")
    rates = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
    for system, name in (("none", "no cache"), ("own", "own DRAM, 48 GB"), ("pool", "pool, 48 GB")):
        right.plot(rates, [simulated.workload("A", rate)[system]["ttft"]["mean_s"] for rate in rates], marker="o", markersize=3, label=name)
    right.set(yscale="log", xlabel="requests a second", ylabel="mean time to the first token, s", title="TraCT, workload A (simulated)")
    right.legend()
    for panel in (left, right):
        panel.grid(True, which="major", color="#dcdcdc")
        panel.set_axisbelow(True)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write PAPERS.md and papers.svg there")
    asked = parser.parse_args()
    if not simulated.PLAN.is_file():
        sys.exit(f"{simulated.PLAN} is not there: run `make build`")
    parts, ratios = [], {}
    rows = tomllib.loads((HERE / "paper/rows.toml").read_text())["row"]
    for paper in PAPERS:
        text, found = table(paper, [row for row in rows if row["paper"] == paper])
        parts.append(text)
        ratios |= found
    if asked.write:
        draw(asked.write / "papers.svg")
        picture = "![What simulated devices give](papers.svg)\n"
        (asked.write / "PAPERS.md").write_text("\n".join([(HERE / "paper/heading.txt").read_text(), picture, *parts]))
    print(f"RATIOS {json.dumps({name: round(ratio, 4) for name, ratio in ratios.items()})}")


if __name__ == "__main__":
    main()
