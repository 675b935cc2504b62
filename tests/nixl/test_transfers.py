# SPDX-License-Identifier: Apache-2.0
"""Reads and writes between two processes: every wheel, every kind of memory, every place that buffers can have; all bytes are checked."""

import os

import numpy
import pytest
import wheels
from cluster import MIB, Cluster

KIB = 1 << 10
# Where the buffer of the initiator lies, and that of the other one.
PLACES = [("pool", "pool"), ("heap", "pool"), ("pool", "heap"), ("heap", "heap")]


def combinations():
    """UCX with one wheel shows that the harness is right; the rest is the plugin. NIXL_MATRIX=full leaves nothing out."""
    yield pytest.param(("UCX", wheels.DEFAULT, "plain", ("heap", "heap")), id="UCX")
    for wheel in wheels.chosen():
        # What differs between versions is how the plugin is called, not what it does: the oldest gets the two ends of the range.
        whole = wheel != "1.3.2" or os.environ.get("NIXL_MATRIX") == "full"
        for memory in ("plain", "emulated"):
            for places in PLACES if whole else PLACES[::3]:
                yield pytest.param(("CXL", wheel, memory, places), id=f"CXL-{wheel}-{memory}-{'-'.join(places)}")
    # Where the pool's metadata lies is nothing to a wheel.
    for memory, places in (("apart", PLACES[0]), ("apart", PLACES[1]), ("apart-emulated", PLACES[0])):
        yield pytest.param(("CXL", wheels.DEFAULT, memory, places), id=f"CXL-{wheels.DEFAULT}-{memory}-{'-'.join(places)}")


class Pair:
    """Two agents of two processes, and where their buffers lie."""

    def __init__(self, cluster, places):
        self.cluster, self.places = cluster, places
        self.hosts = [cluster.host(), cluster.host()]
        cluster.introduce(*self.hosts)

    def buffers(self, len_bytes):
        """A buffer of the initiator and one of the other, known to both."""
        sides = [self.cluster.buffer(host, where, len_bytes) for host, where in zip(self.hosts, self.places, strict=True)]
        self.cluster.introduce(*self.hosts)
        return sides

    def transfer(self, operation, local, remote, **named):
        return self.hosts[0].transfer(operation, local, remote, self.hosts[1].name, **named)


@pytest.fixture(scope="module", params=combinations())
def pair(request, folder):
    backend, wheel, memory, places = request.param
    if backend == "CXL":
        request.getfixturevalue("plugin")
    with Cluster(folder, backend, wheel, memory) as cluster:
        made = Pair(cluster, places)
        yield made
        for host in made.hosts:
            assert host.stop() == 0, host.story("did not end well")


def moved(operation, mine, theirs):
    """Which side of a transfer is written to, and which is read from."""
    return (mine, theirs) if operation == "READ" else (theirs, mine)


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
@pytest.mark.parametrize("length", [1, 63, 4 * KIB, 64 * KIB, 3 * MIB + 17])
def test_one_piece(pair, operation, length):
    mine, theirs = pair.buffers(length + 200)
    assert pair.transfer(operation, mine.row(131, length), theirs.row(67, length)) == "DONE"
    into, source = moved(operation, mine, theirs)
    at, start = (131, 67) if operation == "READ" else (67, 131)
    into.check([(at, length, source.seed, start)])
    source.check()


def moves_a_list(pair, operation, count, length, stride, shift):
    """Pieces in one random order of places on this side, and another one, shifted, on the other."""
    mine, theirs = pair.buffers(count * stride)
    places = numpy.arange(count, dtype=numpy.int64) * stride
    random = numpy.random.default_rng(count)
    local, remote = random.permutation(places), random.permutation(places) + shift
    assert pair.transfer(operation, mine.rows(local, length), theirs.rows(remote, length)) == "DONE"
    into, source = moved(operation, mine, theirs)
    at, start = moved(operation, local, remote)
    into.check_list(source, at, start, length)
    source.check()


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
def test_a_list_of_128_blocks(pair, operation):
    """As KV transfers are: 128 pieces of 20 KiB, to other places than they come from."""
    moves_a_list(pair, operation, 128, 20 * KIB, 24 * KIB, 64)


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
def test_many_small_descriptors(pair, operation):
    """100 000 pieces that no merging makes fewer."""
    moves_a_list(pair, operation, 100_000, 40, 64, 8)


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
def test_prepared_once_posted_often(pair, operation):
    """Each post moves what is there by then, and says so in its own words."""
    length, times = 100 * KIB, 12
    mine, theirs = pair.buffers(4 * length)
    initiator, other = pair.hosts
    blocks = [index * length for index in range(4)]
    into, source = moved(operation, mine, theirs)
    handle = initiator.prepare_blocks(operation, mine.rows(blocks, length), theirs.rows(blocks, length), other.name, [1, 3])
    for turn in range(times):
        source.renew(source.seed + 1000)
        assert initiator.post(handle, b"turn %d" % turn) in ("DONE", "PROC")
        assert initiator.wait(handle) == "DONE"
        assert other.notifications(1) == {initiator.name: [b"turn %d" % turn]}
        into.check([(at, length, source.seed, at) for at in blocks[1::2]])
    initiator.release(handle)


def test_both_ways_at_once(pair):
    """Each side reads and writes in the other's memory at the same time."""
    length, rounds = 256 * KIB, 8
    mine, theirs = pair.buffers(4 * length)
    initiator, other = pair.hosts
    initiator.begin("transfer", "READ", mine.row(0, length), theirs.row(0, length), other.name, times=rounds)
    other.begin("transfer", "WRITE", theirs.row(length, length), mine.row(length, length), initiator.name, times=rounds)
    assert (initiator.end(), other.end()) == ("DONE", "DONE")
    mine.check([(0, length, theirs.seed, 0), (length, length, theirs.seed, length)])
    theirs.check()


def test_several_under_way_at_once(pair):
    """Requests of one agent do not wait for one another, nor mix their bytes up."""
    length, count = 512 * KIB, 6
    mine, theirs = pair.buffers(count * length)
    initiator, other = pair.hosts
    handles = []
    for index in range(count):
        place = index * length
        operation = "READ" if index % 2 else "WRITE"
        handles.append(initiator.prepare(operation, mine.row(place, length), theirs.row(place, length), other.name))
    states = [initiator.post(handle) for handle in handles]
    assert set(states) <= {"DONE", "PROC"}
    assert [initiator.wait(handle) for handle in handles] == ["DONE"] * count
    for handle in handles:
        initiator.release(handle)
    mine.check([(index * length, length, theirs.seed, index * length) for index in range(1, count, 2)])
    theirs.check([(index * length, length, mine.seed, index * length) for index in range(0, count, 2)])


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
def test_a_range_outside_of_what_is_registered_is_refused(pair, operation):
    """Before the transfer or by it: an error, and nothing is written."""
    from hosts import WorkerError

    mine, theirs = pair.buffers(8 * KIB)
    with pytest.raises(WorkerError) as refused:
        assert pair.transfer(operation, mine.row(0, 8 * KIB), theirs.row(4 * KIB, 8 * KIB)) == "DONE"
    assert refused.value.kind.startswith("nixl"), refused.value
    mine.check()
    theirs.check()
