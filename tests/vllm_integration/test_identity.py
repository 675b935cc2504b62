# SPDX-License-Identifier: Apache-2.0
"""The namespace: anything that shapes the bytes of a block changes it, the place of a model does not. And what is refused at start."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import kvbm_cxl
import pytest
import torch
from kvbm_cxl.options import ConfigError
from kvbm_cxl.vllm_integration import identity, support
from kvbm_cxl.vllm_integration.config import ConnectorConfig
from kvbm_cxl.vllm_integration.groups import Group, Shape, kind_of
from kvbm_cxl.vllm_integration.settings import config_text
from kvbm_cxl.vllm_integration.shards import shards_of
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)


SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
SLIDING = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=64)
LAYERS = [f"model.layers.{layer}.self_attn.attn" for layer in range(3)]


class HfConfig(SimpleNamespace):
    def to_dict(self):
        return dict(vars(self))


def _vllm_config(**changes) -> SimpleNamespace:
    values = {
        "model": "m",
        "revision": None,
        "hf_config": HfConfig(rope_theta=1e4, _name_or_path="/here"),
        "dtype": torch.bfloat16,
        "quantization": None,
        "cache_dtype": "auto",
        "tensor_parallel_size": 2,
        "hash": "sha256",
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "speculative_config": None,
        "calculate_kv_scales": False,
        "load_format": "auto",
        "seed": 0,
        "max_model_len": 4096,
        "model_loader_extra_config": {},
        "ec_transfer_config": None,
        "is_encoder_decoder": False,
        "is_diffusion": False,
    } | changes
    pick = lambda *names: SimpleNamespace(**{name: values[name] for name in names})  # noqa: E731
    cache = pick("cache_dtype", "calculate_kv_scales")
    cache.prefix_caching_hash_algo = values["hash"]
    return SimpleNamespace(
        model_config=Model(
            **vars(
                pick(
                    *("model", "revision", "hf_config", "dtype", "quantization", "seed", "max_model_len", "is_encoder_decoder"),
                    "is_diffusion",
                )
            )
        ),
        load_config=pick("load_format", "model_loader_extra_config"),
        cache_config=cache,
        parallel_config=pick("tensor_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"),
        speculative_config=values["speculative_config"],
        ec_transfer_config=values["ec_transfer_config"],
    )


def _cache_config(spec=SPEC, layers=LAYERS, layout="LBHNC", replicas=1, groups=1) -> KVCacheConfig:
    made = [KVCacheGroupSpec(layers, spec) for _ in range(groups)]
    return KVCacheConfig(8, [], made, kv_cache_layout=layout, kv_tp_replicas=replicas)


class Model(SimpleNamespace):
    """Stands for vLLM's ModelConfig."""


def accept_made_up_configurations(monkeypatch) -> None:
    """Takes `_vllm_config` for one without settings; what counts of real ones: test_settings."""
    monkeypatch.setattr(identity, "engine_settings", lambda vllm_config: {})
    monkeypatch.setattr(identity, "config_text", lambda config: "" if isinstance(config, Model) else config_text(config))


@pytest.fixture(autouse=True)
def _settings(monkeypatch):
    accept_made_up_configurations(monkeypatch)


def _fields(monkeypatch, *, rank=0, cache=None, backend="CPU_ATTN/vec", options=None, **changes) -> dict:
    monkeypatch.setattr(identity, "attention_backend", lambda *_: backend)
    config = ConnectorConfig.read({"pool": "p", "model_id": "the model", **(options or {})})
    cache = cache or _cache_config()
    spec = cache.kv_cache_groups[0].kv_cache_spec
    group = Group(0, tuple(cache.kv_cache_groups[0].layer_names), spec.block_size, *kind_of(spec))
    vllm_config, heads = _vllm_config(**changes), [getattr(spec, "num_kv_heads", 1)]
    shards = shards_of(vllm_config.parallel_config.tensor_parallel_size, rank, cache.kv_tp_replicas, heads, config.stored_tp)
    (fields,) = identity.namespace_fields(vllm_config, cache, config, Shape((group,), 16, 16), shards)[0]
    return fields


