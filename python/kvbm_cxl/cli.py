# SPDX-License-Identifier: Apache-2.0
"""Command kvbm-cxl."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__, nixl
from .nixl import _overlay


def _plugin_dir(options: argparse.Namespace) -> int:
    if options.bare:
        print(nixl.plugin_dir())
        return 0
    installation = nixl.find()
    nixl.check(installation)
    print(_overlay.make_overlay(installation, options.into or _overlay.default_folder(installation)))
    return 0


def _check(_: argparse.Namespace) -> int:
    installation = nixl.find()
    print(f"NIXL {installation.version} ({installation.package}) in {installation.site}")
    print(f"plugin {nixl.plugin_path()}")
    print(f"fits: NIXL's own {', '.join(nixl.check(installation))} have the virtual functions that it was built for")
    nixl.enable()
    print("backend CXL can be loaded")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; 0, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="kvbm-cxl", description="CXL shared memory for KV caches.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    folder = commands.add_parser(
        "nixl-plugin-dir",
        help="print a folder for NIXL_PLUGIN_DIR with NIXL's plugins and CXL",
        description="Makes a folder of links to NIXL's own plugins and to CXL, and prints it: NIXL_PLUGIN_DIR=$(kvbm-cxl nixl-plugin-dir). "
        "Programs that can be changed need none of it: they call kvbm_cxl.nixl.enable().",
    )
    folder.add_argument("--into", type=Path, metavar="DIR", help="make it below this folder instead of the user's cache")
    folder.add_argument("--bare", action="store_true", help="print the folder that holds CXL alone: NIXL then has no other backend")
    folder.set_defaults(run=_plugin_dir)
    checked = commands.add_parser("nixl-check", help="tell whether the plugin fits the installed NIXL, and load it")
    checked.set_defaults(run=_check)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except nixl.NixlError as error:
        print(f"kvbm-cxl: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
