# SPDX-License-Identifier: Apache-2.0
"""`kvbm-cxl nixlbench` over a program that says how it was called: what it is told, and what becomes of how it ends."""

import json
import sys
import time

import pytest
from kvbm_cxl import cli

# Tells of its arguments and environment; the first TIMES calls end as the target of an initiator that does not wait yet.
PROGRAM = """#!{python}
import json, os, pathlib, sys
folder = pathlib.Path(__file__).parent
calls = folder / "calls"
calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
if len(calls.read_text()) <= {early}:
    print("  what():  ASIO Connection failed: Connection refused")
    os.abort()
plugins = pathlib.Path(os.environ["NIXL_PLUGIN_DIR"])
links = {{name: os.path.realpath(plugins / name) for name in os.listdir(plugins)}}
told = {{"arguments": sys.argv[1:], "links": links, "libraries": os.environ["LD_LIBRARY_PATH"]}}
told["preload"] = os.environ.get("LD_PRELOAD", "")
(folder / "told").write_text(json.dumps(told))
sys.exit({status})
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Makes the program; gives how to run it: (exit status, what it told, or None)."""
    monkeypatch.setattr("kvbm_cxl.nixl._bench._RETRY_S", 0.01)
    monkeypatch.delenv("LD_PRELOAD", raising=False)

    def run(*arguments, early=0, status=0, initiator="127.0.0.1"):
        binary = tmp_path / "nixlbench"
        binary.write_text(PROGRAM.format(python=sys.executable, early=early, status=status))
        binary.chmod(0o755)
        ended = cli.main(["nixlbench", "--initiator", initiator, *arguments[: len(arguments) - 1], str(binary), "--", *arguments[-1]])
        told = tmp_path / "told"
        return ended, json.loads(told.read_text()) if told.exists() else None

    return run


@pytest.mark.parametrize(("memory", "name"), [("pool", "Mooncake"), ("heap", "UCCL")])
def test_the_plugin_has_the_name_and_the_buffers_their_place(program, capfd, memory, name):
    status, told = program("--memory", memory, "--name", name, "--port", "7", ["--op_type=READ"])
    assert status == 0
    assert told["arguments"] == [f"--backend={name}", "--runtime_type=ASIO", "--asio_address=127.0.0.1", "--asio_port=7", "--op_type=READ"]
    assert told["links"][f"libplugin_{name}.so"] == told["links"]["libplugin_CXL.so"] and "libplugin_UCX.so" in told["links"]
    assert told["preload"].endswith("libcxl_malloc.so") == (memory == "pool")
    assert ".mesonpy.libs" in told["libraries"]


def test_the_target_waits_for_the_initiator(program, tmp_path):
    status, told = program([], early=3)
    assert status == 0 and told and len((tmp_path / "calls").read_text()) == 4


def test_the_target_does_not_wait_for_ever(program, capfd):
    before = time.monotonic()
    status, told = program("--wait-s", "0.2", [], early=10**9)
    assert status == 134 and told is None and time.monotonic() - before < 60
    assert "no initiator at 127.0.0.1:12345" in capfd.readouterr().err


def test_how_it_ends_is_the_exit_status_and_nothing_is_tried_twice(program, tmp_path):
    status, told = program([], status=3)
    assert status == 3 and told and (tmp_path / "calls").read_text() == "x"


@pytest.mark.parametrize(("initiator", "named"), [("127.0.0.1", "cannot be run"), ("no-such-host.invalid", "has no address")])
def test_what_is_missing_is_named(tmp_path, capfd, initiator, named):
    assert cli.main(["nixlbench", "--initiator", initiator, "--wait-s", "0", str(tmp_path / "none")]) == 1
    said = capfd.readouterr().err
    assert named in said and "Traceback" not in said
