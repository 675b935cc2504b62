# SPDX-License-Identifier: Apache-2.0
"""When a store of the second level is let alone, on a clock of the test's own."""

from types import SimpleNamespace

import pytest
from kvbm_cxl.l2 import health
from kvbm_cxl.l2.health import Health

SLOW_S = 5.0


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now_s=1000.0)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr(health, "time", clock)
    return clock


def fail(of, error=OSError):
    with pytest.raises(error), of.call():
        raise error


def test_three_failures_in_a_row_pause_it_for_longer_each_time_up_to_a_minute(clock):
    of, paused_s = Health(SLOW_S), []
    fail(of), fail(of)
    assert of.is_good()
    for _ in range(9):
        fail(of)
        began = clock.now_s
        while not of.is_good():
            clock.now_s += 0.5
        paused_s.append(clock.now_s - began)
    assert paused_s == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_an_answer_ends_the_row_and_a_missing_object_is_one(clock):
    of = Health(SLOW_S)
    for _ in range(4):
        fail(of), fail(of)
        fail(of, FileNotFoundError)
    assert of.is_good()
    fail(of), fail(of), fail(of)
    clock.now_s += 1
    with of.call():
        pass
    fail(of), fail(of)
    assert of.is_good()
    fail(of)
    assert not of.is_good()
    clock.now_s += 1
    assert of.is_good(), "the pause is the first one again"


def test_a_call_that_takes_too_long_is_a_failure_and_while_it_lasts_none_other_begins(clock):
    of = Health(SLOW_S)
    for _ in range(3):
        with of.call():
            clock.now_s += SLOW_S
            assert of.is_good()
            clock.now_s += 0.01
            assert not of.is_good()
    assert not of.is_good()
    clock.now_s += 1
    assert of.is_good()
