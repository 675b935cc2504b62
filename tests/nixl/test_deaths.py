# SPDX-License-Identifier: Apache-2.0
"""Peers that are killed or stopped at random points: no crash, no hang, no wrong byte; the survivor and its other peers go on.

NIXL_ROUNDS says how often, NIXL_SEED begins elsewhere. A failure names its round; the choices replay, what the scheduler does does not.
"""

import math
import os
import random
import signal
import time

import pytest
import wheels
from cluster import MIB, Cluster
from hosts import WorkerError
from test_lifecycle import works

ROUNDS = int(os.environ.get("NIXL_ROUNDS", "20"))
SEED = int(os.environ.get("NIXL_SEED", "1"))
# Less than what ROUNDS dead peers would keep if what they staged did not come back.
POOL_MIB = 192
LENGTH = 6 * MIB
# After that a peer that is silent counts as gone, and a request to it as failed: later on a machine whose cores are shared.
BOUND_S = 25 * max(1, math.ceil(os.getloadavg()[0] / (os.cpu_count() or 1)))


class Scene:
    """A survivor, and a friend of it that is never harmed."""

    def __init__(self, folder):
        self.cluster = cluster = Cluster(folder, "CXL", wheels.chosen()[-1], pool_mib=POOL_MIB)
        try:
            options = {"staging_bytes": "16M"}
            survivor, friend = cluster.host("survivor", options), cluster.host("friend", options)
            works(cluster, survivor, friend)
            sides = [cluster.buffer(survivor, where, LENGTH) for where in ("heap", "pool")]
            friendly = cluster.buffer(friend, "heap", LENGTH)
            survivor.remove(friend.name)
            friend.remove(survivor.name)
            cluster.introduce(survivor, friend)
        except BaseException:
            cluster.__exit__()
            raise
        self.parts = cluster, survivor, friend, sides, friendly


@pytest.fixture(scope="module")
def scenes(folder, plugin):
    """The scene of the rounds so far, if none of them failed: a failure is to be that of its own round."""
    made = []
    yield made
    for scene in made:
        scene.cluster.__exit__()


@pytest.fixture
def scene(scenes, folder, request):
    if not scenes:
        scenes.append(Scene(folder))
    yield scenes[0].parts
    if getattr(request.node, "broke", False):
        scenes.pop().cluster.__exit__()


def between_friends(survivor, friend, mine, friendly, turn):
    """The survivor reads from and writes to its friend."""
    for side, seed in ((mine, 10_000 + turn), (friendly, 20_000 + turn)):
        side.renew(seed)
    half = LENGTH // 2
    try:
        assert survivor.transfer("READ", mine.row(0, half), friendly.row(0, half), friend.name) == "DONE"
        assert survivor.transfer("WRITE", mine.row(half, half), friendly.row(half, half), friend.name, b"turn %d" % turn) == "DONE"
    except WorkerError as error:
        # Either may have given the other up: both tell why.
        raise WorkerError(error.kind, f"{error}\n{friend.story('its friend')}") from error
    assert friend.notifications(1) == {survivor.name: [b"turn %d" % turn]}
    mine.check([(0, half, friendly.seed, 0)])
    friendly.check([(half, half, mine.seed, half)])


