# SPDX-License-Identifier: Apache-2.0
"""Whole engines that share a namespace although something that shapes their blocks differs: the audit finds it, whatever it is.

What keeps such engines apart is switched off: the fields of the namespace, fingerprints of memory, and digests of adapters.
"""

import json
import shutil
import uuid
from pathlib import Path

import kvbm_cxl
import numpy
import pytest
import tiny_models
import torch
from engines import engine, prompt
from kvbm_cxl.vllm_integration import adapters, attachment, weights
from PIL import Image
from safetensors.torch import load_file, save_file
from test_engine_weights import LORA, _adapter
from vllm.lora.request import LoRARequest

AUDIT = {"extra": {"audit": True}}
PROMPTS = [prompt(300, 41), prompt(400, 42), prompt(290, 43), prompt(300, 44)]


@pytest.fixture(scope="module")
def pool():
    path = f"/dev/shm/kvbm-cxl-test-{uuid.uuid4().hex[:12]}"
    kvbm_cxl.format_pool(f"{path},size=192M", cells="512K:80%")
    yield path
    Path(path).unlink()


@pytest.fixture(scope="module")
def one_namespace():
    """All engines of the test's process have the keys of the first one, whatever they are made of."""
    with pytest.MonkeyPatch.context() as patch:
        first: dict[tuple, dict] = {}
        fields_of = attachment.namespace_fields

        def fields(vllm_config, kv_cache_config, config, shape, shards):
            found = fields_of(vllm_config, kv_cache_config, config, shape, shards)
            architecture = vllm_config.model_config.architecture
            return {index: first.setdefault((architecture, index, shards.numbers), of_group) for index, of_group in found.items()}

        patch.setattr(attachment, "namespace_fields", fields)
        patch.setattr(weights.Era, "suspect", lambda *_: None)
        patch.setattr(adapters.KnownAdapters, "content", lambda *_: b"any")
        patch.setattr(adapters.LoadedAdapters, "is_loaded", lambda *_: True)
        yield


@pytest.fixture(scope="module")
def published(model, pool, one_namespace) -> None:
    """The prompts' blocks, by an engine of the model."""
    with engine(model, "kv_both", pool, **AUDIT) as first:
        first.texts(PROMPTS)
        first.settle()
        assert not _audited(first.counted())


def _audited(counted: dict[str, float]) -> dict[str, int]:
    return {name.partition("/")[2]: int(count) for name, count in counted.items() if name.startswith("audited_blocks")}


def _asked(running, prompts=PROMPTS, **more) -> dict[str, float]:
    """What is counted over requests one after the other."""
    for each in prompts:
        running.outputs([each], **more)
        running.settle()
    return running.counted()


def _assert_isolated(running, counted: dict[str, float], caplog) -> None:
    assert _audited(counted)["different"] == 1 and counted["isolated"] == 1
    (said,) = [record.getMessage() for record in caplog.records if "is not what this engine computed" in record.getMessage()]
    assert "host of slot" in said and "incarnation" in said
    running.forget()
    assert "external_hits" not in _asked(running), "it shares nothing any more"


def _edited(model: str, folder: Path, change) -> str:
    """A copy of the model whose tensors `change` has changed."""
    shutil.copytree(model, folder)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(str(path))
    change(tensors)
    save_file(tensors, str(path), metadata={"format": "pt"})
    return str(folder)


def _named(tensors: dict[str, torch.Tensor], end: str) -> torch.Tensor:
    return tensors[next(name for name in sorted(tensors) if name.endswith(end))]


def _rows_of_keys(tensors) -> None:
    _named(tensors, "layers.2.self_attn.k_proj.weight")[70:73] *= -2


def _rows_of_tokens(tensors) -> None:
    """Those of five tokens that the prompts have."""
    _named(tensors, "embed_tokens.weight")[PROMPTS[0]["prompt_token_ids"][10:15]] *= -1


def _rounded(tensors) -> None:
    """As a quantization to 8 bits leaves them."""
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            largest = tensor.abs().amax(-1, keepdim=True).clamp_min(1e-9)
            tensor.copy_((tensor / largest * 448).to(torch.float8_e4m3fn).to(tensor.dtype) * largest / 448)


