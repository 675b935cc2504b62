# SPDX-License-Identifier: Apache-2.0
"""Peers that a fork server makes are processes like others: in hosts of namespaces, with modules of their own."""

import os
import signal

import pytest
from conftest import lab_of_namespaces, reason_to_skip
from cxl_lab.host import AGENT
from cxl_lab.lab import NAMESPACES
from rack import FORKS, PATHS, fork_server

PROGRAM = """
import os, sys

def main():
    if sys.argv[1:] == ["raise"]:
        raise ValueError("of the program")
    print(os.getpid(), os.environ["GREETING"], "LEFT" in os.environ, "drill_peer" in sys.modules, sys.argv, flush=True)
    for line in sys.stdin:
        print(line.strip(), file=sys.stderr, flush=True)
    sys.exit(7)
"""
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """A host of namespaces with a fork server, for which `told` is a module."""
    if missing := reason_to_skip(NAMESPACES):
        pytest.skip(missing)
    folder = tmp_path_factory.mktemp("forks")
    (folder / "told.py").write_text(PROGRAM)
    with lab_of_namespaces(1, folder) as lab:
        server = fork_server(lab["A"], {"PYTHONPATH": os.pathsep.join(map(str, [folder, *PATHS])), "LEFT": "behind"})
        assert server.read_line(TIMEOUT_S) == "ready"
        yield lab["A"]
        assert server.status is None, server.story("ended")


def ask(host, *words):
    return host.start([AGENT, "fork", FORKS, "told", *words], {"GREETING": "hello"})


def test_a_peer_has_the_streams_the_environment_and_the_arguments_of_who_asked(host):
    asked = ask(host, "one", "")
    assert asked.read_line(TIMEOUT_S).split(" ", 1)[1] == "hello False True ['told', 'one', '']"
    asked.write(b"first\n")
    asked.end_input()
    done = asked.finish(TIMEOUT_S, check=False)
    assert (done.status, done.error) == (7, "first\n")


def test_an_error_of_its_program_is_told_as_of_any_program(host):
    done = ask(host, "raise").finish(TIMEOUT_S, check=False)
    assert done.status == 1
    assert done.error.endswith("ValueError: of the program\n")


@pytest.fixture
def peer(host):
    """One that has started: who asked for it, and its process number in the host."""
    asked = ask(host)
    return asked, asked.read_line(TIMEOUT_S).split()[0]


def test_what_kills_who_asked_kills_the_peer_and_no_other(host, peer):
    asked, number = peer
    other = ask(host)
    other.read_line(TIMEOUT_S)
    asked.signal(signal.SIGKILL)
    assert asked.wait(TIMEOUT_S) == -signal.SIGKILL
    gone = ["sh", "-c", f"while kill -0 {number} 2>/dev/null; do sleep 0.05; done"]
    assert host.run(gone, timeout_s=TIMEOUT_S).status == 0
    other.end_input()
    assert other.wait(TIMEOUT_S) == 7


def test_what_stops_who_asked_stops_the_peer(host, peer):
    asked, number = peer
    asked.signal(signal.SIGSTOP)
    stopped = ["sh", "-c", f"until grep -q '^State:.*stopped' /proc/{number}/status; do sleep 0.05; done"]
    host.run(stopped, timeout_s=TIMEOUT_S)
    asked.signal(signal.SIGCONT)
    asked.end_input()
    assert asked.wait(TIMEOUT_S) == 7


def test_a_peer_that_dies_alone_ends_who_asked(host, peer):
    asked, number = peer
    host.run(["sh", "-c", f"kill -9 {number}"])
    assert asked.wait(TIMEOUT_S) == 128 + signal.SIGKILL


def test_without_a_server_one_is_told(host):
    done = host.start([AGENT, "fork", "/nowhere", "told"]).finish(TIMEOUT_S, check=False)
    assert done.status == 1
    assert "fork server /nowhere: No such file" in done.error
