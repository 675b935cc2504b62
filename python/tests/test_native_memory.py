# SPDX-License-Identifier: Apache-2.0
"""Memory of the pool is given back once, by who has it, and never under a view that the program has."""

import signal
import subprocess
import sys
import threading

import kvbm_cxl
import pytest
from pools import ROOT, opened, until

LEN_BYTES = 4096


def handed_out(pool, offset):
    """Takes memory of the pool until it gets the block at an offset; everything that it got."""
    got = []

    def step():
        got.append(pool.allocate(LEN_BYTES))
        return got[-1].offset == offset

    until(step, "a block that was given back to be handed out again")
    return got


def test_a_handle_of_a_name_bound_anew_frees_nothing(spec):
    """It is of a block that others have by now; the name stands for another one."""
    with opened(spec) as pool, opened(spec) as other:
        first = pool.allocate(LEN_BYTES, name="kv")
        stale, offset = other.find("kv"), first.offset
        first.free()
        somebodys = handed_out(pool, offset)
        second = pool.allocate(LEN_BYTES, name="kv")
        with pytest.raises(kvbm_cxl.NotFoundError, match="kv"):
            stale.free()
        assert other.find("kv").offset == second.offset
        # A block that is rightly given back from there arrives, and nothing that was asked for before it is still on its way.
        late = pool.allocate(LEN_BYTES, name="late")
        other.find("late").free()
        later = handed_out(pool, late.offset)
        assert somebodys[-1].offset == offset and offset not in [memory.offset for memory in later]
        # The handle of the name itself works in any process.
        other.find("kv").free()
        with pytest.raises(kvbm_cxl.NotFoundError):
            pool.find("kv")


def test_no_view_is_made_of_memory_that_is_given_back(pool):
    """A thread takes a view just as another one gives the memory back: one of the two is refused, whichever."""
    turns, memory, freed, views = [threading.Barrier(2, timeout=60) for _ in range(2)], [None], [None], [None]
    rounds, errors = 400, []

    def view():
        try:
            for _ in range(rounds):
                turns[0].wait()
                while freed[0] is None:
                    pass
                try:
                    views[0] = memoryview(memory[0])
                except BufferError:
                    views[0] = None
                turns[1].wait()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread, interval = threading.Thread(target=view), sys.getswitchinterval()
    thread.start()
    both, outcomes = 0, set()
    try:
        # The other thread runs as soon as this one lets it.
        sys.setswitchinterval(1e-6)
        for _ in range(rounds):
            memory[0], freed[0], views[0] = pool.allocate(LEN_BYTES), None, None
            turns[0].wait()
            freed[0] = False
            try:
                memory[0].free()
                freed[0] = True
            except kvbm_cxl.InvalidError:
                pass
            turns[1].wait()
            both += freed[0] and views[0] is not None
            outcomes.add(freed[0])
            views[0] = None
    finally:
        sys.setswitchinterval(interval)
        for turn in turns:
            turn.abort()
        thread.join(timeout=60)
    assert both == 0, f"{both} of {rounds} views are of memory that was given back"
    assert not [error for error in errors if not isinstance(error, threading.BrokenBarrierError)] and True in outcomes


def cxlctl(spec, *arguments):
    """As another process of this machine."""
    command = [str(ROOT / "target" / "release" / "cxlctl"), "--pool", spec.partition(",")[0], *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_name_stays_where_there_is_no_allocator(spec, peer):
    """Another host has the lock of the chunks and does not answer, so a process that has no allocator yet gets none."""
    with opened(spec, join_timeout_ms=1000) as pool, opened(spec) as here:
        kept = here.allocate(LEN_BYTES, name="kept")
        other = peer(machine="other")
        other("store", "theirs", "x")
        # This host has the lock of the names again.
        here.allocate(LEN_BYTES, name="later")
        found = pool.find("kept")
        other.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(kvbm_cxl.TimeoutError_):
                found.free()
        finally:
            other.process.send_signal(signal.SIGCONT)
        assert (found.name, pool.find("kept").offset) == ("kept", kept.offset)
        found.free()
        with pytest.raises(kvbm_cxl.NotFoundError):
            pool.find("kept")
        handed_out(here, kept.offset)


def test_memory_whose_name_is_gone_is_given_back_later(spec, peer):
    """A host that was declared dead comes back, takes the name away, and gets no further: another has the lock that it needs then."""
    with opened(spec) as pool:
        pool.allocate(LEN_BYTES, name="early")
        victim, other = peer(machine="victim", PEER_JOIN_TIMEOUT_MS="1000"), peer(machine="other")
        victim("store", "kept", "x")
        slot, incarnation = victim("slot"), victim("incarnation")
        other("store", "theirs", "x")
        # The lock of the names is taken from the other host again, that of the chunks is not.
        pool.allocate(LEN_BYTES, name="later")
        victim.process.send_signal(signal.SIGSTOP)
        declared = ("hosts", "declare-dead", str(slot), "--incarnation", str(incarnation), "--i-know-it-is-gone")
        cxlctl(spec, *declared)
        other.process.send_signal(signal.SIGSTOP)
        victim.process.send_signal(signal.SIGCONT)
        try:
            said = victim("free")
        finally:
            other.process.send_signal(signal.SIGCONT)
        assert said == ["timeout", None], "the name is gone, and the memory is not"
        assert victim("free") == ["freed", None], "it is given back when that is possible"
