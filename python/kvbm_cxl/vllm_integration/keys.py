# SPDX-License-Identifier: Apache-2.0
"""What blocks are called in the pool.

A full block has the first 16 bytes of vLLM's own hash of it, which chains over all tokens before it and over everything else that vLLM
takes to shape a block: cache salt, LoRA adapter, images, prompt embeddings. vLLM has no hash for the last, partly filled block of a
prompt (the tail), so that decode would compute it again: it gets a name of ours, chained to the block before it the same way.

vLLM's hash has adapters by name and path, and takes no notice of weights that are replaced in memory. Where an engine has either, digests
of both become part of the key (`named`).

An engine whose blocks lie in the pool in smaller ones hashes its requests once more, as an engine with such blocks does (`Rehashed`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvbm_cxl import chain_key

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

Hasher = Callable[["Request"], Sequence[bytes]]
"""Hashes of a request's full blocks after those that it has."""

KEY_BYTES = 16
_TAIL_DOMAIN, _NAMED_DOMAIN, _GROUP_DOMAIN = b"vllm prompt tail\0", b"vllm weights and adapter\0", b"vllm cache group\0"


class Rehashed:
    """A request with the hashes that an engine with blocks of another size has of it; everything else is the request's."""

    def __init__(self, request: "Request", hasher: Hasher) -> None:
        self._request, self._hasher = request, hasher
        self.block_hashes: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    def update(self) -> None:
        """Hashes blocks that have become full."""
        self.block_hashes += self._hasher(self)


def hasher_of(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", hash_tokens: int) -> Hasher | None:
    """What hashes requests every `hash_tokens` tokens; None where vLLM does so itself."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, resolve_kv_cache_block_sizes

    _, of_vllm = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    if of_vllm == hash_tokens:
        return None
    return get_request_block_hasher(hash_tokens, get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo))


def block_key(block_hash: bytes) -> bytes:
    """The key of a full block from vLLM's hash of it (sha256: 32 bytes)."""
    return bytes(block_hash[:KEY_BYTES])


def group_keys(request: "Request", start: int, stop: int, hashes: int = 1) -> list[bytes]:
    """Keys of the full blocks `start` to `stop` of a request, as far as vLLM has hashed them. Each block takes `hashes` of vLLM's hashes:
    the last one chains over all tokens of the block and before."""
    return [block_key(block_hash) for block_hash in request.block_hashes[(start + 1) * hashes - 1 : stop * hashes : hashes]]


def tail_key(request: "Request", block_tokens: int) -> bytes | None:
    """The key of the tail of a request's prompt, or None where the prompt ends with a full block."""
    full_blocks, tail_tokens = divmod(request.num_prompt_tokens, block_tokens)
    if tail_tokens == 0:
        return None
    start, stop = full_blocks * block_tokens, request.num_prompt_tokens
    parent = block_key(request.block_hashes[full_blocks - 1]) if full_blocks else None
    return chain_key(parent, request.all_token_ids[start:stop], _TAIL_DOMAIN + encode(_extra_keys(request, start, stop)))


def name_variant(key: bytes, weights: bytes, adapter: bytes) -> bytes:
    """The key of the same block as computed with an adapter, and with weights that replaced those of the start; empty for neither."""
    return chain_key(None, [], _NAMED_DOMAIN + encode((weights, adapter, key))) if weights or adapter else key


def of_group(key: bytes, position: int) -> bytes:
    """The key of the part of a block that the KV cache group at `position` has; the first group's is the key itself."""
    return chain_key(None, [], _GROUP_DOMAIN + encode((position, key))) if position else key


def _extra_keys(request: "Request", start: int, stop: int) -> tuple[Any, ...]:
    """Extra keys that vLLM would hash with the tokens of such a block."""
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    # It walks the images of a prompt from the one named; the first is right for any block, only slower.
    extra, _ = generate_block_hash_extra_keys(request, start, stop, 0)
    return extra or ()


def event_extra_keys(request: "Request", start: int, stop: int) -> list[Any] | None:
    """Fields of vLLM's events for such a block besides its tokens."""
    from vllm.v1.core.kv_cache_utils import to_event_extra_keys

    extra = _extra_keys(request, start, stop)
    (keys,) = (to_event_extra_keys([extra]) if extra else None) or [None]
    return None if keys is None else list(keys)


def encode(value: Any) -> bytes:
    """Bytes of nested tuples of texts, byte strings and numbers, that can be read back and so are never equal for two values."""
    if isinstance(value, str):
        return b"s" + _with_length(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return b"b" + _with_length(value)
    if isinstance(value, int):
        return b"i" + _with_length(str(int(value)).encode())
    if value is None:
        return b"n"
    if isinstance(value, Iterable):
        items = [encode(item) for item in value]
        return b"t" + len(items).to_bytes(8, "little") + b"".join(items)
    raise TypeError(f"no encoding for {type(value).__name__} in the hash of a block")


def _with_length(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data

