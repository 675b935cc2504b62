# SPDX-License-Identifier: Apache-2.0
"""The pool as a tier of LMCache: shared between hosts without a coordinator, and warm after a restart.

`CxlL2Adapter` and `CxlL2AdapterConfig` are the L2 adapter `plugin` of LMCache's multi-process server, `CxlStorageBackend` is a storage
plugin of LMCache within an engine's process; docs/start/lmcache.md tells how to turn them on. LMCache is loaded when one of them is first
used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .. import versions

if TYPE_CHECKING:
    from .plugin import CxlStorageBackend
    from .server import CxlL2Adapter, CxlL2AdapterConfig

__all__ = ["CxlL2Adapter", "CxlL2AdapterConfig", "CxlStorageBackend"]
_MODULES = {"CxlL2Adapter": ".server", "CxlL2AdapterConfig": ".server", "CxlStorageBackend": ".plugin"}


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    versions.check_imported("lmcache")
    return getattr(import_module(_MODULES[name], __name__), name)
