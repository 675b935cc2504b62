# SPDX-License-Identifier: Apache-2.0
"""One pool per process, and what happens when it is lost."""

import time

import kvbm_cxl
import pytest
from kvbm_cxl.options import ConfigError
from kvbm_cxl.vllm_integration import pool_access
from kvbm_cxl.vllm_integration.config import ConnectorConfig
from kvbm_cxl.vllm_integration.pool_access import PoolLost, acquire, error_kind


def _config(pool: str, **more) -> ConnectorConfig:
    return ConnectorConfig.read({"pool": pool, **more})


def test_a_process_opens_a_pool_once(pool):
    first, second = acquire(_config(pool)), acquire(_config(pool, workers=7))
    assert first is second
    first.release()
    assert second.call(lambda cache: cache.pinned()) == 0
    second.release()
    assert not pool_access._registry and second.pool is None
    with pytest.raises(PoolLost):
        second.call(lambda cache: cache.pinned())


def test_an_unusable_pool_is_an_error_that_says_what_to_do(pool, folder):
    with pytest.raises(ConfigError, match="cxlctl format"):
        acquire(_config(str(folder / "nothing here")))
    with pytest.raises(ConfigError, match="no_such_option"):
        acquire(_config(pool, cache={"no_such_option": 1}))
    assert not pool_access._registry


def test_a_lost_pool_is_opened_again(pool, monkeypatch):
    monkeypatch.setattr(pool_access, "_RETRY_FIRST_S", 0.02)
    access = acquire(_config(pool))
    before = access.pool

    def fails(_):
        error = kvbm_cxl.DeviceError("gone")
        error.kind = "device_lost"
        raise error

    with pytest.raises(kvbm_cxl.DeviceError):
        access.call(fails)
    assert access.pool is None
    deadline = time.monotonic() + 180
    while True:
        try:
            assert access.call(lambda cache: cache.pinned()) == 0
            break
        except PoolLost as error:
            assert error_kind(error) == "lost" and time.monotonic() < deadline
            time.sleep(0.01)
    assert access.pool is not before
    access.release()
    assert access.pool is None


def test_errors_of_one_call_lose_nothing(pool):
    access = acquire(_config(pool))
    for error in (kvbm_cxl.FencedError("f"), kvbm_cxl.TimeoutError_("t"), kvbm_cxl.FullError("f")):

        def fails(_, error=error):
            raise error

        with pytest.raises(type(error)):
            access.call(fails)
    assert access.pool is not None
    access.release()


def test_a_pool_that_comes_back_after_its_last_user_is_closed(pool):
    access = acquire(_config(pool))
    opened, access._opened = access._opened, None
    opened.close()
    access.release()
    access._reopen()
    assert access.pool is None


def test_kinds():
    assert error_kind(kvbm_cxl.FencedError("x")) == "fenced" and error_kind(ValueError()) == "other"
