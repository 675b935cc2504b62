# SPDX-License-Identifier: Apache-2.0
"""The size of the house, its prose, and the marks of the commands in its documents."""

import re
import sys

import tidy
import tidy_prose

sys.path.insert(0, str(tidy.ROOT / "tests" / "documented"))
import blocks  # noqa: E402

SETUPS = re.compile(r"^SETUPS := (.*)$", re.MULTILINE)
# By how much production may grow in a change before CHANGELOG names who gains.
ROOM_LINES = 500
TESTS = re.compile(r"(^|/)tests?(/|\.rs$)|_test\.(cpp|py|rs)$|/test_[^/]*$|^kvbm_cxl/fuzz/")
DATA = re.compile(r"^perf/records/|\.(svg|png|csv|jsonl|lock|ptx)$|^deploy/helm/.*/dashboards/|^scripts/requirements/")
CODE = re.compile(r"\.(rs|c|cc|cpp|h|hpp|cu|py|pyi|sh|tpl)$")


def part_of(path):
    """The part of the house that a file belongs to."""
    if DATA.search(path):
        return "data"
    if TESTS.search(path):
        return "tests"
    if path.startswith("kvbm_cxl/sim/"):
        return "simulator"
    if path.startswith(("kvbm_cxl/", "nixl_plugin/", "python/", "deploy/")) and CODE.search(path):
        return "production"
    return "documents" if path.endswith(".md") else "rest"


def lines_by_part():
    found = {}
    for path in tidy.tracked():
        found[part_of(path)] = found.get(part_of(path), 0) + (tidy.ROOT / path).read_bytes().count(b"\n")
    return found


def test_production_grows_for_named_users_alone(capsys):
    """CHANGELOG says how many lines production has, and who gained what they grew for."""
    found = lines_by_part()
    with capsys.disabled():
        print("\n   lines: " + ", ".join(f"{part} {count:,}" for part, count in sorted(found.items())))
    unreleased = (tidy.ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    stated = re.findall(r"^- Lines of production code: ([\d,]+)", unreleased, re.MULTILINE)
    assert len(stated) == 1, "CHANGELOG, Unreleased: one line `- Lines of production code: N`, with the users who gain where N grows"
    most = int(stated[0].replace(",", "")) + ROOM_LINES
    assert found["production"] <= most, f"production has {found['production']} lines, more than {most}: name in CHANGELOG who gains"


def test_prose_has_the_rates_of_good_prose():
    files = [(path, text) for path in tidy.tracked() if part_of(path) != "data" and (text := tidy.read(path)) is not None]
    wrong = []
    for part, by_mark in tidy_prose.rates(files).items():
        for mark, rate in by_mark.items():
            limit = tidy_prose.MARKS[mark][1]
            if rate > limit + 0.05:
                wrong.append(f"{part}: {mark}: {rate:.1f} for each 10,000 words, more than {limit}: python tests/tidy_prose.py '{mark}'")
    assert not wrong, "\n".join(wrong)


def test_every_code_block_of_the_documents_says_who_walks_it():
    makefile = tidy.read("Makefile")
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    targets |= {f"setup-{name}" for name in SETUPS.search(makefile)[1].split()}
    found = [block for page in blocks.pages() for block in blocks.blocks(page)]
    wrong = [problem for block in found if (problem := blocks.problem(block, targets))]
    assert len(found) > 30 and not wrong, "\n".join(wrong)
