# SPDX-License-Identifier: Apache-2.0
"""What can go wrong when the backend is made available."""


class NixlError(RuntimeError):
    """The CXL backend cannot be made available to NIXL; the text says why and what to do."""


class NixlNotFound(NixlError):
    """No NIXL is installed, or one that lacks something required."""


class PluginNotFound(NixlError):
    """The plugin's file is missing, or cannot be loaded here."""


class AbiMismatch(NixlError):
    """The installed NIXL calls its plugins in another way than this plugin was built for. Loading it would crash, or worse."""
