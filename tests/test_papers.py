# SPDX-License-Identifier: Apache-2.0
"""perf/paper/rows.toml: every row can be filled, and perf/PAPERS.md has each of them."""

import ast
import json
import sys
import tomllib

import tidy

PERF = tidy.ROOT / "perf"
sys.path.insert(0, str(PERF))
from paper import items as paper_items  # noqa: E402

ROWS = tomllib.loads((PERF / "paper/rows.toml").read_text())["row"]
HOW = {"measured", "recorded", "simulated", "needs hardware"}
# Figures and tables with results, as the papers number them.
EXPECTED = {
    "TraCT": {"Table 1", *(f"Figure {number}" for number in range(5, 12))},
    "Beluga": {"Table 4", "Table 5", "Table 6", "Figure 5", "Figure 7", "Figure 8", "Figure 14", "Figure 15"},
    "CXL-SSD": {"Figure 1", "Figure 2"},
    "Slides": {"Results"},
}


def latest(name):
    """Ratios of the latest record of a benchmark."""
    path = sorted((PERF / "records").glob(f"*-{name}.json"))[-1]
    return json.loads(path.read_text())["ratios"]


def test_every_row_says_how_ours_was_got_and_where_from():
    functions = {found.name for found in ast.parse((PERF / "paper/ours.py").read_text()).body if isinstance(found, ast.FunctionDef)}
    for row in ROWS:
        assert row["how"] in HOW and row["theirs"] and row["differs"], row
        if row["how"] == "recorded":
            assert set(row["ratios"]) <= set(latest(row["record"])) and row["form"].count("{}") == len(row["ratios"]), row
        elif row["how"] == "needs hardware":
            assert not {"function", "record"} & set(row), row
        else:
            assert row["function"] in functions, row


def test_no_figure_with_results_is_left_out():
    for paper, wanted in EXPECTED.items():
        assert wanted <= {row["where"] for row in ROWS if row["paper"] == paper}, paper


def test_the_page_has_every_row_filled():
    items = (PERF / "PAPERS.md").read_text().replace("\n  ", " ").splitlines()
    for row in ROWS:
        head, tail = paper_items.item(row, "\0").split("\0")
        found = [item for item in items if item.startswith(head) and item.endswith(tail)]
        assert len(found) == 1, head
        assert (found[0] == f"{head}-{tail}") == (row["how"] == "needs hardware"), head
