# SPDX-License-Identifier: Apache-2.0
"""Hosts that lose their power in the middle of something, and come back (rows 1, 3, 5 and 6 of docs/internals/faults.md)."""

import pytest
from cxl_lab.lab import NAMESPACES
from drills import (
    BLOCK_BYTES,
    MODEL,
    SMALL,
    SMALL_BLOCK_BYTES,
    at_some_moment,
    b_holds_a_lock,
    dice_of,
    finish,
    goes_on,
    hosts,
    start,
    start_both,
    states,
    stop,
    until,
    until_all_cells_are_of,
    until_fenced,
    until_served,
)

TIMES = 10


@pytest.mark.smoke
def test_a_lock_of_a_killed_host_passes_on_when_its_death_is_proven(pair):
    rack = pair
    a, b, lock, counter = b_holds_a_lock(rack, TIMES)
    slot, incarnation = b("slot"), b("incarnation")
    a.send("count", lock, counter, TIMES)
    # Until a program of the host joins, others have its silence alone: the wait for that goes on beside the boot.
    rack.reboot("B")
    until_fenced(rack, "A", slot)
    # Silence is no proof: it could be a pause.
    assert a.process.output.count("\n") == a.answers, "the lock has passed on"
    b = start(rack, "B").ready()
    # Who gives a repaired lock back and asks anew before the manager looks is told to repair once more (LOCKS.md, S1).
    assert a.answer() >= 1
    assert (b("slot"), b("incarnation") > incarnation) == (slot, True)
    assert b("count", lock, counter, TIMES) == 0
    assert a("counted", lock, counter) == 3 * TIMES
    finish(rack, a, b)


@pytest.mark.smoke
def test_a_lock_of_a_killed_host_passes_on_by_the_word_of_their_kernel(racks):
    rack = racks.formatted(NAMESPACES)
    a, b, lock, counter = b_holds_a_lock(rack, TIMES)
    slot = b("slot")
    a.send("count", lock, counter, TIMES)
    rack["B"].kill()
    assert a.answer() >= 1
    assert hosts(rack, "A")["slots"][slot]["standing"] == "declared dead"
    assert a("counted", lock, counter) == 2 * TIMES
    finish(rack, a)


def test_a_lock_of_a_killed_host_passes_on_when_its_death_is_stated(pair):
    rack = pair
    a, b, lock, counter = b_holds_a_lock(rack, TIMES)
    slot, incarnation = b("slot"), b("incarnation")
    a.send("count", lock, counter, TIMES)
    rack["B"].kill()
    until_fenced(rack, "A", slot)
    rack.cxlctl("A", "hosts", "declare-dead", slot, "--incarnation", incarnation, "--i-know-it-is-gone")
    assert a.answer() >= 1
    assert a("counted", lock, counter) == 2 * TIMES
    finish(rack, a)


def test_what_a_host_had_published_outlives_it(either_pair, seed):
    rack, dice = either_pair, dice_of(seed)
    a, b = start_both(rack)
    # Few enough that nothing has to be evicted.
    for number, (peer, count) in enumerate(((a, 200), (b, 1500))):
        peer("start_publishing", "publish", MODEL, seed + number, BLOCK_BYTES, count)
    a("start_pulling", "pull", MODEL, seed + 1, BLOCK_BYTES, 80)
    slot, incarnation = b("slot"), b("incarnation")
    stored = at_some_moment(b, "publish", dice)
    rack.reboot("B")
    a.until("publish", lambda done: "exists" in done)
    until_fenced(rack, "A", slot)
    until_served(a, seed + 1, stored)
    b = start(rack, "B").ready()
    assert b("incarnation") > incarnation
    until_served(b, seed + 1, stored)
    # What it was in the middle of is there, or can be published now.
    assert set(b("publish_some", MODEL, seed + 1, stored, 20, BLOCK_BYTES)) <= {"stored", "exists"}
    until_served(a, seed + 1, stored + 20)
    assert stop(a, "publish", "pull")["publish"]["stored"] == 200
    until_served(b, seed, 200)
    finish(rack, a, b)


def test_a_host_killed_while_it_evicts_leaves_its_room_to_others(either_pair, seed):
    rack, dice = either_pair, dice_of(seed)
    rack.format(cells=SMALL)
    a, b = start_both(rack)
    for number, peer in enumerate((a, b)):
        peer("start_publishing", "publish", MODEL, seed + number, SMALL_BLOCK_BYTES)
        peer("start_pulling", "pull", MODEL, seed + 1 - number, SMALL_BLOCK_BYTES, 400)
    cells = sum(states(rack, "A").values())
    # As much as the whole pool holds: both have evicted.
    for peer in (a, b):
        peer.until("publish", lambda done: done.get("stored", 0) >= cells)
    at_some_moment(b, "publish", dice, cells, cells + 40)
    slot = b("slot")
    rack.reboot("B")
    goes_on(a, "publish", "stored", cells // 2)
    until_fenced(rack, "A", slot)
    until_all_cells_are_of(rack, a, cells)
    b = start(rack, "B").ready()
    b("start_publishing", "publish", MODEL, seed + 2, SMALL_BLOCK_BYTES)
    goes_on(b, "publish", "stored")
    goes_on(a, "publish", "stored")
    for peer, works in ((a, ("publish", "pull")), (b, ("publish",))):
        stop(peer, *works)
    until("every cell can be emptied", lambda: emptied(rack, a, b) == cells)
    finish(rack, a, b)


def emptied(rack, *peers):
    """Clears the cache; how many cells are free then."""
    for peer in peers:
        peer("clear")
    return states(rack, "A")["free"]


def test_another_host_manages_when_the_manager_is_killed(either_pair, seed):
    rack = either_pair
    peers = dict(zip("AB", start_both(rack), strict=True))
    slots = {name: peer("slot") for name, peer in peers.items()}
    seen = hosts(rack, "A")
    machines = {name: seen["slots"][slot]["machine"] for name, slot in slots.items()}
    manager = next(name for name, machine in machines.items() if machine == managing(seen))
    other = next(name for name in "AB" if name != manager)
    survivor = peers[other]
    assert survivor("publish", MODEL, seed, 20, BLOCK_BYTES) == ["stored"] * 20
    survivor("start_pulling", "pull", MODEL, seed, BLOCK_BYTES, 20)
    lock, counter = survivor("new_counter")
    goes_on(survivor, "pull", "hit")
    rack[manager].kill()
    # Reads do not need a manager; a lock that no host ever had does.
    goes_on(survivor, "pull", "hit")
    unused, second = survivor("new_counter")
    assert survivor("count", unused, second, TIMES) == 0
    until("the other one manages", lambda: managing(hosts(rack, other)) == machines[other])
    rack.boot(manager)
    back = start(rack, manager).ready()
    for peer in (survivor, back):
        peer.send("count", lock, counter, TIMES)
    assert [peer.answer() for peer in (survivor, back)] == [0, 0]
    assert back("counted", lock, counter) == 2 * TIMES
    until_served(back, seed, 20)
    assert set(stop(survivor, "pull")["pull"]) == {"hit"}
    finish(rack, survivor, back)


def managing(seen):
    """The machine that manages the pool."""
    return next(seat["machine"] for seat in seen["seats"] if seat["newest"])
