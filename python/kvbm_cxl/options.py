# SPDX-License-Identifier: Apache-2.0
"""Options of CxlConnector and of the adapters for other caches: one way to declare, parse and check them.

A class of options is a frozen dataclass. A field's type and metadata say what its values may be, its docstring is its row in
docs/reference/configuration.md.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self, get_origin


class ConfigError(ValueError):
    """The connector, or an adapter, cannot run as it is configured. The message says what to change."""


CACHE_OPTIONS = frozenset(
    ("policy", "low_water_percent", "high_water_percent", "quotas", "lock_timeout_ms", "copy")
    + ("dma", "register_bytes")
)
"""What `cache` may hold: those keywords of `Pool.cache` that an operator decides."""
_TYPE_WORDS = {bool: "true or false", int: "an integer", str: "a text", Mapping: "an object of names and values"}


def number(default: int, least: int, most: int | None = None) -> Any:
    """A field of an integer between `least` and `most`."""
    return field(default=default, metadata={"least": least, "most": most})


@dataclass(frozen=True)
class PoolOptions:
    """The options of every consumer of a pool."""

    who: ClassVar[str] = "an adapter"
    """What error messages call the consumer."""

    pool: str = ""
    """The pool, as in CXL_POOL."""
    checksums: bool = True
    """Store a checksum with each block and compare it on every load."""
    cache: Mapping[str, Any] = field(default_factory=dict)
    """Options of the pool's cache: `policy`, `low_water_percent`, `high_water_percent`, `quotas`, `lock_timeout_ms`, `copy`; for GPUs `dma`
    (`cached`, `uncached`), `register_bytes`."""

    @classmethod
    def read(cls, given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Self:
        """Checks `given`; `ConfigError` names the option and what it may be."""
        known = {option.name: option for option in fields(cls)}
        _check_names(f"{cls.who} has", given, known)
        values = {"pool": environment.get("CXL_POOL", ""), **given}
        for name, value in values.items():
            _check_value(f"{cls.who}: {name} is {value!r}", value, known[name])
        options = cls(**values)
        if not options.pool:
            raise ConfigError(f'{cls.who} has no pool: name it with option "pool", as "/dev/dax0.0", or in the environment as CXL_POOL')
        if "checksums" in options.cache:
            raise ConfigError(f"{cls.who}: checksums is an option of its own, not one of cache")
        _check_names(f"{cls.who}: cache has", options.cache, CACHE_OPTIONS)
        options.check()
        return options

    def check(self) -> None:
        """Checks options of which not every value of their type will do. Raises `ConfigError`."""


@dataclass(frozen=True)
class AdapterOptions(PoolOptions):
    """The options of every adapter for another cache."""

    namespace: str = ""
    """Anything else that distinguishes blocks and that the engine does not report: revision of the weights, engine, serializer."""


@dataclass(frozen=True)
class ThreadOptions(AdapterOptions):
    """Those of an adapter with threads of its own."""

    threads: int = number(2, 1, 64)
    """Copy threads for each direction."""


def _check_names(has: str, given: Mapping[str, Any], known: Any) -> None:
    if unknown := sorted(set(given) - set(known)):
        raise ConfigError(f"{has} no option {', '.join(map(repr, unknown))}; it has {', '.join(sorted(known))}")


def _check_value(is_value: str, value: Any, option: Any) -> None:
    wanted = get_origin(option.type) or option.type
    if not isinstance(value, wanted) or (wanted is not bool and isinstance(value, bool)):
        raise ConfigError(f"{is_value}; it takes {_TYPE_WORDS[wanted]}")
    least, most = option.metadata.get("least"), option.metadata.get("most")
    if least is not None and (value < least or (most is not None and value > most)):
        raise ConfigError(f"{is_value}; it {f'must be at least {least}' if most is None else f'takes {least} to {most}'}")
