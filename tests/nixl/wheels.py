# SPDX-License-Identifier: Apache-2.0
"""The NIXL wheels that `make setup-nixl` put side by side, and how a process gets one of them."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

# The wheel of the environment itself, which needs no path of its own.
DEFAULT = "1.4.1"
VERSIONS = ("1.3.2", "1.4.1", "1.5.1")


def folder(version):
    """Where the files of another wheel than the default one lie."""
    return ROOT / ".venv" / f"nixl-{version}"


def python_path(version):
    """What PYTHONPATH has to be, in order, so that `import nixl` means this version."""
    paths = [] if version == DEFAULT else [folder(version)]
    if version == "1.3.2":
        paths.append(HERE / "stubs")
    return [str(path) for path in [*paths, ROOT / "python", HERE]]


def library_path(version):
    """Where the libraries of NIXL lie, for programs that were linked with them."""
    site = [folder(version)] if version != DEFAULT else list((ROOT / ".venv").glob("lib/python3*/site-packages"))
    return os.pathsep.join(str(path) for at in site for path in sorted(at.glob(".nixl_cu1*.mesonpy.libs")))


def installed(version):
    """Whether `make setup-nixl` has been run for this version."""
    if version != DEFAULT:
        return (folder(version) / "nixl" / "__init__.py").is_file()
    return any((ROOT / ".venv").glob("lib/python3*/site-packages/nixl/__init__.py"))


def chosen():
    """The versions to test: those that NIXL_WHEELS names, else all."""
    named = os.environ.get("NIXL_WHEELS")
    return tuple(named.split()) if named else VERSIONS
