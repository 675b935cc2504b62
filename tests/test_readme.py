# SPDX-License-Identifier: Apache-2.0
"""What the documents tell a reader to run or to open exists."""

import re
import tomllib
from pathlib import PurePosixPath

import pytest
import tidy

DOCUMENTS = ["README.md", "CONTRIBUTING.md", "perf/README.md", "docs/internals/claims.md"]


def make_targets(makefile):
    """Names of the targets that a Makefile declares phony, with those of its lists."""
    declared = re.findall(r"^\.PHONY:(.*)$", makefile, re.MULTILINE)
    lists = re.findall(r"^SETUPS := (.*)$", makefile, re.MULTILINE)
    return {name for line in declared for name in line.split()} | {f"setup-{name}" for line in lists for name in line.split()}


def named_targets(text):
    """Targets of every `make NAME` in code: between back-ticks, or in an indented or fenced line."""
    code = "\n".join(re.findall(r"`([^`\n]+)`", text)) + "\n" + "\n".join(re.findall(r"^(?: {4}|\$ )(.*)$", text, re.MULTILINE))
    code += "\n" + "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    named = re.findall(r"\bmake\s+((?:[A-Z_]+=\S+\s+)*)([a-z][a-z0-9-]*)(?![\w-])", code)
    return {target for _, target in named}


def quickstart(readme):
    """The commands of the first code block under the heading Try it."""
    block = re.search(r"^## Try it\n.*?^```sh\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    return [line for line in block[1].splitlines() if line.strip()] if block else []


def links(text):
    """Targets of relative links, without their anchors."""
    return [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target and not target.startswith("#")]


def packages(text):
    """Packages of every `cargo ... -p NAME`."""
    return {name for line in re.findall(r"cargo [^`\n]*", text) for name in re.findall(r"-p ([a-z][a-z0-9-]*)", line)}


def named_tests(text):
    """(package, test program or None, filter or None) of every `cargo test -p PACKAGE ...`; --doc names no test."""
    for line in re.findall(r"\bcargo test ((?:-p|--doc) [^`#\n]*)", text):
        words = line.split(" -- ")[0].split()
        if "--doc" not in words:
            program = words[words.index("--test") + 1] if "--test" in words else None
            filters = [word for before, word in zip([""] + words, words) if not word.startswith("-") and before not in ("-p", "--test")]
            yield words[words.index("-p") + 1], program, filters[0] if filters else None


def sources_of(package, program):
    """The text in which the tests of a package, or of one test program of it, are found: paths and contents."""
    folder = {"cxl-pool": "pool", "cxl-capi": "capi", "cxlctl": "ctl", "cxl-sim": "sim"}[package]
    inside = f"kvbm_cxl/{folder}/" + (f"tests/{program}" if program else "")
    return {name: tidy.read(name) for name in tidy.tracked() if name.startswith(inside) and name.endswith(".rs")}


@pytest.fixture(scope="module")
def targets():
    benchmarks = tomllib.loads((tidy.ROOT / "perf/programs.toml").read_text())
    return make_targets((tidy.ROOT / "Makefile").read_text()) | set(benchmarks)


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


@pytest.mark.parametrize("document", ["docs/internals/claims.md", "CONTRIBUTING.md"])
def test_named_packages_exist(document):
    manifests = [tidy.read(name) for name in tidy.tracked() if PurePosixPath(name).name == "Cargo.toml"]
    known = {name for manifest in manifests for name in re.findall(r'^name = "([^"]+)"', manifest, re.MULTILINE)}
    assert packages((tidy.ROOT / document).read_text()) <= known


@pytest.mark.parametrize("document", ["docs/internals/claims.md", "CONTRIBUTING.md", "docs/internals/proofs.md"])
def test_named_tests_exist(document):
    named = list(named_tests((tidy.ROOT / document).read_text()))
    assert named, "the document names no test: the pattern or the document is wrong"
    for package, program, wanted in named:
        files = sources_of(package, program)
        assert files, f"{package} has no tests/{program}"
        # A filter is a part of a path: of a module, which is a file, of a function, or of a scenario in a macro's list.
        module = (wanted or "").removesuffix("::")
        is_there = any(f"{module}." in name or f"/{module}/" in name for name in files) or any(
            re.search(rf"\bfn \w*{module}|^    {module}: \d", text, re.MULTILINE) for text in files.values()
        )
        assert is_there, f"{package} {program or ''}: nothing matches {wanted}"


def test_the_readme_takes_a_minute():
    text = (tidy.ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120 and len(text.split()) <= 900


def test_readme_names_the_test_command():
    assert "test" in named_targets((tidy.ROOT / "README.md").read_text())


def test_the_readers_of_documents_find_what_is_there():
    text = "Use `make lint`.\n\n    SEED=1 make SEEDS=3 nightly\n\n```sh\nmake setup\n```\nmake no-code; "
    text += "[a](docs/x.md#y) [b](https://example.org)\n"
    assert named_targets(text) == {"lint", "nightly", "setup"}
    assert links(text) == ["docs/x.md"]
    assert make_targets(".PHONY: a b\nc: a\n") == {"a", "b"}
    assert quickstart("## Try it\ntext\n```sh\nmake a\nmake b\n```\n") == ["make a", "make b"]
    commands = "`cargo test -p a --test b c`, `cargo test -p a d::`  # e\n`cargo test --doc -p a`, `cargo test -p a -- --nocapture`"
    assert list(named_tests(commands)) == [("a", "b", "c"), ("a", None, "d::"), ("a", None, None)]
    assert packages("`cargo test -q -p cxl-pool -p cxl-sim name`") == {"cxl-pool", "cxl-sim"}
