# SPDX-License-Identifier: Apache-2.0
"""Locks between hosts: one that stands on atomics fails on this memory, the pool's holds."""

import json
import shutil
import subprocess

import pytest
from conftest import HERE

ROUNDS = 4000
OURS = 150
AREA_BYTES = 4096


@pytest.fixture(scope="module")
def naive_lock(racks):
    """The compiled program."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    program = racks.folder / "naive_lock"
    program.parent.mkdir(parents=True, exist_ok=True)
    source = HERE / "programs" / "naive_lock.c"
    subprocess.run([compiler, "-O2", "-Wall", "-Werror", "-static", "-o", program, source], check=True, timeout=60)
    return program


def count_naively(rack, program, offset, rounds):
    """Both hosts count under the naive lock; what each says of it in the end."""
    running = [rack[name].start([program, rack.spec, offset, number, 2, rounds]) for number, name in enumerate("AB")]
    return [json.loads(process.finish(150).output) for process in running]


def area(peer):
    """Offset of memory of the pool that is zero."""
    return peer("store", "naive", "\0" * AREA_BYTES)


def held(said, rounds):
    """Whether the naive lock did what a lock has to."""
    return all(one == {"counter": 2 * rounds, "in": rounds, "doubles": 0, "stuck": False} for one in said)


def count_with_ours(peers):
    """Peers count at the same time under one lock of the pool, each at least OURS times: how often they did, where the counter stands."""
    lock, counter = peers[0]("new_counter")
    for peer in peers:
        peer("start_counting", "count", lock, counter)
    for peer in peers:
        peer.until("count", lambda done: done.get("times", 0) >= OURS)
    done = [peer("stop", "count") for peer in peers]
    assert all("raised" not in progress and progress["repairs"] == 0 for progress in done), f"{done}: no host died"
    return sum(progress["times"] for progress in done), peers[1]("counted", lock, counter)


def test_atomics_lose_updates_between_hosts_and_the_pools_lock_does_not(pair, naive_lock):
    peers = pair.peers()
    said = count_naively(pair, naive_lock, area(peers[0]), ROUNDS)
    assert not held(said, ROUNDS), f"{said}: this memory has atomics between hosts, so it shows nothing"
    done, counted = count_with_ours(peers)
    assert counted == done


@pytest.mark.rare
def test_the_naive_lock_holds_where_memory_has_atomics(racks, naive_lock):
    """One setting of the emulator apart: it is the memory that the lock fails on, not a mistake in it."""
    rack = racks.formatted("nvdimm")
    peers = rack.peers()
    said = count_naively(rack, naive_lock, area(peers[0]), ROUNDS)
    assert held(said, ROUNDS), said
    done, counted = count_with_ours(peers)
    assert counted == done
