# SPDX-License-Identifier: Apache-2.0
"""An object of the store: a header with name, length and checksums, then the block.

    0 magic | 8 version u32 | 12 flags u32 (1: has a parent) | 16 namespace | 32 key | 48 parent | 64 length u64 | 72 XXH3-64 of the payload
    80 XXH3-64 of bytes 0 to 80 | 88 payload

Numbers are little-endian. Nothing of an object counts before all of this was compared: a store can lose the end of an object, or give
another one's bytes.
"""

import re
import struct
from dataclasses import dataclass
from typing import Literal

import kvbm_cxl

MAGIC, VERSION = b"KVBMCXL2", 1
_FIELDS = struct.Struct("<8sII16s16s16sQQ")
_SUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _SUM.size
_HAS_PARENT = 1
_NAME = re.compile(r"([0-9a-f]{32})/([0-9a-f]{2})/([0-9a-f]{32})\.kv")

Damage = Literal["truncated", "header", "version", "foreign", "checksum"]
"""truncated: shorter or longer than it says. header: its header is not whole. version: of another version of this format. foreign: it is
another block. checksum: its payload differs."""


class DamagedObject(Exception):
    """An object that is not the block that was asked for, or not whole."""

    def __init__(self, damage: Damage) -> None:
        super().__init__(damage)
        self.damage: Damage = damage


@dataclass(frozen=True)
class BlockName:
    """Which block: digest of its namespace, and its key, 16 bytes each."""

    namespace: bytes
    key: bytes

    @property
    def path(self) -> str:
        """Where its object lies in the store."""
        key = self.key.hex()
        return f"{self.namespace.hex()}/{key[:2]}/{key}.kv"

    @classmethod
    def of_path(cls, path: str) -> "BlockName | None":
        """The name of the block at a path of a store; None if it is no object."""
        found = _NAME.fullmatch(path)
        if not found or not found[3].startswith(found[2]):
            return None
        return cls(bytes.fromhex(found[1]), bytes.fromhex(found[3]))


def header(name: BlockName, parent: bytes | None, payload: bytes | bytearray | memoryview) -> bytes:
    """The header of a block's object."""
    flags = 0 if parent is None else _HAS_PARENT
    digest = kvbm_cxl.checksum(payload)
    fields = _FIELDS.pack(MAGIC, VERSION, flags, name.namespace, name.key, parent or bytes(16), len(payload), digest)
    return fields + _SUM.pack(kvbm_cxl.checksum(fields))


def payload_of(data: bytes, name: BlockName) -> tuple[bytes | None, memoryview]:
    """The parent and the payload of a block, out of its whole object. Raises DamagedObject."""
    if len(data) < HEADER_BYTES:
        raise DamagedObject("truncated")
    fields = data[: _FIELDS.size]
    magic, version, flags, namespace, key, parent, len_bytes, digest = _FIELDS.unpack(fields)
    if magic != MAGIC or _SUM.unpack_from(data, _FIELDS.size)[0] != kvbm_cxl.checksum(fields):
        raise DamagedObject("header")
    if version != VERSION or flags & ~_HAS_PARENT:
        raise DamagedObject("version")
    if (namespace, key) != (name.namespace, name.key):
        raise DamagedObject("foreign")
    payload = memoryview(data)[HEADER_BYTES:]
    if len(payload) != len_bytes:
        raise DamagedObject("truncated")
    if kvbm_cxl.checksum(payload) != digest:
        raise DamagedObject("checksum")
    return parent if flags & _HAS_PARENT else None, payload
