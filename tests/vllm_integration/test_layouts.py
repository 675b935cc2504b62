# SPDX-License-Identifier: Apache-2.0
"""KV caches of models that vLLM's CPU build cannot run, laid out by vLLM itself: every byte of them that is needed arrives, and no other
byte changes."""

import pytest
import tiny_models
import torch
from layouts import Driven, Layout, blocks_of, layout_of, raw
from requests_of_vllm import tokens
from vllm.platforms import current_platform

LENGTH = 700


@pytest.fixture
def without_kernels(monkeypatch):
    """CPUs have no sparse attention. Of a backend, the layout of the cache has its name alone."""
    choose = type(current_platform).get_attn_backend_cls

    def any_backend(cls, selected, attn_selector_config, num_heads=None):
        return choose(selected, attn_selector_config._replace(use_sparse=False), num_heads)

    monkeypatch.setattr(type(current_platform), "get_attn_backend_cls", classmethod(any_backend))
    # With AMX the CPU build takes a backend that cannot even be made for sparse attention.
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


def _handed_over(layout: Layout, pool: str, **options) -> Driven:
    """Publishes a prompt from one KV cache, loads it into another one, and compares all bytes of both."""
    prefill, decode = (Driven(layout, pool, seed, is_producer=seed == 1, **options) for seed in (1, 2))
    try:
        prompt = tokens(LENGTH, seed=3)
        sources = prefill.publish(prefill.request("a", prompt))
        before, expected = raw(prefill.kv_caches).clone(), layout.memory()
        raw(expected).copy_(raw(decode.kv_caches))
        found, targets = decode.load(decode.request("b", prompt))
        assert found == decode.shape.reach(LENGTH, True) > LENGTH - 2 * decode.shape.align_tokens
        compared = set()
        for group in decode.shape.groups:
            for block in group.needed_blocks(found):
                for name in group.layer_names or layout.kv_cache_config.kv_cache_groups[group.index].layer_names:
                    source = blocks_of(prefill.kv_caches[name], layout.kv_cache_config, sources[group.index][block])
                    blocks_of(expected[name], layout.kv_cache_config, targets[group.index][block]).copy_(source)
                    compared.add(name)
        assert torch.equal(raw(decode.kv_caches), raw(expected)), "all that is needed, and nothing else"
        assert torch.equal(raw(prefill.kv_caches), before)
        assert compared == set(decode.kv_caches)
        return decode
    finally:
        prefill.close()
        decode.close()


@pytest.mark.parametrize("name", ("deepseek-v3", "gpt-oss", "granite4"))
def test_caches_that_engines_on_cpus_have_too(name, folder, make_pool):
    with layout_of(tiny_models.make(name, folder), mamba_cache_mode="align", enable_prefix_caching=True) as layout:
        _handed_over(layout, make_pool(size="64M", cells="512K:60%"))


def test_deepseek_v32_has_a_cache_for_attention_and_one_for_its_indexer(folder, make_pool, without_kernels):
    with layout_of(tiny_models.make("deepseek-v3.2", folder)) as layout:
        widths = {tuple(cache.shape[1:]) for cache in layout.memory().values()}
        assert len(widths) == 2, "latents, and keys of the indexer"
        _handed_over(layout, make_pool(size="64M", cells="512K:60%"))
