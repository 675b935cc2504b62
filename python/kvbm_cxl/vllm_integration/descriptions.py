# SPDX-License-Identifier: Apache-2.0
"""What routers want to know of a block and the pool does not: its place in its chain, whole hashes, tokens.

A description is a small block under the same key as the block that it describes, in a namespace of its own, so that every
engine can announce every block, those of other engines included. All have one length for a size of blocks, and so lie in cells of one size.

    4 bytes   "KVD" and the version
    4 bytes   CRC-32 of what follows, up to the length, little-endian
    4 bytes   length of what follows in bytes, little-endian
    ...       MessagePack array of `Description`'s fields; then zeros
"""

import struct
import zlib
from typing import Annotated, Any

import kvbm_cxl
import msgspec

_MAGIC = b"KVD\x01"
_HEAD = struct.Struct("<4sII")
# Hashes, names and extra keys; a token takes at most 5 bytes in MessagePack.
_BESIDE_TOKENS_BYTES = 500
_TOKEN_BYTES = 5

Hash = Annotated[bytes, msgspec.Meta(min_length=16, max_length=64)]
Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Description(msgspec.Struct, frozen=True, array_like=True):
    """A full block of a chain, as vLLM's events have it."""

    position: Annotated[int, msgspec.Meta(ge=0)]
    """How many blocks of its chain come before it."""
    block_hash: Hash
    """vLLM's hash of it, whole; the pool's key is its beginning."""
    parent_hash: Hash | None
    token_ids: list[Token]
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    """What else shapes its hash, as vLLM's events have it: adapter, images, cache salt."""


class DescriptionError(ValueError):
    """Bytes are no description of a block of the expected size. Such a block is not announced."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Description)


def description_bytes(block_tokens: int) -> int:
    """Length of every description of blocks of `block_tokens` tokens, in bytes."""
    return _HEAD.size + _BESIDE_TOKENS_BYTES + _TOKEN_BYTES * block_tokens


def description_namespace(namespace: "kvbm_cxl.Namespace", block_tokens: int) -> "kvbm_cxl.Namespace":
    """Where the descriptions of a namespace's blocks lie."""
    return kvbm_cxl.Namespace(
        model=str(namespace),
        dtype="description",
        layer_count=1,
        kv_head_count=1,
        head_size=1,
        block_tokens=block_tokens,
        layout=_MAGIC.hex(),
        extra={"kind": "description"},
    )


def encode(description: Description, len_bytes: int) -> bytes | None:
    """The description in `len_bytes` bytes; None where it does not fit, as with many images in one block."""
    body = _encoder.encode(description)
    head = _HEAD.pack(_MAGIC, zlib.crc32(body), len(body))
    return (head + body).ljust(len_bytes, b"\0") if len(head) + len(body) <= len_bytes else None


def decode(data: bytes | bytearray | memoryview, key: bytes, block_tokens: int) -> Description:
    """The description of block `key`. Raises `DescriptionError` for anything else."""
    try:
        magic, checksum, len_bytes = _HEAD.unpack_from(data)
    except struct.error as error:
        raise DescriptionError(f"{len(data)} bytes are too few") from error
    body = memoryview(data)[_HEAD.size : _HEAD.size + len_bytes]
    if magic != _MAGIC or len(body) != len_bytes or zlib.crc32(body) != checksum:
        raise DescriptionError("magic, length or checksum is wrong")
    try:
        found = _decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DescriptionError(str(error)) from error
    if not found.block_hash.startswith(key) or len(found.token_ids) != block_tokens or (found.parent_hash is None) != (found.position == 0):
        raise DescriptionError("it is of another block")
    return found
