# SPDX-License-Identifier: Apache-2.0
"""Tiny models of the families that people serve: configurations in a folder; vLLM makes random weights itself (`load_format="dummy"`)."""

import json
from pathlib import Path

_SMALL = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "max_position_embeddings": 4096}
_TEXT = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False, "dtype": "float32"}
_SLIDING, _FULL = "sliding_attention", "full_attention"

MODELS = {
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
    "deepseek-v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        **_SMALL,
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


def make(name: str, folder: Path) -> str:
    """Writes the configuration of a model; its folder."""
    made = folder / f"tiny-{name}"
    made.mkdir(exist_ok=True)
    (made / "config.json").write_text(json.dumps({**_TEXT, **MODELS[name]}, indent=1))
    return str(made)
