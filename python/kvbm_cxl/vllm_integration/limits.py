# SPDX-License-Identifier: Apache-2.0
"""Bounded maps whose keys come from requests."""

from typing import Any

MAX_REMEMBERED = 4096
"""Entries that one container remembers by names of requests, adapters or hashes, where an older entry may be forgotten."""


def trim(entries: dict[Any, Any], limit: int | None = None) -> None:
    """Forgets the oldest entries beyond `limit`, which is `MAX_REMEMBERED` if it is not given."""
    while len(entries) > (MAX_REMEMBERED if limit is None else limit):
        del entries[next(iter(entries))]
