# SPDX-License-Identifier: Apache-2.0
"""What is served, and how large its KV blocks are."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from .errors import GraphError
from .options import ROOT, Options

sys.path.insert(0, str(ROOT / "deploy" / "dynamo"))
from tiny_model import sentences as tiny_sentences  # noqa: E402
from tiny_model import tiny_model  # noqa: E402

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


def block_bytes(config: dict, block_tokens: int = BLOCK_TOKENS) -> int | None:
    """Bytes of keys and values of one block, from the fields that configurations of decoder models have; None where some are missing."""
    config = config.get("text_config", config)
    try:
        heads = config["num_attention_heads"]
        head_size = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        dtype = DTYPE_BYTES[config.get("dtype") or config.get("torch_dtype") or "bfloat16"]
        return 2 * config["num_hidden_layers"] * kv_heads * head_size * block_tokens * dtype
    except (KeyError, TypeError, ZeroDivisionError):
        return None


def choose(options: Options) -> Model:
    """The model that was asked for, or the tiny one. Raises GraphError."""
    path = Path(options.model) if options.model else tiny_model(options.state / "models")
    try:
        config = json.loads((path / "config.json").read_text()) if path.is_dir() else {}
    except (OSError, ValueError) as error:
        raise GraphError(f"model {path}: config.json cannot be read: {error}") from error
    name = path.name if path.is_dir() else options.model
    return Model(str(path), "tiny" if not options.model else name, not options.model, block_bytes(config))


__all__ = ["BLOCK_TOKENS", "Model", "block_bytes", "choose", "tiny_sentences"]
