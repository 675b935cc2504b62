# SPDX-License-Identifier: Apache-2.0
"""The namespace of a worker's blocks: everything besides the tokens that shapes their bytes.

Two engines share blocks only if all of it is equal; when in doubt they do not. The model is known by its weights, not by its path: copies
of a model share blocks, and a model that was replaced in place does not find those of its predecessor.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from .config import ConfigError, ConnectorConfig
from .groups import Group, Kind, specs_of
from .shards import Shards, cut_spec

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_SAMPLES, _SAMPLES_A_TENSOR = 64, 3
_SAMPLE_BYTES = 4096
# As the format has it: a length of 8 bytes, then a header in JSON with every tensor's place.
_SAFETENSORS, _MAX_HEADER_BYTES = ".safetensors", 100 << 20
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
# Files beside the weights that vLLM reads, and that shape no block: what makes tokens of texts is in the tokens.
_NOT_OF_BLOCKS = ("tokenizer*", "vocab*", "special_tokens*", "added_tokens*", "generation_config*", "chat_template*", "*.index.json")
# Fields of a model's configuration that say where it came from, not what it is.
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "name_or_path")


def namespace_fields(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", config: ConnectorConfig, group: Group, shards: Shards, number: int
) -> dict[str, Any]:
    """Arguments of `kvbm_cxl.Namespace` for shard `number` of a KV cache group, of this pipeline stage: those of an engine whose blocks are
    such cells."""
    whole = kv_cache_config.kv_cache_groups[group.index].kv_cache_spec
    spec = cut_spec(whole, len(shards.numbers), group.slices, vllm_config.cache_config.cache_dtype)
    layers = specs_of(spec)
    model, tp_size = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
    return {
        "model": config.model_id or fingerprint(model),
        "revision": model.revision or "",
        "dtype": f"{_dtypes(layers[0])}/{vllm_config.cache_config.cache_dtype}",
        "first_layer": min(map(layer_number, group.layer_names)),
        "layer_count": len(group.layer_names),
        # Recurrent layers have none; what they have is in `layer_specs`.
        "kv_head_count": getattr(layers[0], "num_kv_heads", 1),
        "head_size": getattr(layers[0], "head_size", 1),
        "block_tokens": spec.block_size,
        "layout": str(kv_cache_config.kv_cache_layout),
        "tp_rank": number,
        "tp_size": shards.count,
        "tenant_salt": config.tenant_salt.encode(),
        "extra": {
            "engine": "vllm",
            "spec": type(spec).__name__,
            "page_bytes": str(spec.page_size_bytes),
            "layers": digest("\n".join(group.layer_names)),
            "hash": vllm_config.cache_config.prefix_caching_hash_algo,
            "computed": f"{model.dtype}/{model.quantization}",
            "loaded": loading(vllm_config, of_ranks=tp_size if shards.count != tp_size else 0),
            "config": model_config_digest(model),
            "side": side_files_digest(model),
            "backend": attention_backend(vllm_config, group.layer_names),
            **_more(group, layers),
            **_draft(vllm_config, config, group),
        },
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
    return {"draft": f"{speculative.method}/{config.model_id or fingerprint(draft)}/{model_config_digest(draft)}"}


def layer_number(name: str) -> int:
    """The number in a layer's name (`model.layers.7.self_attn.attn`: 7), or 0."""
    return next((int(word) for word in name.split(".") if word.isdigit()), 0)


def loading(vllm_config: "VllmConfig", of_ranks: int = 0) -> str:
    """How the weights came to be, where that is not from the model's files. `of_ranks`: engines of other tensor parallelism may have the
    namespace, too, if their weights are the same."""
    load_format = str(vllm_config.load_config.load_format)
    # Weights that are made up depend on the seed, and each rank makes its own.
    made_up = f"dummy/{vllm_config.model_config.seed}" + (f"/{of_ranks} ranks" if of_ranks else "")
    how = made_up if load_format == "dummy" else "files"
    # An adapter for the quantized weights, for one, is named there.
    more = getattr(vllm_config.load_config, "model_loader_extra_config", None)
    return f"{how}/{digest(json.dumps(more, sort_keys=True, default=str))}" if more else how


def digest(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:32]


def model_config_digest(model: "ModelConfig") -> str:
    """A digest of the model's configuration as it is used, overrides such as RoPE scaling included."""
    fields = {key: value for key, value in model.hf_config.to_dict().items() if key not in _NOT_THE_MODEL}
    text = json.dumps(fields, sort_keys=True, default=str)
    # LongRoPE has two sets of factors; the longest prompt that an engine takes decides which one it uses for all.
    return digest(text + (f"/{model.max_model_len}" if "longrope" in text or '"su"' in text else ""))


