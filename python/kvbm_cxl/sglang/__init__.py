# SPDX-License-Identifier: Apache-2.0
"""The pool as the third level of SGLang's HiCache: shared between hosts, and warm after a restart.

`CxlHiCache` is a storage backend of type `dynamic`; docs/start/sglang.md tells how to turn it on. SGLang is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .. import versions

if TYPE_CHECKING:
    from .storage import CxlHiCache

__all__ = ["CxlHiCache"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    versions.check_imported("sglang")
    return getattr(import_module(".storage", __name__), name)
