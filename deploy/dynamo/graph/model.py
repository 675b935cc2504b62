# SPDX-License-Identifier: Apache-2.0
"""The served model and the size of its KV blocks."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from .environment import has_gpu
from .errors import GraphError
from .options import ROOT, Options

sys.path.insert(0, str(ROOT / "deploy" / "dynamo"))
from tiny_model import sentences as tiny_sentences  # noqa: E402
from tiny_model import tiny_model  # noqa: E402

# Numbers of a CPU's KV cache have four bytes, whatever the weights have.
CPU_DTYPE = "float32"
CPU_CACHE_BLOCKS, CPU_MAX_TOKENS, CPU_MIN_CACHE_BYTES = 64, 4096, 128 << 20
# vLLM's block size for CPUs, and what we ask for elsewhere as well so that the pool's cells fit.
BLOCK_TOKENS = 128
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Model:
    """A model's folder or name; the bytes of a block of KV cache over all layers, where its configuration can be read."""

    path: str
    name: str
    tiny: bool
    block_bytes: int | None
    # Arguments of LLM(); none with a GPU, whose size vLLM detects.
    engine: dict

    def engine_flags(self) -> list[str]:
        """The same as flags of a worker."""
        flags = []
        for name, value in self.engine.items():
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return flags

    def tokenizer(self):
        """What cuts texts into tokens; of a model in a folder."""
        from tokenizers import Tokenizer

        return Tokenizer.from_file(f"{self.path}/tokenizer.json")


def block_bytes(config: dict, dtype: str = "", block_tokens: int = BLOCK_TOKENS) -> int | None:
    """Bytes of keys and values of one block, from the fields that configurations of decoder models have; None where some are missing.

    dtype: of the KV cache, where it is not that of the weights.
    """
    config = config.get("text_config", config)
    try:
        heads = config["num_attention_heads"]
        head_size = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        number_bytes = DTYPE_BYTES[dtype or config.get("dtype") or config.get("torch_dtype") or "bfloat16"]
        return 2 * config["num_hidden_layers"] * kv_heads * head_size * block_tokens * number_bytes
    except (KeyError, TypeError, ZeroDivisionError):
        return None


def _cpu_engine(config: dict, block: int | None) -> dict:
    """A small cache, but one that holds a few of the longest prompts."""
    longest = min(CPU_MAX_TOKENS, config.get("max_position_embeddings") or CPU_MAX_TOKENS)
    cache_bytes = max(CPU_MIN_CACHE_BYTES, CPU_CACHE_BLOCKS * (block or 0))
    return {"enforce_eager": True, "kv_cache_memory_bytes": cache_bytes, "dtype": CPU_DTYPE, "max_model_len": longest}


def _config(name: str) -> dict:
    """The configuration of a model in a folder, or of one that has to be fetched. Raises GraphError."""
    try:
        if os.path.isdir(name):
            return json.loads((Path(name) / "config.json").read_text())
        from huggingface_hub import hf_hub_download

        return json.loads(Path(hf_hub_download(name, "config.json")).read_text())
    except (OSError, ValueError) as error:
        raise GraphError(f"model {name}: config.json cannot be read: {error}") from error


def choose(options: Options) -> Model:
    """The model that was asked for, or the tiny one. Raises GraphError."""
    path = options.model or str(tiny_model(options.state / "models"))
    config, gpu = _config(path), has_gpu()
    block = block_bytes(config, "" if gpu else CPU_DTYPE)
    if not options.model:
        name = "tiny"
    else:
        name = Path(path).name if os.path.isdir(path) else path
    return Model(path, name, not options.model, block, {} if gpu else _cpu_engine(config, block))


__all__ = ["BLOCK_TOKENS", "Model", "block_bytes", "choose", "tiny_sentences"]
