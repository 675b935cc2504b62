#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws what perf/load.py measured: times to the first token at the middle load, over the loads, what they are made of, and throughput.

    load_plot.py target/load.csv perf/load.svg
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("svg")
# The same input gives the same file, and text stays text.
matplotlib.rcParams.update({"svg.hashsalt": "kvbm-cxl", "svg.fonttype": "none", "font.size": 9})

from matplotlib import pyplot  # noqa: E402

COLOURS = {"pool": "#1f77b4", "pool again": "#2ca02c", "ucx": "#7f7f7f"}
MEANING = {"pool": "CxlConnector, first time", "pool again": "CxlConnector, the same once more", "ucx": "NixlConnector, UCX"}
SHORT = {"pool": "pool", "pool again": "again", "ucx": "UCX"}
PART_COLOURS = {
    "wait": "#bdbdbd",
    "lookup": "#ff7f0e",
    "pull": "#d62728",
    "compute": "#1f77b4",
    "hand-over": "#9467bd",
    "decode": "#17becf",
    "rest": "#e6e0c8",
}


def read(path):
    """By (system, load): values by name, and times to the first token."""
    values, times = defaultdict(dict), defaultdict(list)
    with open(path, newline="") as file:
        for line in csv.DictReader(file):
            key = line["system"], float(line["offered"])
            if line["what"] == "ttft_s":
                times[key].append(float(line["value"]))
            else:
                values[key][line["what"]] = float(line["value"])
    return values, times


def steps(times):
    """Times in order, and the part of them that is no longer: (x, y) that begin at 0."""
    ordered = sorted(times)
    return [ordered[0], *ordered], [number / len(ordered) for number in range(len(ordered) + 1)]


def distribution(panel, times, systems, load):
    for system in systems:
        panel.plot(*steps(times[system, load]), drawstyle="steps-post", color=COLOURS[system], label=MEANING[system])
    panel.set(xscale="log", xlabel="time to the first token, s", ylabel="part of the requests", title=f"Load {load:g}", ylim=(0, 1.02))
    panel.legend(fontsize=8, loc="lower right")


def over_loads(panel, values, systems, loads):
    for system in systems:
        for what, style, name in (("mean_s", "-", "mean"), ("p99_s", "--", "P99")):
            seconds = [values[system, load][what] for load in loads]
            panel.plot(loads, seconds, style, color=COLOURS[system], marker="o", markersize=3, label=f"{SHORT[system]}, {name}")
    longest = max(values[system, load]["p99_s"] for system in systems for load in loads)
    panel.set(yscale="log", ylabel="time to the first token, s", title="Over the loads")
    # Room for the legend.
    panel.set(xlabel="offered load (1: prefill never rests if nothing is found)", ylim=(None, longest * 4))
    panel.set_xticks(loads, [f"{load:g}" for load in loads])
    panel.legend(fontsize=8, ncols=len(systems), loc="upper left")


def parts(panel, values, systems, loads, whole=False):
    """Bars in ms, or as parts of the time to the first token."""
    apart = len(systems) + 0.8
    places = {(system, load): row * apart + number for row, load in enumerate(loads) for number, system in enumerate(systems)}
    unit = {key: 1 / values[key]["mean_s"] if whole else 1e3 for key in places}
    below = dict.fromkeys(places, 0.0)
    for part, colour in PART_COLOURS.items():
        heights = [max(values[key][f"part {part}"], 0) * unit[key] for key in places]
        panel.bar(list(places.values()), heights, 0.85, bottom=list(below.values()), color=colour, label=part)
        below = {key: bottom + height for (key, bottom), height in zip(below.items(), heights, strict=True)}
    panel.set_xticks(list(places.values()), [SHORT[system] for system, _ in places], rotation=45, ha="right", fontsize=8)
    highest = max(below.values())
    label, title = ("part of the time to the first token", "The same in parts") if whole else ("mean ms of a request", "What it is made of")
    # Room for what the bars are, and for the load of each group.
    panel.set(ylabel=label, title=title, ylim=(0, highest * (1.08 if whole else 1.4)))
    for load in loads:
        group = [places[system, load] for system in systems]
        above = max(below[system, load] for system in systems) + highest * 0.02
        panel.text(sum(group) / len(group), above, f"load {load:g}", ha="center", fontsize=8)
    if not whole:
        panel.legend(fontsize=8, ncols=3, loc="upper left")


def answered(panel, values, systems, loads):
    for system in systems:
        asked, done = ([values[system, load][what] for load in loads] for what in ("offered_per_s", "achieved_per_s"))
        panel.plot(asked, done, color=COLOURS[system], marker="o", markersize=3, label=MEANING[system])
    panel.plot(asked, asked, ":", color="black", linewidth=0.8, label="as asked")
    panel.set(xlabel="requests asked a second", ylabel="requests answered a second", title="Throughput")
    panel.legend(fontsize=8)


def figure(path):
    """The picture of a file that perf/load.py wrote."""
    values, times = read(path)
    systems = list(dict.fromkeys(system for system, _ in values))
    loads = sorted({load for _, load in values})
    middle = loads[(len(loads) - 1) // 2]
    drawn = pyplot.figure(figsize=(13, 9))
    grid = drawn.add_gridspec(2, 6)
    above = [drawn.add_subplot(grid[0, columns]) for columns in (slice(0, 3), slice(3, 6))]
    below = [drawn.add_subplot(grid[1, columns]) for columns in (slice(0, 2), slice(2, 4), slice(4, 6))]
    distribution(above[0], times, systems, middle)
    over_loads(above[1], values, systems, loads)
    # The wait at the highest load would leave nothing to be seen of the others.
    parts(below[0], values, systems, sorted({loads[0], middle}))
    parts(below[1], values, systems, sorted({loads[0], middle, loads[-1]}), whole=True)
    answered(below[2], values, systems, loads)
    for panel in (*above, *below):
        panel.grid(True, which="major", axis="y" if panel.containers else "both", color="#dcdcdc")
        panel.set_axisbelow(True)
    drawn.suptitle("Dynamo graph on CPUs, one prefill and one decode worker, open loop")
    drawn.tight_layout()
    return drawn


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    drawn = figure(Path(sys.argv[1]))
    drawn.savefig(sys.argv[2], metadata={"Date": None} if sys.argv[2].endswith(".svg") else None)
    pyplot.close(drawn)


if __name__ == "__main__":
    main()
