# SPDX-License-Identifier: Apache-2.0
"""The prefix cache between hosts: blocks of every length, eviction while others pull, chains and pins."""

import mmap
import time

MODEL = "tiny"
SMALL = 16 << 10
# A pool that a chain of this length does not fit in.
FEW_CELLS = f"{SMALL}:2M"
LONG = 400


def test_blocks_of_every_length(either_pair, seed):
    either_pair.format(cells="4K:10%,64K:50%")
    a, b = either_pair.peers()
    for number, len_bytes in enumerate([1, 64, 4095, 4097, 65536]):
        chain = (MODEL, seed + number, 16, len_bytes)
        assert a("publish", *chain) == ["stored"] * 16
        assert b("outcomes", *chain) == ["hit"] * 16
        assert b("publish", *chain) == ["exists"] * 16
    for peer in (a, b):
        peer.end()


def test_a_bit_that_flipped_in_the_memory_is_a_miss(pair, seed):
    import pools  # Needs the extension, without which there is no pair.

    a, b = pair.peers()
    assert a("publish", MODEL, seed, 8, SMALL) == ["stored"] * 8
    with mmap.mmap(pair.lab.memories[0], pair.lab.device_bytes) as memory:
        # Two blocks, hit at their first and at their last byte.
        for number, byte in ((2, 0), (5, SMALL - 1)):
            place = memory.find(pools.payload(pools.chain(8, seed)[number], SMALL))
            assert place >= 0, "the memory does not hold the block"
            memory[place + byte] ^= 1
    for peer in (b, a):
        assert peer("outcomes", MODEL, seed, 8, SMALL) == ["hit", "hit", "checksum", "hit", "hit", "checksum", "hit", "hit"]
    for peer in (a, b):
        peer.end()


def test_eviction_gives_right_bytes_or_a_miss(either_pair, seed):
    either_pair.format(cells=FEW_CELLS)
    peers = either_pair.peers()
    for number, peer in enumerate(peers):
        peer("start_publishing", "publish", MODEL, seed + number, SMALL, LONG)
        peer("start_pulling", "pull", MODEL, seed + 1 - number, SMALL, LONG)

    def seen(done):
        hits = done.get("hit", 0)
        return hits > 100 and sum(done.values()) - hits > 100

    for peer in peers:
        peer.until("pull", seen)
        peer.until("publish", lambda done: done.get("stored", 0) > 2 * LONG)
    for peer in peers:
        pulled, published = peer("stop", "pull"), peer("stop", "publish")
        assert "wrong" not in pulled and "raised" not in pulled, pulled
        assert published["stored"] > 2 * LONG and "raised" not in published, published
        peer.end()
    assert "0 errors" in either_pair.fsck()


def test_a_pinned_chain_stays_and_its_end_goes(either_pair, seed):
    either_pair.format(cells=FEW_CELLS)
    a, b = either_pair.peers()
    assert a("publish_some", MODEL, seed, 0, 24, SMALL) == ["stored"] * 24
    assert b("chain_length", MODEL, seed, 30) == 24
    assert b("pin", MODEL, seed, 8) == 8
    # Far more than there is room for: what is not pinned goes.
    for first in range(0, LONG, 100):
        assert "stored" in a("publish_some", MODEL, seed + 1, first, 100, SMALL)
    assert b("chain_length", MODEL, seed, 30) == 8
    assert b("outcomes", MODEL, seed, 24, SMALL)[:8] == ["hit"] * 8
    assert a("outcomes", MODEL, seed, 8, SMALL) == ["hit"] * 8
    assert b("release") == 0
    deadline, number = time.monotonic() + 120, 2
    while b("chain_length", MODEL, seed, 30):
        assert time.monotonic() < deadline, "what is not pinned any more does not go"
        a("publish_some", MODEL, seed + number, 0, 150, SMALL)
        number += 1
    for peer in (a, b):
        peer.end()
