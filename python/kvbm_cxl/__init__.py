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
        Event,
        Events,
        LentOffer,
        LentRegion,
        Namespace,
        Pins,
        Pool,
        PoolMemory,
        PullResult,
        Watch,
        chain_key,
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
    "CxlError",
    "DamagedError",
    "DeviceError",
    "Event",
    "Events",
    "ExistsError",
    "FencedError",
    "ForkedError",
    "FullError",
    "InvalidError",
    "LentOffer",
    "LentRegion",
    "Namespace",
    "NotAPoolError",
    "NotFoundError",
    "Pins",
    "Pool",
    "PoolMemory",
    "PullResult",
    "ReplacedError",
    "SlotInUseError",
    "SystemError_",
    "TimeoutError_",
    "Watch",
    "__version__",
    "chain_key",
    "format_pool",
    "pool_info",
]


def __getattr__(name: str):
    """Loads the extension when something of it is first asked for: kvbm_cxl.nixl needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        return _version()
    try:
        native = import_module("._native", __name__)
    except ImportError as error:
        advice = "install a wheel of kvbm-cxl, or run `make python-extension`"
        raise ImportError(f"kvbm_cxl.{name} needs the compiled part of the package ({error}): {advice}") from error
    value = getattr(native, name)
    globals()[name] = value
    return value


def _version() -> str:
    """Asked for when it is wanted: to load what reads it takes longer than all the rest of the package."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kvbm-cxl")
    except PackageNotFoundError:  # A checkout that is on PYTHONPATH without being installed.
        return "0.1.0"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
