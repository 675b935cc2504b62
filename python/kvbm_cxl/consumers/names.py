# SPDX-License-Identifier: Apache-2.0
"""What blocks are called: the namespace holds everything that shapes their bytes but the tokens, the key holds the tokens."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import kvbm_cxl

# Raised when the bytes of a block of an unchanged configuration change their meaning.
_VERSION = 1


def namespace_of(consumer: str, **fields: Any) -> "kvbm_cxl.Namespace":
    """The namespace of a consumer's blocks. Two are equal only if the consumer, the names of all fields and their values are.

    Values are texts, numbers, None, and lists, tuples or mappings of these; anything else counts by its text.
    """
    # JSON tells 1 from "1", and where a text ends.
    text = json.dumps([consumer, _VERSION, fields], sort_keys=True, default=str)
    return kvbm_cxl.Namespace.from_bytes(hashlib.blake2b(text.encode(), digest_size=16, person=b"kvbm-cxl-ns").digest())


def key_of(key: bytes | str) -> bytes:
    """The key of the pool, 16 bytes, for a consumer's key of any length."""
    data = key.encode() if isinstance(key, str) else bytes(key)
    return hashlib.blake2b(data, digest_size=16, person=b"kvbm-cxl-key").digest()


def by_namespace(namespaces: Sequence["kvbm_cxl.Namespace"]) -> Iterator[tuple["kvbm_cxl.Namespace", list[int]]]:
    """Each namespace with the places where it stands."""
    places: dict["kvbm_cxl.Namespace", list[int]] = {}
    for place, namespace in enumerate(namespaces):
        places.setdefault(namespace, []).append(place)
    return iter(places.items())
