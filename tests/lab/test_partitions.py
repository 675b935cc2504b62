# SPDX-License-Identifier: Apache-2.0
"""Two pools side by side on one device: both at work at once, from both hosts, and what happens in one does not concern the other."""

from rack import CXLCTL


def test_two_pools_lie_on_one_device(either_pair, seed):
    rack = either_pair
    device, half = rack.spec, rack.lab.device_bytes // 2
    parts = [f"{device},offset={at},size={half}" for at in (0, half)]
    rack.cxlctl("A", "erase", "--evict-hosts")
    try:
        for rack.spec in parts:
            rack.format(name="B")
        rack.spec = device
        assert "overlap the pool" in rack.cxlctl("A", "format", "--force", status=4).error
        peers = []
        for rack.spec in parts:
            peers.append(rack.peers())
        # The same names in both pools, of other chains.
        for number, (a, _) in enumerate(peers):
            assert a("publish", "tiny", seed + number, 24, 65536) == ["stored"] * 24
        for number, (_, b) in enumerate(peers):
            assert b("outcomes", "tiny", seed + number, 24, 65536) == ["hit"] * 24
            assert set(b("outcomes", "tiny", seed + 1 - number, 24, 65536)) == {"absent"}
        # A process dies in one and comes back, while the other serves.
        peers[0][0].kill()
        peers[1][1].send("publish", "tiny", seed + 2, 24, 65536)
        rack.spec = parts[0]
        peers[0][0] = rack.start("A").ready()
        assert peers[0][0]("outcomes", "tiny", seed, 24, 65536) == ["hit"] * 24
        assert peers[1][1].answer() == ["stored"] * 24
        assert peers[1][0]("outcomes", "tiny", seed + 2, 24, 65536) == ["hit"] * 24
        for peer in (peer for pair in peers for peer in pair):
            peer.end()
        for rack.spec in parts:
            assert "0 errors" in rack.fsck("B")
    finally:
        # The next test has the device to itself.
        for rack.spec in parts:
            rack.lab["A"].run([CXLCTL, "erase", "--evict-hosts"], {"CXL_POOL": rack.spec}, check=False)
        rack.spec = device
