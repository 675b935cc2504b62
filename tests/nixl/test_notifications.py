# SPDX-License-Identifier: Apache-2.0
"""Notifications: whole, once, in order, and never before the bytes that they tell of."""

import pytest
import wheels
from cluster import MIB, Cluster


def combinations():
    yield pytest.param(("UCX", wheels.DEFAULT, "plain"), id="UCX")
    for wheel in wheels.chosen():
        for memory in ("plain", "emulated"):
            yield pytest.param(("CXL", wheel, memory), id=f"CXL-{wheel}-{memory}")


@pytest.fixture(scope="module", params=combinations())
def three(request, folder):
    """Three agents that know each other."""
    backend, wheel, memory = request.param
    if backend == "CXL":
        request.getfixturevalue("plugin")
    with Cluster(folder, backend, wheel, memory) as cluster:
        hosts = [cluster.host() for _ in range(3)]
        for one, other in ((0, 1), (0, 2), (1, 2)):
            cluster.introduce(hosts[one], hosts[other])
        yield cluster, hosts
        for host in hosts:
            assert host.stop() == 0, host.story("did not end well")


def message_of(number, length):
    """`length` bytes that no other number has (from 8 bytes on), with zeros in them."""
    return (number.to_bytes(8, "big") * (length // 8 + 1))[:length]


@pytest.mark.parametrize("length", [0, 1, 64, 1000, 70_000, MIB])
def test_without_a_transfer(three, length):
    _, (one, other, _) = three
    message = message_of(length + 1, length)
    one.notify(other.name, message)
    assert other.notifications(1) == {one.name: [message]}


def test_many_in_order_and_none_twice(three):
    _, (one, other, third) = three
    messages = [message_of(number, 8 + number % 300) for number in range(2000)]
    for message in messages:
        one.notify(other.name, message)
    third.notify(other.name, b"from the third")
    found = other.notifications(len(messages) + 1, quiet_s=0.2)
    assert found == {one.name: messages, third.name: [b"from the third"]}


def test_to_oneself(three):
    _, (one, *_) = three
    one.notify(one.name, b"to myself")
    assert one.notifications(1) == {one.name: [b"to myself"]}


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
@pytest.mark.parametrize(("length", "words"), [(4096, 1), (4096, 0), (2 * MIB, 100), (65536, MIB)], ids=["small", "empty", "large", "long"])
@pytest.mark.parametrize("where", ["heap", "pool"])
def test_with_a_transfer(three, operation, length, words, where):
    """The bytes are there when the notification is."""
    cluster, (one, other, _) = three
    if cluster.backend == "UCX" and (where == "pool" or not words):
        pytest.skip("UCX knows no pool, and takes an empty message for none")
    mine, theirs = cluster.buffer(one, "heap", length), cluster.buffer(other, where, length)
    cluster.introduce(one, other)
    message = message_of(length, words)
    handle = one.prepare(operation, mine.row(0, length), theirs.row(0, length), other.name, message)
    assert one.post(handle, message) in ("DONE", "PROC")
    one.begin("wait", handle)
    if words:
        assert other.notifications(1) == {one.name: [message]}
        if operation == "WRITE":
            theirs.check([(0, length, mine.seed, 0)])
    assert one.end() == "DONE"
    if operation == "READ":
        mine.check([(0, length, theirs.seed, 0)])
    one.release(handle)


def test_two_write_to_one(three):
    """Fan-in: each writes to its half, over and over; the reader sees every transfer announced and both halves whole."""
    cluster, (one, other, target) = three
    if cluster.backend == "UCX":
        places = ["heap"]
    else:
        places = ["heap", "pool"]
    length, times = 300_000, 10
    for where in places:
        into = cluster.buffer(target, where, 2 * length)
        sources = [cluster.buffer(host, "heap", length) for host in (one, other)]
        for host in (one, other):
            cluster.introduce(host, target)
        for index, source in enumerate(sources):
            rows = source.row(0, length), into.row(index * length, length)
            source.host.begin("repeat_times", "WRITE", *rows, target.name, times, b"half %d, " % index)
        found = target.notifications(2 * times)
        assert [source.host.end() for source in sources] == ["DONE", "DONE"]
        for index, source in enumerate(sources):
            assert found[source.host.name] == [b"half %d, %d" % (index, turn) for turn in range(times)]
        into.check([(index * length, length, source.seed, 0) for index, source in enumerate(sources)])


def test_one_reads_from_and_writes_to_two(three):
    """Fan-out: requests to two peers under way at once."""
    cluster, (source, *peers) = three
    length = 700_000
    mine = cluster.buffer(source, "heap", 4 * length)
    where = ("heap", "heap" if cluster.backend == "UCX" else "pool")
    theirs = [cluster.buffer(peer, place, 2 * length) for peer, place in zip(peers, where, strict=True)]
    for peer in peers:
        cluster.introduce(source, peer)
    handles = []
    for index, there in enumerate(theirs):
        for part, operation in enumerate(("READ", "WRITE")):
            rows = mine.row((2 * index + part) * length, length), there.row(part * length, length)
            handles.append(source.prepare(operation, *rows, there.host.name))
    assert {source.post(handle) for handle in handles} <= {"DONE", "PROC"}
    assert [source.wait(handle) for handle in handles] == ["DONE"] * 4
    for handle in handles:
        source.release(handle)
    mine.check([(2 * index * length, length, there.seed, 0) for index, there in enumerate(theirs)])
    for index, there in enumerate(theirs):
        there.check([(length, length, mine.seed, (2 * index + 1) * length)])
