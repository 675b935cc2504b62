# SPDX-License-Identifier: Apache-2.0
"""Finds the NIXL that `import nixl` means, and imports it only where that decides which one it is."""

import importlib
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


def import_nixl() -> bool:
    """Imports NIXL by its common name; False where nothing has that name. Raises NixlNotFound where it is there and cannot be imported."""
    try:
        importlib.import_module("nixl")
    except ModuleNotFoundError as error:
        if error.name == "nixl":
            return False
        raise NixlNotFound(f"NIXL cannot be imported: {error}") from error
    except ImportError as error:
        raise NixlNotFound(f"NIXL cannot be imported: {error}") from error
    return True


def _find_imported() -> Installation | None:
    # Where several are imported, it is the one that nixl's own modules are of.
    chosen = getattr(sys.modules.get("nixl._api"), "__name__", "").partition(".")[0]
    for package in sorted(_PACKAGES, key=lambda package: package != chosen):
        module = sys.modules.get(package)
        if module is not None and getattr(module, "__file__", None):
            return _installation(package, Path(module.__file__).resolve().parent.parent)
    return None


def find() -> Installation:
    """The NIXL that this process has imported, else the one that it would import. Raises NixlNotFound.

    Where several builds are installed, NIXL chooses one by the CUDA that is there, in another way in each of its versions: then it is
    imported, and a program that does that without package nixl has to import theirs before.
    """
    imported = _find_imported()
    if imported is not None:
        return imported
    found = []
    for package in _PACKAGES:
        spec = importlib.machinery.PathFinder.find_spec(package)
        if spec is not None and spec.origin:
            found.append((package, Path(spec.origin).resolve().parent.parent))
    if not found:
        if importlib.machinery.PathFinder.find_spec("nixl") is not None:
            raise NixlNotFound(f"package nixl is installed, but none of {' and '.join(_PACKAGES)}, the builds that there is a plugin for")
        raise NixlNotFound("NIXL is not installed for this Python: `pip install nixl`")
    if len(found) == 1:
        return _installation(*found[0])
    names = " and ".join(package for package, _ in found)
    if not import_nixl():
        raise NixlNotFound(f"{names} are installed, but not nixl, which chooses one: import the one that you need, or remove the other")
    imported = _find_imported()
    if imported is None:
        raise NixlNotFound(f"`import nixl` chose none of {names}, which are the builds of NIXL that there is a plugin for")
    return imported
