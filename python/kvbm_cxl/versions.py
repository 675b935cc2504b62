# SPDX-License-Identifier: Apache-2.0
"""Versions of other packages that this package was tested with. Others are refused at the start, not at the first request."""

import re
import sys

from .options import ConfigError

WINDOWS: dict[str, tuple[str, str]] = {
    "vllm": ("0.31", "0.34"),
    "lmcache": ("0.5.6", "0.5.8"),
    "sglang": ("0.5.23", "0.5.24"),
}
"""Package -> first version, and the first that is too new. pyproject.toml says the same; tests/versions/records has the interfaces."""


def release(version: str) -> tuple[int, ...]:
    """The numbers at the start of a version; empty if there are none. A release candidate counts as its release."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def check(package: str, version: str) -> None:
    """Raises `ConfigError` for a version outside the window of its package."""
    first, end = WINDOWS.get(package, ("0", ""))
    if end and not release(first) <= release(version) < release(end):
        *head, last = release(end)
        newest = ".".join(map(str, (*head, last - 1)))
        raise ConfigError(f"kvbm_cxl is tested with {package} {first} to {newest}, not with {version}: install one of these versions")


def check_imported(package: str) -> None:
    """The same for a package that this process has imported and that says its version."""
    found = getattr(sys.modules.get(package), "__version__", "unknown")
    if found != "unknown":
        check(package, found)
