# SPDX-License-Identifier: Apache-2.0
"""Where the plugin's file is."""

from pathlib import Path

from ._errors import PluginNotFound

NAME = "libplugin_CXL.so"
_PACKAGE = Path(__file__).resolve().parent.parent


def plugin_path() -> Path:
    """The plugin's file: the one that was installed with this package, or, in a checkout, the one that was built last.

    Raises PluginNotFound.
    """
    places = [_PACKAGE / "lib" / NAME, _PACKAGE.parents[1] / "target" / "nixl_plugin" / NAME]
    for place in places:
        if place.is_file():
            return place
    raise PluginNotFound(f"{NAME} is at none of {', '.join(map(str, places))}: install a wheel of kvbm-cxl, or run `make build-plugin`")


def plugin_dir() -> Path:
    """The folder of the plugin's file, which holds no other plugin. Raises PluginNotFound."""
    return plugin_path().parent
