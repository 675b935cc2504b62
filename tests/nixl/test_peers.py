# SPDX-License-Identifier: Apache-2.0
"""What becomes of a pair of agents that is disturbed, and what applications are told: a peer that lives never counts as disconnected."""

import signal
import time

import pytest
from cluster import MIB, Cluster
from hosts import WorkerError
from test_lifecycle import KIB, works

LENGTH = 256 * KIB
BOUND_S = 30


def outcome(host, handle, timeout_s=BOUND_S):
    """The state in which a prepared transfer ends, or the name of its error."""
    try:
        state = host.post(handle)
        return host.wait(handle, timeout_s) if state == "PROC" else state
    except WorkerError as error:
        return error.kind


@pytest.fixture
def small(folder, plugin):
    """A pool that is soon full."""
    with Cluster(folder, "CXL", "1.4.1", pool_mib=96) as made:
        yield made


def test_a_pool_that_is_full_at_first_contact(small):
    """The peer lives: an error for as long as the pool is full, and success once there is room, with the same metadata."""
    one, other = small.host(machine="both"), small.host(machine="both")
    mine, theirs = small.buffer(one, "heap", LENGTH), small.buffer(other, "heap", LENGTH)
    small.introduce(one, other)
    one.open_pool(str(small.pool_file))
    one.fill_pool()
    handle = one.prepare("READ", mine.row(0, LENGTH), theirs.row(0, LENGTH), other.name)
    assert [outcome(one, handle) for _ in range(4)] == ["nixlBackendError"] * 4
    one.empty_pool()
    end, seen = time.monotonic() + BOUND_S, []
    while (state := outcome(one, handle)) != "DONE":
        seen.append(state)
        assert time.monotonic() < end, seen
    assert set(seen) <= {"nixlBackendError"}
    mine.check([(0, LENGTH, theirs.seed, 0)])
    one.notify(other.name, b"there")
    assert other.notifications(1) == {one.name: [b"there"]}


@pytest.mark.parametrize("where", ["heap", "pool"])
@pytest.mark.parametrize("machine", ["same", "other"])
def test_a_peer_that_is_stopped_for_a_while(cluster, machine, where):
    """It may be taken for dead meanwhile. The error is one that keeps its metadata, and the transfer that is prepared works again."""
    one = cluster.host(machine="first", environment={"CXL_SUSPECT_MS": "1000"}, parameters={"timeout_ms": 3000})
    machines = {"same": "first", "other": "second"}
    other = cluster.host(machine=machines[machine], environment={"CXL_SUSPECT_MS": "1000"})
    mine, theirs = cluster.buffer(one, "heap", LENGTH), cluster.buffer(other, where, LENGTH)
    cluster.introduce(one, other)
    handle = one.prepare("READ", mine.row(0, LENGTH), theirs.row(0, LENGTH), other.name)
    assert outcome(one, handle) == "DONE"
    other.signal(signal.SIGSTOP)
    seen, end = [], time.monotonic() + BOUND_S
    try:
        # Memory in the pool is read without its owner until that is found silent.
        while "nixlBackendError" not in seen:
            seen.append(outcome(one, handle))
            assert time.monotonic() < end, "a peer that is stopped is not noticed"
        seen.append(outcome(one, handle))
    finally:
        other.signal(signal.SIGCONT)
    mine.renew(mine.seed + 5000)
    while (state := outcome(one, handle)) != "DONE":
        seen.append(state)
        assert time.monotonic() < end, seen
    assert set(seen) <= {"DONE", "nixlBackendError"}, seen
    mine.check([(0, LENGTH, theirs.seed, 0)])
    one.notify(other.name, b"on it goes")
    assert other.notifications(1) == {one.name: [b"on it goes"]}


