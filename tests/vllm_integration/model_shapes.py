# SPDX-License-Identifier: Apache-2.0
"""What shapes the KV cache of models that people serve, as their config.json files have it. Their weights are not needed."""

from typing import Any

_REST = {"vocab_size": 2048, "intermediate_size": 256, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
_MORE_QWEN = {"shared_expert_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": []}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DEEPSEEK = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
_V2 = {**_DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy", "scoring_func": "softmax", "n_group": 1, "topk_group": 1}
_V3 = {**_DEEPSEEK, "q_lora_rank": 1536, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 4, "topk_group": 2}
_YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
_YARN |= {"beta_fast": 32.0, "beta_slow": 1.0}
_GLM = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1}
_GLM |= {"norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "pad_token_id": 0}


def _model(architecture: str, model_type: str, layers: int, hidden: int, heads: int, kv_heads: int | None, **more) -> dict[str, Any]:
    numbers = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    given = {} if kv_heads is None else {"num_key_value_heads": kv_heads}
    return {"architectures": [architecture], "model_type": model_type, **_REST, **numbers, **given, **more}


def _delta_nets(architecture: str, model_type: str, layers: int, hidden: int, heads: int, kv_heads: int, values: int, **more):
    nets = {
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": values,
        "linear_value_head_dim": 128,
        "partial_rotary_factor": 0.25,
    }
    return _model(architecture, model_type, layers, hidden, heads, kv_heads, head_dim=256, **nets, **more)


SHAPES = {
    "llama 3.1 8B": _model("LlamaForCausalLM", "llama", 32, 4096, 32, 8),
    "llama 2 7B": _model("LlamaForCausalLM", "llama", 32, 4096, 32, None),
    "mistral 7B v0.1": _model("MistralForCausalLM", "mistral", 32, 4096, 32, 8, sliding_window=4096),
    "mixtral 8x7B": _model("MixtralForCausalLM", "mixtral", 32, 4096, 32, 8, sliding_window=None, **_EXPERTS),
    "qwen2 7B": _model("Qwen2ForCausalLM", "qwen2", 28, 3584, 28, 4, use_sliding_window=False, sliding_window=131072, max_window_layers=28),
    "qwen2 moe": _model("Qwen2MoeForCausalLM", "qwen2_moe", 24, 2048, 16, 16, **_MOE, **_MORE_QWEN),
    "qwen3 32B": _model("Qwen3ForCausalLM", "qwen3", 64, 5120, 64, 8, head_dim=128),
    "qwen3, no head size": _model("Qwen3ForCausalLM", "qwen3", 28, 1024, 16, 8),
    "qwen3 moe": _model("Qwen3MoeForCausalLM", "qwen3_moe", 48, 2048, 32, 4, head_dim=128, **_MOE, **_MORE_QWEN),
    "phi 3": _model("Phi3ForCausalLM", "phi3", 32, 3072, 32, 32, sliding_window=2047, pad_token_id=0),
    "granite 3": _model("GraniteForCausalLM", "granite", 40, 2048, 32, 8),
    "glm 4 9B": _model("Glm4ForCausalLM", "glm4", 40, 4096, 32, 2, pad_token_id=0),
    "glm 4.5 air": _model("Glm4MoeForCausalLM", "glm4_moe", 46, 4096, 96, 8, head_dim=128, **_GLM),
    "olmo 2": _model("Olmo2ForCausalLM", "olmo2", 32, 4096, 32, 8),
    "gemma 2": _model("Gemma2ForCausalLM", "gemma2", 42, 3584, 16, 8, sliding_window=4096),
    "gemma 3 27B": _model("Gemma3ForCausalLM", "gemma3_text", 62, 5376, 32, 16, head_dim=128, sliding_window=1024),
    "gemma 3 4B": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 256,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "vocab_size": 2048,
        "max_position_embeddings": 4096,
    },
    "gpt-oss 120B": _model(
        "GptOssForCausalLM",
        "gpt_oss",
        36,
        2880,
        64,
        8,
        head_dim=64,
        sliding_window=128,
        **_EXPERTS,
        swiglu_limit=7.0,
        rope_parameters=_YARN,
    ),
    "command r7b": _model("Cohere2ForCausalLM", "cohere2", 32, 4096, 32, 8, sliding_window=4096, sliding_window_pattern=4),
    "llama 4 scout": _model(
        "Llama4ForCausalLM",
        "llama4_text",
        48,
        5120,
        40,
        8,
        head_dim=128,
        attention_chunk_size=8192,
        intermediate_size_mlp=256,
        interleave_moe_layer_step=1,
        no_rope_layers=[],
        num_local_experts=2,
        num_experts_per_tok=1,
    ),
    "deepseek v2 lite": _model("DeepseekV2ForCausalLM", "deepseek_v2", 27, 2048, 16, 16, **_V2),
    "deepseek v3": _model("DeepseekV3ForCausalLM", "deepseek_v3", 61, 7168, 128, 128, **_V3),
    "kimi k2": _model("DeepseekV3ForCausalLM", "kimi_k2", 61, 7168, 64, 64, **_V3),
    "qwen3.5": _delta_nets("Qwen3_5ForCausalLM", "qwen3_5_text", 32, 4096, 16, 4, 32, mamba_ssm_dtype="float32"),
    "qwen3.5 moe": _delta_nets("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", 40, 2048, 16, 2, 32, **_MOE, **_MORE_QWEN),
    "qwen3-next 80B": _delta_nets("Qwen3NextForCausalLM", "qwen3_next", 48, 2048, 16, 2, 32, **_MOE, **_MORE_QWEN),
    "granite 4 h": _model(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        40,
        1536,
        12,
        4,
        layer_types=(["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
        mamba_n_heads=48,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_n_groups=1,
        mamba_chunk_size=256,
        **_EXPERTS,
        shared_intermediate_size=128,
        position_embedding_type="nope",
    ),
    "nemotron-h 8B": _model(
        "NemotronHForCausalLM",
        "nemotron_h",
        52,
        4096,
        32,
        8,
        hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        attention_head_dim=128,
        mamba_num_heads=128,
        mamba_head_dim=64,
        ssm_state_size=128,
        conv_kernel=4,
        n_groups=8,
        chunk_size=128,
        expand=2,
    ),
}
"""Name: config.json."""