def side_files_digest(model: "ModelConfig") -> str:
    """A digest of the JSON files beside the weights: quantization, scales, processors of images. vLLM knows them by name.

    Empty for a model that is known by a name or a commit. config.json is left out: what of it is used is in the model's configuration.
    """
    folder = Path(model.model)
    if not folder.is_dir():
        return ""
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.json")):
        if path.name != "config.json" and path.is_file() and not any(map(path.match, _NOT_OF_BLOCKS)):
            total.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:32]


def fingerprint(model: "ModelConfig") -> str:
    """What tells this model from any other: a digest of its weights, or the commit that they were fetched from."""
    folder = Path(model.model)
    if folder.is_dir():
        return "weights:" + weights_digest(folder)
    if folder.is_file():
        return "weights:" + digest(_sampled(folder))
    if commit := _hub_commit(model.model, model.revision):
        return f"hub:{model.model}@{commit}"
    raise ConfigError(
        f"CxlConnector cannot tell which weights {model.model!r} has: they are neither in a folder nor in the Hugging Face cache. "
        'Give the model a name of your own with kv_connector_extra_config {"model_id": "..."}, a new one for each version of the weights'
    )


def weights_digest(folder: Path) -> str:
    """A digest over name, size and samples of every file of weights.

    Of safetensors three pieces of every tensor, and the header that lists them; of other files 64 pieces, evenly spread. Training changes
    them all, replacing a layer or an adapter merged into some layers changes those tensors, and reading more would hold up the start.
    `model_id` is for models made to differ in less.
    """
    files = sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern) if path.is_file()})
    if not files:
        raise ConfigError(
            f"CxlConnector finds no weights ({', '.join(_WEIGHTS)}) in {folder}: "
            'name the model with kv_connector_extra_config {"model_id": "..."}'
        )
    total = hashlib.sha256()
    for path in files:
        total.update(path.name.encode() + b"\0" + _sampled(path))
    return total.hexdigest()[:32]


def _sampled(path: Path) -> bytes:
    size = path.stat().st_size
    samples = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        header, tensors = _tensors(file, size) if path.suffix == _SAFETENSORS else (b"", [])
        samples.update(header)
        for start, stop, count in [(*tensor, _SAMPLES_A_TENSOR) for tensor in tensors] or [(0, size, _SAMPLES)]:
            last = max(stop - start - _SAMPLE_BYTES, 0)
            for offset in sorted({last * index // (count - 1) for index in range(count)}):
                file.seek(start + offset)
                samples.update(file.read(min(_SAMPLE_BYTES, stop - start - offset)))
    return samples.digest()


def _tensors(file: BinaryIO, size: int) -> tuple[bytes, list[tuple[int, int]]]:
    """The header of a file of safetensors, and where each tensor begins and ends; nothing of a file that is none."""
    len_bytes = int.from_bytes(file.read(8), "little")
    if not 0 < len_bytes <= min(_MAX_HEADER_BYTES, size - 8):
        return b"", []
    header = file.read(len_bytes)
    try:
        named = json.loads(header)
        places = sorted(tuple(tensor["data_offsets"]) for name, tensor in named.items() if name != "__metadata__")
        stretches = [(8 + len_bytes + start, 8 + len_bytes + stop) for start, stop in places]
    except (ValueError, TypeError, KeyError, AttributeError):
        return b"", []
    if any(not (type(start) is type(stop) is int and 8 + len_bytes <= start <= stop <= size) for start, stop in stretches):
        return b"", []
    return header, stretches


def _hub_commit(name: str, revision: str | None) -> str | None:
    try:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(name, "config.json", revision=revision)
    except (ImportError, ValueError):  # No hub, or not a name of one.
        return None
    # .../snapshots/COMMIT/config.json
    return Path(path).parent.name if isinstance(path, str) else None


def attention_backend(vllm_config: "VllmConfig", layer_names: Sequence[str]) -> str:
    """Names of the attention backends of the layers, with what else decides the order of numbers within a page.

    Only a worker knows it. On CPUs the kernel depends on the instruction set, and with it how keys are packed.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, list(layer_names))
    names = {f"{layer.get_attn_backend().get_name()}/{getattr(layer, 'isa', '')}" for layer in layers.values()}
    return ",".join(sorted(names))
