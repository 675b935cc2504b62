# SPDX-License-Identifier: Apache-2.0
"""However the launcher ends, nothing of the graph stays: processes, their children, segments, the pool, folders, ports."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import leftovers
import pytest

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 60


class Launcher:
    """fake_serve.py in a process of its own; its children are known by a word in their environment."""

    def __init__(self, folder, *arguments, **told):
        self.marker = f"GRAPH_TEST={uuid.uuid4().hex}"
        self.output = folder / f"output-{self.marker[-6:]}"
        name, _, value = self.marker.partition("=")
        environment = {**os.environ, name: value, **told}
        command = [sys.executable, str(HERE / "fake_serve.py"), "--decode", "2", "--state", str(folder / "state"), *arguments]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)

    def said(self):
        return self.output.read_text(errors="replace")

    def wait_for(self, text):
        leftovers.wait_for(lambda: text in self.said() or self.process.poll() is not None, TIMEOUT_S, f"no {text!r}")
        assert text in self.said(), self.said()

    def wait(self):
        return self.process.wait(TIMEOUT_S)

    def port(self):
        return int(re.search(r"on port (\d+)", self.said())[1])


@pytest.fixture
def launch(tmp_path):
    """Starts launchers; whatever a failed test leaves is ended by number."""
    started = []

    def start(*arguments, **told):
        started.append(Launcher(tmp_path, *arguments, **told))
        return started[-1]

    yield start
    for launcher in started:
        launcher.process.kill()
        launcher.process.wait(10)
        # The watcher does what a failed test did not wait for.
        leftovers.wait_for(lambda: not leftovers.processes_with(launcher.marker), what="processes are left")  # noqa: B023


def assert_clean(launcher, made=(), timeout_s=20):
    leftovers.wait_for(lambda: not leftovers.processes_with(launcher.marker), timeout_s, "processes are left")
    leftovers.wait_for(lambda: not leftovers.there(made), timeout_s, lambda: f"left: {leftovers.there(made)}")


def is_listened_on(port):
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_launcher_that_gets_a_signal_leaves_nothing(launch, number):
    launcher = launch("--connector", "nixl-cxl")
    launcher.wait_for("until Ctrl-C")
    assert is_listened_on(launcher.port())
    # Launcher, watcher, frontend; three workers, each with a child and with Python's tracker of shared memory.
    assert len(leftovers.processes_with(launcher.marker)) == 12
    made = leftovers.made_by(launcher.marker)
    assert sum(name.startswith("/dev/shm/psm_") for name in made) == 3
    assert sum(name.startswith("/dev/shm/sem.mp-") for name in made) == 3
    assert any(name.startswith("/dev/shm/kvbm-cxl-serve-") for name in made)
    launcher.process.send_signal(number)
    assert launcher.wait() == (-signal.SIGKILL if number == signal.SIGKILL else 0)
    # A launcher that could do it by itself has done it when it ends; else its watcher does.
    assert_clean(launcher, made, timeout_s=20 if number == signal.SIGKILL else 0)
    assert not is_listened_on(launcher.port())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_ended_before_the_graph_is_ready_leaves_nothing(launch, number):
    launcher = launch("--connector", "nixl-cxl", FAKE="late")
    leftovers.wait_for(lambda: sum(name.startswith("/dev/shm/psm_") for name in leftovers.made_by(launcher.marker)) == 3)
    made = leftovers.made_by(launcher.marker)
    launcher.process.send_signal(number)
    launcher.wait()
    assert_clean(launcher, made)


def test_children_that_do_not_end_when_they_are_asked_to_are_killed(launch):
    launcher = launch("--connector", "nixl-ucx", FAKE="stubborn")
    launcher.wait_for("until Ctrl-C")
    made = leftovers.made_by(launcher.marker)
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.wait() == 0
    assert_clean(launcher, made, timeout_s=0)


def test_a_worker_that_crashes_is_named_with_the_end_of_its_log(launch):
    launcher = launch("--connector", "nixl-ucx", FAKE="crash")
    assert launcher.wait() == 1
    told = r"serve: (prefill|decode)-\d ended with 7; the end of .*\n.*the fake worker has had enough"
    assert re.search(told, launcher.said()), launcher.said()
    assert_clean(launcher)


def test_a_graph_that_does_not_get_ready_says_how_far_each_worker_came(launch):
    launcher = launch("--connector", "nixl-ucx", "--ready-timeout", "3", FAKE="late")
    assert launcher.wait() == 1
    assert "not ready after" in launcher.said() and "'decode-1': 'importing'" in launcher.said()
    assert_clean(launcher)


def test_once_fails_where_a_text_or_a_counter_is_wrong(launch):
    launcher = launch("--connector", "nixl-ucx", "--once", FAKE_TEXT="something else")
    assert launcher.wait() == 1
    wrong = [line for line in launcher.said().splitlines() if line.startswith("WRONG")]
    assert any("text 1: 'fake'" in line for line in wrong), launcher.said()
    # The fake decode workers say that they computed all by themselves.
    assert any("tokens that decode computed: 200" in line for line in wrong), launcher.said()


@pytest.mark.parametrize("metadata", ["", ",metadata={}/metadata"], ids=["one-device", "metadata-elsewhere"])
def test_a_given_pool_is_neither_formatted_nor_removed(launch, tmp_path, metadata):
    from graph.pool import cxlctl

    spec = f"{tmp_path / 'pool'}{metadata.format(tmp_path)}"
    sized = f"{spec},size=64M" + (",metadata_size=64M" if metadata else "")
    empty = launch("--connector", "nixl-cxl", "--pool", sized)
    assert empty.wait() == 1
    assert re.search(r"serve: cxlctl info .*: there is no such device", empty.said())
    cxlctl(sized, "format")
    identity = json.loads(cxlctl(spec, "info", "--json"))
    launcher = launch("--connector", "nixl-cxl", "--pool", spec)
    launcher.wait_for("until Ctrl-C")
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait() == 0
    assert json.loads(cxlctl(spec, "info", "--json"))["uuid"] == identity["uuid"]
    # Asked to, it formats what the name gives, and no less.
    launcher = launch("--connector", "nixl-cxl", "--pool", spec, "--format-pool")
    launcher.wait_for("until Ctrl-C")
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait() == 0
    info = json.loads(cxlctl(spec, "info", "--json"))
    assert info["uuid"] != identity["uuid"] and (info["geometry"]["metadata_bytes"] > 0) == bool(metadata)