def test_a_peer_of_the_same_process_that_ends(cluster):
    """NIXL hears that it is disconnected, drops its metadata, and takes those of the one that has its name next."""
    host = cluster.host("one")
    mine = cluster.buffer(host, "heap", LENGTH)
    for turn in range(2):
        host.agent("two", "CXL")
        theirs = cluster.buffer(host, "pool" if turn else "heap", LENGTH)
        metadata = host.metadata()
        host.use("one")
        assert host.add(metadata) == "two"
        handle = host.prepare("READ", mine.row(0, LENGTH), theirs.row(0, LENGTH), "two")
        assert outcome(host, handle) == "DONE"
        mine.check([(0, LENGTH, theirs.seed, 0)])
        host.use("two")
        host.deregister(theirs.key)
        host.end_agent("two")
        host.use("one")
        assert outcome(host, handle) == "nixlRemoteDisconnectError"
        host.release(handle)


@pytest.mark.parametrize("where", ["heap", "pool"])
def test_memory_that_is_deregistered_twice_in_one_list(cluster, where):
    """Whatever NIXL makes of it, the process lives and the agent goes on."""
    one, other = cluster.host(), cluster.host()
    mine = cluster.buffer(one, where, LENGTH)
    assert isinstance(one.deregister_twice(mine.key), str)
    for _ in range(20):
        one.register(mine.key)
        one.deregister(mine.key)
    works(cluster, one, other)


@pytest.mark.parametrize("where", ["heap", "pool"])
def test_new_metadata_of_a_peer_that_is_known(cluster, where):
    """Memory that was deregistered and is registered again: the metadata are taken, and so is a transfer that was prepared before."""
    one, other = cluster.host(), cluster.host()
    mine, theirs = cluster.buffer(one, "heap", LENGTH), cluster.buffer(other, where, LENGTH)
    cluster.introduce(one, other)
    handle = one.prepare("READ", mine.row(0, LENGTH), theirs.row(0, LENGTH), other.name)
    assert outcome(one, handle) == "DONE"
    for turn in range(3):
        other.deregister(theirs.key)
        assert outcome(one, handle) not in ("DONE", "PROC", "nixlRemoteDisconnectError")
        theirs.renew(theirs.seed + 5000 + turn)
        other.register(theirs.key)
        further = cluster.buffer(other, where, LENGTH)
        assert one.add(other.metadata()) == other.name
        mine.renew(mine.seed + 7000)
        assert outcome(one, handle) == "DONE"
        mine.check([(0, LENGTH, theirs.seed, 0)])
        assert one.transfer("READ", mine.row(0, LENGTH), further.row(0, LENGTH), other.name) == "DONE"
        mine.check([(0, LENGTH, further.seed, 0)])


def test_removing_a_peer_is_nothing_to_warn_of(cluster):
    one, other = cluster.host(), cluster.host()
    works(cluster, one, other)
    one.remove(other.name)
    # Behind the end of the link.
    works(cluster, one, cluster.host())
    for host in (one, other):
        assert "nixl_cxl]" not in host.log.read_text(errors="replace")


def test_an_agent_without_a_progress_thread_has_none(cluster):
    """Its application makes progress by its calls, on both sides."""
    hosts = [cluster.host(agent=False) for _ in range(2)]
    for host, progress in zip(hosts, (True, False), strict=True):
        host.agent(host.name, "CXL", progress=progress)
    one, other = hosts
    assert ["nixl-cxl-links" in host.threads() for host in hosts] == [True, False]
    mine, theirs = cluster.buffer(one, "heap", MIB), cluster.buffer(other, "heap", MIB)
    cluster.introduce(one, other)
    other.begin("notifications", 1, BOUND_S)
    assert one.transfer("READ", mine.row(0, MIB), theirs.row(0, MIB), other.name) == "DONE"
    mine.check([(0, MIB, theirs.seed, 0)])
    one.notify(other.name, b"read")
    assert other.end(BOUND_S + 5) == {one.name: [b"read"]}
    assert "nixl-cxl-links" not in other.threads()
