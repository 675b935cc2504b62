# SPDX-License-Identifier: Apache-2.0
"""Hosts that come and go, and what they find on the devices."""

import json
import os
import random

import pytest
from cxl_lab import LabError

MODEL = "tiny"
# An emulated processor takes a second for a megabyte of CXL memory.
BLOCK_BYTES = 8192
COUNT = 20
HITS = ["hit"] * COUNT
MIB = 1 << 20


def test_blocks_are_still_there_after_all_hosts_lost_their_power(either_pair, seed):
    rack = either_pair
    peers = rack.peers()
    for number, peer in enumerate(peers):
        assert peer("publish", MODEL, seed + number, COUNT, BLOCK_BYTES) == ["stored"] * COUNT
    rack.reboot("AB")
    peers = rack.peers()
    for peer in peers:
        for number in range(2):
            assert peer("outcomes", MODEL, seed + number, COUNT, BLOCK_BYTES) == HITS
    # And they go on as before.
    assert peers[0]("publish", MODEL, seed + 2, COUNT, BLOCK_BYTES) == ["stored"] * COUNT
    assert peers[1]("outcomes", MODEL, seed + 2, COUNT, BLOCK_BYTES) == HITS
    for peer in peers:
        peer.end()
    assert "0 errors" in rack.fsck()


def test_a_device_full_of_anything_is_refused_and_formatted_only_by_force(racks, seed):
    rack = racks.get("cxl")
    dirt = random.Random(seed)
    for place in range(0, rack.lab.device_bytes, 4 * MIB):
        os.pwrite(rack.lab.memories[0], dirt.randbytes(4 * MIB), place)
    before = os.pread(rack.lab.memories[0], 4 * MIB, 0)
    refused = rack.cxlctl("B", "info", status=3)
    assert rack.spec in refused.error
    for name in "AB":
        assert "--force" in rack.cxlctl(name, "format", status=4).error
    assert os.pread(rack.lab.memories[0], 4 * MIB, 0) == before, "a command that refused has written"
    rack.format()
    assert "0 errors" in rack.fsck("B")
    rack.exchange(seed)


def test_an_old_pool_is_kept_until_a_new_one_is_forced(either_pair, seed):
    rack = either_pair
    a, b = rack.peers()
    assert a("publish", MODEL, seed, COUNT, BLOCK_BYTES) == ["stored"] * COUNT
    rack.cxlctl("B", "format", status=4)
    assert b("outcomes", MODEL, seed, COUNT, BLOCK_BYTES) == HITS
    for peer in (a, b):
        peer.end()
    rack.format(name="B")
    a, b = rack.peers()
    for peer in (a, b):
        assert set(peer("outcomes", MODEL, seed, COUNT, BLOCK_BYTES)) == {"absent"}
    assert b("publish", MODEL, seed, COUNT, BLOCK_BYTES) == ["stored"] * COUNT
    assert a("outcomes", MODEL, seed, COUNT, BLOCK_BYTES) == HITS
    for peer in (a, b):
        peer.end()


@pytest.mark.parametrize("mode", ["namespaces", "cxl"])
def test_four_hosts_in_turn_on_two_slots(racks, mode, seed):
    rack = racks.formatted(mode, "AB")
    rack.format("--slots", "2")
    published = []

    def work(peer):
        """Every block of all hosts so far, and some of its own."""
        for other in published:
            assert peer("outcomes", MODEL, other, COUNT, BLOCK_BYTES) == HITS
        published.append(seed + len(published))
        assert peer("publish", MODEL, published[-1], COUNT, BLOCK_BYTES) == ["stored"] * COUNT

    up = rack.peers()
    for peer in up:
        work(peer)
    for name in "CDAB":
        if not rack[name].alive():
            rack.boot(name)
        staying, going = up[1], up[0]
        going.end()
        coming = rack.start(name).ready()
        work(coming)
        work(staying)
        up = [staying, coming]
    for peer in up:
        peer.end()
    assert "0 errors" in rack.fsck("B")


@pytest.mark.parametrize("mode", ["namespaces", "cxl"])
def test_the_slot_of_a_host_without_power_is_given_away_on_a_statement(racks, mode, seed):
    rack = racks.formatted(mode, "ABC")
    rack.format("--slots", "2")
    a, b = rack.peers()
    assert b("publish", MODEL, seed, COUNT, BLOCK_BYTES) == ["stored"] * COUNT
    slot = b("slot")
    rack["B"].kill()
    # Silence is no proof: B may only be paused.
    with pytest.raises(LabError, match="host slots is full"):
        rack.start("C", join_timeout_ms=3000).ready()
    slots = json.loads(rack.cxlctl("A", "hosts", "--json").output)["slots"]
    incarnation = next(one["incarnation"] for one in slots if one["slot"] == slot)
    declare = ["hosts", "declare-dead", slot, "--incarnation", incarnation]
    assert "--i-know-it-is-gone" in rack.cxlctl("A", *declare, status=4).error
    rack.cxlctl("A", *declare, "--i-know-it-is-gone", "--timeout-ms", "60000")
    c = rack.start("C").ready()
    for peer in (c, a):
        assert peer("outcomes", MODEL, seed, COUNT, BLOCK_BYTES) == HITS
    for peer in (a, c):
        peer.end()
    assert "0 errors" in rack.fsck("C")
