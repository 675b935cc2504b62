#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes perf/PAPERS.md: every figure and table of the papers that this project follows, their numbers, and ours.

    papers.py [--write perf]

Ours are measured here, on this machine; taken from the latest records of other benchmarks; or simulated by cxl-plan with the papers' own
numbers. What needs hardware says so. The ratios of the last line are those that were measured or simulated here.
"""

import argparse
import json
import sys
import textwrap
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from paper import items, ours, simulated  # noqa: E402

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


def listed(paper, rows):
    """The rows of a paper as a list in Markdown, and their ratios."""
    lines = [f"## {PAPERS[paper]}\n"]
    ratios = {}
    for row in rows:
        text, found = ours_of(row)
        ratios |= found
        print(f"   {paper}, {row['where']}: {text}", flush=True)
        lines.append(textwrap.fill(items.item(row, text), 160, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
    return "\n".join(lines) + "\n", ratios


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write PAPERS.md there")
    asked = parser.parse_args()
    if not simulated.PLAN.is_file():
        sys.exit(f"{simulated.PLAN} is not there: run `make build`")
    parts, ratios = [], {}
    rows = tomllib.loads((HERE / "paper/rows.toml").read_text())["row"]
    for paper in PAPERS:
        text, found = listed(paper, [row for row in rows if row["paper"] == paper])
        parts.append(text)
        ratios |= found
    if asked.write:
        (asked.write / "PAPERS.md").write_text("\n".join([(HERE / "paper/heading.txt").read_text(), *parts]))
    print(f"RATIOS {json.dumps({name: round(ratio, 4) for name, ratio in ratios.items()})}")


if __name__ == "__main__":
    main()
