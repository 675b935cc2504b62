# SPDX-License-Identifier: Apache-2.0
"""Two hosts, one pool: what one publishes the other pulls."""

BLOCK_BYTES = 40_000
COUNT = 24


def test_two_hosts_exchange_blocks(either_pair, seed):
    a, b = either_pair.peers()
    assert a("slot") != b("slot")
    assert a("publish", "a", seed, COUNT, BLOCK_BYTES) == ["stored"] * COUNT
    assert b("outcomes", "a", seed, COUNT, BLOCK_BYTES) == ["hit"] * COUNT
    assert b("publish", "b", seed + 1, COUNT, BLOCK_BYTES) == ["stored"] * COUNT
    assert a("outcomes", "b", seed + 1, COUNT, BLOCK_BYTES) == ["hit"] * COUNT
    # Of the other's namespace and chain nothing is a hit here.
    assert set(a("outcomes", "a", seed + 1, COUNT, BLOCK_BYTES)) == {"absent"}
    for peer in (a, b):
        peer.end()
    assert "0 errors" in either_pair.fsck("B")