@pytest.mark.parametrize("turn", range(SEED, SEED + ROUNDS))
def test_a_peer_that_dies_or_stops(scene, turn):
    cluster, survivor, friend, sides, friendly = scene
    choose = random.Random(turn)
    ending = choose.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
    operation, initiator = choose.choice(["READ", "WRITE"]), choose.choice(["survivor", "victim"])
    mine, where = choose.choice(sides), choose.choice(["heap", "heap", "file"])
    delay_s = choose.choice([0.0, choose.uniform(0, 0.02), choose.uniform(0, 0.3)])
    mine.renew(mine.seed + 1)
    victim = cluster.host("victim", {"staging_bytes": "16M"}, machine="victim")
    theirs = cluster.buffer(victim, where, LENGTH)
    survivor.remove_if_known("victim")
    cluster.introduce(survivor, victim)
    # Half of each buffer takes part; the other half must stay as it is.
    half = LENGTH // 2
    here, there = mine.row(0, half), theirs.row(0, half)
    if initiator == "survivor":
        key, pieces = (mine.key, [(0, half, theirs.seed, 0)]) if operation == "READ" else (None, ())
        survivor.begin("repeat", operation, here, there, "victim", 3, key, pieces, b"done ")
    else:
        victim.begin("repeat", operation, there, here, "survivor", 3, None, (), b"done ")
    time.sleep(delay_s)
    victim.signal(ending)
    if initiator == "survivor":
        done, state, wrong = survivor.end(BOUND_S)
        assert state != "WRONG", wrong
        assert state != "PROC", "a transfer to a peer that is gone did not end"
        assert state != "DONE" or where == "file", f"{done} transfers from ordinary memory of a peer that is gone ended well"
    else:
        survivor.notifications(0, 1.0)
    if ending == signal.SIGSTOP:
        # A peer that was taken for dead goes on: it must not do any more harm.
        between_friends(survivor, friend, mine, friendly, turn)
        mine.renew(mine.seed + 1)
        victim.signal(signal.SIGCONT)
        time.sleep(0.3)
        if initiator == "survivor" and operation == "READ":
            mine.check()
    victim.discard()
    cluster.hosts.remove(victim)
    survivor.remove_if_known("victim")
    between_friends(survivor, friend, mine, friendly, turn)
    if where == "file":
        cluster.give_back(theirs)


def test_an_engine_goes_on_after_its_host_was_taken_for_dead(cluster):
    """Its host joins the pool again by itself; the agents only have to meet again."""
    survivor, victim = cluster.host("survivor"), cluster.host("victim")
    works(cluster, survivor, victim)
    for turn in range(2):
        mine, theirs = cluster.buffer(survivor, "heap", LENGTH), cluster.buffer(victim, "heap", LENGTH)
        survivor.remove_if_known("victim")
        cluster.introduce(survivor, victim)
        handle = survivor.prepare("READ", mine.row(0, LENGTH), theirs.row(0, LENGTH), "victim")
        victim.signal(signal.SIGSTOP)
        end, state = time.monotonic() + BOUND_S, "DONE"
        while state in ("DONE", "PROC"):
            assert time.monotonic() < end, "a peer that is stopped is not noticed"
            try:
                state = survivor.post(handle)
                state = survivor.wait(handle, BOUND_S) if state == "PROC" else state
            except WorkerError as error:
                state = error.kind
        victim.signal(signal.SIGCONT)
        while True:
            try:
                works(cluster, survivor, victim, ("heap", "file" if turn else "heap"))
                break
            except WorkerError:
                # Until it has found out.
                assert time.monotonic() < end, "an engine whose host was taken for dead does not come back"
                time.sleep(0.2)


def test_requests_to_a_dead_peer_fail_and_say_so(scene):
    cluster, survivor, *_ = scene
    victim = cluster.host("victim", machine="victim")
    mine, theirs = cluster.buffer(survivor, "heap", LENGTH), cluster.buffer(victim, "heap", LENGTH)
    survivor.remove_if_known("victim")
    cluster.introduce(survivor, victim)
    assert survivor.transfer("READ", mine.row(0, LENGTH), theirs.row(0, LENGTH), "victim") == "DONE"
    handle = survivor.prepare("READ", mine.row(0, LENGTH), theirs.row(0, LENGTH), "victim")
    victim.kill()
    start = time.monotonic()
    try:
        state = survivor.post(handle)
        state = survivor.wait(handle, BOUND_S) if state == "PROC" else state
    except WorkerError as error:
        state = error.kind
    assert state == "nixlRemoteDisconnectError", state
    assert time.monotonic() - start < BOUND_S
    with pytest.raises(WorkerError):
        # The first may still be under way when the death is noticed.
        for _ in range(50):
            survivor.notify("victim", b"hello")
            survivor.cpu_s(0.2)
