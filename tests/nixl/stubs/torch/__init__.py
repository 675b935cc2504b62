# SPDX-License-Identifier: Apache-2.0
"""Stands in for torch where a NIXL wheel imports it without needing it (1.3.2 does): no tensor is ever one of these."""

from . import version

__all__ = ["Tensor", "version"]


class Tensor:
    """What NIXL asks `isinstance` about."""
