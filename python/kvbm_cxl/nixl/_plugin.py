# SPDX-License-Identifier: Apache-2.0
"""Where the plugin's file is."""

from pathlib import Path

from ._errors import PluginNotFound

NAME = "libplugin_CXL.so"
_PACKAGE = Path(__file__).resolve().parent.parent


def _find_library(name: str) -> Path:
    places = [_PACKAGE / "lib" / name, _PACKAGE.parents[1] / "target" / "nixl_plugin" / name]
    for place in places:
        if place.is_file():
            return place
    raise PluginNotFound(f"{name} is at none of {', '.join(map(str, places))}: install a wheel of kvbm-cxl, or run `make build-plugin`")


def plugin_path() -> Path:
    """The plugin's file: the one that was installed with this package, or, in a checkout, the one that was built last.

    Raises PluginNotFound.
    """
    return _find_library(NAME)


def malloc_path() -> Path:
    """libcxl_malloc.so, which puts large aligned buffers of a program into the pool (LD_PRELOAD), found as plugin_path finds the plugin.

    Raises PluginNotFound.
    """
    return _find_library("libcxl_malloc.so")


def plugin_dir() -> Path:
    """The folder of the plugin's file, which holds no other plugin. Raises PluginNotFound."""
    return plugin_path().parent
