# SPDX-License-Identifier: Apache-2.0
"""Errors of background threads: logged, counted by reason, the last one kept."""

import logging
import threading
import time

import kvbm_cxl
import pytest
from kvbm_cxl.vllm_integration import events as events_module
from kvbm_cxl.vllm_integration import failures, pool_access
from kvbm_cxl.vllm_integration.announcer import Announcer
from kvbm_cxl.vllm_integration.config import ConnectorConfig
from kvbm_cxl.vllm_integration.events import PoolEvents
from kvbm_cxl.vllm_integration.failures import ThreadFailures
from kvbm_cxl.vllm_integration.publisher import Outlet
from kvbm_cxl.vllm_integration.stats import Tally


def _counted(reporting: ThreadFailures) -> dict[str, int]:
    return {f"thread_errors/{reason}": count for reason, count in reporting.take_counts().items() if count}


def _lost() -> kvbm_cxl.CxlError:
    return pool_access.PoolLost("pool")


def test_an_error_is_logged_once_a_minute_and_counted_each_time(caplog, monkeypatch):
    reporting = ThreadFailures()
    assert reporting.last_error is None and _counted(reporting) == {}
    for _ in range(3):
        reporting.report("a round", _lost())
    assert _counted(reporting) == {"thread_errors/lost": 3} and _counted(reporting) == {}, "counts are moved, not copied"
    assert [record.levelno for record in caplog.records] == [logging.WARNING] and "a round: pool pool is lost" in caplog.text
    reporting.report("another round", _lost())
    assert len(caplog.records) == 2, "other work that fails is logged at once"
    monkeypatch.setattr(failures, "_LOG_AGAIN_S", 0.0)
    reporting.report("a round", _lost())
    assert len(caplog.records) == 3


def test_the_end_of_a_thread_is_reported(caplog):
    reporting = ThreadFailures()

    def raises():
        raise ValueError("a fault of the connector")

    before_s = time.time()
    reporting.start_thread("kvbm-cxl-test", "testing", raises).join(60)
    last = reporting.last_error
    assert (last.thread, last.doing, last.reason) == ("kvbm-cxl-test", "testing", "other")
    assert last.message == "ValueError: a fault of the connector" and last.at_s >= before_s
    assert caplog.records[-1].exc_info is not None, "with its traceback"
    assert _counted(reporting) == {"thread_errors/other": 1}


def test_a_pool_is_tried_again_after_any_error(monkeypatch):
    access = pool_access.PoolAccess("pool", {}, _users=1)
    attempts = []

    def fails(spec, options):
        attempts.append(spec)
        raise TypeError("not an error of the pool")

    monkeypatch.setattr(pool_access, "_open", fails)
    deadline = time.monotonic() + 180
    while len(attempts) < 2:
        assert time.monotonic() < deadline
        access._retry_at = 0.0
        with pytest.raises(pool_access.PoolLost):
            access.call(lambda cache: None)
        time.sleep(0.001)
    assert access.failures.last_error.doing == "opening the pool again"


@pytest.mark.parametrize("failing", ("round", "refresh"))
def test_a_round_of_events_that_fails_is_reported_and_the_next_goes_on(monkeypatch, failing):
    monkeypatch.setattr(events_module, "PERIOD_S", 0.001)
    access = pool_access.PoolAccess("pool", {})
    events = PoolEvents(ConnectorConfig.read({"pool": "pool"}), access, Outlet(), Tally())
    rounds = threading.Semaphore(0)

    def fails(self, _):
        rounds.release()
        raise OSError("this round failed")

    monkeypatch.setattr(Announcer, failing, fails)
    announcer = Announcer(access, [kvbm_cxl.Namespace.from_bytes(bytes(16))], 16, Tally())
    thread = access.failures.start_thread("kvbm-cxl-events", "KV events", lambda: events._run(announcer))
    for _ in range(2):
        assert rounds.acquire(timeout=180)
    events._ending.set()
    thread.join(180)
    assert not thread.is_alive() and access.failures.last_error.message == "OSError: this round failed"
