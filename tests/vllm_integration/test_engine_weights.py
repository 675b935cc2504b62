# SPDX-License-Identifier: Apache-2.0
"""Whole engines whose adapters or weights are replaced: the text is that of the weights in memory, and equal weights share blocks."""

import json
import shutil
from pathlib import Path

import pytest
import tiny_models
import torch
from engines import engine, prompt
from kvbm_cxl.vllm_integration.handover import prefill_params
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest

PROMPTS = [prompt(300, 41), prompt(60, 42)]
# What is found of them without a hand-over: whole blocks.
TOKENS = 256
LORA = {"enable_lora": True, "max_lora_rank": 8}
RANK = 8


def _adapter(model: str, folder: Path, seed: int) -> Path:
    """An adapter for the projections of a model's attention."""
    random, tensors = torch.Generator().manual_seed(seed), {}
    config = json.loads((Path(model) / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim", hidden // heads)
    kv = config["num_key_value_heads"] * head
    for layer in range(config["num_hidden_layers"]):
        for name, size in (("q_proj", heads * head), ("k_proj", kv), ("v_proj", kv)):
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{base}.lora_A.weight"] = torch.randn(RANK, hidden, generator=random) * 0.2
            tensors[f"{base}.lora_B.weight"] = torch.randn(size, RANK, generator=random) * 0.2
    folder.mkdir(exist_ok=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _ask(running, folder: Path, **options) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    request = LoRARequest("tenant", 1, str(folder), **options)
    outputs = running.llm.generate(PROMPTS, params, use_tqdm=False, lora_request=request)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(params=("llama", "gemma3"))
def adapted(request, model, folder) -> tuple[str, dict]:
    """A model with one KV cache group, and one with sliding windows; what its engines take."""
    if request.param == "llama":
        return model, LORA
    return tiny_models.make(request.param, folder), {**tiny_models.options(request.param), **LORA}


def test_an_adapter_replaced_under_its_name(adapted, make_pool, tmp_path):
    """Between engines, and under a running one that loads it again. One of equal files is found."""
    model, options = adapted
    pool, folder = make_pool(size="128M", cells="512K:80%"), _adapter(model, tmp_path / "adapter", 1)
    with engine(model, None, **{key: value for key, value in options.items() if key != "extra"}) as alone:
        first = _ask(alone, folder)
        # Otherwise vLLM goes on with its own blocks of the first one.
        alone.llm.reset_prefix_cache()
        second = _ask(alone, _adapter(model, folder, 2), load_inplace=True)
    assert first != second
    _adapter(model, folder, 1)
    with engine(model, "kv_both", pool, **options) as running:
        reach = sum(running.scheduler_side.shape.reach(len(each["prompt_token_ids"]), with_tail=False) for each in PROMPTS)
        assert reach >= TOKENS
        assert _ask(running, folder) == first
        running.settle()
        # Replaced on disk: the engine keeps what it has loaded, and so do its blocks.
        _adapter(model, folder, 2)
        running.llm.reset_prefix_cache()
        running.counted()
        assert _ask(running, folder) == first and running.counted()["external_hits"] == reach
        # Loaded again under its number.
        running.llm.llm_engine.add_lora(LoRARequest("tenant", 1, str(folder), load_inplace=True))
        running.llm.reset_prefix_cache()
        assert _ask(running, folder) == second and "external_hits" not in running.counted()
        running.settle()
    with engine(model, "kv_both", pool, **options) as other:
        assert _ask(other, folder) == second
        assert other.counted()["external_hits"] == reach, "at its first request"
        # vLLM drops it for another one, and loads it again by itself: with other files by then.
        _adapter(model, folder, 1)
        other.llm.llm_engine.remove_lora(1)
        other.llm.reset_prefix_cache()
        assert _ask(other, folder) == first
        assert other.counted()["external_hits"] == reach


@pytest.fixture(scope="module")
def other_model(model, tmp_path_factory) -> str:
    """The tiny model, trained a little further."""
    folder = shutil.copytree(model, tmp_path_factory.mktemp("weights") / "other")
    (path,) = folder.glob("*.safetensors")
    random, tensors = torch.Generator().manual_seed(3), load_file(str(path))
    for tensor in tensors.values():
        if tensor.dim() == 2:
            tensor += torch.randn(tensor.shape, generator=random) * 0.05
    save_file(tensors, str(path), metadata={"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def texts(model, other_model):
    """Answers of both models, from engines without a connector."""
    found = []
    for each in (model, other_model):
        with engine(each, None) as plain:
            found.append(plain.texts(PROMPTS))
    assert found[0] != found[1]
    return found


def _hand_over(running, asked) -> dict:
    (output,) = running.outputs([asked], max_tokens=1, extra_args={"kv_transfer_params": prefill_params()})
    return output.kv_transfer_params


def test_weights_replaced_in_place(model, other_model, pool, texts):
    """vLLM's default reset does not reach a connector. Reset after the weights are replaced, or before."""
    with engine(model, "kv_both", pool) as running:
        assert running.texts(PROMPTS) == texts[0]
        running.settle()
        running.llm.collective_rpc("reload_weights", kwargs={"weights_path": other_model})
        running.llm.reset_prefix_cache()
        running.counted()
        assert running.texts(PROMPTS) == texts[1], "nothing of the earlier weights is pulled"
        assert "external_hits" not in running.counted()
        running.settle()
        running.llm.reset_prefix_cache()
        assert running.texts(PROMPTS) == texts[1] and running.counted()["external_hits"] == TOKENS, "but what the new ones computed"
        running.llm.reset_prefix_cache()
        running.llm.collective_rpc("reload_weights", kwargs={"weights_path": model})
        assert running.texts(PROMPTS) == texts[0] and running.counted()["external_hits"] == TOKENS, "the first weights are back"

    with engine(model, "kv_both", pool) as second:
        # Weights of the file system's are not all: numbers are changed in memory, by a function of the caller's.
        second.llm.apply_model(lambda loaded: [each.data.mul_(1.25) for each in loaded.parameters()] and None)
        second.texts(PROMPTS)
        assert "external_hits" not in second.counted()
        second.settle()
    with engine(model, "kv_consumer", pool) as decode:
        assert decode.texts(PROMPTS) == texts[0] and decode.counted()["external_hits"] == TOKENS, "the others go on as before"


KINDS = ("embed_tokens", "layers.0.input_layernorm", "layers.2.self_attn.k_proj", "layers.0.self_attn.o_proj", "layers.1.mlp.up_proj")
KINDS += ("layers.3.mlp.down_proj", "model.norm")


def test_one_number_of_any_tensor_makes_other_weights(model, pool, tmp_path):
    """Reloaded from files, whose layout in memory vLLM's CPU build packs away."""
    folder = shutil.copytree(model, tmp_path / "changed")
    (path,) = folder.glob("*.safetensors")
    plain = load_file(str(path))
    with engine(model, "kv_both", pool) as running:
        running.texts(PROMPTS)
        running.settle()
        for kind in KINDS:
            tensors = {name: tensor.clone() for name, tensor in plain.items()}
            tensors[next(name for name in tensors if kind in name)].view(-1)[-3] += 1e-3
            save_file(tensors, str(path), metadata={"format": "pt"})
            running.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            running.llm.reset_prefix_cache()
            running.counted()
            running.texts(PROMPTS)
            counted = running.counted()
            assert "external_hits" not in counted and counted["weights/changed"] == 1, kind
        running.llm.collective_rpc("reload_weights", kwargs={"weights_path": model})
        running.llm.reset_prefix_cache()
        running.texts(PROMPTS)
        assert running.counted()["external_hits"] == TOKENS, "the first weights are back"


def test_engines_whose_settings_differ_share_nothing(model, pool, tmp_path):
    """Which layers an adapter is applied to is a setting of the engine. Capacities are none that shape blocks."""
    folder = _adapter(model, tmp_path / "adapter", 1)
    some = {**LORA, "lora_target_modules": ["q_proj"]}
    with engine(model, None, **some) as alone:
        expected = _ask(alone, folder)
    with engine(model, "kv_both", pool, **LORA) as first:
        assert _ask(first, folder) != expected
        first.settle()
    with engine(model, "kv_both", pool, **some) as other:
        assert _ask(other, folder) == expected and "external_hits" not in other.counted()
    with engine(model, "kv_both", pool, **LORA, max_loras=2, max_num_seqs=4) as roomy:
        _ask(roomy, folder)
        assert roomy.counted()["external_hits"] == TOKENS


def test_without_a_reset_nothing_is_published_upon_old_blocks(model, other_model, pool, texts):
    """vLLM goes on with its own blocks of the earlier weights then. What it computes upon them is neither weights' text."""
    longer = [{"prompt_token_ids": PROMPTS[0]["prompt_token_ids"] + prompt(200, 9)["prompt_token_ids"]}]
    with engine(model, "kv_both", pool) as running:
        running.texts(PROMPTS)
        running.settle()
        running.counted()
        running.llm.collective_rpc("reload_weights", kwargs={"weights_path": other_model})
        running.texts(longer)
        running.settle()
        assert not [name for name in running.counted() if name.startswith("published_blocks")]


def test_sleep_and_wake(model, pool, texts):
    """Weights are as before: blocks are found, and handed over."""
    with engine(model, "kv_both", pool) as running:
        running.texts(PROMPTS)
        running.settle()
        running.counted()
        running.llm.sleep(level=1)
        running.llm.wake_up()
        assert running.texts(PROMPTS) == texts[0] and running.counted()["external_hits"] == TOKENS
        params = _hand_over(running, prompt(200, 77))
        assert params["kvbm_cxl"]["tokens"] == 200
    with engine(model, "kv_consumer", pool) as decode:
        decode.texts([prompt(200, 77)], extra_args={"kv_transfer_params": params})
        assert decode.counted()["external_hits"] == 200


def test_two_ranks_agree_about_their_weights(model, other_model, make_pool, texts):
    pool = make_pool(size="128M", cells="512K:75%")
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(model, "kv_both", pool, **options) as running:
        before = running.texts(PROMPTS)
        running.settle()
        running.llm.reset_prefix_cache()
        running.counted()
        assert running.texts(PROMPTS) == before and running.counted()["external_hits"] == TOKENS
        running.llm.collective_rpc("reload_weights", kwargs={"weights_path": other_model})
        running.llm.reset_prefix_cache()
        after = running.texts(PROMPTS)
        assert after != before and "external_hits" not in running.counted()
        running.settle()
        running.llm.reset_prefix_cache()
        assert running.texts(PROMPTS) == after and running.counted()["external_hits"] == TOKENS


def test_another_hash_seed_is_named(model, pool, monkeypatch, caplog):
    """vLLM's sha256 needs no PYTHONHASHSEED. Where one engine has it and the other does not, the first hand-over says so."""
    # Of at least a block each: the tail of a shorter one has no hash of vLLM's in its name, and is found.
    prompts = [prompt(300, 43), prompt(200, 44)]
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with engine(model, "kv_producer", pool) as prefill:
        params = [_hand_over(prefill, each) for each in prompts]
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    with engine(model, "kv_consumer", pool) as decode:
        for each, handed_over in zip(prompts, params):
            decode.texts([each], extra_args={"kv_transfer_params": handed_over})
        decode.settle()
        counted = decode.counted()
    assert counted["handovers/foreign"] == 2 and "external_hits" not in counted
    said = [record.getMessage() for record in caplog.records if record.name == "vllm.kvbm_cxl" and record.levelname == "WARNING"]
    assert len(said) == 1 and "PYTHONHASHSEED" in said[0] and said[0].count(" there, ") == 1, said
