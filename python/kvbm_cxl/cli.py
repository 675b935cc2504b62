# SPDX-License-Identifier: Apache-2.0
"""Command kvbm-cxl."""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import __commit__, __version__, nixl
from .nixl import _bench, _overlay


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


def _nixlbench(options: argparse.Namespace) -> int:
    installation = nixl.find()
    nixl.check(installation)
    with contextlib.ExitStack() as held:
        # A folder of its own: in the one of nixl-plugin-dir the name belongs to NIXL's own plugin.
        folder = options.into or Path(held.enter_context(tempfile.TemporaryDirectory(prefix="kvbm-cxl-nixlbench-")))
        env = _bench.environment(installation, folder, options.name, options.memory == "pool")
        more = options.arguments[options.arguments[:1] == ["--"] :]
        return _bench.run(options.binary, options.initiator, options.port, env, options.name, more, options.wait_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; 0, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="kvbm-cxl", description="CXL shared memory for KV caches.")
    parser.add_argument("--version", action="version", version=f"{__version__} ({__commit__ or 'a checkout'})")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    folder = commands.add_parser(
        "nixl-plugin-dir",
        help="print a folder for NIXL_PLUGIN_DIR with NIXL's plugins and CXL",
        description="Makes a folder of links to NIXL's own plugins and to CXL, and prints it: NIXL_PLUGIN_DIR=$(kvbm-cxl nixl-plugin-dir). "
        "Python programs can call kvbm_cxl.nixl.enable() instead.",
    )
    folder.add_argument("--into", type=Path, metavar="DIR", help="make it below this folder instead of the user's cache")
    folder.add_argument("--bare", action="store_true", help="print the folder with CXL only: NIXL then has no other backend")
    folder.set_defaults(run=_plugin_dir)
    checked = commands.add_parser("nixl-check", help="check whether the plugin fits the installed NIXL, and load it")
    checked.set_defaults(run=_check)
    bench = commands.add_parser(
        "nixlbench",
        help="run NIXL's own benchmark as one of two hosts of a pool",
        description="Runs nixlbench, from NIXL's build or container, over the plugin; the same command on the two hosts to measure. "
        "Each host has its CXL_POOL and its identity (CXL_MACHINE_ID, CXL_STATE_DIR) in the environment.",
    )
    bench.add_argument("--initiator", required=True, metavar="HOST", help="the host that prints the figures; the other connects to it")
    bench.add_argument("--port", type=int, default=12345, help="of the initiator; default %(default)s")
    bench.add_argument("--memory", choices=("pool", "heap"), default="pool", help="memory of nixlbench's buffers; default %(default)s")
    bench.add_argument("--name", default="Mooncake", help="of a backend that it knows, for the plugin; default %(default)s")
    bench.add_argument("--into", type=Path, metavar="DIR", help="make the folder of plugins below this one, and leave it")
    bench.add_argument("--wait-s", type=float, default=60, help="for the initiator; default %(default)s")
    bench.add_argument("binary", type=Path, help="the program nixlbench")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="options of nixlbench, after --")
    bench.set_defaults(run=_nixlbench)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except nixl.NixlError as error:
        print(f"kvbm-cxl: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
