# SPDX-License-Identifier: Apache-2.0
"""The runner of NIXL's gtests, with a small program in their place: what it makes of each outcome."""

import os
import subprocess
import sys

import pytest
import wheels
from etcd_server import ETCD

RUNNER, FAKE = wheels.HERE / "upstream_gtest.py", wheels.HERE / "fake_gtest.py"
PATHS = os.pathsep.join([str(wheels.HERE), str(wheels.HERE.parent)])


def run(tmp_path, *more):
    """The runner's exit status and output over the stand-in."""
    program = tmp_path / "gtest"
    program.write_text(f"#!{sys.executable}\n" + FAKE.read_text())
    program.chmod(0o755)
    env = {**os.environ, "PYTHONPATH": PATHS}
    ended = subprocess.run([sys.executable, str(RUNNER), str(program), *more], env=env, capture_output=True, text=True, timeout=250)
    return ended.returncode, ended.stdout + ended.stderr


def rows(told):
    """Test -> its outcomes in both passes."""
    return {words[2]: words[:2] for words in map(str.split, told.splitlines()) if len(words) == 3}


def test_what_passes_with_ucx_passes_with_ours(plugin, tmp_path):
    status, told = run(tmp_path, "--filter", "*TestTransfer*:*parameters:*skipped")
    assert status == 0, told
    found = rows(told)
    assert found["ucx/TestTransfer.moves/0"] == ["passed", "passed"]
    assert found["TestErrorHandling.parameters"] == ["passed", "but"]
    assert found["TestErrorHandling.is_skipped"] == ["skipped", "skipped"]
    assert "DISABLED" not in told and "transfers that our plugin made: 1" in told


@pytest.mark.parametrize("how", ["breaks", "hangs"])
def test_what_passes_with_ucx_alone_is_named(plugin, tmp_path, how):
    status, told = run(tmp_path, "--filter", f"*moves/0:*{how}_with_ours", "--timeout-s", "20")
    assert status == 1 and f"passed with UCX alone: TestErrorHandling.{how}_with_ours" in told, told


def test_messages_of_both_are_no_failure(plugin, tmp_path):
    status, told = run(tmp_path, "--filter", "*moves/0:*from_both/0:*announced/0:*on_parameters/0")
    assert status == 0, told
    assert rows(told)["TestMessages.from_both/0"] == ["warned", "warned"]
    assert rows(told)["TestMessages.announced/0"] == ["passed", "passed"]
    assert rows(told)["TestMessages.on_parameters/0"] == ["passed", "passed"]
    assert "message with UCX: createBackend: unsupported backend N" in told


@pytest.mark.parametrize("whose", ["from_nixl_with_ours", "from_ours"])
def test_a_message_with_ours_alone_is_a_failure(plugin, tmp_path, whose):
    status, told = run(tmp_path, "--filter", f"*moves/0:*{whose}/0")
    assert status == 1 and f"passed with UCX alone: TestMessages.{whose}/0" in told, told
    assert rows(told)[f"TestMessages.{whose}/0"] == ["passed", "warned"]


def test_a_crash_with_ucx_is_tried_again(plugin, tmp_path):
    status, told = run(tmp_path, "--filter", "*moves/0:*crashes_once_with_ucx")
    assert status == 0 and rows(told)["TestErrorHandling.crashes_once_with_ucx"] == ["passed", "passed"], told
    assert "crashed with UCX, tried again: TestErrorHandling.crashes_once_with_ucx" in told


def test_tests_that_use_etcd_have_one(plugin, tmp_path):
    status, told = run(tmp_path, "--filter", "*moves/0:*EtcdSends")
    assert status == 0, told
    if ETCD.exists():
        assert rows(told)["MetadataExchange.EtcdSends"] == ["passed", "passed"], told
    else:
        assert rows(told)["MetadataExchange.EtcdSends"] == ["skipped", "skipped"] and "`make setup-etcd` has not run" in told


def test_a_plugin_that_moved_nothing_was_not_tested(plugin, tmp_path):
    status, told = run(tmp_path, "--filter", "*waits/0")
    assert status == 1 and "moved nothing" in told, told


def test_a_binary_that_is_none_is_named(tmp_path):
    env = {**os.environ, "PYTHONPATH": PATHS}
    ended = subprocess.run([sys.executable, str(RUNNER), str(tmp_path / "none")], env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "name the gtest binary" in ended.stderr
