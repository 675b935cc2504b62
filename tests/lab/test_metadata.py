# SPDX-License-Identifier: Apache-2.0
"""A pool with its metadata on one device and its payload on another: hosts at work, killed and back, and a device that goes."""

import pytest

pytestmark = pytest.mark.rare


@pytest.fixture
def rack(racks):
    """Hosts A and B, and a new pool with its metadata on the second device."""
    rack = racks.get("cxl-two")
    payload, metadata = rack["A"].devices
    rack.spec = f"{payload},metadata={metadata}"
    rack.format()
    return rack


def test_hosts_exchange_blocks_and_one_loses_its_power(rack, seed):
    payload, metadata = rack["A"].devices
    told = rack.json("B", "info")
    assert [device["name"] for device in told["devices"]] == [metadata, payload] and told["geometry"]["metadata_bytes"] > 0
    a, b = rack.peers()
    assert a("publish", "tiny", seed, 24, 65536) == ["stored"] * 24
    assert b("outcomes", "tiny", seed, 24, 65536) == ["hit"] * 24
    assert b("publish", "tiny", seed + 1, 24, 65536) == ["stored"] * 24
    rack["A"].kill()
    assert b("outcomes", "tiny", seed, 24, 65536) == ["hit"] * 24
    rack.boot("A")
    again = rack.start("A").ready()
    for number in range(2):
        assert again("outcomes", "tiny", seed + number, 24, 65536) == ["hit"] * 24
    assert again("publish", "tiny", seed + 2, 24, 65536) == ["stored"] * 24
    assert b("outcomes", "tiny", seed + 2, 24, 65536) == ["hit"] * 24
    for peer in (again, b):
        peer.end()
    assert "0 errors" in rack.fsck("B")


def test_one_device_alone_is_no_pool_and_is_not_formatted_under_hosts(rack, seed):
    devices, name = rack["A"].devices, rack.spec
    peer = rack.start("A").ready()
    assert peer("publish", "tiny", seed, 8, 65536) == ["stored"] * 8
    for rack.spec in devices:
        assert "is missing" in rack.cxlctl("B", "info", status=3).error
        assert "hosts use this pool" in rack.cxlctl("B", "format", "--force", status=4).error
    rack.spec = name
    other = rack.start("B").ready()
    assert other("outcomes", "tiny", seed, 8, 65536) == ["hit"] * 8
    for one in (peer, other):
        one.end()
