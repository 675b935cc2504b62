# SPDX-License-Identifier: Apache-2.0
"""Which blocks of which group a prefix needs: as vLLM's own coordinator and managers have it, over random caches."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from kvbm_cxl.options import ConfigError
from kvbm_cxl.vllm_integration.groups import Kind, Shape, shape_of
from requests_of_vllm import request, tokens
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

_HEADS = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}


def full(block_tokens: int = 16):
    return FullAttentionSpec(block_size=block_tokens, **_HEADS)


def window(reach: int, block_tokens: int = 16):
    return SlidingWindowSpec(block_size=block_tokens, sliding_window=reach, **_HEADS)


def chunk(reach: int, block_tokens: int = 16):
    return ChunkedLocalAttentionSpec(block_size=block_tokens, attention_chunk_size=reach, **_HEADS)


def state(block_tokens: int = 16):
    return MambaSpec(block_size=block_tokens, shapes=((4, 8), (8, 8)), dtypes=(torch.float32, torch.float32), mamba_cache_mode="align")


MODELS = {
    "llama": [full()],
    "gpt-oss": [full(), window(40)],
    "gemma3": [full(), window(33), window(33)],
    "mistral": [window(50)],
    "llama4": [full(), chunk(64)],
    "qwen3-next": [full(), state(), state()],
    "blocks of two sizes": [full(32), window(40, 16)],
}


def configuration(specs, drafts=()):
    groups = [KVCacheGroupSpec([f"layers.{at}.attn"], spec, is_eagle_group=at in drafts) for at, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=512, kv_cache_tensors=[], kv_cache_groups=groups)


def engine(specs, speculative=None):
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=specs[0].block_size, enable_prefix_caching=True, prefix_match_unit=None),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        kv_transfer_config=object(),
        speculative_config=speculative,
    )


def coordinator_of(config, shape: Shape):
    return get_kv_cache_coordinator(
        config,
        max_model_len=4096,
        max_in_flight_tokens=512,
        use_eagle=shape.drops_last,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=shape.align_tokens,
        hash_block_size=shape.hash_tokens,
    )


@pytest.mark.parametrize("speculative", [None, SimpleNamespace(use_eagle=lambda: True)], ids=["plain", "eagle"])
@pytest.mark.parametrize("name", MODELS)
def test_prefixes_are_those_that_vllm_finds(name, speculative):
    specs = MODELS[name]
    if speculative and any(isinstance(spec, ChunkedLocalAttentionSpec) for spec in specs):
        pytest.skip("vLLM has no chunked local attention with EAGLE")
    config = configuration(specs)
    shape = shape_of(engine(specs, speculative), config)
    choose = random.Random(name)
    found = set()
    for case in range(400):
        # A prompt that ends within a block: vLLM takes care of the last token in another way than the connector.
        prompt = tokens(16 * choose.randrange(1, 24) + choose.randrange(1, 16), seed=case)
        asked = request("r", prompt)
        chance = choose.choice((0.5, 0.9, 0.97, 1))
        coordinator = coordinator_of(config, shape)
        have = []
        for group in shape.groups:
            blocks = len(prompt) // group.block_tokens
            have.append([choose.random() < chance for _ in range(blocks)])
            for at, there in enumerate(have[-1]):
                if there:
                    block = coordinator.block_pool.get_new_blocks(1)[0]
                    block_hash = asked.block_hashes[(at + 1) * group.block_tokens // shape.hash_tokens - 1]
                    key = make_block_hash_with_group_id(block_hash, group.index)
                    coordinator.block_pool.cached_block_hash_to_block.insert(key, block)
        blocks, length, beyond = coordinator.find_longest_cache_hit(asked.block_hashes, len(prompt) - 1)
        hit = shape.longest(have, len(prompt))
        tokens_of_hit = hit.tokens if hit else 0
        if speculative and name == "blocks of two sizes" and tokens_of_hit > length == 0:
            # Near the start of a prompt vLLM drops two blocks here: one to align the match, and one more to align what is left of it.
            continue
        assert tokens_of_hit == length, (name, case, have)
        if any(isinstance(spec, FullAttentionSpec) for spec in specs):
            # Where vLLM would keep a state of what is in its own cache.
            assert shape.longest_known(have, len(prompt)) == length + beyond, (name, case, have)
        found.add(length > 0)
        if hit is None:
            continue
        for group, needed in zip(shape.groups, hit.needed):
            manager = coordinator.single_type_managers[group.index]
            # What vLLM allocates room for behind such a hit is what has to be filled.
            assert group.skipped_tokens(hit.tokens) == manager.get_num_skipped_tokens(hit.tokens)
            real = {at for at, block in enumerate(blocks[group.index]) if not block.is_null}
            assert set(needed) <= real, (name, case, needed, real)
    assert found == {True, False}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_stored_of_a_prompt_is_enough_for_the_prompt_again_and_for_a_longer_one(name):
    specs = MODELS[name]
    shape = shape_of(engine(specs), configuration(specs))
    for prompt_tokens in (*range(1, 200), 1000, 1024):
        for every in (64, 1 << 20):
            have = [[False] * (-(-prompt_tokens // group.block_tokens)) for group in shape.groups]
            # In two chunks, as vLLM computes long prompts.
            cut = prompt_tokens * 2 // 3
            for group, blocks in zip(shape.groups, have):
                for begin, end in ((0, cut), (cut, prompt_tokens)):
                    for at in shape.worth_storing(group, begin, end, prompt_tokens, every):
                        blocks[at] = True
            have = [blocks[: prompt_tokens // group.block_tokens] for group, blocks in zip(shape.groups, have)]
            last = prompt_tokens // shape.align_tokens * shape.align_tokens
            longer = shape.longest(have, prompt_tokens + 1)
            assert (longer.tokens if longer else 0) == last, (prompt_tokens, every)
            # A prompt that is a prefix of this one up to a multiple of `every`.
            if every == 64 and last > 64:
                short = last - 1 - (last - 1) % 64
                part = [blocks[: short // group.block_tokens] for group, blocks in zip(shape.groups, have)]
                hit = shape.longest(part, short + 1)
                assert (hit.tokens if hit else 0) == short // shape.align_tokens * shape.align_tokens


def test_a_window_is_stored_at_the_end_of_a_prompt_and_now_and_then_before():
    specs = MODELS["gpt-oss"]
    shape = shape_of(engine(specs), configuration(specs))
    everything, reach = shape.groups
    assert shape.worth_storing(everything, 0, 1000, 1000, 512) == list(range(62))
    # A window of 40 tokens before the tokens 512 and 992.
    assert shape.worth_storing(reach, 0, 1000, 1000, 512) == [29, 30, 31, 59, 60, 61]
    # Generated blocks: whichever comes last ends a later prompt's match.
    assert shape.worth_storing(reach, 1000, 1024, 1000, 512) == [60, 61, 62, 63]


def test_a_prompt_s_tail_is_a_prefix_of_its_own_where_all_groups_end_their_blocks_together():
    for name, most in (("llama", 40), ("gpt-oss", 39), ("llama4", 39)):
        specs = MODELS[name]
        shape = shape_of(engine(specs), configuration(specs))
        have = [[True] * 3 for _ in specs]
        assert shape.takes_tails and shape.longest(have, 40, 8, True).tokens == most
        have[-1][2] = False
        assert shape.longest(have, 40, 8, True).tokens == 32
    for name in ("qwen3-next", "blocks of two sizes"):
        assert not shape_of(engine(MODELS[name]), configuration(MODELS[name])).takes_tails


def test_where_a_state_has_several_tokens_a_prefix_ends_with_a_block():
    packed = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32, tokens_per_state=4)
    # Its raw keys of the tokens since the last state are with the engine that computed them.
    ring = CircularBufferSpec(block_size=16, **_HEADS)
    for specs in ([packed], [full(), ring]):
        shape = shape_of(engine(specs), configuration(specs))
        assert len(shape.groups) == 1 and not shape.takes_tails
        assert shape.longest([[True] * 3], 40, 8, True).tokens == 32


def test_a_whole_prompt_with_recurrent_layers_is_not_taken():
    specs = MODELS["qwen3-next"]
    shape = shape_of(engine(specs), configuration(specs))
    # The last token is computed again, and the state behind it holds it already.
    assert shape.longest([[True] * 2] * 3, 32).tokens == 16
    assert shape.longest([[True] * 2] * 3, 33).tokens == 32


@pytest.mark.parametrize("spec", (state(), window(24)), ids=("state", "window"))
def test_without_full_attention_nothing_tells_how_far_a_prefix_is_known(spec):
    shape = shape_of(engine([spec]), configuration([spec]))
    assert shape.longest([[True, True]], 40).tokens == 32 and shape.longest_known([[False, False]], 40) == 0


@pytest.mark.parametrize("speculative", [None, SimpleNamespace(use_eagle=lambda: True)], ids=["plain", "eagle"])
@pytest.mark.parametrize("cut", (0, 400, 700))
def test_a_window_is_stored_where_the_prefix_ends_that_others_have(speculative, cut):
    """Whatever the chunk that computes it: the next prompt with the same beginning finds as much as full attention has."""
    specs = MODELS["gpt-oss"]
    shape = shape_of(engine(specs, speculative), configuration(specs))
    known = shape.longest_known([[True] * 40, []], 1000)
    assert known == (624 if speculative else 640)
    have = [[True] * 40, [False] * 62]
    for begin, end in ((0, cut), (cut, 1000)):
        for at in shape.worth_storing(shape.groups[1], begin, end, 1000, 1 << 20, known):
            have[1][at] = True
    assert shape.longest(have, 1000).tokens == known
    alone = [[True] * 40, [False] * 62]
    for at in shape.worth_storing(shape.groups[1], 0, 1000, 1000, 1 << 20):
        alone[1][at] = True
    assert shape.longest(alone, 1000) is None


def test_kinds_are_told_by_their_specs_and_others_are_refused():
    specs = [MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float32)]
    (group,) = shape_of(engine(specs), configuration(specs)).groups
    assert group.kind is Kind.FULL and group.layer_names == ("layers.0.attn",)
    narrow = FullAttentionSpec(block_size=16, **{**_HEADS, "head_size": 32})
    mixed = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": full(), "b": narrow})
    (group,) = shape_of(engine([mixed]), configuration([mixed])).groups
    assert group.kind is Kind.FULL
    hidden = HiddenStateCacheSpec(block_size=16, **_HEADS)
    with pytest.raises(ConfigError, match="HiddenStateCacheSpec.*do not depend on the tokens"):
        shape_of(engine([hidden]), configuration([hidden]))
    for wrong in (replace(full(), non_causal=True), CrossAttentionSpec(block_size=16, **_HEADS)):
        with pytest.raises(ConfigError, match="Spec: its blocks do not depend on the tokens before them alone"):
            shape_of(engine([wrong]), configuration([wrong]))
    several = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": full(), "b": window(32)})
    with pytest.raises(ConfigError, match="layers of several kinds"):
        shape_of(engine([several]), configuration([several]))