def _namespace(monkeypatch, **given) -> str:
    return str(kvbm_cxl.Namespace(**_fields(monkeypatch, **given)))


def test_fields_say_what_the_blocks_are(monkeypatch):
    fields = _fields(monkeypatch, cache=_cache_config(layers=LAYERS[1:]))
    extra = fields.pop("extra")
    assert fields == {
        "model": "the model",
        "revision": "",
        "dtype": "torch.bfloat16/auto",
        "first_layer": 1,
        "layer_count": 2,
        "kv_head_count": 2,
        "head_size": 64,
        "block_tokens": 16,
        "layout": "LBHNC",
        "tp_size": 2,
        "tp_rank": 0,
        "tenant_salt": b"",
    }
    assert (extra["spec"], extra["page_bytes"], extra["loaded"]) == ("FullAttentionSpec", str(SPEC.page_size_bytes), "files")
    assert "kind" not in extra
    assert _fields(monkeypatch, cache=_cache_config(SLIDING))["extra"]["kind"] == f"window/{kind_of(SLIDING)[1]}"
    states = MambaSpec(block_size=16, shapes=((4, 8), (8,)), dtypes=(torch.float32, torch.bfloat16), mamba_cache_mode="align")
    assert _fields(monkeypatch, cache=_cache_config(states))["dtype"] == "torch.float32,torch.bfloat16/auto"


def test_whatever_shapes_the_bytes_changes_the_namespace(monkeypatch):
    def spec(**changes):
        return _cache_config(FullAttentionSpec(**{**vars_of(SPEC), **changes}))

    def vars_of(made):
        return {"block_size": made.block_size, "num_kv_heads": made.num_kv_heads, "head_size": made.head_size, "dtype": made.dtype}

    mine = _namespace(monkeypatch)
    assert mine == _namespace(monkeypatch), "and nothing else does"
    assert mine == _namespace(monkeypatch, hf_config=HfConfig(rope_theta=1e4, _name_or_path="/elsewhere"))
    assert mine == _namespace(monkeypatch, load_format="safetensors", seed=7)
    assert mine == _namespace(monkeypatch, max_model_len=8192)
    others = {
        "rank": _namespace(monkeypatch, rank=1),
        "ranks": _namespace(monkeypatch, tensor_parallel_size=4),
        "KV type": _namespace(monkeypatch, cache_dtype="fp8_e4m3"),
        "KV type of the tensor": _namespace(monkeypatch, cache=spec(dtype=torch.float32)),
        "computed in": _namespace(monkeypatch, dtype=torch.float16),
        "quantization": _namespace(monkeypatch, quantization="awq"),
        "block size": _namespace(monkeypatch, cache=spec(block_size=32)),
        "heads": _namespace(monkeypatch, cache=spec(num_kv_heads=4)),
        "head size": _namespace(monkeypatch, cache=spec(head_size=128)),
        "layout": _namespace(monkeypatch, cache=_cache_config(layout="LBNHC")),
        "layers": _namespace(monkeypatch, cache=_cache_config(layers=LAYERS[1:])),
        "names of layers": _namespace(monkeypatch, cache=_cache_config(layers=LAYERS[::-1])),
        "backend": _namespace(monkeypatch, backend="CPU_ATTN/amx"),
        "rope": _namespace(monkeypatch, hf_config=HfConfig(rope_theta=1e6)),
        "revision": _namespace(monkeypatch, revision="v2"),
        "hash": _namespace(monkeypatch, hash="sha256_cbor"),
        "model": _namespace(monkeypatch, options={"model_id": "another"}),
        "made-up weights": _namespace(monkeypatch, load_format="dummy"),
        "other made-up weights": _namespace(monkeypatch, load_format="dummy", seed=1),
        "tenant": _namespace(monkeypatch, options={"tenant_salt": "s"}),
        "adapter of the loader": _namespace(monkeypatch, model_loader_extra_config={"qlora_adapter_name_or_path": "x"}),
    }
    assert len({mine, *others.values()}) == 1 + len(others), others


