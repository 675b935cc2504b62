# SPDX-License-Identifier: Apache-2.0
"""Finds the NIXL that `import nixl` means, without importing it."""

import importlib.machinery
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ._errors import NixlNotFound

# The packages that hold NIXL itself, by the CUDA they are built for, newest first: `nixl` chooses one of them.
_PACKAGES = ("nixl_cu13", "nixl_cu12")


@dataclass(frozen=True)
class Installation:
    """An installed NIXL."""

    package: str
    """Name of the package that holds it, like nixl_cu12."""
    version: str
    """Its version, or "unknown"."""
    site: Path
    """The folder that the package lies in."""
    libraries: Path
    """The folder of libnixl.so."""
    plugins: Path
    """The folder of the plugins that it brings."""


def _version(package: str, site: Path) -> str:
    for found in metadata.distributions(name=package.replace("_", "-"), path=[str(site)]):
        return found.version
    return "unknown"


def _installation(package: str, site: Path) -> Installation:
    libraries = site / f".{package}.mesonpy.libs"
    plugins = libraries / "plugins"
    if not (libraries / "libnixl.so").is_file() or not plugins.is_dir():
        raise NixlNotFound(f"{package} in {site} is laid out in an unknown way: {libraries / 'libnixl.so'} or {plugins} is missing")
    return Installation(package, _version(package, site), site, libraries, plugins)


def find() -> Installation:
    """The NIXL that this process has imported, else the one that it would import. Raises NixlNotFound.

    Where both nixl-cu12 and nixl-cu13 are installed and neither is imported, import nixl first: it decides by the CUDA that is there.
    """
    for package in _PACKAGES:
        module = sys.modules.get(package)
        if module is not None and getattr(module, "__file__", None):
            return _installation(package, Path(module.__file__).resolve().parent.parent)
    found = []
    for package in _PACKAGES:
        spec = importlib.machinery.PathFinder.find_spec(package)
        if spec is not None and spec.origin:
            found.append((package, Path(spec.origin).resolve().parent.parent))
    if not found:
        raise NixlNotFound("NIXL is not installed for this Python: `pip install nixl`")
    return _installation(*found[0])
