# SPDX-License-Identifier: Apache-2.0
"""Which heads ranks have, in how many cells of the pool they lie, and what cannot be divided."""

import pytest
import torch
from kvbm_cxl.options import ConfigError
from kvbm_cxl.vllm_integration.shards import cut_spec, replicas_of, shards_of
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, MLAAttentionSpec, UniformTypeKVCacheSpecs


def full(heads: int = 4, **more) -> FullAttentionSpec:
    return FullAttentionSpec(**{"block_size": 64, "num_kv_heads": heads, "head_size": 64, "dtype": torch.bfloat16, **more})


@pytest.mark.parametrize("total", (1, 2, 4, 8, 12))
@pytest.mark.parametrize("stored_tp", (1, 2, 4, 8))
def test_engines_of_every_parallelism_that_divides_have_the_same_shards(total, stored_tp):
    """Each of an engine's ranks has its heads in shards of equal size, all of them once but for replicas, whatever the parallelism."""
    if stored_tp % total and total % stored_tp:
        return
    counts = set()
    for tp_size in (1, 2, 4, 8):
        if tp_size % total and total % tp_size:
            continue
        replicas, heads = max(tp_size // total, 1), max(total // tp_size, 1)
        if tp_size // replicas > min(stored_tp, total):
            with pytest.raises(ConfigError, match="largest --tensor-parallel-size"):
                shards_of(tp_size, 0, replicas, [heads, heads], stored_tp)
            continue
        ranks = [shards_of(tp_size, rank, replicas, [heads, heads], stored_tp) for rank in range(tp_size)]
        counts |= {rank.count for rank in ranks}
        published = [number for rank in ranks if rank.publishes for number in rank.numbers]
        assert published == list(range(ranks[0].count)), "each once"
        for at, rank in enumerate(ranks):
            first_head = at // replicas * heads
            heads_of_shard = total // rank.count
            assert [number * heads_of_shard for number in rank.numbers] == list(range(first_head, first_head + heads, heads_of_shard))
    assert counts == {min(stored_tp, total)}


def test_without_the_option_ranks_have_one_shard_each():
    for tp_size, replicas in ((1, 1), (4, 1), (4, 2), (8, 8)):
        for rank in range(tp_size):
            found = shards_of(tp_size, rank, replicas, [4], 0)
            assert (list(found.numbers), found.count) == ([rank // replicas], tp_size // replicas)
            assert found.publishes == (rank % replicas == 0)


@pytest.mark.parametrize(
    ("tp_size", "heads", "stored_tp"),
    ((4, [2], 2), (2, [2], 3), (1, [6], 4), (1, [8, 3], 2), (2, [8, 2], 8), (1, [1, 4], 2), (1, [2], 3), (2, [1], 3)),
    ids=("smaller", "no multiple", "heads", "heads of a layer", "replicas of some layers", "one head and four", "beyond", "beyond ranks"),
)
def test_heads_that_do_not_divide_are_refused(tp_size, heads, stored_tp):
    with pytest.raises(ConfigError, match=f"stored_tp is {stored_tp}"):
        shards_of(tp_size, 0, 1, heads, stored_tp)


class Module(torch.nn.Module):
    def __init__(self, **values) -> None:
        super().__init__()
        for name, value in values.items():
            setattr(self, name, value)


def model_of(*replicas: int | None, adapter: bool = False) -> torch.nn.Module:
    """Layers whose projections say how many ranks hold the same heads."""
    model, layers = Module(), torch.nn.ModuleList()
    for each in replicas:
        projection = Module(**({} if each is None else {"num_kv_head_replicas": each}))
        layers.append(Module(attn=Module(), qkv_proj=Module(base_layer=projection) if adapter else projection))
    model.layers = layers
    return model


def test_replicas_are_those_of_every_layer():
    names = [f"layers.{layer}.attn" for layer in range(3)]
    assert replicas_of(1, model_of(2, 2, 2), names) == 2
    assert replicas_of(1, model_of(2, 2, 2, adapter=True), names) == 2
    assert replicas_of(1, model_of(4, 2, 4), names) == 2
    assert replicas_of(1, model_of(4, None, 4), names) == 1, "a layer that does not say"
    assert replicas_of(1, model_of(4, 4), names) == 1, "a layer that the model does not have"
    assert replicas_of(4, model_of(1, 1, 1), names) == 4, "vLLM knows it of KV caches without heads"
    assert replicas_of(1, None, names) == 1


def test_a_cut_spec_is_that_of_an_engine_with_such_blocks():
    assert cut_spec(full(), 1, 1, "fp8_per_token_head") == full(), "nothing is cut"
    assert cut_spec(full(8), 4, 2, "auto") == full(2, block_size=32)
    assert cut_spec(full(8), 4, 2, "fp8").page_size_bytes * 8 == full(8).page_size_bytes
    mixed = UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs={"a": full(4), "b": full(8)})
    assert cut_spec(mixed, 2, 2, "auto").kv_cache_specs == {"a": full(2, block_size=32), "b": full(4, block_size=32)}
    mla = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    assert cut_spec(mla, 1, 4, "auto").block_size == 16


@pytest.mark.parametrize(
    ("spec", "cache_dtype"),
    (
        (full(page_size_padded=1 << 20), "auto"),
        (full(num_head_slots=8), "auto"),
        (full(tokens_per_state=4), "auto"),
        (full(kv_quant_mode=KVQuantMode.NVFP4), "nvfp4"),
        (full(), "fp8_per_token_head"),
        (UniformTypeKVCacheSpecs(block_size=64, kv_cache_specs={"a": full(), "b": full(page_size_padded=1 << 20)}), "auto"),
    ),
)
def test_pages_with_more_than_numbers_of_tokens_are_refused(spec, cache_dtype):
    for shards, slices in ((2, 1), (1, 2)):
        with pytest.raises(ConfigError, match="leave stored_tp and stored_block_tokens out"):
            cut_spec(spec, shards, slices, cache_dtype)


def test_projections_of_vllm_say_so():
    """The name that is looked for is the one that vLLM has."""
    import inspect

    from vllm.model_executor.layers.linear import QKVParallelLinear

    assert "self.num_kv_head_replicas = " in inspect.getsource(QKVParallelLinear.__init__)
