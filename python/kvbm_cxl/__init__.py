# SPDX-License-Identifier: Apache-2.0
"""CXL shared memory for KV caches. `kvbm_cxl.nixl` brings the pool to NIXL as backend CXL."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvbm-cxl")
except PackageNotFoundError:  # A checkout that is on PYTHONPATH without being installed.
    __version__ = "0.1.0"

__all__ = ["__version__"]
