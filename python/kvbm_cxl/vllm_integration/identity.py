# SPDX-License-Identifier: Apache-2.0
"""The namespace of a worker's blocks: everything besides the tokens that shapes their bytes.

Two engines share blocks only if all of it is equal; when in doubt they do not. The engine's whole configuration is part of it, but for what
is known to shape no block (`settings`). The model is known by its weights, not by its path: copies of a model share blocks, and a model
that was replaced in place does not find those of its predecessor.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..options import ConfigError
from .config import ConnectorConfig
from .groups import Group, Kind, Shape, specs_of
from .model_files import files_of, place_of, weights_digest
from .settings import config_text, digest, engine_settings, text_or_random, versions
from .shards import Shards, cut_spec

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

# Files other than weights that vLLM reads, and those that shape no block: tokens cover the tokenizer.
_SIDE_FILES = ("*.json", "*.py")
_NOT_OF_BLOCKS = ("tokenizer*", "vocab*", "special_tokens*", "added_tokens*", "generation_config*", "chat_template*", "*.index.json")
# Formats by which vLLM reads weights from the files of the model's folder, or makes them up. Others may read anything.
_READ_FILES = frozenset(
    ("auto", "hf", "safetensors", "fastsafetensors", "pt", "npcache", "mistral", "gguf", "bitsandbytes", "sharded_state", "dummy")
    + ("runai_streamer", "runai_streamer_sharded", "instanttensor")
)


def namespace_fields(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", config: ConnectorConfig, shape: Shape, shards: Shards
) -> dict[int, list[dict[str, Any]]]:
    """Arguments of `kvbm_cxl.Namespace` for each KV cache group of this pipeline stage, by the group's index. One for each shard: those of
    an engine whose blocks are such cells."""
    model, engine = config.model_id or fingerprint(vllm_config.model_config, vllm_config.load_config), engine_fields(vllm_config)
    found = {}
    for group in shape.groups:
        if group.layer_names:
            of_group = _group_fields(vllm_config, kv_cache_config, config, group, shards)
            of_group |= {"model": model, "extra": engine | of_group["extra"]}
            found[group.index] = [{**of_group, "tp_rank": number} for number in shards.numbers]
    return found


def _group_fields(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", config: ConnectorConfig, group: Group, shards: Shards
) -> dict[str, Any]:
    """The arguments that say what a group's blocks are and how they are cut."""
    whole = kv_cache_config.kv_cache_groups[group.index].kv_cache_spec
    spec = cut_spec(whole, len(shards.numbers), group.slices, vllm_config.cache_config.cache_dtype)
    layers = specs_of(spec)
    return {
        "revision": vllm_config.model_config.revision or "",
        "dtype": f"{_dtypes(layers[0])}/{vllm_config.cache_config.cache_dtype}",
        "first_layer": min(map(layer_number, group.layer_names)),
        "layer_count": len(group.layer_names),
        # Recurrent layers have none; what they have is in `layer_specs`.
        "kv_head_count": getattr(layers[0], "num_kv_heads", 1),
        "head_size": getattr(layers[0], "head_size", 1),
        "block_tokens": spec.block_size,
        "layout": str(kv_cache_config.kv_cache_layout),
        "tp_size": shards.count,
        "tenant_salt": config.tenant_salt.encode(),
        "extra": {
            "engine": "vllm",
            "spec": type(spec).__name__,
            "page_bytes": str(spec.page_size_bytes),
            "layers": digest("\n".join(group.layer_names)),
            "loaded": loading(vllm_config),
            "backend": attention_backend(vllm_config, group.layer_names),
            **_more(group, layers),
            **_draft(vllm_config, config, group),
        },
    }


def engine_fields(vllm_config: "VllmConfig") -> dict[str, str]:
    """What shapes the blocks of an engine, however they are cut and whatever group they are of."""
    model = vllm_config.model_config
    return {
        "versions": versions(),
        "hash": vllm_config.cache_config.prefix_caching_hash_algo,
        "computed": f"{model.dtype}/{model.quantization}",
        "config": model_config_digest(model),
        "side": side_files_digest(model),
        **engine_settings(vllm_config),
    }


def _dtypes(spec: "KVCacheSpec") -> str:
    return ",".join(map(str, spec.dtypes)) if hasattr(spec, "dtypes") else str(spec.dtype)