def test_what_else_a_group_keeps_changes_the_namespace(monkeypatch):
    """Windows of another length, states and layers of another order that take as many bytes."""
    narrow = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=32)
    shapes = ((4, 8), (8, 8)), ((8, 8), (4, 8))
    states = [MambaSpec(block_size=16, shapes=each, dtypes=(torch.float32,) * 2, mamba_cache_mode="align") for each in shapes]
    assert states[0].page_size_bytes == states[1].page_size_bytes
    sizes = ((64, 128, 64), (64, 64, 128))
    mixed = [
        UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={name: replace(SPEC, head_size=size) for name, size in zip(LAYERS, each)})
        for each in sizes
    ]
    specs = (SPEC, SLIDING, narrow, *states, *mixed)
    assert len({_namespace(monkeypatch, cache=_cache_config(spec)) for spec in specs}) == len(specs)


def test_files_beside_the_weights_shape_blocks_and_those_of_texts_do_not(tmp_path):
    def here() -> str:
        return identity.side_files_digest(SimpleNamespace(model=str(folder), revision=None))

    folder = tmp_path / "model"
    folder.mkdir()
    seen = [here()]
    for name in ("quantize_config.json", "hf_quant_config.json", "kv_cache_scales.json", "preprocessor_config.json", "modeling_own.py"):
        for content in ("{}", '{"bits": 4}'):
            (folder / name).write_text(content)
            seen.append(here())
    assert len(set(seen)) == 11
    (folder / "modeling_own.py").rename(folder / "modeling_theirs.py")
    seen.append(here())
    assert len(set(seen)) == 12, "and their names do"
    texts = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json")
    for name in (*texts, "generation_config.json", "model.safetensors.index.json", "config.json"):
        (folder / name).write_text(name)
    (folder / "notes.txt").write_text("words")
    (folder / "code.py").mkdir()
    assert here() == seen[-1]
    shutil.copytree(folder, tmp_path / "copy")
    folder = tmp_path / "copy"
    assert here() == seen[-1]


def test_files_beside_the_weights_change_the_namespace(monkeypatch, tmp_path):
    seen = []
    for content in ("", '{"bits": 4}', '{"bits": 8}'):
        (tmp_path / "quantize_config.json").write_text(content)
        seen.append(_namespace(monkeypatch, model=str(tmp_path)))
    assert len(set(seen)) == 3


def test_groups_and_shards_share_one_digest_of_the_engine(monkeypatch):
    """All of them have it, and the files are read once."""
    calls = []
    monkeypatch.setattr(identity, "attention_backend", lambda *_: "CPU_ATTN/vec")
    monkeypatch.setattr(identity, "engine_fields", lambda vllm_config: calls.append("engine") or {"config": "of the engine"})
    monkeypatch.setattr(identity, "fingerprint", lambda *_: calls.append("weights") or "weights:1")
    spec = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)
    groups = (Group(0, tuple(LAYERS), 16, *kind_of(spec)), Group(1, (), 16, *kind_of(spec)), Group(2, tuple(LAYERS), 16, *kind_of(spec)))
    given = _vllm_config(), _cache_config(spec, groups=3), ConnectorConfig.read({"pool": "p"})
    fields = identity.namespace_fields(*given, Shape(groups, 16, 16), shards_of(2, 1, 1, [4], 4))
    assert calls == ["weights", "engine"] and list(fields) == [0, 2], "group 1 has no layer on this stage of the pipeline"
    made = [each for of_group in fields.values() for each in of_group]
    assert [each["tp_rank"] for each in made] == [2, 3, 2, 3]
    assert all(each["model"] == "weights:1" and each["extra"]["config"] == "of the engine" and "backend" in each["extra"] for each in made)


