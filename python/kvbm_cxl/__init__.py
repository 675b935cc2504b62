# SPDX-License-Identifier: Apache-2.0
"""CXL shared memory for KV caches: pools, their prefix cache, and (`kvbm_cxl.nixl`) the pool as backend CXL of NIXL.

The classes come from the extension module `kvbm_cxl._native`, which is loaded when one of them is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .errors import (
    ClosedError,
    CxlError,
    DamagedError,
    DeviceError,
    ExistsError,
    FencedError,
    ForkedError,
    FullError,
    InvalidError,
    NotAPoolError,
    NotFoundError,
    ReplacedError,
    SlotInUseError,
    SystemError_,
    TimeoutError_,
)

if TYPE_CHECKING:
    from ._native import (
        BlockInfo,
        BlockLayout,
        Cache,
        CellUsage,
        Changes,
        ColdBlock,
        Event,
        Events,
        GpuReach,
        Namespace,
        Pins,
        Pool,
        PoolMemory,
        PullResult,
        Queued,
        Reservations,
        TraceRecorder,
        Watch,
        chain_key,
        checksum,
        format_pool,
        pool_info,
    )

__all__ = [
    "BlockInfo",
    "BlockLayout",
    "Cache",
    "CellUsage",
    "Changes",
    "ClosedError",
    "ColdBlock",
    "CxlError",
    "DamagedError",
    "DeviceError",
    "Event",
    "Events",
    "ExistsError",
    "FencedError",
    "ForkedError",
    "FullError",
    "GpuReach",
    "InvalidError",
    "Namespace",
    "NotAPoolError",
    "NotFoundError",
    "Pins",
    "Pool",
    "PoolMemory",
    "PullResult",
    "Queued",
    "Reservations",
    "ReplacedError",
    "SlotInUseError",
    "SystemError_",
    "TimeoutError_",
    "TraceRecorder",
    "Watch",
    "__commit__",
    "__version__",
    "chain_key",
    "checksum",
    "format_pool",
    "pool_info",
]


def __getattr__(name: str):
    """Finds out when it is first asked for: kvbm_cxl.nixl needs nothing of the extension, and few need the version."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = {"__commit__": _commit, "__version__": _version}.get(name)
    value = globals()[name] = found() if found else _from_extension(name)
    return value


def _from_extension(name: str):
    try:
        native = import_module("._native", __name__)
    except ImportError as error:
        advice = "install a wheel of kvbm-cxl, or run `make python-extension`"
        raise ImportError(f"kvbm_cxl.{name} needs the compiled part of the package ({error}): {advice}") from error
    return getattr(native, name)


def _version() -> str:
    # To load what reads it takes longer than all the rest of the package.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kvbm-cxl")
    except PackageNotFoundError:  # A checkout that is on PYTHONPATH without being installed.
        return "0.2.0"


def _commit() -> str:
    """The commit that the wheel was built from; empty in a checkout."""
    from pathlib import Path

    commit = Path(__file__).with_name("commit")
    return commit.read_text().strip() if commit.exists() else ""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
