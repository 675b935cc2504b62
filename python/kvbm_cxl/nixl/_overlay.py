# SPDX-License-Identifier: Apache-2.0
"""A folder for NIXL_PLUGIN_DIR: that variable replaces the folder of NIXL's own plugins, so theirs have to be in it too."""

import errno
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

from ._errors import NixlError
from ._installation import Installation
from ._plugin import NAME, plugin_path


def _link(target: Path, link: Path) -> None:
    """Makes a link in one step: others may be making the same one, and NIXL may be loading what it leads to."""
    # One look: between two of them another process may have made it.
    try:
        if os.readlink(link) == str(target):
            return
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise NixlError(f"{link} is there and no link of ours: remove it, or name another folder with --into") from error
    fresh = link.with_name(f".{link.name}.{uuid.uuid4().hex}")
    fresh.symlink_to(target)
    try:
        os.replace(fresh, link)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def make_overlay(installation: Installation, folder: Path, aliases: Sequence[str] = ()) -> Path:
    """Links NIXL's plugins and ours below `folder`; returns the folder to set NIXL_PLUGIN_DIR to. Nothing is copied.

    `aliases`: further names of backends that our plugin has there, for programs that know a closed list of names.

    Plugins look for their libraries next to their own path, so the folders around them are there as well. May be called by many at a
    time. Raises NixlError where `folder` holds NIXL itself, or files with these names that are no links: nothing of them is touched.
    """
    # The process that gets this path may run elsewhere.
    folder = folder.absolute()
    libraries = folder / installation.libraries.name
    plugins = libraries / "plugins"
    if libraries.resolve() == installation.libraries.resolve() or plugins.resolve() == installation.plugins.resolve():
        raise NixlError(f"{folder} holds NIXL itself: name another folder with --into")
    try:
        plugins.mkdir(parents=True, exist_ok=True)
        for file in installation.libraries.iterdir():
            if file.is_file():
                _link(file, libraries / file.name)
        ours = {NAME, *(f"libplugin_{alias}.so" for alias in aliases)}
        for file in installation.plugins.iterdir():
            if file.name not in ours:
                _link(file, plugins / file.name)
        for name in sorted(ours):
            _link(plugin_path(), plugins / name)
        bundled = f"{installation.package}.libs"
        if (installation.site / bundled).is_dir():
            _link(installation.site / bundled, folder / bundled)
    except OSError as error:
        raise NixlError(f"the folder for NIXL_PLUGIN_DIR cannot be made: {error}; name another with --into") from error
    return plugins


def default_folder(installation: Installation) -> Path:
    """Where the overlay of an installation goes: in the user's cache. Raises NixlError where this user has none."""
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        cache = cache or Path.home() / ".cache"
    except RuntimeError as error:
        raise NixlError("the folder for NIXL_PLUGIN_DIR has no default: this user has no home; name a folder with --into") from error
    return Path(cache) / "kvbm-cxl" / f"nixl-{installation.package}-{installation.version}"
