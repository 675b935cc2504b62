# SPDX-License-Identifier: Apache-2.0
"""Code blocks of the documents, and the mark of each that says who walks it.

A mark is a comment on the line before the block (an empty line may stand between):

    <!-- walk: machine -->          `make test-documented` executes it as it stands, after the blocks of the page above it
    <!-- walk: machine, afresh -->  the same, with a new shell and empty devices
    <!-- walk: make TARGET -->      that target runs what these lines configure, with commands of its own
    <!-- walk: no, REASON -->       no test executes it: it needs two hosts, a cluster, a GPU, a CXL device
    <!-- walk: text -->             no commands: output, values, a part of a command
    <!-- from examples/... -->      lines of an example, which has a test of its own
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/concepts.md", "docs/start/", "docs/operating/", "deploy/", "examples/README.md")
_MARK = re.compile(r"<!-- (?:walk: (?P<walk>[^>]*?)|from (?P<example>\S+)) -->")


@dataclass(frozen=True)
class Block:
    """text: its lines without indentation or fence. mark: what the comment above it says, None without one."""

    page: str
    line: int
    text: str
    mark: str | None


def pages():
    """The documents whose blocks need a mark."""
    names = subprocess.run(["git", "-C", ROOT, "ls-files", "--", "*.md"], capture_output=True, text=True, check=True).stdout.split()
    return [name for name in names if name.startswith(PAGES)]


def _mark_above(lines, at):
    """The mark in the lines before line `at` (from 0), across one empty line."""
    above = at - 1 if at and lines[at - 1].strip() else at - 2
    found = _MARK.fullmatch(lines[above].strip()) if above >= 0 else None
    return found and (found["walk"] or f"from {found['example']}")


def blocks(page, text=None):
    """The fenced and the indented blocks of a page, in order. Indented lines that continue a list are no block."""
    lines = (text if text is not None else (ROOT / page).read_text()).splitlines()
    found, at, in_list = [], 0, False
    while at < len(lines):
        line = lines[at]
        if line.startswith("```"):
            end = next(number for number in range(at + 1, len(lines)) if lines[number].startswith("```"))
            found.append(Block(page, at + 1, "\n".join(lines[at + 1 : end]), _mark_above(lines, at)))
            at = end + 1
            continue
        if line.startswith("    ") and not in_list and (at == 0 or not lines[at - 1].strip() or _MARK.fullmatch(lines[at - 1])):
            end = at
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            body = "\n".join(each[4:] for each in lines[at:end]).rstrip()
            found.append(Block(page, at + 1, body, _mark_above(lines, at)))
            at = end
            continue
        if line.strip():
            in_list = bool(re.match(r"([-*]|\d+\.) ", line)) or (in_list and line.startswith(" "))
        at += 1
    return found


def problem(block, targets):
    """The fault of a block's mark; None if it has none. `targets`: names of the Makefile's targets."""
    where = f"{block.page}:{block.line}"
    if block.mark is None:
        return f"{where}: a code block without a mark: <!-- walk: machine -->, or as tests/documented/blocks.py lists them"
    kind, _, rest = block.mark.partition(" ")
    if kind == "make":
        missing = [word for word in rest.split() if word not in targets]
        return f"{where}: no target {', '.join(missing)}" if missing or not rest else None
    if kind == "no,":
        return None if rest else f"{where}: say why no test walks it"
    if kind == "from":
        return None if (ROOT / rest).is_file() else f"{where}: no file {rest}"
    return None if block.mark in ("machine", "machine, afresh", "text") else f"{where}: an unknown mark, {block.mark!r}"
