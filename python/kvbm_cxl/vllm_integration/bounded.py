# SPDX-License-Identifier: Apache-2.0
"""Bounds of what is remembered by names that requests bring."""

from typing import Any

MAX_REMEMBERED = 4096
"""Entries that one container remembers by names of requests, adapters or hashes, where an older entry may be forgotten."""


def trim(entries: dict[Any, Any], limit: int = MAX_REMEMBERED) -> None:
    """Forgets the oldest entries beyond `limit`."""
    while len(entries) > limit:
        del entries[next(iter(entries))]
