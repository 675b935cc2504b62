# SPDX-License-Identifier: Apache-2.0
"""Tiny models of the families that people serve: configurations in a folder; vLLM makes random weights itself (`load_format="dummy"`)."""

import json
from pathlib import Path
from typing import Any

_SMALL = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "max_position_embeddings": 4096}
_TEXT = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False, "dtype": "float32"}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_LLAMA = {"num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-5}
_DEEPSEEK = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
}
_DEEPSEEK_V3 = {"q_lora_rank": 128, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "n_group": 2}

MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_SMALL, **_LLAMA, "num_hidden_layers": 3},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **_SMALL,
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "sliding_window": 64,
        "layer_types": [_SLIDING] * 5 + [_FULL],
        "query_pre_attn_scalar": 64,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **_SMALL,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "sliding_window": 64,
        "layer_types": [_SLIDING, _FULL] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 1024,
        },
    },
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        **_SMALL,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "layer_types": ["linear_attention"] * 3 + [_FULL],
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_value_head_dim": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
    },
    "deepseek-v2": {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", **_SMALL, **_DEEPSEEK},
    "deepseek-v3": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **_SMALL, **_DEEPSEEK, **_DEEPSEEK_V3},
    "llama4": {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        **_SMALL,
        "intermediate_size_mlp": 256,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attention_chunk_size": 128,
        "interleave_moe_layer_step": 1,
        "no_rope_layers": [1, 1, 1, 0],
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "use_qk_norm": True,
        "attn_temperature_tuning": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "granite4": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        **_SMALL,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "mamba_n_heads": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 128,
        "position_embedding_type": "rope",
    },
    "nemotron-h": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        **_SMALL,
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M*M-",
        "num_key_value_heads": 2,
        "head_dim": 64,
        "mamba_num_heads": 4,
        "mamba_head_dim": 64,
        "ssm_state_size": 64,
        "conv_kernel": 4,
        "n_groups": 1,
        "chunk_size": 64,
        "expand": 2,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **_SMALL,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **_SMALL,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
}
# Draft models: of one layer, over the hidden states of the model named; the last one is a model by itself.
DRAFTS = {
    "eagle-llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_SMALL, **_LLAMA, "num_hidden_layers": 1},
    "eagle3-llama": {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **_SMALL, **_LLAMA, "num_hidden_layers": 1},
}
# Those that vLLM's CPU build cannot run.
LAYOUTS = {
    "deepseek-v3.2": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        **_SMALL,
        **_DEEPSEEK,
        **_DEEPSEEK_V3,
        "index_head_dim": 128,
        "index_n_heads": 4,
        "index_topk": 64,
    },
}

# What engines of all of them take. The connector cannot tell by the weights that are made up which model it is.
_OPTIONS = {
    "load_format": "dummy",
    "worker_extension_cls": "lively_weights.Extension",
    "skip_tokenizer_init": True,
    "block_size": 32,
    "enable_prefix_caching": True,
}
# vLLM computes recurrent layers on CPUs in bfloat16 only.
_STATES = {"mamba_cache_mode": "align", "dtype": "bfloat16"}
# With AMX its CPU build takes a backend for latents that refuses float32.
_LATENTS = {"attention_config": {"backend": "CPU_MLA"}}
_MORE = {"qwen3-next": _STATES, "granite4": _STATES, "nemotron-h": _STATES, "deepseek-v2": _LATENTS, "deepseek-v3": _LATENTS}


def options(name: str) -> dict[str, Any]:
    """Options of an engine of this model; `extra` are those of the connector."""
    return {**_OPTIONS, **_MORE.get(name, {}), "extra": {"model_id": name, "window_every_tokens": 128}}


def make(name: str, folder: Path) -> str:
    """Writes the configuration of a model; its folder."""
    made = folder / f"tiny-{name}"
    made.mkdir(exist_ok=True)
    (made / "config.json").write_text(json.dumps({**_TEXT, **(MODELS | DRAFTS | LAYOUTS)[name]}, indent=1))
    return str(made)


def make_multimodal(folder: Path, tokenizer: Path) -> str:
    """A model that sees: a tiny Qwen2-VL with its image processor, and with the tokens of images added to a tokenizer.json."""
    from tokenizers import AddedToken, Tokenizer

    made = folder / "tiny-qwen2-vl"
    made.mkdir(exist_ok=True)
    words = Tokenizer.from_file(str(tokenizer))
    names = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    words.add_special_tokens([AddedToken(name, special=True) for name in names])
    start, end, image, video = map(words.token_to_id, names)
    text = {
        "model_type": "qwen2_vl_text",
        **_SMALL,
        "vocab_size": words.get_vocab_size(),
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        **_TEXT,
    }
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14, "spatial_merge_size": 2}
    config = {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "text_config": text,
        "vision_config": {**vision, "temporal_patch_size": 2, "in_channels": 3},
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        **_TEXT,
    }
    seen = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 56 * 56, "max_pixels": 112 * 112}
    files = {
        "config": config,
        "preprocessor_config": {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor", **seen},
        "video_preprocessor_config": {"video_processor_type": "Qwen2VLVideoProcessor", "processor_class": "Qwen2VLProcessor", **seen},
        "tokenizer_config": {"tokenizer_class": "Qwen2Tokenizer", "processor_class": "Qwen2VLProcessor"},
    }
    words.save(str(made / "tokenizer.json"))
    for name, content in files.items():
        (made / f"{name}.json").write_text(json.dumps(content, indent=1))
    return str(made)
