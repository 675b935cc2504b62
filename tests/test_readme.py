# SPDX-License-Identifier: Apache-2.0
"""What the documents tell a reader to run or to open exists."""

import re
from pathlib import PurePosixPath

import pytest
import tidy

DOCUMENTS = ["README.md", "CONTRIBUTING.md", "perf/README.md"]


def make_targets(makefile):
    """Names of the targets that a Makefile documents or declares phony."""
    declared = re.findall(r"^\.PHONY:(.*)$", makefile, re.MULTILINE)
    return {name for line in declared for name in line.split()}


def named_targets(text):
    """Targets of every `make NAME` in code: between back-ticks, or in an indented or fenced line."""
    code = "\n".join(re.findall(r"`([^`\n]+)`", text)) + "\n" + "\n".join(re.findall(r"^(?: {4}|\$ )(.*)$", text, re.MULTILINE))
    code += "\n" + "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    named = re.findall(r"\bmake\s+((?:[A-Z_]+=\S+\s+)*)([a-z][a-z0-9-]*)\b", code)
    return {target for _, target in named}


def quickstart(readme):
    """The commands of the first code block under the heading Quickstart."""
    block = re.search(r"^## Quickstart\n.*?^```sh\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    return [line for line in block[1].splitlines() if line.strip()] if block else []


def links(text):
    """Targets of relative links, without their anchors."""
    return [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target and not target.startswith("#")]


def packages(text):
    """Packages of every `cargo ... -p NAME`."""
    return {name for line in re.findall(r"cargo [^`\n]*", text) for name in re.findall(r"-p ([a-z][a-z0-9-]*)", line)}


@pytest.fixture(scope="module")
def targets():
    return make_targets((tidy.ROOT / "Makefile").read_text())


def test_quickstart_is_two_commands_that_exist(targets):
    commands = quickstart((tidy.ROOT / "README.md").read_text())
    assert len(commands) == 2
    assert {command.split()[1] for command in commands if command.split()[0] == "make"} <= targets
    assert all(command.split()[0] == "make" for command in commands)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_make_targets_exist(document, targets):
    named = named_targets((tidy.ROOT / document).read_text())
    assert named, "the document names no target: the pattern or the document is wrong"
    assert not named - targets


@pytest.mark.parametrize("document", [name for name in tidy.tracked() if name.endswith(".md")])
def test_relative_links_lead_to_tracked_files(document):
    folder, tracked = PurePosixPath(document).parent, set(tidy.tracked())
    folders = {str(parent) for name in tracked for parent in PurePosixPath(name).parents}
    text = (tidy.ROOT / document).read_text()
    resolved = [(link, str((tidy.ROOT / folder / link).resolve().relative_to(tidy.ROOT))) for link in links(text)]
    assert not [link for link, name in resolved if name not in tracked | folders]


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_named_packages_exist(document):
    manifests = [tidy.read(name) for name in tidy.tracked() if PurePosixPath(name).name == "Cargo.toml"]
    known = {name for manifest in manifests for name in re.findall(r'^name = "([^"]+)"', manifest, re.MULTILINE)}
    assert packages((tidy.ROOT / document).read_text()) <= known


def test_readme_names_the_test_command():
    assert "test" in named_targets((tidy.ROOT / "README.md").read_text())


def test_the_readers_of_documents_find_what_is_there():
    text = "Use `make lint`.\n\n    SEED=1 make SEEDS=3 nightly\n\n```sh\nmake setup\n```\nmake no-code; "
    text += "[a](docs/x.md#y) [b](https://example.org)\n"
    assert named_targets(text) == {"lint", "nightly", "setup"}
    assert links(text) == ["docs/x.md"]
    assert make_targets(".PHONY: a b\nc: a\n") == {"a", "b"}
    assert quickstart("## Quickstart\ntext\n```sh\nmake a\nmake b\n```\n") == ["make a", "make b"]
    assert packages("`cargo test -q -p cxl-pool -p cxl-sim name`") == {"cxl-pool", "cxl-sim"}
