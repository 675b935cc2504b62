# SPDX-License-Identifier: Apache-2.0
"""`make help` shows every documented target under a heading; the hosted workflow runs what .ci/run says."""

import re
import subprocess

import tidy


def printed(makefile):
    """The lines that scripts/help prints."""
    done = subprocess.run([tidy.ROOT / "scripts/help", makefile], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.splitlines()


def shown(makefile):
    """What scripts/help prints: heading -> targets; those above the first heading under the empty one."""
    groups, heading = {"": []}, ""
    for line in printed(makefile):
        if target := re.match(r"  ([a-z0-9-]+) +\S", line):
            groups[heading].append(target[1])
        elif line and not line.startswith(" "):
            heading = line
            groups[heading] = []
    return groups


def test_help_shows_every_documented_target_in_a_group():
    groups = shown(tidy.ROOT / "Makefile")
    assert groups.pop("") == ["help"]
    assert len(groups) >= 6 and all(groups.values())
    named = [target for targets in groups.values() for target in targets]
    joined = (tidy.ROOT / "Makefile").read_text().replace("\\\n", "")
    documented = re.findall(r"^([a-z0-9-]+):.* ## ", joined, re.MULTILINE)
    assert sorted([*named, "help"]) == sorted(documented) and len(set(named)) == len(named)
    assert {"demo", "serve"} <= set(groups["Try it"])


def test_help_joins_lines_and_folds(tmp_path):
    makefile = tmp_path / "Makefile"
    makefile.write_text("a: ## First\nb:\n## Two\nc: a \\\n\tb ## " + "word " * 40 + "\n\techo '  ## no'\n## Three\n")
    assert shown(makefile) == {"": ["a"], "Two": ["c"], "Three": []}
    lines = printed(makefile)
    assert all(len(line) <= 120 for line in lines) and sum(line.count("word") for line in lines) == 40


def test_the_workflow_runs_what_ci_runs():
    workflow = (tidy.ROOT / ".github/workflows/ci.yml").read_text()
    assert re.search(r"^ +run: \.ci/run$", workflow, re.MULTILINE) and "timeout-minutes: 90" in workflow
    assert re.search(r"^  push:", workflow, re.MULTILINE) and re.search(r"^  pull_request:", workflow, re.MULTILINE)
    wanted = re.search(r'^rust-version = "(.*)"', (tidy.ROOT / "Cargo.toml").read_text(), re.MULTILINE)[1]
    assert f"rustup toolchain install {wanted} " in workflow and f"rustup default {wanted}" in workflow


def shell_of(recipe):
    """What make gives to the shell for one recipe line: its own marks at the start and its conditionals are gone."""
    while found := re.fullmatch(r"[@+-]*\$\(if .*?,(\$\(STEP\).*)\)", recipe, re.DOTALL):
        recipe = found[1]
    return re.sub(r"^[@+-]+", "", recipe.replace("$(STEP)", "@scripts/step", 1) if recipe.startswith("$(STEP)") else recipe)


def test_no_recipe_gives_a_mark_of_make_to_the_shell():
    """`$(STEP)` begins with `@`, which make takes only at the start of a recipe line: later it is part of a command's name."""
    joined = (tidy.ROOT / "Makefile").read_text().replace("\\\n", "")
    recipes = re.findall(r"^\t\s*(.*)$", joined, re.MULTILINE)
    assert len(recipes) > 80
    assert [line for line in recipes if "$(STEP)" in shell_of(line) or re.search(r"(^|[;&|]\s*|then |else )@", shell_of(line))] == []
    assert "$(STEP)" in shell_of("if true; then $(STEP) name true; fi") and "$(STEP)" not in shell_of("$(if $(X),,$(STEP) name true)")
