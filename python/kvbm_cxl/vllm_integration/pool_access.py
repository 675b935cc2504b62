# SPDX-License-Identifier: Apache-2.0
"""The pool as a process of the engine uses it: opened once, however many connectors live in the process, and opened again after a loss.

At start a pool that cannot be used is an error that says what to do. Later it is never one: until it is back, lookups miss and
publishing fails, both counted, and the engine computes.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import kvbm_cxl

from ..options import ConfigError, PoolOptions
from .failures import ThreadFailures, error_kind
from .log import logger

_T = TypeVar("_T")
# After a loss the pool is tried again this often at first, then ever less.
_RETRY_FIRST_S, _RETRY_LAST_S = 0.5, 30.0
# Kinds of errors after which this process's view of the pool is gone. Others concern one call; a fenced host joins again by itself.
_LOST = frozenset({"device_lost", "not_a_pool", "replaced", "closed"})
# Kinds of errors that another try does not change: "other" is an option that the cache does not have, or a value of another type.
_OF_OPTIONS = frozenset({"invalid", "other"})


@dataclass
class _Opened:
    pool: "kvbm_cxl.Pool"
    cache: "kvbm_cxl.Cache"

    def close(self) -> list[kvbm_cxl.CxlError]:
        """Closes both; what went wrong."""
        errors = []
        for handle in (self.cache, self.pool):
            try:
                handle.close()
            except kvbm_cxl.CxlError as error:
                errors.append(error)
        return errors


@dataclass
class PoolAccess:
    """A pool and its cache, shared by the connectors of a process. All methods may be called from any thread."""

    spec: str
    options: dict[str, Any]
    failures: ThreadFailures = field(default_factory=ThreadFailures)
    """Of the background threads of this process's connectors."""
    _opened: _Opened | None = None
    _users: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _retry_at: float = 0.0
    _retry_s: float = _RETRY_FIRST_S
    _retrying: bool = False
    _gpus: set[int] = field(default_factory=set)
    """Numbers of those that the cache was opened for."""

    @property
    def pool(self) -> "kvbm_cxl.Pool | None":
        """The pool, or None while it is lost."""
        opened = self._opened
        return opened.pool if opened else None

    def call(self, operation: Callable[["kvbm_cxl.Cache"], _T]) -> _T:
        """Runs `operation` on the cache. Raises `CxlError`, of kind `lost` while there is no pool."""
        opened = self._opened
        if opened is None:
            self._retry()
            raise PoolLost(self.spec)
        try:
            return operation(opened.cache)
        except kvbm_cxl.CxlError as error:
            if error_kind(error) in _LOST:
                self._lose(opened, error)
            raise

    def bind_worker(self) -> None:
        """Has the calling thread run where CXL_CPUS wants workers. An error is reported, and the thread runs where the process does."""
        try:
            if pool := self.pool:
                pool.bind_worker()
        except Exception as error:  # Whatever it is: a thread that does not begin leaves its jobs undone, and a step waits for them.
            self.failures.report("binding a thread to its CPUs", error)

    def open_gpu(self, device: int) -> "kvbm_cxl.GpuReach":
        """Has the pool registered for a GPU, now and when it is opened again. Raises as `call` and `Cache.open_gpu` do."""
        with self._lock:
            self._gpus.add(device)
        return self.call(lambda cache: cache.open_gpu(device))

    def _lose(self, opened: _Opened, error: Exception) -> None:
        with self._lock:
            if self._opened is not opened:
                return
            self._opened = None
            self._retry_s = _RETRY_FIRST_S
            self._retry_at = time.monotonic() + self._retry_s
        logger.error("pool %s is lost (%s): this process continues without it and tries to open it again", self.spec, error)
        # Closing may wait for a heartbeat, and the engine must not.
        self.failures.start_thread("kvbm-cxl-close", "closing the lost pool", lambda: self._close(opened))

    def _retry(self) -> None:
        with self._lock:
            if self._retrying or self._users == 0 or time.monotonic() < self._retry_at:
                return
            self._retrying = True
        self.failures.start_thread("kvbm-cxl-reopen", "opening the lost pool again", self._reopen)

    def _reopen(self) -> None:
        opened = None
        try:
            opened = _open(self.spec, self.options)
            for device in sorted(self._gpus):
                # Before the pool is used: afterwards it would be in the way of requests.
                opened.cache.open_gpu(device)
            logger.warning("pool %s is open again", self.spec)
        except Exception as error:  # Whatever it is, the next attempt must come.
            self.failures.report("opening the pool again", error, self.spec)
        with self._lock:
            self._retrying = False
            self._retry_s = min(self._retry_s * 2, _RETRY_LAST_S)
            self._retry_at = time.monotonic() + self._retry_s
            if self._users:
                self._opened, opened = opened, None
        if opened:
            self._close(opened)

    def _close(self, opened: _Opened) -> None:
        for error in opened.close():
            self.failures.report("closing the pool", error, self.spec)

    def release(self) -> None:
        """One user less; the last one closes the pool."""
        with _registry_lock:
            with self._lock:
                self._users -= 1
                if self._users:
                    return
                opened, self._opened = self._opened, None
            _registry.pop(_registry_key(self.spec, self.options), None)
        if opened:
            self._close(opened)


class PoolLost(kvbm_cxl.CxlError):
    """There is no pool at present."""

    kind = "lost"

    def __init__(self, spec: str, advice: str = "") -> None:
        super().__init__(f"pool {spec} is lost{', ' + advice if advice else ''}")


_registry: dict[str, PoolAccess] = {}
_registry_lock = threading.Lock()


def _registry_key(spec: str, options: dict[str, Any]) -> str:
    return json.dumps([spec, options], sort_keys=True, default=str)


def _open(spec: str, options: dict[str, Any]) -> _Opened:
    pool = kvbm_cxl.Pool(spec)
    try:
        return _Opened(pool, pool.cache(**options))
    except BaseException:
        pool.close()
        raise


def acquire(config: PoolOptions, *, must_open: bool = True) -> PoolAccess:
    """The pool of `config`, opened if this process has it not open yet. Every call needs a `release`.

    `must_open` False: a pool that cannot be opened now counts as lost, unless its options are wrong, which raises `ConfigError`.
    """
    options = {**config.cache, "checksums": config.checksums}
    key = _registry_key(config.pool, options)
    with _registry_lock:
        access = _registry.get(key)
        if access is None:
            try:
                opened = _open(config.pool, options)
            except (kvbm_cxl.CxlError, TypeError, ValueError, OverflowError) as error:
                if must_open or error_kind(error) in _OF_OPTIONS:
                    raise ConfigError(
                        f"{config.who} cannot use pool {config.pool!r}: {error}. A pool is made once with `cxlctl format {config.pool}`; "
                        "its name is option pool, or CXL_POOL in the environment"
                    ) from error
                logger.error("pool %s cannot be opened (%s): this process starts without it and tries again", config.pool, error)
                opened = None
            access = _registry[key] = PoolAccess(config.pool, options, _opened=opened)
        with access._lock:
            access._users += 1
    return access