def test_the_longest_prompt_decides_between_factors_of_longrope(monkeypatch):
    def with_rope(length: int, **rope) -> str:
        return _namespace(monkeypatch, max_model_len=length, hf_config=HfConfig(rope_parameters=rope))

    assert with_rope(4096, rope_type="longrope") != with_rope(8192, rope_type="longrope") == with_rope(8192, rope_type="longrope")
    assert with_rope(4096, type="su") != with_rope(8192, type="su"), "its earlier name"
    assert with_rope(4096, rope_type="yarn") == with_rope(8192, rope_type="yarn")


def test_requests_that_vllm_knows_by_name_alone_are_not_cached():
    def asked(*identifiers: str, **more) -> SimpleNamespace:
        features = [SimpleNamespace(identifier=each) for each in identifiers]
        return SimpleNamespace(**{"resumable": False, "pooling_params": None, "mm_features": features, **more})

    digest = "0123456789abcdef" * 4
    for shared in (asked(), asked(digest), asked(digest, digest * 2), asked("an adapter: with words:" + digest)):
        assert support.can_be_cached(shared)
    # A caller's UUID, and the number of a request's image where vLLM hashes none.
    for named in ("cat-1", "0-image-0", digest[1:], digest.upper(), "", f"{digest}-image-0"):
        assert not support.can_be_cached(asked(named)) and not support.can_be_cached(asked(digest, named))
    assert not support.can_be_cached(asked(pooling_params=SimpleNamespace(extra_kwargs={"compressed_token_type_ids": 7})))
    assert support.can_be_cached(asked(pooling_params=SimpleNamespace(extra_kwargs=None)))


def test_ranks_with_the_same_heads_share_a_namespace(monkeypatch):
    names = [_namespace(monkeypatch, rank=rank, cache=_cache_config(replicas=2), tensor_parallel_size=4) for rank in range(4)]
    assert names[0] == names[1] != names[2] == names[3]


