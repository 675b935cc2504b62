# SPDX-License-Identifier: Apache-2.0
"""A folder for NIXL_PLUGIN_DIR: that variable replaces the folder of NIXL's own plugins, so theirs have to be in it too."""

import os
from pathlib import Path

from ._errors import NixlError
from ._installed import Installation
from ._plugin import NAME, plugin_path


def _link(target: Path, link: Path) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(target)


def make_overlay(installation: Installation, folder: Path) -> Path:
    """Links NIXL's plugins and ours below `folder`; returns the folder to set NIXL_PLUGIN_DIR to. Nothing is copied.

    Plugins look for their libraries beside where they were found, so the folders around them are there as well.
    """
    libraries = folder / installation.libraries.name
    plugins = libraries / "plugins"
    try:
        plugins.mkdir(parents=True, exist_ok=True)
        for file in installation.libraries.iterdir():
            if file.is_file():
                _link(file, libraries / file.name)
        for file in installation.plugins.iterdir():
            _link(file, plugins / file.name)
        _link(plugin_path(), plugins / NAME)
        bundled = f"{installation.package}.libs"
        if (installation.site / bundled).is_dir():
            _link(installation.site / bundled, folder / bundled)
    except OSError as error:
        raise NixlError(f"the folder for NIXL_PLUGIN_DIR cannot be made: {error}; name another with --into") from error
    return plugins


def default_folder(installation: Installation) -> Path:
    """Where the overlay of an installation goes: in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "kvbm-cxl" / f"nixl-{installation.package}-{installation.version}"
