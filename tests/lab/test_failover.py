# SPDX-License-Identifier: Apache-2.0
"""How long publishes wait when the host that manages the pool leaves or loses its power (row 3 of faults.md, LOCKS.md 12.21)."""

import time

import pytest
from cxl_lab.lab import NAMESPACES
from drills import SUSPECT_MS, hosts
from test_drills_kills import managing

MODEL = "tiny"
BLOCKS = 64
BLOCK_BYTES = 16 << 10
# What a machine with other work may add to all of these publishes.
LATE_S = 3.0


def names_of(rack, peers):
    """The host that manages, and the others."""
    seen = hosts(rack, next(iter(peers)))
    machines = {name: seen["slots"][peer("slot")]["machine"] for name, peer in peers.items()}
    manager = next(name for name, machine in machines.items() if machine == managing(seen))
    return manager, [name for name in peers if name != manager]


@pytest.mark.parametrize("ends", [("leave", "leave"), ("kill", "kill"), ("kill", "leave"), ("leave", "kill")], ids="-".join)
def test_publishes_go_on_when_the_manager_ends(racks, seed, ends):
    rack = racks.formatted(NAMESPACES, "ABC")
    # Where no host is killed no silence is ever waited for, however long that would be.
    options = {"suspect_ms": SUSPECT_MS} if "kill" in ends else {}
    peers = dict(zip("ABC", rack.peers("ABC", **options), strict=True))
    for number, end in enumerate(ends):
        name, others = names_of(rack, peers)
        manager = peers.pop(name)
        # So that it holds the locks of the table.
        assert manager("publish", MODEL, seed + 2 * number, BLOCKS, BLOCK_BYTES) == ["stored"] * BLOCKS
        begun = time.monotonic()
        if end == "kill":
            rack[name].kill()
        else:
            manager.send("leave")
        heir = peers[others[(seed + number) % len(others)]]
        assert heir("publish", MODEL, seed + 2 * number + 1, BLOCKS, BLOCK_BYTES) == ["stored"] * BLOCKS
        waited_s = time.monotonic() - begun
        most_s = 1.5 * SUSPECT_MS / 1000 if end == "kill" else 0.1
        assert waited_s < most_s + LATE_S, f"after a {end} of {name} a publish waited {waited_s:.1f} s, and not {most_s} s"
        if end == "leave":
            manager.answer()
            manager.end()
    for peer in peers.values():
        peer.end()
    assert "0 errors" in rack.fsck(next(iter(peers)))
