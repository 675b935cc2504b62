# SPDX-License-Identifier: Apache-2.0
"""What the connector does not do, said at start instead of found out later."""

from typing import TYPE_CHECKING

from .config import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

# Hashes that are equal in every process. The others of vLLM have a random seed, so that no two processes would ever share a block.
_HASHES = ("sha256", "sha256_cbor")


def check(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
    """Raises `ConfigError` for an engine whose blocks the connector cannot share rightly."""
    for reason in _reasons(vllm_config, kv_cache_config):
        raise ConfigError(f"CxlConnector does not support {reason}")


def _reasons(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig"):
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        HiddenStateCacheSpec,
        RSWASpec,
        SinkFullAttentionSpec,
        UniformTypeKVCacheSpecs,
    )

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        yield (
            f"models with {len(groups)} KV cache groups (hybrid attention): start vLLM with --disable-hybrid-kv-cache-manager, "
            "which gives all attention layers one group; models with Mamba layers cannot be cached in the pool"
        )
        return
    spec = groups[0].kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs) or not isinstance(spec, FullAttentionSpec):
        yield f"a KV cache of type {type(spec).__name__}: it needs one full-attention type for all layers"
        return
    if isinstance(spec, (HiddenStateCacheSpec, RSWASpec, SinkFullAttentionSpec)):
        yield f"a KV cache of type {type(spec).__name__}: its blocks do not depend on the tokens before them alone"
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "context parallelism: a block of vLLM's is then spread over ranks by token"
    if vllm_config.speculative_config is not None:
        yield "speculative decoding: KV of rejected drafts must not be published. Leave --speculative-config out"
    if getattr(cache, "calculate_kv_scales", False):
        yield "KV scales calculated at run time (--calculate-kv-scales): each engine would give the same bytes another meaning"
    if cache.prefix_caching_hash_algo not in _HASHES:
        yield f"--prefix-caching-hash-algo {cache.prefix_caching_hash_algo}: use {' or '.join(_HASHES)}"


def check_zero_copy(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
    """Raises `ConfigError` for an engine whose KV cache cannot lie in the pool."""
    transfer = vllm_config.kv_transfer_config
    if transfer.is_kv_consumer and transfer.kv_load_failure_policy == "fail":
        raise ConfigError(
            'CxlConnector: zero_copy needs "kv_load_failure_policy": "recompute" in --kv-transfer-config: a lent block may be taken back '
            "between lookup and load, and with the policy fail its request would end with an error"
        )
    if kv_cache_config.needs_kv_cache_zeroing:
        raise ConfigError("CxlConnector: zero_copy is for KV caches of one precision, whose blocks vLLM does not clear")


def can_be_cached(request: "Request") -> bool:
    """Whether a request's blocks are looked up and published at all.

    A streaming session replaces tokens that were hashed and saved before, so its blocks are left to vLLM. Images, adapters, salts and
    prompt embeddings are in vLLM's hashes.
    """
    return not request.resumable
