# SPDX-License-Identifier: Apache-2.0
"""What of vLLM's configuration is part of the namespace: everything but what is known to shape no block, and every field was read."""

import dataclasses
import enum
import functools
import os
import subprocess
import sys
import threading
import types
import typing
from pathlib import Path

import pytest
import torch
from shaping_settings import SHAPE, SHAPE_ENVIRONMENT
from kvbm_cxl.vllm_integration import harmless_settings, identity, settings
from vllm import envs
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs

def _classes() -> dict[str, type]:
    """Configuration classes that are reached from vLLM's, but for those in fields that shape no block. What is said of drafts is in the
    namespace by itself."""
    found, ahead = {}, [VllmConfig, SpeculativeConfig]
    while ahead:
        kind = ahead.pop()
        if found.setdefault(kind.__name__, kind) is not kind:
            raise AssertionError(f"two classes are called {kind.__name__}")
        hints, skipped = typing.get_type_hints(kind), harmless_settings.of_class(kind.__name__)
        for each in dataclasses.fields(kind):
            if each.name not in skipped:
                ahead += [one for one in _types_in(hints[each.name]) if dataclasses.is_dataclass(one) and one.__name__ not in found]
    return found


def _types_in(hint) -> set[type]:
    return {hint} if isinstance(hint, type) else set().union(*map(_types_in, typing.get_args(hint)))


def test_every_field_of_vllms_configuration_was_read():
    for name, kind in _classes().items():
        known, shape = harmless_settings.of_class(name), set(SHAPE.get(name, "").split())
        fields = {each.name for each in dataclasses.fields(kind)}
        assert not fields - known - shape, f"{name}: do they shape blocks? Enter them in harmless_settings with the reason, or here"
        assert not known & shape, f"{name}: in both lists"
    assert set(SHAPE) <= set(_classes()) and {name for each in harmless_settings.FIELDS.values() for name in each} <= set(_classes())


def test_every_environment_variable_of_vllm_was_read():
    known, shape = harmless_settings.of_environment(), set(SHAPE_ENVIRONMENT.split())
    unread = set(envs.environment_variables) - known - shape
    assert not unread, f"do they shape blocks? Enter them in harmless_settings with the reason, or here: {sorted(unread)}"
    assert not known & shape


def test_no_field_is_under_two_reasons():
    for kind in _classes():
        named = [field for each in harmless_settings.FIELDS.values() for field in each.get(kind, "").split()]
        assert len(named) == len(set(named)), kind
    named = " ".join(harmless_settings.ENVIRONMENT.values()).split()
    assert len(named) == len(set(named))


@pytest.fixture(scope="module")
def counts(model):
    """A function: what counts of the configuration of an engine with these options."""

    def made(**options) -> dict:
        config = EngineArgs(**{"model": model, **options}).create_engine_config()
        return identity.engine_fields(config) | {"loaded": identity.loading(config)}

    return made


