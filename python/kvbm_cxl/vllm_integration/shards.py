# SPDX-License-Identifier: Apache-2.0
"""Which heads of a block a rank has, and in how many cells of the pool they lie.

A block of the pool is a grid of cells: shards of its heads side by side, slices of its tokens one after the other (`groups.Group.slices`).
Without options a rank has one shard, and a block one slice: the cell is vLLM's block. With `stored_tp` and `stored_block_tokens` each cell
is what an engine with that tensor parallelism and block size has of a block, in its namespace and under its key, so that such engines need
no option to share it. A block is there when all cells that it consists of are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..options import ConfigError

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheSpec

# Of --kv-cache-dtype: each number of a page belongs to one token and head. Other types have scales of several, packed in ways of their own.
_PLAIN_TYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")


@dataclass(frozen=True)
class Shards:
    """A rank's shards of the heads."""

    numbers: range
    count: int
    """Of all ranks."""
    publishes: bool = True
    """Of ranks that hold the same heads, one publishes."""


def shards_of(tp_size: int, rank: int, replicas: int, heads: Sequence[int], stored_tp: int) -> Shards:
    """The shards of tensor-parallel rank `rank`. Raises `ConfigError` for heads that do not divide.

    replicas: consecutive ranks that hold the same heads. heads: KV heads of each layer on one rank. stored_tp: 0 for as many shards as
    there are ranks with heads of their own.
    """
    ranks = tp_size // replicas
    # Ranks with the same heads have one each, or a KV cache without heads: nothing to divide.
    most = 1 if replicas > 1 else math.gcd(*heads)
    each = min(stored_tp // ranks, most) if stored_tp else 1
    if stored_tp > ranks * most:
        # More ranks than heads: as vLLM has it a multiple, and not of layers of which some would be shared and others divided.
        fits = stored_tp % (ranks * most) == 0 and len(set(heads)) == 1
    else:
        fits = not stored_tp or (stored_tp % ranks == 0 and most % each == 0)
    if not fits:
        raise ConfigError(
            f"CxlConnector: stored_tp is {stored_tp}, which does not divide the KV heads of this engine: {ranks} ranks have "
            f"{sorted(set(heads))} each. Name the largest --tensor-parallel-size of all engines, a multiple of the others"
        )
    first = rank // replicas * each
    return Shards(range(first, first + each), ranks * each, rank % replicas == 0)


def replicas_of(known: int, model: "torch.nn.Module | None", layer_names: Sequence[str]) -> int:
    """Consecutive ranks that hold the same heads of every layer. vLLM says so (`known`) of KV caches without heads; of others, where there
    are fewer heads than ranks, the layer's projection does. 1 where it cannot be found."""
    if known > 1 or model is None:
        return known
    return math.gcd(*(_replicas_of_layer(model, name) for name in layer_names))


def _replicas_of_layer(model: "torch.nn.Module", name: str) -> int:
    try:
        attention = model.get_submodule(name.rpartition(".")[0])
    except AttributeError:
        return 1
    # With adapters another layer wraps the projection.
    parts = [getattr(part, "base_layer", part) for part in attention.children()]
    found = {part.num_kv_head_replicas for part in parts if hasattr(part, "num_kv_head_replicas")}
    return found.pop() if len(found) == 1 else 1


def cut_spec(spec: "KVCacheSpec", shards: int, slices: int, cache_dtype: str) -> "KVCacheSpec":
    """The spec that an engine has whose blocks are cells of these. Raises `ConfigError` for a KV cache that cannot be cut."""
    if shards == slices == 1:
        return spec
    changes: dict[str, Any] = {"block_size": spec.block_size // slices}
    if layers := getattr(spec, "kv_cache_specs", None):
        return replace(spec, kv_cache_specs={name: cut_spec(each, shards, slices, cache_dtype) for name, each in layers.items()}, **changes)
    packed = [name for name in ("page_size_padded", "num_head_slots", "state_content_bytes") if getattr(spec, name, None) is not None]
    if packed or getattr(spec, "tokens_per_state", 1) != 1 or cache_dtype not in _PLAIN_TYPES:
        raise ConfigError(
            f"CxlConnector: pages of this KV cache ({', '.join([type(spec).__name__, cache_dtype, *packed])}) cannot "
            "be divided by heads or tokens; leave stored_tp and stored_block_tokens out"
        )
    return replace(spec, num_kv_heads=spec.num_kv_heads // shards, **changes)
