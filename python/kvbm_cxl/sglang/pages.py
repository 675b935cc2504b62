# SPDX-License-Identifier: Apache-2.0
"""Pages of SGLang's host pools: what shapes their bytes, and where these lie.

SGLang's keys are hashes of tokens alone. Everything else that shapes a page is in the namespace: model, ranks, type, layout, and the sizes
of a page's pieces, in which the numbers of layers and heads are. Ranks that have the same bytes have one namespace.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName

import kvbm_cxl

from ..consumers.names import namespace_of
from ..options import ConfigError

# Pools that are sharded by rank although the model's KV cache is the same on all ranks.
_SHARDED = {PoolName.MAMBA}
# Numbers that host pools of several kinds have, and that order the bytes of a page whose length they may leave as it is.
_NUMBERS = (
    "layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "head_group_num",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "num_mamba_layers",
    "temporal_dtype",
    "conv_dtype",
    "temporal_state_shape",
    "conv_state_shapes",
)
# Pools that are sharded if they are of this kind.
_OF_DRAFTS, _SHARDED_KIND = {PoolName.DRAFT, PoolName.DRAFT_SWA}, "MHATokenToKVPoolHost"


@dataclass(frozen=True)
class HostPool:
    """A host pool of SGLang, under the name that it has for storage."""

    name: str
    host: Any
    config: HiCacheStorageConfig
    extra: str

    @property
    def page_tokens(self) -> int:
        """How many of a transfer's indices one page has."""
        return getattr(self.host, "logical_page_size", None) or self.host.page_size or 1

    @property
    def has_memory(self) -> bool:
        """False for a pool that only counts tokens; what a page holds is in other pools then."""
        return getattr(self.host, "kv_buffer", True) is not None

    @cached_property
    def piece_bytes(self) -> tuple[int, ...]:
        """Sizes of a page's pieces. `ConfigError` for a pool whose pages have no addresses."""
        try:
            _, sizes = self.host.get_page_buffer_meta(torch.arange(self.page_tokens))
        except (NotImplementedError, ValueError) as error:
            raise ConfigError(
                f"SGLang's pool {self.name} cannot be stored where it lies: {error}. The layout page_first (--hicache-mem-layout) is the "
                "one that SGLang has for this"
            ) from error
        return tuple(int(size) for size in sizes)

    @cached_property
    def namespace(self) -> "kvbm_cxl.Namespace":
        """That of this pool's pages on this rank."""
        return self._namespace(pieces=self.piece_bytes)

    def flat_namespace(self, len_bytes: int) -> "kvbm_cxl.Namespace":
        """That of pages that SGLang copies to tensors of so many bytes, in an order of its own."""
        return self._namespace(flat=len_bytes)

    def _namespace(self, **shape: Any) -> "kvbm_cxl.Namespace":
        config, host = self.config, self.host
        is_draft_shard = self.name in _OF_DRAFTS and any(one.__name__ == _SHARDED_KIND for one in type(host).__mro__)
        is_replica = config.is_mla_model and self.name not in _SHARDED and not is_draft_shard
        return namespace_of(
            "sglang",
            model=config.model_name,
            extra=self.extra,
            pool=str(self.name),
            kind=type(host).__name__,
            dtype=str(getattr(host, "dtype", None)),
            layout=str(getattr(host, "layout", None)),
            format=getattr(host, "storage_format_tag", None),
            numbers={name: str(getattr(host, name, None)) for name in _NUMBERS},
            page_tokens=self.page_tokens,
            logical_page_tokens=config.logical_page_size,
            tp=None if is_replica else (config.tp_rank, config.tp_size),
            pp=(config.pp_rank, config.pp_size),
            attention_cp=(config.attn_cp_rank, config.attn_cp_size),
            dcp=(config.dcp_rank, config.dcp_size),
            heads=(config.tp_lcm_size, config.should_split_heads),
            **shape,
        )

    def pages(self, keys: Sequence[str], indices: torch.Tensor) -> list[tuple[ctypes.Array, ...]] | None:
        """The memory of the pages of `keys`, each in pieces; None where the indices are not theirs."""
        if indices is None or indices.numel() != len(keys) * self.page_tokens:
            return None
        addresses, sizes = self.host.get_page_buffer_meta(indices)
        count = len(self.piece_bytes)
        if len(addresses) != count * len(keys) or tuple(sizes[:count]) * len(keys) != tuple(sizes):
            return None
        pieces = [(ctypes.c_char * int(size)).from_address(int(address)) for address, size in zip(addresses, sizes, strict=True)]
        return [tuple(pieces[first : first + count]) for first in range(0, len(pieces), count)]