SHAPING = (
    {"enable_lora": True, "lora_target_modules": ["v_proj"]},
    {"enable_lora": True, "enable_tower_connector_lora": True},
    {"quantization": "fp8_per_channel"},
    {"quantization": "fp8_per_channel", "quantization_config": {"ignore": ["re:.*o_proj"]}},
    {"dtype": "float16"},
    {"kv_cache_dtype": "fp8_e5m2"},
    {"kv_cache_dtype_skip_layers": ["1"]},
    {"kv_sharing_fast_prefill": True},
    {"mamba_cache_dtype": "float16"},
    {"disable_sliding_window": True},
    {"model_impl": "transformers"},
    {"trust_remote_code": True},
    {"hf_overrides": {"rms_norm_eps": 1e-3}},
    {"hf_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}},
    {"attention_config": {"use_prefill_query_quantization": True}},
    {"attention_config": {"disable_flashinfer_q_quantization": True}},
    {"attention_config": {"indexer_kv_dtype": "bf16"}},
    {"moe_backend": "triton"},
    {"linear_backend": "cutlass"},
    {"additional_config": {"anything": {"nested": [1, 2.5]}}},
    {"ignore_patterns": ["*.part"]},
    {"model_loader_extra_config": {"enable_multithread_load": True}},
    {"load_format": "dummy"},
    {"load_format": "dummy", "seed": 5},
    {"worker_extension_cls": "lively_weights.Extension"},
    {"prefix_caching_hash_algo": "sha256_cbor"},
    {"compilation_config": {"inductor_passes": {"post_grad_custom_post_pass": "json.dumps"}}},
)
HARMLESS = (
    {"max_model_len": 1024},
    {"max_num_seqs": 3, "max_num_batched_tokens": 4096},
    {"gpu_memory_utilization": 0.5},
    {"kv_cache_memory_bytes": 32 << 20},
    {"num_gpu_blocks_override": 99},
    {"enforce_eager": True},
    {"optimization_level": 0},
    {"performance_mode": "throughput"},
    {"block_size": 32},
    {"tensor_parallel_size": 2},
    {"served_model_name": ["a", "b"]},
    {"seed": 7},
    {"enable_prefix_caching": False},
    {"enable_chunked_prefill": True},
    {"async_scheduling": False},
    {"scheduling_policy": "priority"},
    {"load_format": "safetensors"},
    {"safetensors_load_strategy": "eager"},
    {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2},
    {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_producer"}},
    {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_consumer", "kv_port": 7777}},
    {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:7778"}},
    {"compilation_config": {"cudagraph_capture_sizes": [1, 2]}},
    {"disable_custom_all_reduce": True},
    {"max_logprobs": 3, "logprobs_mode": "raw_logits"},
    {"structured_outputs_config": {"backend": "xgrammar"}},
    {"generation_config": "vllm", "override_generation_config": {"temperature": 0.5}},
    {"shutdown_timeout": 5},
    {"cpu_offload_gb": 1},
)


def test_settings_that_shape_blocks_count(counts):
    plain = counts()
    assert plain == counts(), "and nothing else does"
    assert len({str(each) for each in (plain, *(counts(**options) for options in SHAPING))}) == len(SHAPING) + 1


@pytest.mark.parametrize("options", HARMLESS, ids=lambda options: "-".join(options))
def test_settings_that_shape_no_block_do_not(counts, options, monkeypatch):
    assert counts(**options) == counts()


def test_the_environment_counts_but_for_what_is_harmless(counts, monkeypatch):
    plain = counts()
    for name in ("VLLM_LOGGING_PREFIX", "VLLM_CACHE_ROOT", "VLLM_DEEPEP_BUFFER_SIZE_MB"):
        monkeypatch.setenv(name, "1234")
    assert counts() == plain
    monkeypatch.setenv("VLLM_MLA_DISABLE", "0")
    assert counts() == plain, "what is so anyway"
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    assert counts() != plain


def test_a_field_that_is_in_no_list_counts(counts, model):
    """One that a later vLLM adds."""

    def later(value: int):
        config = EngineArgs(model=model).create_engine_config()
        kind = dataclasses.make_dataclass("CacheConfig", [("later", int, 0)], bases=(type(config.cache_config),))
        kind.__module__ = "vllm.config.cache"
        config.cache_config.__class__ = kind
        config.cache_config.later = value
        return settings.engine_settings(config)["settings.cache_config"]

    assert later(0) == later(0) != later(1)


def test_versions_count_to_the_patch(counts, monkeypatch):
    import vllm

    before = settings.versions()
    assert counts()["versions"] == before
    assert vllm.__version__ in before
    monkeypatch.setattr(vllm, "__version__", vllm.__version__ + ".post1")
    assert settings.versions() != before


def test_options_of_the_image_processor_count(tmp_path_factory, model):
    import tiny_models

    seeing = tiny_models.make_multimodal(tmp_path_factory.mktemp("seeing"), next(Path(model).rglob("tokenizer.json")))
    changes = (
        {},
        {"mm_processor_kwargs": {"max_pixels": 28 * 28 * 40}},
        {"mm_processor_kwargs": {"max_pixels": 28 * 28 * 41}},
        {"media_io_kwargs": {"video": {"num_frames": 4}}},
        {"video_pruning_rate": 0.5},
        {"language_model_only": True},
    )
    same = ({"limit_mm_per_prompt": {"image": 3}}, {"mm_processor_cache_gb": 1}, {"mm_encoder_tp_mode": "data"})
    configs = [EngineArgs(model=seeing, max_model_len=512, **each).create_engine_config() for each in (*changes, *same)]
    found = [str(identity.engine_fields(each)) for each in configs]
    assert len(set(found)) == len(changes) and set(found[len(changes) :]) == {found[0]}


class Plain:
    def __init__(self, **values) -> None:
        vars(self).update(values)


class Colour(enum.Enum):
    RED = 1


class Hashed:
    """As configurations that say by themselves what counts."""

    def __init__(self, text: str) -> None:
        self.text = text

    def compute_hash(self) -> str:
        return self.text


class Called(Plain):
    def __call__(self) -> None:
        """What it does is not in its attributes."""


class Saved(Plain):
    """As a model's configuration."""

    def to_dict(self) -> dict:
        return vars(self)


VALUES = (
    *(None, True, 1, 1.0, "1", b"1", [], [1], [[1]], {}, {1: 2}, {"1": 2}, {2: 1}, set(), {1}, Colour.RED, torch.float16, dict),
    *(float("nan"), functools.partial(dict, 1), functools.partial(dict, 2), Plain(a=1), Plain(a=2), torch.zeros(2)),
    *(torch.zeros(3), torch.ones(2), os.path.join),
    # What is alike but for its type or its shape.
    *("31", "RED", Path("a"), "a", {"a": 1}, torch.zeros(2, dtype=torch.int32), torch.zeros(1, 2), torch.zeros(2, 1)),
    *(functools.partial(dict, a=1), functools.partial(dict, a=2), functools.partial(list, 1), Hashed("a"), Hashed("b")),
)


def test_values_are_told_apart():
    assert len({str(settings.config_text(value)) for value in VALUES}) == len(VALUES)
    assert settings.stable({"a": 1, "b": 2}) == settings.stable({"b": 2, "a": 1})


def test_values_are_written_alike_in_every_process():
    program = (
        "from kvbm_cxl.vllm_integration.settings import config_text\n"
        "print(config_text({'b': {'x', 'y', 'z'}, 'a': [frozenset('abc'), 1.5]}))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        ).stdout
        for seed in "123"
    }
    assert len(outputs) == 1


WITHOUT_TEXT = (object(), lambda: 1, iter([]), open, sys, [object()], Called(a=1), threading.Event(), types.SimpleNamespace(a=1))


@pytest.mark.parametrize("value", WITHOUT_TEXT, ids=lambda value: type(value).__name__)
def test_a_value_without_a_stable_text_makes_the_namespace_its_own(value, caplog):
    if value is open or value is sys:
        value = value if value is sys else open(os.devnull)  # noqa: SIM115
    with pytest.raises(settings.UnstableValue):
        settings.stable(value)
    texts = [settings.text_or_random("a setting", lambda: settings.config_text(value)) for _ in range(2)]
    assert texts[0] != texts[1] and "shares blocks with itself alone" in caplog.text


def test_a_value_too_large_or_too_deep_has_no_text(monkeypatch):
    deep: list = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(settings.UnstableValue):
        settings.stable(deep)
    monkeypatch.setattr(settings, "_MAX_VALUES", 20)
    with pytest.raises(settings.UnstableValue):
        settings.stable([[] for _ in range(30)])


def test_a_value_may_be_in_two_places():
    twice = [1]
    assert settings.stable([twice, twice, (twice,)]) == [[1], [1], [[1]]]


def test_where_a_models_configuration_came_from_does_not_count():
    def text(place: str, layers: int = 2) -> str:
        return settings.config_text(Saved(_name_or_path=place, parts=[{"name_or_path": place, "layers": layers}]))

    assert text("/here") == text("/there") != text("/here", 3)


def test_a_file_of_scales_counts_by_its_content(tmp_path):
    from vllm.config import MultiModalConfig

    def text(name: str) -> str:
        config = MultiModalConfig()
        config.mm_encoder_fp8_scale_path = str(tmp_path / name)
        return settings.config_text(config)

    for name, content in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / name).write_text(content)
    assert settings.config_text(MultiModalConfig()) == "" != text("a") == text("b") != text("c")
    with pytest.raises(settings.UnstableValue, match="cannot be read"):
        text("none")


def test_a_value_within_itself_has_no_text():
    endless: list = []
    endless.append(endless)
    with pytest.raises(settings.UnstableValue):
        settings.stable(endless)
