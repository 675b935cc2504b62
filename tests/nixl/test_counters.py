# SPDX-License-Identifier: Apache-2.0
"""What agents count, as `cxlctl` shows it of every host."""

import json
import os
import subprocess
import time

import pytest
import wheels
from cluster import MIB

CXLCTL = wheels.ROOT / "target" / "release" / "cxlctl"
PATIENCE_S = 30


class Shown:
    """`cxlctl` on a cluster's pool, as another machine that only looks."""

    def __init__(self, cluster):
        if not CXLCTL.is_file():
            pytest.fail(f"{CXLCTL} is not there: run `make build`")
        self.cluster = cluster

    def run(self, *command):
        environment = {**os.environ, "CXL_POOL": str(self.cluster.pool_file)}
        return subprocess.run([CXLCTL, *command], env=environment, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout

    def hosts(self):
        """Counters by slot, of hosts that have told of any agent."""
        shown = json.loads(self.run("--json", "nixl"))
        assert not shown["lacks_counters"]
        return {host["slot"]: host["counters"] for host in shown["hosts"] if any(host["counters"].values())}

    def await_counters(self, *wanted):
        """Waits until there is one host for each of these, in whatever order, with these values among its counters; returns them."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            hosts = list(self.hosts().values())
            found = [next((host for host in hosts if values.items() <= host.items()), None) for values in wanted]
            if all(found):
                return found
            assert time.monotonic() < deadline, f"wanted {wanted}, found {hosts}"
            time.sleep(0.05)


@pytest.mark.parametrize("cluster", [(wheels.DEFAULT, "plain"), (wheels.DEFAULT, "emulated")], indirect=True, ids=["plain", "emulated"])
def test_cxlctl_shows_what_both_hosts_transferred(cluster):
    shown, (one, other) = Shown(cluster), (cluster.host(), cluster.host())
    mine, theirs, pooled = cluster.buffer(one, "heap", 4 * MIB), cluster.buffer(other, "heap", 4 * MIB), cluster.buffer(other, "file", MIB)
    cluster.introduce(one, other)
    assert one.transfer("READ", mine.row(0, 3 * MIB), theirs.row(0, 3 * MIB), other.name) == "DONE"
    assert one.transfer("WRITE", mine.row(3 * MIB, 70_000), theirs.row(3 * MIB, 70_000), other.name, b"moved") == "DONE"
    assert one.transfer("WRITE", mine.row(0, 50_000), pooled.row(0, 50_000), other.name) == "DONE"
    assert other.transfer("READ", theirs.row(0, 4096), mine.row(0, 4096), one.name) == "DONE"
    assert other.notifications(1) == {one.name: [b"moved"]}
    # Under the emulator a block that is mapped by itself is ordinary memory, as far as the plugin is concerned.
    direct = 50_000 if cluster.memory == "plain" else 0
    staged = 120_000 - direct
    initiator, _ = shown.await_counters(
        {"posted": 3, "reads": 1, "writes": 2, "failed": 0, "staged_read_bytes": 3 * MIB, "staged_written_bytes": staged,
         "pool_written_bytes": direct, "served_read_bytes": 4096, "notifs_sent": 1, "notifs_received": 0, "engines": 1},
        {"posted": 1, "reads": 1, "writes": 0, "staged_read_bytes": 4096, "served_read_bytes": 3 * MIB, "served_written_bytes": staged,
         "notifs_sent": 0, "notifs_received": 1, "engines": 1},
    )
    assert initiator["links"] >= 1 and initiator["links_lost"] == 0
    text = shown.run("nixl")
    assert any(line.startswith("staged read bytes ") and " 3 MiB " in line for line in text.splitlines()), text
    slots = sorted(shown.hosts())
    rates = json.loads(shown.run("--json", "top", "--once", "--interval-ms", "50"))
    assert {host["slot"]: host["stats"]["nixl_posted"] for host in rates["hosts"] if host["slot"] in slots} == {
        slot: counters["posted"] for slot, counters in shown.hosts().items()
    }
    assert "\nNIXL\n" in shown.run("top", "--once", "--interval-ms", "50")


def test_counts_of_a_process_that_was_killed_stay(cluster):
    """Two processes are one host: their counts are one sum, of which nothing is lost with either of them."""
    shown, peer = Shown(cluster), cluster.host("peer")
    first, second = (cluster.host(name, machine="shared") for name in ("first", "second"))
    theirs = cluster.buffer(peer, "heap", 2 * MIB)
    for host, count in ((first, 5), (second, 3)):
        mine = cluster.buffer(host, "heap", 2 * MIB)
        cluster.introduce(host, peer)
        assert host.transfer("WRITE", mine.row(0, MIB), theirs.row(0, MIB), peer.name, times=count) == "DONE"
    shown.await_counters({"posted": 8, "writes": 8, "staged_written_bytes": 8 * MIB, "engines": 2}, {"served_written_bytes": 8 * MIB})
    first.kill()
    kept = {"posted": 8, "writes": 8, "staged_written_bytes": 8 * MIB}
    shown.await_counters({**kept, "engines": 1}, {"served_written_bytes": 8 * MIB, "links_lost": 1, "peers_gone": 1})
    # The last one ends in good order, and a new one of the same machine goes on from there.
    assert second.stop() == 0
    third = cluster.host("third", machine="shared")
    mine = cluster.buffer(third, "heap", MIB)
    cluster.introduce(third, peer)
    assert third.transfer("WRITE", mine.row(0, MIB), theirs.row(0, MIB), peer.name) == "DONE"
    shown.await_counters({"posted": 9, "writes": 9, "staged_written_bytes": 9 * MIB, "engines": 1}, {"served_written_bytes": 9 * MIB})