def _more(group: Group, layers: list["KVCacheSpec"]) -> dict[str, str]:
    """What else shapes the blocks of a group that is not of plain full attention."""
    if group.kind is Kind.FULL and len(layers) == 1:
        return {}
    return {"kind": f"{group.kind.value}/{group.reach_tokens}", "layer_specs": digest("\n".join(map(repr, layers)))}


def _draft(vllm_config: "VllmConfig", config: ConnectorConfig, group: Group) -> dict[str, str]:
    """The draft model whose layers a group may have."""
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    # n-grams have none; vLLM names the model itself in its place.
    if draft is None or draft is vllm_config.model_config or (speculative.use_eagle() and not group.is_draft):
        return {}
    load_config = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    name = config.model_id or fingerprint(draft, load_config)
    settings = digest(text_or_random("the configuration of the draft model", partial(config_text, speculative)))
    return {"draft": f"{speculative.method}/{name}/{model_config_digest(draft)}/{settings}"}


def layer_number(name: str) -> int:
    """The number in a layer's name (`model.layers.7.self_attn.attn`: 7), or 0."""
    return next((int(word) for word in name.split(".") if word.isdigit()), 0)


def loading(vllm_config: "VllmConfig") -> str:
    """How the weights came to be, where that is not from the model's files."""
    # Weights that are made up depend on the seed, and each rank makes its own.
    made_up = f"dummy/{vllm_config.model_config.seed}/{vllm_config.parallel_config.tensor_parallel_size} ranks"
    how = made_up if str(vllm_config.load_config.load_format) == "dummy" else "files"
    # An adapter for the quantized weights, for one, is named there.
    more = getattr(vllm_config.load_config, "model_loader_extra_config", None)
    return f"{how}/{digest(text_or_random('--model-loader-extra-config', partial(config_text, more)))}" if more else how


def model_config_digest(model: "ModelConfig") -> str:
    """A digest of the model's configuration as it is used, overrides such as RoPE scaling included, and of the engine's options for it."""
    text = text_or_random("the configuration of the model", lambda: config_text(model.hf_config) + config_text(model))
    # LongRoPE has two sets of factors; the longest prompt that an engine takes decides which one it uses for all.
    return digest(text + (f"/{model.max_model_len}" if "longrope" in text or '"su"' in text else ""))


def side_files_digest(model: "ModelConfig") -> str:
    """A digest of the small files next to the weights: quantization, scales, processors of images, code. vLLM knows them by name.

    Empty where there are none at hand. config.json is left out: what of it is used is in the model's configuration.
    """
    folder = place_of(model)
    if folder is None:
        return ""
    total, found = hashlib.sha256(), {path for pattern in _SIDE_FILES for path in folder.glob(pattern)}
    for path in sorted(found):
        if path.name != "config.json" and path.is_file() and not any(map(path.match, _NOT_OF_BLOCKS)):
            total.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:32]


def fingerprint(model: "ModelConfig", load_config: Any = None) -> str:
    """What tells this model from any other: a digest of all bytes of its weights, wherever they lie. For a model of the Hugging Face hub
    without files at hand, the commit."""
    load_format = str(getattr(load_config, "load_format", "auto"))
    place = place_of(model) if load_format in _READ_FILES else None
    if place is not None and (files_of(place) or Path(model.model).exists()):
        return "weights:" + weights_digest(place)
    if place is not None:
        return f"hub:{model.model}@{place.name}"
    raise ConfigError(
        f"CxlConnector cannot tell which weights {model.model!r} has (load format {load_format}): they are neither in a folder nor in the "
        'Hugging Face cache. Name them with kv_connector_extra_config {"model_id": "..."}, a new one for each '
        "version of the weights"
    )


def attention_backend(vllm_config: "VllmConfig", layer_names: Sequence[str]) -> str:
    """Names of the attention backends of the layers, with what else decides the order of numbers within a page.

    Only a worker knows it. On CPUs the kernel depends on the instruction set, and with it how keys are packed.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, list(layer_names))
    names = {f"{layer.get_attn_backend().get_name()}/{getattr(layer, 'isa', '')}" for layer in layers.values()}
    return ",".join(sorted(names))
