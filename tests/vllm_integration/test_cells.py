# SPDX-License-Identifier: Apache-2.0
"""`cxlctl cells` computes from a config.json what vLLM makes of that model: groups, layers, tokens and bytes of their blocks."""

import json
import subprocess
from pathlib import Path

import kvbm_cxl
import pytest
import tiny_models
import torch
from kvbm_cxl.programs import cxlctl_path
from kvbm_cxl.vllm_integration.geometry import cache_tensors, cell_parts
from layouts import Layout, layout_of
from model_shapes import SHAPES

# Lazily made zeros: only shapes and strides are used.
MEMORY_BYTES = 1 << 30


@pytest.fixture(autouse=True)
def without_avx512_bf16(monkeypatch):
    """With these instructions vLLM's CPU build keeps states in 32 bits, whatever the model says."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)


def _cells(model: Path, *options: str) -> dict:
    command = [cxlctl_path(), "--json", "cells", "--model", model, *options]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _vllm_groups(layout: Layout) -> list[tuple[int, int, int]]:
    """Of each group of vLLM's: layers, tokens of a block, and bytes of a block as the connector stores it."""
    config, memory = layout.kv_cache_config, layout.memory()

    def stored_bytes(names: list[str]) -> int:
        ((parts,),) = cell_parts(cache_tensors(memory, names), config.num_blocks)
        return sum(part.len_bytes for part in parts)

    return [(len(group.layer_names), group.kv_cache_spec.block_size, stored_bytes(group.layer_names)) for group in config.kv_cache_groups]


def _compare(folder: Path, name: str, block_size: int, tp: int = 1, kv_cache_dtype: str = "auto") -> dict:
    model = folder / f"shape of {name}"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({**SHAPES[name], "dtype": "bfloat16"}))
    return _compare_folder(model, block_size, tp, kv_cache_dtype)


def _compare_folder(model: Path, block_size: int, tp: int = 1, kv_cache_dtype: str = "auto", **more) -> dict:
    options = {"block_size": block_size, "kv_cache_dtype": kv_cache_dtype, "max_model_len": 64, "mamba_cache_mode": "align", **more}
    with layout_of(str(model), MEMORY_BYTES, tp, enable_prefix_caching=True, **options) as layout:
        expected = _vllm_groups(layout)
    said = _cells(model, "--tp", str(tp), "--block-size", str(block_size), "--kv-cache-dtype", kv_cache_dtype)
    assert [(group["layers"], group["tokens"], group["block_bytes"]) for group in said["groups"]] == expected
    assert max(size for *_, size in expected) <= said["cell_bytes"] < max(size for *_, size in expected) + 64
    return said


def _block_size(name: str) -> int:
    """vLLM's CPU build has blocks of 16 tokens for latents."""
    return 16 if "kv_lora_rank" in SHAPES[name] else 32


@pytest.mark.parametrize("name", SHAPES)
def test_groups_of_each_family(folder, name):
    _compare(folder, name, _block_size(name))


RANKS = (("llama 3.1 8B", 4), ("llama 3.1 8B", 16), ("gemma 3 27B", 8), ("deepseek v3", 8))
RANKS_OF_STATES = (("qwen3-next 80B", 4), ("nemotron-h 8B", 8), ("granite 4 h", 4))


@pytest.mark.parametrize(("name", "tp"), [*RANKS, *RANKS_OF_STATES])
def test_ranks_divide_heads_and_states(folder, name, tp):
    _compare(folder, name, _block_size(name), tp)


@pytest.mark.parametrize("name", ["llama 3.1 8B", "gemma 3 27B", "qwen3-next 80B"])
def test_a_quantized_cache(folder, name):
    _compare(folder, name, 32, kv_cache_dtype="fp8")


def test_a_model_that_sees(folder, model, tmp_path):
    """Its language model is in a part of config.json; earlier files have it in the file itself."""
    seeing = Path(tiny_models.make_multimodal(folder, Path(model) / "tokenizer.json"))
    said = _compare_folder(seeing, 32, skip_tokenizer_init=False, limit_mm_per_prompt={"image": 1, "video": 0})
    config = json.loads((seeing / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config.pop("text_config"), **config}))
    assert _cells(tmp_path, "--block-size", "32") == said


def test_every_known_type_is_compared(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    command = [cxlctl_path(), "cells", "--model", tmp_path, "--block-size", "16"]
    said = subprocess.run(command, check=False, capture_output=True, text=True)
    known = set(said.stderr.split("is not known (")[1].split(")")[0].split(", "))
    assert known == {shape["model_type"] for shape in SHAPES.values()} | {"qwen2_vl", "qwen2_vl_text"}


def test_a_pool_is_formatted_for_a_model(folder, tmp_path):
    """Its cells hold each block of Gemma 3, which has groups of 8 to 10 of its 62 layers."""
    said = _compare(folder, "gemma 3 27B", 32)
    assert sorted(group["layers"] for group in said["groups"]) == [8, 8, 9, 9, 9, 9, 10]
    pool = tmp_path / "pool"
    options = ["--model", folder / "shape of gemma 3 27B" / "config.json", "--block-size", "32", "--cells", "2K:1%"]
    subprocess.run([cxlctl_path(), "--pool", f"{pool},size=256M", "format", *options], check=True, capture_output=True)
    assert [cells["cell_bytes"] for cells in kvbm_cxl.pool_info(str(pool))["cells"]] == [2048, said["cell_bytes"]]
