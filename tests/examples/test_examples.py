# SPDX-License-Identifier: Apache-2.0
"""Every example runs, does what it says, and is what the documents show."""

import json
import re
import sys

import pytest
from conftest import ROOT

EXAMPLES = ROOT / "examples"


def test_python(run):
    assert run(sys.executable, "examples/python/publish_pull.py").split() == ["published", "65536", "bytes", "pulled", "65536", "bytes"]


def test_python_on_a_pool_that_is_there(run, pool):
    assert "pulled 65536 bytes" in run(sys.executable, "examples/python/publish_pull.py", CXL_POOL=pool)
    # The second run finds the block of the first, on the pool that stays.
    assert "pulled 65536 bytes" in run(sys.executable, "examples/python/publish_pull.py", CXL_POOL=pool)


def test_rust(run):
    # With the packages of `make test-rust`, which has built the example: cargo would unify other features for cxl-pool alone.
    build = ["--locked", "-q", "--message-format=json", "--profile", "test", "-p", "cxl-pool", "-p", "cxl-capi", "-p", "cxlctl"]
    built = [json.loads(line) for line in run("cargo", "build", *build, "--example", "publish_pull").splitlines()]
    (program,) = [message["executable"] for message in built if message.get("target", {}).get("name") == "publish_pull"]
    said = run(program)
    assert said.splitlines() == ["cached prefix: 2 blocks", "pulled 60000 bytes, verified"]


def test_c(run, pool, tmp_path):
    run("scripts/install-capi", tmp_path / "prefix")
    flags = [f"-I{tmp_path / 'prefix/include'}", f"-L{tmp_path / 'prefix/lib'}", "-lcxl_shm"]
    run("cc", "-Wall", "-Wextra", "-Werror", "examples/c/greeting.c", *flags, "-o", tmp_path / "greeting")
    assert run(tmp_path / "greeting", CXL_POOL=pool, LD_LIBRARY_PATH=str(tmp_path / "prefix/lib")) == "hello\n"


def test_nixl(run):
    pytest.importorskip("nixl", reason="NIXL is not installed: make setup-nixl")
    assert "read 2621440 bytes in 128 blocks" in run(sys.executable, "examples/nixl/two_agents.py")


def test_every_example_is_listed_and_has_a_test():
    """A new file under examples/ is named in its README, and here or in the test of the vLLM examples."""
    files = sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*") if path.suffix in {".py", ".rs", ".c", ".sh"})
    assert files
    readme = (EXAMPLES / "README.md").read_text()
    assert [name for name in files if f"]({name})" not in readme] == []
    mine, engines = "tests/examples/test_examples.py", "tests/vllm_integration/test_engine_examples.py"
    tests = "".join((ROOT / path).read_text() for path in (mine, engines))
    stem = {name: name.split("/")[1].removesuffix(".rs") for name in files}
    assert [name for name in files if stem[name] not in tests] == []


def test_documents_show_the_lines_of_the_examples():
    """A snippet in a document names the example that it is taken from, and stands in that file word for word."""
    shown = 0
    for document in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for name, snippet in re.findall(r"<!-- from (examples/\S+) -->\n+```\w*\n(.*?)```", document.read_text(), re.DOTALL):
            text = (ROOT / name).read_text()
            missing = [line for line in snippet.splitlines() if line.strip() and line.strip() not in text]
            assert not missing, f"{document.name}: not in {name}: {missing}"
            shown += 1
    assert shown, "no document shows an example: the pattern or the documents are wrong"
