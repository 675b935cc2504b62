# SPDX-License-Identifier: Apache-2.0
"""Hosts that stand still for longer than others wait, and go on (row 2 of docs/internals/faults.md)."""

import pytest
from drills import (
    MODEL,
    SMALL,
    SMALL_BLOCK_BYTES,
    at_some_moment,
    b_holds_a_lock,
    dice_of,
    finish,
    goes_on,
    start_both,
    states,
    stop,
    until,
    until_all_cells_are_of,
    until_fenced,
)
from lines import Raised

TIMES = 10


@pytest.mark.smoke
def test_a_zombie_harms_no_host(either_pair, seed):
    """Everything that it was doing is done by others meanwhile: its cells are filled with other blocks, its lock is wanted."""
    rack, dice = either_pair, dice_of(seed)
    rack.format(cells=SMALL)
    a, b = start_both(rack)
    lock, counter = a("new_counter")
    for number, peer in enumerate((a, b)):
        peer("start_publishing", "publish", MODEL, seed + number, SMALL_BLOCK_BYTES)
        peer("start_pulling", "pull", MODEL, seed + 1 - number, SMALL_BLOCK_BYTES, 100)
        peer("start_counting", "count", lock, counter)
    slot, incarnation = b("slot"), b("incarnation")
    goes_on(b, "count", "times", 5)
    at_some_moment(b, "publish", dice)
    rack["B"].pause()
    until_fenced(rack, "A", slot)
    cells = sum(states(rack, "A").values())
    until_all_cells_are_of(rack, a, cells)
    # Those of a dead host are the first to go.
    goes_on(a, "publish", "stored", cells // 2)
    rack["B"].resume()
    until("it has joined again", lambda: b("incarnation") > incarnation)
    for peer in (a, b):
        for work, what in (("publish", "stored"), ("count", "times")):
            goes_on(peer, work, what, 10)
    done = [stop(peer, "publish", "pull", "count") for peer in (a, b)]
    assert a("counted", lock, counter) == sum(works["count"]["times"] for works in done)
    finish(rack, a, b)


def test_a_lock_of_a_paused_host_stays_its_own(either_pair):
    rack = either_pair
    a, b, lock, counter = b_holds_a_lock(rack, TIMES)
    slot = b("slot")
    rack["B"].pause()
    a.send("count", lock, counter, TIMES)
    until_fenced(rack, "A", slot)
    assert a.process.output.count("\n") == a.answers, "two hosts are in the section"
    rack["B"].resume()
    b.send("give_back", lock, False)
    assert a.answer() >= 1, "the section of a fenced host may be half done"
    with pytest.raises(Raised, match="fenced"):
        b.answer()
    assert b("count", lock, counter, TIMES) == 0
    assert a("counted", lock, counter) == 3 * TIMES
    finish(rack, a, b)
