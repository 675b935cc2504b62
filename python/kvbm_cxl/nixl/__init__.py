# SPDX-License-Identifier: Apache-2.0
"""Makes the CXL backend available to the installed NIXL, in addition to NIXL's own.

    import kvbm_cxl.nixl

    kvbm_cxl.nixl.enable()
    agent = nixl_agent("name", nixl_agent_config(backends=["CXL"]))

Nothing has to be set in the environment but where the pool is (CXL_POOL), and nothing in NIXL's folders is changed. Where a program cannot
be changed, `kvbm-cxl nixl-plugin-dir` makes a folder for NIXL_PLUGIN_DIR.
"""

from ._errors import AbiMismatch, NixlError, NixlNotFound, PluginNotFound
from ._installation import Installation, find
from ._manager import enable
from ._plugin import malloc_path, plugin_dir, plugin_path
from ._vtable import check

__all__ = [
    "AbiMismatch",
    "Installation",
    "NixlError",
    "NixlNotFound",
    "PluginNotFound",
    "check",
    "enable",
    "find",
    "malloc_path",
    "plugin_dir",
    "plugin_path",
]
