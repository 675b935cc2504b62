# SPDX-License-Identifier: Apache-2.0
"""What the tests of the lab stand on: hosts that are healed, work in the background, deaths that are noticed."""

import signal

import pytest
from cxl_lab.agent import HostGone
from cxl_lab.lab import NAMESPACES
from lines import Raised

BLOCK_BYTES = 4096


@pytest.fixture
def rack(racks):
    return racks.formatted(NAMESPACES)


def test_a_rack_is_healed(rack, racks):
    idle = rack["A"].start(["sleep", "600"])
    rack["A"].pause()
    rack["B"].kill()
    assert racks.get(NAMESPACES) is rack
    assert idle.wait(10) == -signal.SIGKILL
    assert [rack[name].run(["hostname"]).output for name in "AB"] == ["A\n", "B\n"]


def test_the_death_of_a_host_is_told_to_who_waits(rack):
    a, b = rack.peers()
    a.send("acquire", b("new_counter")[0])
    assert a.answer() is False
    with pytest.raises(Raised) as error:
        b("outcomes", "tiny")
    assert error.value.kind == "TypeError"
    rack["B"].kill()
    with pytest.raises(HostGone):
        b.answer()
    with pytest.raises(HostGone):
        b("slot")
    a.kill()


def test_work_in_the_background(rack, seed):
    a, b = rack.peers()
    lock, counter = a("new_counter")
    for peer in (a, b):
        peer("start_counting", "count", lock, counter)
    a("start_publishing", "publish", "tiny", seed, BLOCK_BYTES, 64)
    b("start_pulling", "pull", "tiny", seed, BLOCK_BYTES, 64)
    b.until("pull", lambda done: done.get("hit", 0) > 200)
    assert "wrong" not in b("stop", "pull")
    assert a.until("publish", lambda done: "exists" in done)["stored"] == 64
    for peer in (a, b):
        peer.until("count", lambda done: done.get("times", 0) > 20)
    done = [peer("stop", "count") for peer in (a, b)]
    assert all("raised" not in progress for progress in done)
    assert b("counted", lock, counter) == sum(progress["times"] for progress in done)
    for peer in (a, b):
        peer.end()
