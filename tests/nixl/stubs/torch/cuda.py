# SPDX-License-Identifier: Apache-2.0
"""A machine without a GPU, as NIXL's tests ask for it."""


def device_count():
    """No device."""
    return 0
