# SPDX-License-Identifier: Apache-2.0
"""Draws what perf/nixl_transfers.py measured: medians by size, one panel each for READ and WRITE, and the lists beside them."""

import matplotlib

matplotlib.use("svg")
# The same input gives the same file, and text stays text.
matplotlib.rcParams.update({"svg.hashsalt": "kvbm-cxl", "svg.fonttype": "none", "font.size": 9})

from matplotlib import pyplot  # noqa: E402

COLOURS = {
    "ucx": "#7f7f7f",
    "tcp": "#bcbd22",
    "posix": "#8c564b",
    "pool": "#1f77b4",
    "both": "#17becf",
    "staged": "#9467bd",
    "hw": "#2ca02c",
    "hw_both": "#98df8a",
    "hw_staged": "#d62728",
}
MEANING = {
    "ucx": "UCX, as it chooses",
    "tcp": "UCX over tcp",
    "posix": "POSIX, a file in memory",
    "pool": "CXL, pool there",
    "both": "CXL, pool on both sides",
    "staged": "CXL, staged through the pool",
    "hw": "CXL mode hardware, pool there",
    "hw_both": "CXL mode hardware, pool on both sides",
    "hw_staged": "CXL mode hardware, staged",
}


def size_name(length):
    return f"{length >> 20} MiB" if length >= 1 << 20 else f"{length >> 10} KiB"


def draw(run, sizes, lists, path):
    """`run.times` has the times in ns by (line, operation, pieces, length)."""
    names = [line.name for line in run.lines]
    figure, panels = pyplot.subplots(2, 2, figsize=(12, 8), gridspec_kw={"width_ratios": [3, 2]})
    for row, operation in zip(panels, ("READ", "WRITE"), strict=True):
        for name in names:
            measured = [length for length in sizes if (name, operation, 1, length) in run.times]
            medians = [run.median(name, operation, 1, length) / 1e3 for length in measured]
            row[0].plot(measured, medians, color=COLOURS[name], marker="o", markersize=3, label=MEANING[name])
        row[0].set(xscale="log", yscale="log", title=f"{operation}, one piece", ylabel="median, us")
        row[0].set_xticks(sizes, [size_name(length) for length in sizes])
        row[0].minorticks_off()
        measured = [shape for shape in lists if (names[0], operation, *shape) in run.times]
        width = 0.8 / len(names)
        for index, name in enumerate(names):
            places = [place + (index - len(names) / 2) * width for place in range(len(measured))]
            row[1].bar(places, [run.median(name, operation, *shape) / 1e3 for shape in measured], width, color=COLOURS[name])
        row[1].set(yscale="log", title=f"{operation}, lists")
        row[1].set_xticks(range(len(measured)), [f"{count} x\n{size_name(length)}" for count, length in measured])
        for panel in row:
            panel.grid(True, which="major", color="#dcdcdc")
            panel.set_axisbelow(True)
    panels[0][0].legend(fontsize=8)
    figure.suptitle("NIXL transfers between two processes")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
