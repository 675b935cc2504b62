# SPDX-License-Identifier: Apache-2.0
"""What test_kvcr.py runs in a network of its own, because NIXL's listener takes no address to bind to."""

import pytest
from peers import MORTAL, fsck, until

NAMES = [f"block {number}" for number in range(16)]


@pytest.fixture
def heap(make_pool):
    """A pool without cells: the plugin takes memory of it."""
    return make_pool(size="64M", cells="none")


@pytest.fixture
def kvcr(heap, peer):
    own = {"CXL_POOL": heap, **MORTAL}
    return lambda machine, memory, **more: peer("kvcr", heap, machine=machine, environment=own, memory=memory, **more)


@pytest.mark.parametrize("memory", ("ordinary", "pool"))
def test_blocks_go_to_kvcr_and_back(kvcr, memory):
    one = kvcr("a", memory)
    one("offer", NAMES)
    assert one("deposit", NAMES) == [True] * 16
    assert one("tiers", NAMES + ["none"]) == ["LOCAL_G2"] * 16 + ["None"]
    assert one("deliver", NAMES) == [True] * 16


@pytest.mark.parametrize("memory", ("ordinary", "pool"))
def test_blocks_go_from_one_host_to_another(kvcr, memory):
    source, target = kvcr("a", memory), kvcr("b", memory)
    endpoint = source("offer", NAMES)
    assert target("deliver", NAMES, endpoint) == [True] * 16
    # And back, of what the target has of its own.
    endpoint = target("offer", [f"other {name}" for name in NAMES])
    assert source("deliver", [f"other {name}" for name in NAMES], endpoint) == [True] * 16


@pytest.mark.parametrize("memory", ("ordinary", "pool"))
def test_a_host_that_is_killed_fails_transfers_and_nothing_else(kvcr, heap, memory):
    """In the middle of transfers, at several moments. Whatever came is right; the others go on."""
    target, other = kvcr("b", memory, timeout_ms=3000), kvcr("c", memory)
    there = other("offer", NAMES)
    for round in range(2):
        source = kvcr(f"a{round}", memory)
        endpoint = source("offer", NAMES)
        if round:
            assert target("deliver", NAMES, endpoint) == [True] * 16
        target.send("deliver", NAMES, endpoint)
        source.kill()
        target.answer()
        assert target("deliver", NAMES[:4], endpoint) == [False] * 4
        until(lambda: target("deliver", NAMES, there) == [True] * 16, "blocks of a host that lives")
    assert other("deposit", NAMES) == [True] * 16 and other("deliver", NAMES) == [True] * 16
    for one in (target, other):
        one.kill()
    assert fsck(heap)["errors"] == 0
