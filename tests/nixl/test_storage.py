# SPDX-License-Identifier: Apache-2.0
"""Objects and files through real NIXL agents of two hosts: what one puts there the other gets, and what is refused leaves all as it was."""

import os

import pytest
import wheels
from cluster import Cluster
from hosts import Host
from pattern import pattern
from pool_api import PoolHandle, format_pool

LENGTH = 200_003
PAGE = 5_120


class StorageCluster(Cluster):
    """A pool with a cache, and hosts whose workers know of objects and files."""

    def __init__(self, folder, wheel, memory):
        super().__init__(folder, "CXL", wheel, memory)
        self.handle.close()
        format_pool(f"{self.pool_file},size=128M", cell_bytes=1 << 20, cells_percent=50)
        self.handle = PoolHandle(str(self.pool_file))

    def host(self, parameters=None):
        environment = {"CXL_POOL": str(self.pool_file)}
        if self.memory == "emulated":
            environment["CXL_COHERENCE"] = f"emulated:seed={len(self.hosts) + 1},noise=4"
        host = Host(self.folder, self.wheel, environment, program=wheels.HERE / "storage_worker.py")
        self.hosts.append(host)
        host.name, host.opened = f"agent-{next(self.names)}", False
        host.agent(host.name, "CXL", parameters)
        return host


@pytest.fixture(scope="module", params=[(wheel, memory) for wheel in wheels.chosen() for memory in ("plain", "emulated")], ids="-".join)
def hosts(request, folder, plugin):
    """Two of them; the second one copies everything on workers."""
    with StorageCluster(folder, *request.param) as cluster:
        cluster.hosts_of_test = [cluster.host(), cluster.host({"inline_bytes": 0})]
        yield cluster
        for host in cluster.hosts_of_test:
            assert host.stop() == 0, host.story("did not end well")


def test_objects(hosts):
    one, two = hosts.hosts_of_test
    keys = [f"block {index}" for index in range(4)]
    for host in (one, two):
        host.register_storage("objects", "OBJ", [(0, LENGTH, index, key) for index, key in enumerate([*keys, "absent"])])
    mine, theirs = hosts.buffer(one, "heap", 4 * LENGTH), hosts.buffer(two, "heap", 4 * LENGTH)
    # Four objects in one list, each in two pieces of which the second comes first.
    pieces = [(index, start, length) for index in range(4) for start, length in ((PAGE, LENGTH - PAGE), (0, PAGE))]
    local = [(mine.address + index * LENGTH + start, length, 0) for index, start, length in pieces]
    remote = [(start, length, index) for index, start, length in pieces]
    assert one.query([(0, LENGTH, 0, key) for key in keys], "OBJ") == [None] * 4
    assert one.move("WRITE", "OBJ", local, remote, times=2) == "DONE"
    found = two.query([(0, LENGTH, 0, keys[1]), (0, LENGTH, 0, "absent")], "OBJ")
    assert found[0]["size"] == str(LENGTH) and found[0]["tier"] == "cxl" and found[1] is None

    # The other host gets them in another order and place, whole and in parts.
    whole = [(theirs.address + (3 - index) * LENGTH, LENGTH, 0) for index in range(4)]
    assert two.move("READ", "OBJ", whole, [(0, LENGTH, index) for index in range(4)], times=3) == "DONE"
    theirs.check([((3 - index) * LENGTH, LENGTH, mine.seed, index * LENGTH) for index in range(4)])
    theirs.renew(999)
    assert two.move("READ", "OBJ", [(theirs.address + 17, PAGE, 0)], [(LENGTH - PAGE, PAGE, 2)]) == "DONE"
    theirs.check([(17, PAGE, mine.seed, 3 * LENGTH - PAGE)])

    # The key of an object in digits names the same one.
    digits = found[0]["namespace"] + found[0]["key"]
    assert two.query([(0, 0, 0, digits)], "OBJ")[0]["size"] == str(LENGTH)
    for refused, rows in (("READ", [(0, LENGTH, 4)]), ("WRITE", [(1, LENGTH - 1, 4)])):
        assert two.move(refused, "OBJ", [(theirs.address, rows[0][1], 0)], rows) not in ("DONE", "PROC")
    assert one.query([(0, LENGTH, 0, "absent")], "OBJ") == [None]


@pytest.mark.parametrize("access", ["pread", "mmap"])
def test_files(hosts, access):
    cluster = hosts
    one, two = (cluster.host({"file_access": access, "inline_bytes": inline}) for inline in ("0", "1G"))
    path = cluster.folder / f"file-{access}"
    path.write_bytes(bytes(64 * PAGE))
    for host in (one, two):
        host.register_storage("file", "FILE", [(0, 64 * PAGE, 77, f"rw:{path}")])
    mine, theirs = cluster.buffer(one, "heap", 64 * PAGE), cluster.buffer(two, "heap", 64 * PAGE)
    local = [(mine.address + index * PAGE, PAGE, 0) for index in range(64)]
    remote = [((63 - index) * PAGE, PAGE, 77) for index in range(64)]
    assert one.move("WRITE", "FILE", local, remote, times=2) == "DONE"
    sent = pattern(mine.seed, 64 * PAGE).reshape(64, PAGE)
    assert path.read_bytes() == sent[::-1].tobytes()
    assert two.move("READ", "FILE", [(theirs.address, 64 * PAGE, 0)], [(0, 64 * PAGE, 77)]) == "DONE"
    theirs.check([(index * PAGE, PAGE, mine.seed, (63 - index) * PAGE) for index in range(64)])
    assert one.query([(0, 0, 0, str(path)), (0, 0, 0, "/absent")], "FILE")[0]["size"] == str(64 * PAGE)
    # Cut behind our backs: the transfer fails, the agent goes on.
    os.truncate(path, 4096)
    assert two.move("READ", "FILE", [(theirs.address, 64 * PAGE, 0)], [(0, 64 * PAGE, 77)]) not in ("DONE", "PROC")
    theirs.renew(1234)
    theirs.check()
    for host in (one, two):
        host.deregister_storage("file")
        assert host.stop() == 0, host.story("did not end well")
        cluster.hosts.remove(host)


def test_the_pool_is_no_file(hosts):
    one = hosts.hosts_of_test[0]
    head = hosts.pool_file.read_bytes()[:4096]
    one.register_storage("pool", "FILE", [(0, 8 << 20, 5, f"rw:{hosts.pool_file}")])
    mine = hosts.buffer(one, "heap", 8 << 20)
    for operation in ("READ", "WRITE"):
        assert one.move(operation, "FILE", [(mine.address, 4096, 0)], [(0, 4096, 5)]) not in ("DONE", "PROC")
    mine.check()
    # A block of it is.
    block = hosts.block(8192)
    one.register_storage("block", "FILE", [(block, 8192, 6, f"rw:{hosts.pool_file}")])
    assert one.move("WRITE", "FILE", [(mine.address + 3, 8000, 0)], [(block + 7, 8000, 6)]) == "DONE"
    assert hosts.pool_file.read_bytes()[block + 7 : block + 8007] == pattern(mine.seed, 8 << 20)[3:8003].tobytes()
    assert hosts.pool_file.read_bytes()[:4096] == head
