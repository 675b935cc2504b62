# SPDX-License-Identifier: Apache-2.0
"""Adds the plugin's folder to the plugin manager of the NIXL that this process has loaded."""

import ctypes
import importlib
import os
from pathlib import Path

from ._errors import NixlNotFound, PluginNotFound
from ._installation import Installation, find, import_nixl
from ._plugin import plugin_path
from ._vtable import check

_GET_INSTANCE = "_ZN17nixlPluginManager11getInstanceEv"
_ADD_DIRECTORY = "_ZN17nixlPluginManager18addPluginDirectoryERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"


class _String(ctypes.Structure):
    """A std::string of libstdc++ that NIXL owns: good for reading, never to be changed or destroyed there."""

    _fields_ = [("data", ctypes.c_char_p), ("size", ctypes.c_size_t), ("capacity", ctypes.c_size_t), ("unused", ctypes.c_size_t)]


_added: set[Path] = set()


def _load(package: str) -> Installation:
    """Imports NIXL, by its common name where that is installed, and tells which one it is now."""
    if not import_nixl():
        try:
            importlib.import_module(f"{package}._bindings")
        except ImportError as error:
            raise NixlNotFound(f"NIXL cannot be imported: {error}") from error
    return find()


def enable() -> Path:
    """Makes backend CXL available to every NIXL agent of this process; returns the folder of the plugin.

    May be called often, before or after agents are made; agents that exist already do not look again. Raises AbiMismatch where the plugin
    does not fit the installed NIXL, NixlNotFound, or PluginNotFound.
    """
    plugin = plugin_path()
    # Of several that are installed, which one it is shows only once NIXL is imported; nothing of ours is loaded before it is known to fit.
    installation = _load(find().package)
    check(installation)
    if plugin in _added:
        return plugin.parent
    try:
        # NIXL would say no more than that there is no such plugin.
        ctypes.CDLL(str(plugin), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        raise PluginNotFound(f"the plugin cannot be loaded on this system: {error}") from error
    try:
        library = ctypes.CDLL(str(installation.libraries / "libnixl.so"), mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        get_instance, add_directory = library[_GET_INSTANCE], library[_ADD_DIRECTORY]
    except (OSError, AttributeError) as error:
        raise NixlNotFound(f"the plugin manager of NIXL {installation.version} cannot be reached: {error}; use NIXL_PLUGIN_DIR") from error
    get_instance.restype, get_instance.argtypes = ctypes.c_void_p, []
    add_directory.restype, add_directory.argtypes = None, [ctypes.c_void_p, ctypes.POINTER(_String)]
    folder = os.fsencode(plugin.parent)
    add_directory(get_instance(), _String(folder, len(folder), len(folder), 0))
    _added.add(plugin)
    return plugin.parent
