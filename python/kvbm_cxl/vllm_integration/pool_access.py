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

from .config import ConfigError, ConnectorConfig
from .log import logger

_T = TypeVar("_T")
# After a loss the pool is tried again this often at first, then ever less.
_RETRY_FIRST_S, _RETRY_LAST_S = 0.5, 30.0
# Kinds of errors after which this process's view of the pool is gone. Others concern one call; a fenced host joins again by itself.
_LOST = frozenset({"device_lost", "not_a_pool", "replaced", "closed"})


@dataclass
class _Opened:
    pool: "kvbm_cxl.Pool"
    cache: "kvbm_cxl.Cache"

    def close(self) -> None:
        for thing in (self.cache, self.pool):
            try:
                thing.close()
            except kvbm_cxl.CxlError as error:
                logger.warning("closing the pool: %s", error)


@dataclass
class PoolAccess:
    """A pool and its cache, shared by the connectors of a process. All methods may be called from any thread."""

    spec: str
    options: dict[str, Any]
    _opened: _Opened | None = None
    _users: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _retry_at: float = 0.0
    _retry_s: float = _RETRY_FIRST_S
    _retrying: bool = False

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

    def _lose(self, opened: _Opened, error: Exception) -> None:
        with self._lock:
            if self._opened is not opened:
                return
            self._opened = None
            self._retry_s = _RETRY_FIRST_S
            self._retry_at = time.monotonic() + self._retry_s
        logger.error("CxlConnector lost pool %s (%s): the engine goes on without it and tries to open it again", self.spec, error)
        # Closing may wait for a heartbeat; nobody here has to.
        threading.Thread(target=opened.close, name="kvbm-cxl-close", daemon=True).start()

    def _retry(self) -> None:
        with self._lock:
            if self._retrying or self._users == 0 or time.monotonic() < self._retry_at:
                return
            self._retrying = True
        threading.Thread(target=self._reopen, name="kvbm-cxl-reopen", daemon=True).start()

    def _reopen(self) -> None:
        opened = None
        try:
            opened = _open(self.spec, self.options)
            logger.warning("CxlConnector opened pool %s again", self.spec)
        except kvbm_cxl.CxlError as error:
            logger.debug("pool %s is still lost: %s", self.spec, error)
        with self._lock:
            self._retrying = False
            self._retry_s = min(self._retry_s * 2, _RETRY_LAST_S)
            self._retry_at = time.monotonic() + self._retry_s
            if self._users:
                self._opened, opened = opened, None
        if opened:
            opened.close()

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
            opened.close()


class PoolLost(kvbm_cxl.CxlError):
    """There is no pool at present."""

    kind = "lost"

    def __init__(self, spec: str, advice: str = "") -> None:
        super().__init__(f"pool {spec} is lost{', ' + advice if advice else ''}")


def error_kind(error: BaseException) -> str:
    """The kind of a pool's error, for counters."""
    kind = getattr(error, "kind", None)
    return kind if isinstance(kind, str) else "other"


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


def acquire(config: ConnectorConfig) -> PoolAccess:
    """The pool of `config`, opened if this process has it not open yet. Every call needs a `release`."""
    options = {**config.cache, "checksums": config.checksums}
    with _registry_lock:
        access = _registry.get(_registry_key(config.pool, options))
        if access is None:
            try:
                opened = _open(config.pool, options)
            except (kvbm_cxl.CxlError, TypeError) as error:
                raise ConfigError(
                    f"CxlConnector cannot use pool {config.pool!r}: {error}. A pool is made once with "
                    f"`cxlctl format {config.pool}`; the connector takes its name from kv_connector_extra_config "
                    '{"pool": ...} or from CXL_POOL'
                ) from error
            access = _registry[_registry_key(config.pool, options)] = PoolAccess(config.pool, options, opened)
        with access._lock:
            access._users += 1
    return access
