# SPDX-License-Identifier: Apache-2.0
"""Copies beside the forward pass: who waits for what, and the bounds."""

import threading
import time

import pytest
from kvbm_cxl.vllm_integration.loader import Loads
from kvbm_cxl.vllm_integration.movers import CopyTimeout
from kvbm_cxl.vllm_integration.saver import Saves
from waiting import until


class Job:
    """A job over keys of some bytes together, which runs `run`."""

    def __init__(self, keys, len_bytes, run=lambda: None, block_ids=()) -> None:
        self.keys, self.key_bytes, self.run, self.block_ids = keys, len_bytes // len(keys), run, block_ids

    @property
    def len_bytes(self) -> int:
        return len(self.keys) * self.key_bytes

    def keep(self, places) -> None:
        self.keys = [self.keys[at] for at in places]

    def announce(self) -> bool:
        return True


class Gate(Job):
    """A job that ends when the test lets it, and records which of its keys it keeps."""

    def __init__(self, keys, len_bytes, block_ids=()) -> None:
        super().__init__(keys, len_bytes, self._run, block_ids)
        self.begun, self.go_on, self.places, self.maker = threading.Event(), threading.Event(), None, threading.current_thread()

    def keep(self, places) -> None:
        super().keep(places)
        self.places = places

    def _run(self) -> None:
        assert threading.current_thread() is not self.maker
        self.begun.set()
        assert self.go_on.wait(30)


class Cells(Gate):
    """A job whose cells come when the test lets them, or whose locks do not come."""

    def __init__(self, keys, len_bytes, block_ids=()) -> None:
        super().__init__(keys, len_bytes, block_ids)
        self.asked, self.may_come, self.comes, self.told = threading.Event(), threading.Event(), True, []
        self.probes = 0

    def announce(self) -> bool:
        self.asked.set()
        assert self.may_come.wait(30)
        return self.comes

    def give_up(self) -> None:
        self.told.append("given up")

    def release(self) -> None:
        self.told.append("released")

    def probe(self) -> bool:
        self.probes += 1
        assert self.may_come.wait(30)
        return self.comes


@pytest.fixture
def saves():
    made = Saves(2, 1000, 300)
    yield made
    made.close()


def test_steps_and_requests_end_with_their_last_save(saves):
    first, second = Gate([b"k1"], 10), Gate([b"k2"], 10)
    saves.submit(("a", 1), first)
    saves.submit(("a", 2), second)
    assert saves.is_busy("a") and not saves.is_busy("b") and saves.done_step(5) == 0
    second.go_on.set()
    until(lambda: b"k2" not in saves._by_key, "the second save to end")
    assert saves.is_busy("a") and saves.done_step(5) == 0
    first.go_on.set()
    saves.wait(["a"])
    assert not saves.is_busy("a") and saves.done_step(5) == 5


def test_a_key_under_way_is_not_published_twice_but_waited_for(saves):
    gate, other = Gate([b"k1", b"k2"], 20), Gate([b"k1", b"k3"], 20)
    other.go_on.set()
    saves.submit(("a", 1), gate)
    saves.submit(("b", 1), other)
    assert other.begun.wait(30) and other.places == [1]
    assert saves.is_busy("b")
    with pytest.raises(CopyTimeout, match="request b .*cxlctl doctor"):
        saves.wait(["b"])
    gate.go_on.set()
    saves.wait(["a", "b"])
    assert gate.places is None, "it keeps all"


def test_all_keys_under_way_need_no_job(saves):
    gate, twice = Gate([b"k1"], 10), Job([b"k1"], 10)
    twice.begin = lambda places: pytest.fail("published twice")
    saves.submit(("a", 1), gate)
    saves.submit(("b", 2), twice)
    gate.go_on.set()
    saves.wait(["b"])
    assert saves.done_step(2) == 2


def test_blocks_are_waited_for_while_any_job_reads_them(saves):
    # The second one is of the same block of vLLM's, as a prompt's tail and the full block after it.
    first, second = Gate([b"k1"], 10, {1, 2}), Gate([b"k2"], 10, {2, 3})
    saves.submit(("a", 1), first)
    saves.submit(("b", 1), second)
    saves.wait_blocks([4, 5])
    first.go_on.set()
    saves.wait_blocks([1])
    with pytest.raises(CopyTimeout, match="1 blocks .*about to change.*cxlctl doctor"):
        saves.wait_blocks([1, 2])
    with pytest.raises(CopyTimeout, match="all blocks"):
        saves.wait_all()
    second.go_on.set()
    saves.wait_blocks(range(9))
    saves.wait_all()
    assert not saves._by_block


