# SPDX-License-Identifier: Apache-2.0
"""What happens around transfers: registrations and agents that come and go, other pools, missing pools, cancelling, doing nothing."""

import numpy
import pytest
from cluster import MIB, Cluster
from hosts import WorkerError

KIB = 1 << 10


def works(cluster, one, other, where=("heap", "heap"), length=300_000):
    """New buffers of these two agents can be read and written, and notifications come both ways."""
    mine, theirs = (cluster.buffer(host, place, 2 * length) for host, place in zip((one, other), where, strict=True))
    one.remove_if_known(other.name)
    other.remove_if_known(one.name)
    cluster.introduce(one, other)
    assert one.transfer("READ", mine.row(0, length), theirs.row(0, length), other.name) == "DONE"
    assert one.transfer("WRITE", mine.row(length, length), theirs.row(length, length), other.name, b"written") == "DONE"
    assert other.notifications(1) == {one.name: [b"written"]}
    other.notify(one.name, b"seen")
    assert one.notifications(1) == {other.name: [b"seen"]}
    mine.check([(0, length, theirs.seed, 0)])
    theirs.check([(length, length, mine.seed, length)])


@pytest.mark.parametrize("how", ["ended", "killed"])
def test_an_agent_that_comes_back_under_its_name(cluster, how):
    one, other = cluster.host("one"), cluster.host("other", machine="restarts")
    works(cluster, one, other)
    for turn in range(3):
        if how == "ended":
            assert other.stop() == 0
        else:
            other.kill()
        other = cluster.host("other", machine="restarts")
        works(cluster, one, other, ("heap", "pool" if turn % 2 else "heap"))


def test_an_address_that_is_registered_again(cluster):
    """What the peer knows of the first registration does not reach the second one by mistake."""
    one, other = cluster.host(), cluster.host()
    length = 64 * KIB
    for where in ("heap", "pool"):
        mine, theirs = cluster.buffer(one, "heap", length), cluster.buffer(other, where, length)
        cluster.introduce(one, other)
        assert one.transfer("READ", mine.row(0, length), theirs.row(0, length), other.name) == "DONE"
        mine.check([(0, length, theirs.seed, 0)])
        for turn in range(3):
            other.deregister(theirs.key)
            theirs.renew(theirs.seed + 5000 + turn)
            other.register(theirs.key)
            mine.renew(mine.seed + 7000)
            one.remove(other.name)
            one.add(other.metadata())
            assert one.transfer("READ", mine.row(0, length), theirs.row(0, length), other.name) == "DONE"
            mine.check([(0, length, theirs.seed, 0)])


def test_memory_that_is_not_registered_any_more(cluster):
    """A peer that has not heard of it gets an error, and no byte is written."""
    one, other = cluster.host(), cluster.host()
    length = 64 * KIB
    mine, theirs = cluster.buffer(one, "heap", length), cluster.buffer(other, "heap", length)
    cluster.introduce(one, other)
    handle = one.prepare("WRITE", mine.row(0, length), theirs.row(0, length), other.name)
    assert one.post(handle) in ("DONE", "PROC")
    assert one.wait(handle) == "DONE"
    other.deregister(theirs.key)
    theirs.renew(theirs.seed + 5000)
    try:
        state = one.post(handle)
        state = one.wait(handle) if state == "PROC" else state
    except WorkerError as error:
        state = error.kind
    assert state == "ERR" or state.startswith("nixl"), state
    theirs.check()
    works(cluster, one, other)


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
def test_deregistering_while_transfers_are_under_way(cluster, operation):
    """It returns in bounded time; from then on nothing touches the memory; the peer gets errors and goes on with others."""
    one, other = cluster.host(), cluster.host()
    length = 16 * MIB
    mine, theirs = cluster.buffer(one, "heap", length), cluster.buffer(other, "heap", length)
    cluster.introduce(one, other)
    pieces = [(0, length, theirs.seed, 0)] if operation == "READ" else ()
    key = mine.key if operation == "READ" else None
    one.begin("repeat", operation, mine.row(0, length), theirs.row(0, length), other.name, 10, key, pieces)
    other.cpu_s(0.2)
    other.call("deregister", theirs.key, call_timeout_s=30)
    theirs.renew(theirs.seed + 5000)
    done, state, wrong = one.end()
    assert state != "DONE" and state != "WRONG", (done, state, wrong)
    theirs.check()
    works(cluster, one, other)


def test_a_transfer_that_is_given_up(cluster):
    """A request is released right after it was posted, over and over; its buffers are used for others afterwards."""
    one, other = cluster.host(), cluster.host()
    length = 8 * MIB
    for where in ("heap", "pool"):
        mine, theirs = cluster.buffer(one, "heap", length), cluster.buffer(other, where, length)
        cluster.introduce(one, other)
        for turn in range(20):
            operation = "WRITE" if turn % 2 else "READ"
            one.give_up(operation, mine.row(0, length), theirs.row(0, length), other.name)
        mine.renew(mine.seed + 5000)
        theirs.renew(theirs.seed + 6000)
        assert one.transfer("READ", mine.row(0, length), theirs.row(0, length), other.name) == "DONE"
        mine.check([(0, length, theirs.seed, 0)])
        theirs.check()


