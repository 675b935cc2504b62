# SPDX-License-Identifier: Apache-2.0
"""The form of an item of perf/PAPERS.md."""


def item(row, text):
    """A row as an item of a list; `-` in `theirs` and `differs` says nothing."""
    theirs = "" if row["theirs"] == "-" else f" Theirs: {row['theirs']}."
    differs = "" if row["differs"] == "-" else f" {row['differs']}."
    return f"- **{row['where']}**: {row['what']}.{theirs} Ours ({row['how']}): {text}.{differs}"