def test_bytes_under_way_are_bounded(saves):
    gate = Gate([b"k1"], 900)
    saves.submit(("a", 1), gate)
    with pytest.raises(CopyTimeout, match="room"):
        saves.submit(("b", 1), Job([b"k2"], 101))
    released = threading.Timer(0.05, gate.go_on.set)
    released.start()
    saves.submit(("b", 1), Job([b"k2"], 101))
    assert gate.go_on.is_set()
    saves.submit(("c", 1), Job([b"k3"], 5000))
    saves.wait("abc")
    assert saves._bytes == 0


def test_a_job_that_raises_is_over_too(saves):
    def raises():
        raise OSError("what else may happen")

    saves.submit(("a", 1), Job([b"k1"], 10, raises))
    saves.wait(["a"])
    assert saves._bytes == 0 and saves.done_step(1) == 1
    assert saves.failures.last_error.message == "OSError: what else may happen"
    gate, not_begun = Gate([b"k1"], 10), Job([b"k1", b"k2"], 20)
    not_begun.keep = lambda places: raises()
    saves.submit(("b", 2), gate)
    with pytest.raises(OSError):
        saves.submit(("a", 2), not_begun)
    gate.go_on.set()
    saves.wait(["a", "b"])
    assert saves._bytes == 0 and saves.done_step(2) == 2 and not saves._by_key, "what was not begun is not waited for"


WAYS = {
    "a request": lambda saves: saves.wait(["a"]),
    "cells of a request": lambda saves: saves.wait_announced(["a"]),
    "blocks": lambda saves: saves.wait_blocks([1]),
    "all": lambda saves: saves.wait_all(),
    "room": lambda saves: saves.submit(("b", 1), Job([b"k9"], 999)),
}


@pytest.mark.parametrize("way", WAYS)
def test_cells_that_do_not_come_hold_nothing_up(saves, way):
    """Neither who waits for them, nor what is submitted afterwards, until they come again."""
    saves.patience_s = 0.05
    stuck, waiting, later, more = (Cells([b"k%d" % number], 10, {number}) for number in (1, 2, 3, 4))
    saves.submit(("a", 1), stuck)
    saves.submit(("a", 1), waiting)
    assert stuck.asked.wait(30)
    began_s = time.monotonic()
    later_job = Job([b"k9"], 999)
    later_job.give_up = lambda: later.told.append("room")
    WAYS["room"] = lambda saves: saves.submit(("b", 1), later_job)
    WAYS[way](saves)
    assert 0.05 <= time.monotonic() - began_s < 25
    assert stuck.told == ["given up"] and not waiting.asked.is_set()
    # Who waits for blocks does not care for the others.
    assert waiting.told == ([] if way == "blocks" else ["given up"]) and saves.is_held_up
    began_s = time.monotonic()
    assert saves.submit(("c", 2), later) and later.told[-1] == "given up" and not saves.is_busy("c")
    saves.wait(["c"])
    assert time.monotonic() - began_s < 25 and not later.asked.is_set()
    # The call returns after all: its cells are given back, nothing of it is copied, and publishing goes on.
    stuck.may_come.set()
    waiting.may_come.set()
    waiting.go_on.set()
    until(lambda: not saves.is_held_up and not saves._without_cells, "publishing to go on")
    assert stuck.told == ["given up", "released"] and not stuck.begun.is_set()
    assert waiting.begun.wait(30 if way == "blocks" else 0) == (way == "blocks")
    more.may_come.set()
    more.go_on.set()
    assert saves.submit(("d", 3), more)
    saves.wait(["d"])
    assert more.begun.is_set() and more.told == [] and saves._bytes == 0 and saves.done_step(3) == 3
    assert not (saves._by_key or saves._by_block or saves._by_request or saves._by_step)


def test_a_time_out_is_probed_until_the_locks_come(saves):
    first, second, third, queued = (Cells([b"k%d" % number], 10) for number in (1, 2, 3, 4))
    first.comes = False
    first.go_on.set()
    saves.submit(("a", 1), first)
    saves.submit(("q", 1), queued)
    first.may_come.set()
    saves.wait(["a"])
    until(lambda: not saves.is_busy("q"), "the request to be over")
    assert queued.told == ["given up"], "what is queued does not wait for the probe"
    assert first.begun.is_set(), "its outcome is counted where it runs"
    until(lambda: first.probes > 3, "some probes")
    assert saves.submit(("b", 2), second) and second.told == ["given up"]
    first.comes = True
    until(lambda: not saves.is_held_up, "publishing to go on")
    third.may_come.set()
    third.go_on.set()
    saves.submit(("c", 3), third)
    saves.wait(["c"])
    assert third.begun.is_set() and third.told == []


def test_a_time_out_does_not_keep_it_from_closing():
    made, job = Saves(1, 1000, 300), Cells([b"k1"], 10)
    job.comes = False
    job.may_come.set()
    job.go_on.set()
    made.submit(("a", 1), job)
    until(lambda: job.probes, "a probe")
    made.close()
    assert not made._by_key