def _one_layer_of_mlp(tensors) -> None:
    _named(tensors, "layers.1.mlp.down_proj.weight").mul_(1.5)


@pytest.mark.parametrize("change", (_rows_of_keys, _rows_of_tokens, _rounded, _one_layer_of_mlp))
def test_other_weights_are_found(model, pool, published, tmp_path, caplog, change):
    with engine(_edited(model, tmp_path / "other", change), "kv_both", pool, **AUDIT) as second:
        _assert_isolated(second, _asked(second), caplog)


def test_an_engine_that_only_reads_finds_them_too(model, pool, published, tmp_path, caplog):
    with engine(_edited(model, tmp_path / "other", _one_layer_of_mlp), "kv_consumer", pool, **AUDIT) as decode:
        counted = _asked(decode)
        assert not [name for name in counted if name.startswith("published_blocks")]
        _assert_isolated(decode, counted, caplog)


def test_weights_replaced_in_memory_are_found(model, pool, published, tmp_path, caplog):
    """After two requests that found nothing wrong, in the fourth."""
    other = _edited(model, tmp_path / "other", _one_layer_of_mlp)
    with engine(model, "kv_both", pool, **AUDIT) as running:
        assert set(_audited(_asked(running, PROMPTS[:2]))) == {"same"}
        running.llm.collective_rpc("reload_weights", kwargs={"weights_path": other})
        running.forget()
        _assert_isolated(running, _asked(running), caplog)


def test_the_same_model_is_found_the_same(model, pool, published):
    """And what is not compared is pulled."""
    with engine(model, "kv_both", pool, **AUDIT) as second:
        texts = second.texts(PROMPTS[:2])
        second.settle()
        assert _audited(counted := second.counted()) == {"same": 2 + 3} and "external_hits" not in counted
        assert "isolated" not in counted
        second.forget()
        assert second.texts(PROMPTS[:1]) == texts[:1] and second.counted()["external_hits"] == 256


def test_modules_that_an_adapter_is_applied_to(model, pool, one_namespace, tmp_path, caplog):
    folder = _adapter(model, tmp_path / "adapter", 1)
    request = {"lora_request": LoRARequest("tenant", 1, str(folder))}

    def asked(running) -> dict[str, float]:
        from vllm import SamplingParams

        for each in PROMPTS[:2]:
            running.llm.generate([each], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False, **request)
            running.settle()
        return running.counted()

    with engine(model, "kv_both", pool, **AUDIT, **LORA) as first:
        asked(first)
    with engine(model, "kv_both", pool, **AUDIT, **LORA, lora_target_modules=["o_proj"]) as second:
        counted = asked(second)
        assert _audited(counted)["different"] == 1 and counted["isolated"] == 1


def test_options_of_the_image_processor(model, folder, pool, one_namespace):
    """What a picture is turned into. The first block has the tokens of both sizes: they are alike."""
    seeing = tiny_models.make_multimodal(folder, Path(model) / "tokenizer.json")
    options = {**tiny_models.options("qwen2-vl"), "skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1, "video": 0}}
    options["extra"] = {**options["extra"], "audit": True}
    config = json.loads((Path(seeing) / "config.json").read_text())
    points = numpy.random.default_rng(1).integers(0, 256, (336, 336, 3), dtype=numpy.uint8)
    marks = [config[f"{name}_token_id"] for name in ("vision_start", "image", "vision_end")]
    asked = {"prompt_token_ids": [*marks, *prompt(60, 32)["prompt_token_ids"]], "multi_modal_data": {"image": Image.fromarray(points)}}
    for tokens, found in ((64, set()), (64, {"same"}), (36, {"different"})):
        with engine(seeing, "kv_both", pool, **options, mm_processor_kwargs={"max_pixels": 28 * 28 * tokens}) as running:
            counted = _asked(running, [asked])
            assert set(_audited(counted)) == found, json.dumps(counted)
            assert counted.get("isolated", 0) == ("different" in found)
