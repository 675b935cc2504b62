# SPDX-License-Identifier: Apache-2.0
"""Options that every adapter has, in whatever form its consumer takes them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self, get_origin

from ..vllm_integration import pool_access
from ..vllm_integration.config import CACHE_OPTIONS, ConfigError, type_words


@dataclass(frozen=True)
class PoolConfig:
    """The options of every adapter, with their defaults. Adapters add their own."""

    pool: str
    """The pool: `/dev/dax0.0`, `/dev/dax0.0,metadata=/dev/dax1.0`, `/dev/shm/kv,size=1G`. Default: CXL_POOL."""
    checksums: bool = True
    """Store a checksum with each block and compare it on every load."""
    namespace: str = ""
    """Anything else that distinguishes blocks and that the engine does not report: revision of the weights, engine, serializer."""
    cache: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the pool's cache: `policy`, `low_water_percent`, ..."""

    @classmethod
    def read(cls, who: str, options: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Self:
        """Checks `options`; `ConfigError` names the option of adapter `who` and what it may be."""
        known = {option.name: option for option in fields(cls)}
        if unknown := sorted(set(options) - set(known)):
            raise ConfigError(f"{who} has no option {', '.join(map(repr, unknown))}; it has {', '.join(sorted(known))}")
        values = {"pool": environment.get("CXL_POOL", ""), **options}
        for name, value in values.items():
            wanted = get_origin(known[name].type) or known[name].type
            if not isinstance(value, wanted) or (wanted is not bool and isinstance(value, bool)):
                raise ConfigError(f"{who}: {name} is {value!r}; it takes {type_words(wanted)}")
        config = cls(**values)
        if not config.pool:
            raise ConfigError(f'{who} has no pool: name it with option "pool", as "/dev/dax0.0", or in the environment as CXL_POOL')
        config.check(who)
        if unknown := sorted(set(config.cache) - CACHE_OPTIONS):
            raise ConfigError(f"{who}: cache has no option {', '.join(map(repr, unknown))}; it has {', '.join(sorted(CACHE_OPTIONS))}")
        return config

    def check(self, who: str) -> None:
        """Checks options of adapter `who` of which not every value of their type will do."""

    def acquire(self, who: str, *, must_open: bool = True) -> pool_access.PoolAccess:
        """The pool, opened if this process has it not open yet. Every call needs a `release`. `ConfigError` where it cannot be used;
        `must_open` False: one that cannot be opened now counts as lost, and is tried again."""
        try:
            return pool_access.acquire(self, must_open=must_open)
        except ConfigError as error:
            reason = error.__cause__ or error
            raise ConfigError(
                f"{who} cannot use pool {self.pool!r}: {reason}. A pool is made once with `cxlctl format {self.pool}`"
            ) from reason


@dataclass(frozen=True)
class AdapterConfig(PoolConfig):
    """Those of an adapter with threads of its own."""

    threads: int = 2
    """Copy threads for each direction."""

    def check(self, who: str) -> None:
        super().check(who)
        if not 1 <= self.threads <= 64:
            raise ConfigError(f"{who}: threads is {self.threads}; it takes 1 to 64")