def test_late_jobs_are_given_up_where_no_step_waits(saves):
    stuck, waiting, copied = Cells([b"k1"], 10, {1}), Cells([b"k2"], 10, {2}), Gate([b"k0"], 10, {0})
    saves.submit(("z", 1), copied)
    assert copied.begun.wait(30)
    saves.submit(("a", 1), stuck)
    saves.submit(("b", 1), waiting)
    assert stuck.asked.wait(30)
    saves.give_up_late(60)
    assert saves.is_busy("a") and stuck.told == []
    time.sleep(0.02)
    saves.give_up_late(0.01)
    assert not (saves.is_busy("a") or saves.is_busy("b")) and stuck.told == waiting.told == ["given up"]
    assert saves.is_busy("z"), "what is being copied is not given up"
    copied.go_on.set()
    stuck.may_come.set()
    saves.wait(["z"])
    until(lambda: stuck.told == ["given up", "released"], "the stuck job to be let go")
    saves.give_up_late(0.0)
    assert not saves.is_held_up


def test_copies_are_waited_for_however_long_they_take(saves):
    """Their source must not change."""
    saves.patience_s, saves.timeout_ms = 0.01, 60_000
    job = Cells([b"k1"], 10, {1})
    job.may_come.set()
    saves.submit(("a", 1), job)
    assert job.begun.wait(30)
    threading.Timer(0.3, job.go_on.set).start()
    saves.wait_blocks([1])
    assert job.go_on.is_set() and job.told == []


def test_loads_end_when_all_their_jobs_have():
    loads = Loads(2)
    gate = threading.Event()

    def slow():
        assert gate.wait(30)
        return set()

    loads.submit("a", [([1, 2], slow), ([3], lambda: {3})])
    assert loads.take_done(0.01) == []
    gate.set()
    until(lambda: loads._done, "the load to end")
    (done,) = loads.take_done()
    assert done.request_id == "a" and done.failed_blocks == {3} and not done.is_cancelled
    assert loads.take_done() == []
    loads.close()


def test_the_first_job_can_be_the_callers_own():
    loads, threads = Loads(1), []

    def job():
        threads.append(threading.current_thread() is threading.main_thread())
        return set()

    loads.submit("a", [([1], job)], here=True)
    assert threads == [True] and [load.request_id for load in loads.take_done()] == ["a"], "over when submit returns"

    def raises():
        raise OSError("what else may happen")

    loads.submit("b", [([2, 3], raises), ([4], job)], here=True)
    until(lambda: loads._done, "the load to end")
    (done,) = loads.take_done()
    assert done.failed_blocks == {2, 3} and threads == [True, False] and done.started_s <= done.ended_s
    loads.close()


def test_a_load_that_raises_has_filled_nothing():
    loads = Loads(1)

    def raises():
        raise OSError("what else may happen")

    loads.submit("a", [([1, 2], raises)])
    until(lambda: loads._done, "the load to end")
    assert loads.take_done()[0].failed_blocks == {1, 2}
    loads.close()


def test_all_loads_end_before_the_memory_goes():
    loads, begun, go_on, ended = Loads(1), threading.Event(), threading.Event(), []

    def job():
        begun.set()
        assert go_on.wait(30)
        ended.append("wrote")
        return set()

    loads.submit("a", [({1}, job), ({2}, set)])
    assert begun.wait(30)
    waiting = threading.Thread(target=lambda: (loads.end_all(), ended.append("memory goes")))
    waiting.start()
    waiting.join(0.05)
    go_on.set()
    waiting.join(30)
    assert ended == ["wrote", "memory goes"]
    (load,) = loads.take_done()
    assert load.failed_blocks == {1, 2}, "blocks whose memory went hold nothing"
    loads.close()


def test_what_has_not_begun_of_a_cancelled_load_is_left_out():
    loads = Loads(1)
    begun, gate = threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert gate.wait(30)
        return set()

    loads.submit("a", [([1], slow), ([2], lambda: pytest.fail("begun after it was cancelled"))])
    assert begun.wait(30)
    loads.cancel(["a", "unknown"])
    gate.set()
    until(lambda: loads._done, "the load to end")
    (done,) = loads.take_done()
    assert done.is_cancelled and done.failed_blocks == {2}
    loads.close()


def test_one_load_of_a_request_at_a_time():
    loads = Loads(1)
    gate = threading.Event()
    loads.submit("a", [([1], lambda: (gate.wait(30), set())[1])])
    with pytest.raises(RuntimeError, match="being loaded already"):
        loads.submit("a", [([1], set)])
    gate.set()
    loads.close()