@pytest.mark.parametrize("load_format", ("auto", "dummy"))
def test_cells_have_the_namespace_of_an_engine_that_has_such_blocks(monkeypatch, load_format):
    """But for weights that are made up, which are others on other ranks."""

    def cells(tp_size: int, block_tokens: int, heads: int, **options) -> list[str]:
        monkeypatch.setattr(identity, "attention_backend", lambda *_: "CPU_ATTN/vec")
        config = ConnectorConfig.read({"pool": "p", "model_id": "the model", **options})
        spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=heads, head_size=64, dtype=torch.bfloat16)
        stored = config.stored_block_tokens or block_tokens
        group = Group(0, tuple(LAYERS), stored, *kind_of(spec), slices=block_tokens // stored)
        vllm_config, found = _vllm_config(tensor_parallel_size=tp_size, load_format=load_format), []
        for rank in range(tp_size):
            shards = shards_of(tp_size, rank, 1, [heads], config.stored_tp)
            of_group = identity.namespace_fields(vllm_config, _cache_config(spec), config, Shape((group,), 16, 16), shards)[0]
            found += [str(kvbm_cxl.Namespace(**fields)) for fields in of_group]
        assert len(set(found)) == len(found)
        return found

    native = cells(4, 32, 2)
    cut = [cells(1, 128, 8, stored_tp=4, stored_block_tokens=32), cells(2, 64, 4, stored_tp=4, stored_block_tokens=32)]
    if load_format == "dummy":
        assert len({*native, *cut[0], *cut[1]}) == 12
    else:
        assert native == cut[0] == cut[1]
    assert cells(4, 32, 2, stored_tp=4, stored_block_tokens=32) == native, "an option that says what is so anyway"
    assert set(native).isdisjoint(cells(1, 32, 8)) and set(native).isdisjoint(cells(4, 64, 2))


def test_a_draft_model_is_part_of_the_groups_that_may_have_its_layers(monkeypatch):
    monkeypatch.setattr(identity, "fingerprint", lambda model, load_config: f"weights:{model.model}/{load_config.load_format}")

    class Drafts(Model):
        def use_eagle(self) -> bool:
            return self.method == "eagle"

    def drafts(method: str, load_format="auto", **fields):
        fields = {"model": "d", "hf_config": HfConfig(layers=1), "max_model_len": 4096} | fields
        return Drafts(method=method, draft_model_config=Model(**fields), draft_load_config=SimpleNamespace(load_format=load_format))

    def named(speculative, is_draft=True, model=None, **options):
        group = Group(0, tuple(LAYERS), SPEC.block_size, *kind_of(SPEC), is_draft=is_draft)
        vllm_config, config = _vllm_config(speculative_config=speculative), ConnectorConfig.read({"pool": "p", **options})
        vllm_config.model_config = model or vllm_config.model_config
        return identity._draft(vllm_config, config, group)

    eagle, plain = drafts("eagle"), drafts("eagle")
    assert named(eagle, model=eagle.draft_model_config) == {}, "n-grams have no model of their own"
    del plain.draft_load_config
    assert named(plain) == named(eagle), "as the model is loaded"
    assert "/the model/" in named(eagle, model_id="the model")["draft"]
    monkeypatch.setattr(identity, "config_text", lambda config: config.settings if isinstance(config, Drafts) else "")
    first, second = drafts("eagle"), drafts("eagle")
    first.settings, second.settings = "a", "b"
    assert named(first) != named(second)
    accept_made_up_configurations(monkeypatch)
    assert named(None) == named(SimpleNamespace(draft_model_config=None)) == named(eagle, is_draft=False) == {}
    others = [drafts("eagle", model="e"), drafts("eagle", hf_config=HfConfig(layers=2)), drafts("draft_model"), drafts("eagle", "dummy")]
    assert len({named(each)["draft"] for each in (*others, eagle)}) == 5
    assert named(drafts("draft_model"), is_draft=False), "vLLM does not say where its layers are"
    speculative = (None, drafts("draft_model"), drafts("draft_model", hf_config=HfConfig(layers=2)))
    assert len({_namespace(monkeypatch, speculative_config=each) for each in speculative}) == 3


def test_backends_of_all_layers_and_their_instruction_sets_count(monkeypatch):
    import vllm.config

    def layer(name: str, **more) -> SimpleNamespace:
        return SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: name), **more)

    def named(*layers) -> str:
        found = dict(enumerate(layers))
        monkeypatch.setattr(vllm.config, "get_layers_from_vllm_config", lambda *_: found)
        return identity.attention_backend(None, ())

    vec, amx, other = layer("CPU_ATTN", isa="vec"), layer("CPU_ATTN", isa="amx"), layer("FLASH_ATTN")
    assert len({named(vec), named(amx), named(other), named(vec, other), named(amx, other)}) == 5
    assert named(vec, other, vec) == named(other, vec) == "CPU_ATTN/vec,FLASH_ATTN/"


def test_layer_numbers():
    assert [identity.layer_number(name) for name in (*LAYERS, "lm.layers.17.attn.3", "attn")] == [0, 1, 2, 17, 0]


def test_what_is_supported():
    assert support.check(_vllm_config(), _cache_config()) is None
    mla = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    assert support.check(_vllm_config(hash="sha256_cbor"), _cache_config(mla)) is None


@pytest.mark.parametrize(
    ("changes", "cache", "words"),
    (
        ({"decode_context_parallel_size": 2}, {}, "context parallelism"),
        ({"prefill_context_parallel_size": 2}, {}, "context parallelism"),
        ({"calculate_kv_scales": True}, {}, "--calculate-kv-scales"),
        ({"hash": "xxhash"}, {}, "--prefix-caching-hash-algo xxhash: use sha256"),
        ({"is_encoder_decoder": True}, {}, "encoder-decoder models: KV of cross attention depends on the encoder's input"),
        ({"ec_transfer_config": object()}, {}, "encoder caches .--ec-transfer-config.: images are then known by names"),
        ({"is_diffusion": True}, {}, "diffusion language models"),
    ),
)
def test_what_is_refused(changes, cache, words):
    with pytest.raises(ConfigError, match=words):
        support.check(_vllm_config(**changes), _cache_config(**cache))