def test_a_peer_of_another_pool(cluster, folder):
    """Its metadata is taken, since other backends may need it; transfers to it are refused; others go on."""
    one, other = cluster.host(), cluster.host()
    with Cluster(folder, "CXL", cluster.wheel, pool_mib=64) as elsewhere:
        stranger = elsewhere.host("stranger")
        mine, theirs = cluster.buffer(one, "heap", 4 * KIB), elsewhere.buffer(stranger, "pool", 4 * KIB)
        heap = elsewhere.buffer(stranger, "heap", 4 * KIB)
        cluster.introduce(one, stranger)
        for there in (theirs, heap):
            with pytest.raises(WorkerError) as refused:
                one.transfer("READ", mine.row(0, 4 * KIB), there.row(0, 4 * KIB), stranger.name)
            assert refused.value.kind.startswith("nixl"), refused.value
        with pytest.raises(WorkerError, match="(?i)pool"):
            one.notify(stranger.name, b"hello")
        works(cluster, one, other)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "no such device"), (b"", "small|empty|short"), (bytes(MIB), "fewer"), (bytes(4 * MIB), "format"), (b"x" * MIB * 4, "foreign")],
    ids=["missing", "empty", "short", "unformatted", "foreign"],
)
def test_a_pool_that_cannot_be_used_is_named(cluster, content, words):
    """At the log level that users have: which pool, why, and what to do."""
    path = cluster.folder / "other"
    if content is not None:
        path.write_bytes(content)
    host = cluster.host(agent=False, environment={"CXL_POOL": str(path)})
    with pytest.raises(WorkerError, match=rf"(?s){path}.*({words})") as refused:
        host.agent("one", "CXL")
    # Formatting is no remedy for a device that is too small for any pool.
    assert words != "fewer" or "cxlctl format" not in str(refused.value)


def test_without_a_pool_the_reason_is_said(cluster):
    host = cluster.host(agent=False, environment={"CXL_POOL": ""})
    with pytest.raises(WorkerError, match="CXL_POOL"):
        host.agent("one", "CXL")


def test_the_pool_can_be_a_parameter(cluster):
    one = cluster.host(environment={"CXL_POOL": ""}, parameters={"pool": cluster.pool_file})
    works(cluster, one, cluster.host())


def test_two_agents_of_one_process(cluster):
    """Straight from one's memory to the other's, notifications too."""
    host = cluster.host("first")
    length = 200_000
    for where in (("heap", "heap"), ("pool", "heap"), ("heap", "pool")):
        host.use("first")
        mine = cluster.buffer(host, where[0], length)
        first = host.metadata()
        host.agent(f"second-{where}", "CXL")
        theirs = cluster.buffer(host, where[1], length)
        second = host.metadata()
        host.add(first)
        host.use("first")
        host.add(second)
        assert host.transfer("READ", mine.row(0, length // 2), theirs.row(100, length // 2), f"second-{where}", b"read") == "DONE"
        mine.check([(0, length // 2, theirs.seed, 100)])
        host.use(f"second-{where}")
        assert host.notifications(1) == {"first": [b"read"]}


def test_a_transfer_within_one_agent(cluster):
    host = cluster.host()
    length = 200_000
    for where in (("heap", "heap"), ("pool", "heap"), ("heap", "pool"), ("pool", "pool")):
        here, there = (cluster.buffer(host, place, length) for place in where)
        assert host.transfer("WRITE", here.row(0, length), there.row(0, length), host.name) == "DONE"
        there.check([(0, length, here.seed, 0)])


def test_many_registrations(cluster):
    """Each is its own: 500 small ones in both kinds of memory, read in one list."""
    one, other = cluster.host(), cluster.host()
    count, length = 250, 4 * KIB
    mine = cluster.buffer(one, "heap", 2 * count * length)
    theirs = [cluster.buffer(other, where, length) for where in ("heap", "pool") for _ in range(count)]
    cluster.introduce(one, other)
    remote = numpy.concatenate([side.row(0, length) for side in theirs])
    local = mine.rows(numpy.arange(2 * count) * length, length)
    assert one.transfer("READ", local, remote, other.name) == "DONE"
    mine.check([(index * length, length, side.seed, 0) for index, side in enumerate(theirs)])


def test_a_peer_that_is_forgotten(cluster):
    """Neither transfers nor notifications go to it, until it is known again."""
    one, other = cluster.host(), cluster.host()
    works(cluster, one, other)
    one.remove(other.name)
    with pytest.raises(WorkerError):
        one.notify(other.name, b"hello")
    works(cluster, one, other)


def test_what_a_transfer_costs_can_be_asked(cluster):
    one, other = cluster.host(), cluster.host()
    mine, theirs = cluster.buffer(one, "heap", 8 * MIB), cluster.buffer(other, "pool", 8 * MIB)
    cluster.introduce(one, other)
    costs = []
    for length in (4 * KIB, 8 * MIB):
        handle = one.prepare("READ", mine.row(0, length), theirs.row(0, length), other.name)
        costs.append(one.cost(handle)[0])
        one.release(handle)
    assert 0 <= costs[0] < costs[1] < 10_000_000


def test_nothing_under_way_uses_no_processor_time(cluster):
    one, other = cluster.host(), cluster.host()
    works(cluster, one, other)
    for host in (one, other):
        host.begin("cpu_s", 2.0)
    assert [share for share in (one.end() / 2, other.end() / 2) if share > 0.05] == []
