# SPDX-License-Identifier: Apache-2.0
"""What the connector does not do, said at start instead of found out later."""

import re
from typing import TYPE_CHECKING, Any

from ..options import ConfigError
from .groups import specs_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

# Hashes that are equal in every process. The others of vLLM have a random seed, so that no two processes would ever share a block.
_HASHES = ("sha256", "sha256_cbor")
# Of vLLM's hashes of images (blake3, sha256, sha512): hexadecimal, at least 256 bits.
_DIGEST = re.compile(r"[0-9a-f]{64,128}")


def check(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
    """Raises `ConfigError` for an engine whose blocks the connector cannot share rightly."""
    for reason in _reasons(vllm_config, kv_cache_config):
        raise ConfigError(f"CxlConnector does not support {reason}")


def _reasons(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig"):
    parallel, cache, model = vllm_config.parallel_config, vllm_config.cache_config, vllm_config.model_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "context parallelism: a block of vLLM's is then spread over ranks by token"
    if model.is_encoder_decoder:
        yield "encoder-decoder models: KV of cross attention depends on the encoder's input, which no token of a block stands for"
    if vllm_config.ec_transfer_config is not None:
        yield "a transfer of encoder caches (--ec-transfer-config): images are then known by names of the request, not by their content"
    if model.is_diffusion:
        yield "diffusion language models: attention within a canvas is bidirectional, and block hashes do not cover later tokens"
    if getattr(cache, "calculate_kv_scales", False):
        yield "KV scales calculated at run time (--calculate-kv-scales): each engine would give the same bytes another meaning"
    if cache.prefix_caching_hash_algo not in _HASHES:
        yield f"--prefix-caching-hash-algo {cache.prefix_caching_hash_algo}: use {' or '.join(_HASHES)}"


def caches_states(kv_cache_config: "KVCacheConfig") -> bool:
    """Whether vLLM keeps the states of recurrent layers at the ends of blocks; true for models without any. Where it does not, no prefix
    of such a model can be gone on with."""
    specs = (spec for group in kv_cache_config.kv_cache_groups for spec in specs_of(group.kv_cache_spec))
    return all(getattr(spec, "mamba_cache_mode", "align") == "align" for spec in specs)


def clears_first(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> bool:
    """Whether vLLM clears the blocks that a step is given before it calls the connector, which could still be reading what they held.
    Its second model runner does, where the KV cache has states or layers of several precisions."""
    return bool(getattr(vllm_config, "use_v2_model_runner", False) and kv_cache_config.needs_kv_cache_zeroing)


def takes_hits(vllm_config: "VllmConfig") -> bool:
    """Whether the engine can begin in the middle of a prompt.

    A pooling model that needs every hidden state of a prompt cannot: vLLM turns prefix caching or chunked prefill off for it (MEAN, CLS and
    STEP pooling), its model runner raises otherwise, and turning either back on is against vLLM's own warning. A model that generates can:
    there both only say what vLLM does by itself.
    """
    model = vllm_config.model_config
    if model.runner_type != "pooling":
        return True
    by_settings = vllm_config.cache_config.enable_prefix_caching and vllm_config.scheduler_config.enable_chunked_prefill
    return bool(by_settings and model.is_prefix_caching_supported and model.is_chunked_prefill_supported)


def can_be_cached(request: "Request") -> bool:
    """Whether a request's blocks are looked up and published at all: not where vLLM's hashes leave out, or only name, what shapes them.

    Those with images that have a name instead of a digest (`multi_modal_uuids`, or the request's own number with both of vLLM's caches off)
    are left to vLLM, and those of a pooling request with token types. Salts and prompt embeddings are in vLLM's hashes by content; adapters
    see `adapters`, streaming sessions `sessions`.
    """
    return not _has_token_types(request) and all(map(_is_digest, request.mm_features or ()))


def _has_token_types(request: "Request") -> bool:
    return bool(getattr(request.pooling_params, "extra_kwargs", None))


def _is_digest(feature: Any) -> bool:
    """Whether an image is known by a digest: with an adapter for the image encoder its name stands before it."""
    return _DIGEST.fullmatch(feature.identifier.rpartition(":")[2]) is not None
