# SPDX-License-Identifier: Apache-2.0
"""What fault drills have in common: hosts under load, waits for what the others notice, and the state that all have to reach in the end."""

import random
import time

from rack import CALL_TIMEOUT_S

MODEL = "tiny"
BLOCK_BYTES = 8_000
# Silence after which a host is fenced: short for a drill, long for an emulated processor on a busy machine.
SUSPECT_MS = 4_000
# A pool that two hosts fill within seconds.
SMALL = "64K:3%"
SMALL_BLOCK_BYTES = 4_000


def start(rack, name):
    """Starts a program that survives what happens to its host."""
    return rack.start(name, program="drill_peer", suspect_ms=SUSPECT_MS)


def start_both(rack):
    """One in each host; both have joined."""
    return [peer.ready() for peer in [start(rack, name) for name in "AB"]]


def b_holds_a_lock(rack, times):
    """Both peers, a lock of the pool and its counter, after B has counted `times` times and then kept the lock."""
    a, b = start_both(rack)
    lock, counter = a("new_counter")
    assert b("count", lock, counter, times) == 0
    assert b("acquire", lock) is False
    return a, b, lock, counter


def until(what, check, timeout_s=CALL_TIMEOUT_S, tell=lambda: "no more is known"):
    """Waits until `check` gives something true, and returns it. What `tell` gives goes with the failure."""
    deadline = time.monotonic() + timeout_s
    while not (found := check()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s: {tell()}"
        time.sleep(0.1)
    return found


def hosts(rack, name):
    """What `cxlctl hosts` tells in a host."""
    return rack.json(name, "hosts")


def states(rack, name):
    """How many cells are in each state."""
    return rack.json(name, "cache", "stat")["cells"]


def until_fenced(rack, name, slot):
    """Waits until the others have given up on the host of a slot; `name` is the host that looks. Where both have one kernel, its word on
    the death of a killed one may follow at once.
    """
    until(f"slot {slot} is fenced", lambda: hosts(rack, name)["slots"][slot]["standing"] in ("fenced", "declared dead"))


def at_some_moment(peer, work, dice, least=20, most=60):
    """Waits until background work has stored a number of blocks that the dice tell, and a little longer; how many at least it had then."""
    count = dice.randrange(least, most)
    stored = peer.until(work, lambda done: done.get("stored", 0) >= count)["stored"]
    time.sleep(dice.uniform(0, 0.2))
    return stored


def goes_on(peer, work, what, times=20):
    """Waits until background work has counted an outcome so many times more."""
    before = peer("progress", work).get(what, 0)
    return peer.until(work, lambda done: done.get(what, 0) >= before + times)


def until_all_cells_are_of(rack, peer, cells):
    """Waits until a peer has all `cells` cells of the pool."""
    name = peer.host.name
    until(
        f"all {cells} cells are {peer.host}'s",
        lambda: peer("usage")["owned"] == cells,
        tell=lambda: [peer("usage"), peer("progress", "publish"), states(rack, name), hosts(rack, name)],
    )


def until_served(peer, seed, count, len_bytes=BLOCK_BYTES):
    """Waits until the first blocks of a chain are all hits; none may ever be wrong."""

    def served():
        outcomes = peer("outcomes", MODEL, seed, count, len_bytes)
        assert "wrong" not in outcomes
        return set(outcomes) == {"hit"}

    until(f"{count} blocks served", served)


def stop(peer, *works):
    """Ends background work; none of it saw wrong data or an error that is not an outcome."""
    done = {work: peer("stop", work) for work in works}
    for work, progress in done.items():
        assert not {"wrong", "raised"} & set(progress), f"{work} in {peer.host}: {progress}"
    return done


def finish(rack, *peers):
    """Nothing is held back for the dead, every program leaves, and the pool is sound."""
    for peer in peers:
        until("nothing is quarantined", lambda peer=peer: peer("usage")["quarantined"] == 0)
    for peer in peers:
        peer.end()
    assert "0 errors, 0 warnings" in rack.fsck()


def dice_of(seed):
    """Chooses moments."""
    return random.Random(seed)
