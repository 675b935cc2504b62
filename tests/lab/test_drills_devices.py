# SPDX-License-Identifier: Apache-2.0
"""Memory that goes away or goes bad under the programs of one host (rows 15 to 17 of docs/internals/faults.md)."""

import pytest
from drills import BLOCK_BYTES, MODEL, at_some_moment, dice_of, finish, goes_on, start, start_both, stop, until_fenced, until_served
from lines import Raised

DRIVER = "/sys/bus/dax/drivers/device_dax"
GRANULE_BYTES = 2 << 20
CELL_BYTES = 64 << 10
LOST = "DeviceError"
COUNT = 200


def under_load(rack, seed):
    """Both hosts publish blocks of their own, and pull what the other publishes."""
    a, b = start_both(rack)
    for number, peer in enumerate((a, b)):
        peer("start_publishing", "publish", MODEL, seed + number, BLOCK_BYTES, COUNT)
        peer("start_pulling", "pull", MODEL, seed + 1 - number, BLOCK_BYTES, COUNT)
    return a, b


def lose(rack, name, fault):
    """Takes the device away from a host."""
    if fault == "unbind":
        rack[name].run(["sh", "-c", f"echo dax0.0 >{DRIVER}/unbind"])
    else:
        getattr(rack[name], fault)()


def give_back(rack, name, fault):
    """The host has its device again: without a boot where only a driver was taken away."""
    if fault == "unbind":
        rack[name].run(["sh", "-c", f"echo dax0.0 >{DRIVER}/bind"])
    else:
        rack.reboot([name])


def ends(peer):
    """It ends, whatever it says of the lost device, and no signal ends it."""
    peer.process.end_input()
    assert peer.process.wait(120) in (0, 1), peer.process.error[-3000:]


@pytest.mark.parametrize("fault", [pytest.param("unbind", marks=pytest.mark.smoke), "unplug", "link_error"])
def test_a_device_is_lost_under_load(pair, seed, fault):
    rack = pair
    a, b = under_load(rack, seed)
    slot = b("slot")
    stored = at_some_moment(b, "publish", dice_of(seed))
    lose(rack, "B", fault)
    # Every call comes back, with an error, and the process lives.
    for work in ("publish", "pull"):
        goes_on(b, work, LOST)
    stop(b, "publish", "pull")
    with pytest.raises(Raised, match="DeviceError"):
        b("chain_length", MODEL, seed, COUNT)
    # Other hosts notice only that a host is gone.
    goes_on(a, "pull", "hit")
    until_fenced(rack, "A", slot)
    until_served(a, seed + 1, stored)
    assert LOST not in str(stop(a, "publish", "pull"))
    ends(b)
    give_back(rack, "B", fault)
    b = start(rack, "B").ready()
    until_served(b, seed + 1, stored)
    assert set(b("publish_some", MODEL, seed + 1, stored, 20, BLOCK_BYTES)) <= {"stored", "exists"}
    until_served(a, seed + 1, stored + 20)
    finish(rack, a, b)


def granules_of(rack, peer, chain, count):
    """Offsets of the 2 MiB that the blocks of a chain begin in; None for those that are not there."""
    cells_offset = rack.json("A", "info")["cache"]["cells_offset"]

    def granule(cell):
        offset = cells_offset + cell * CELL_BYTES
        return offset - offset % GRANULE_BYTES

    return [None if cell is None else granule(cell) for cell in peer("cells", MODEL, chain, count)]


def test_poisoned_payload_is_a_miss_for_the_host_that_meets_it(pair, seed):
    rack = pair
    a, b = start_both(rack)
    assert a("publish", MODEL, seed, COUNT, BLOCK_BYTES) == ["stored"] * COUNT
    until_served(b, seed, COUNT)
    where = granules_of(rack, a, seed, COUNT)
    bad = dice_of(seed).choice(where)
    b("poison", bad)
    expected = ["device_error" if place == bad else "hit" for place in where]
    assert "hit" in expected
    assert b("outcomes", MODEL, seed, COUNT, BLOCK_BYTES) == expected
    assert a("outcomes", MODEL, seed, COUNT, BLOCK_BYTES) == ["hit"] * COUNT
    # Another process of the host begins anew: the damage is in what the first one had mapped.
    b.end()
    b = start(rack, "B").ready()
    until_served(b, seed, COUNT)
    finish(rack, a, b)


def test_poisoned_cells_are_left_alone_by_their_owner(pair, seed):
    rack = pair
    a, b = start_both(rack)
    # The cells of a host lie together: those behind its first blocks are where its next ones would go.
    assert b("publish", MODEL, seed, 4, BLOCK_BYTES) == ["stored"] * 4
    bad = granules_of(rack, b, seed, 4)[-1] + GRANULE_BYTES
    b("poison", bad)
    said = b("publish_some", MODEL, seed, 4, COUNT, BLOCK_BYTES)
    # The publish that meets it fails; none after it does.
    assert said.count("stored") >= COUNT - 1, said
    assert set(said) <= {"stored", LOST}
    stored = [place + 4 for place, outcome in enumerate(said) if outcome == "stored"]
    for peer in (a, b):
        outcomes = peer("outcomes", MODEL, seed, COUNT + 4, BLOCK_BYTES)
        assert [outcomes[place] for place in stored] == ["hit"] * len(stored)
    assert bad not in granules_of(rack, b, seed, COUNT + 4)
    finish(rack, a, b)


def test_poisoned_metadata_stops_one_process_and_no_other(pair, seed):
    rack = pair
    a, b = under_load(rack, seed)
    slot = b("slot")
    stored = at_some_moment(b, "publish", dice_of(seed))
    # Superblocks come first; the lines of slots, locks and cells lie behind them.
    b("poison", GRANULE_BYTES)
    for work in ("publish", "pull"):
        goes_on(b, work, LOST)
    stop(b, "publish", "pull")
    goes_on(a, "pull", "hit")
    until_fenced(rack, "A", slot)
    until_served(a, seed + 1, stored)
    assert LOST not in str(stop(a, "publish", "pull"))
    ends(b)
    b = start(rack, "B").ready()
    until_served(b, seed + 1, stored)
    finish(rack, a, b)
