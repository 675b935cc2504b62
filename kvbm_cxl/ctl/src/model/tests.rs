// SPDX-License-Identifier: Apache-2.0
//! Tests of the groups of models. Python tests compare every family with vLLM.
use super::config::kv_cache;
use super::*;
use serde_json::{Value, json};

fn llama() -> Value {
    json!({"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8})
}

fn with(mut config: Value, changes: Value) -> Value {
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

/// Layers and bytes of each group.
fn shape(config: &Value, tp: u64, block_size: u64) -> Vec<(u64, u64)> {
    let groups = groups(&kv_cache(config, tp, false).unwrap(), block_size);
    groups.iter().map(|group| (group.layers, group.block_bytes)).collect()
}

#[test]
fn all_layers_alike_are_one_group() {
    assert_eq!(shape(&llama(), 1, 128), [(32, 16 << 20)]);
    assert_eq!(shape(&llama(), 8, 16), [(32, 256 << 10)]);
    assert_eq!(shape(&llama(), 32, 16), [(32, 256 << 10)], "each head is on four ranks");
    assert_eq!(kv_cache(&llama(), 1, true).unwrap().token_bytes, 2 * 8 * 128);
}

#[test]
fn layers_of_two_kinds_are_divided_into_groups_of_about_the_smaller_kind() {
    let gemma = json!({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 62, "hidden_size": 5376,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024}});
    let token = 2 * 16 * 128 * 2;
    let expected = [9, 9, 9, 9, 8, 8, 10].map(|layers| (layers, layers * 16 * token));
    assert_eq!(shape(&gemma, 1, 16), expected);
    assert_eq!(cell_bytes(&groups(&kv_cache(&gemma, 1, false).unwrap(), 16)), 10 * 16 * token);
    // 12 and 17 are nearly equal: one group each.
    for (windows, layers) in [(13, &[13, 12][..]), (17, &[17, 12]), (18, &[9, 9, 12])] {
        let kinds = [vec![Kind::Window(128); windows], vec![Kind::Full; 12]].concat();
        let made = groups(&config::KvCache { layers: kinds, token_bytes: 64, state_bytes: 0 }, 1);
        assert_eq!(made.iter().map(|group| group.layers).collect::<Vec<_>>(), layers);
    }
}

#[test]
fn a_block_of_a_model_with_states_is_as_large_as_a_state() {
    let cache = config::KvCache { layers: vec![Kind::State, Kind::State, Kind::Full], token_bytes: 100, state_bytes: 5_000 };
    let made = groups(&cache, 16);
    assert_eq!(made.iter().map(|group| (group.tokens, group.block_bytes)).collect::<Vec<_>>(), [(64, 5_000), (64, 5_000), (64, 6_400)]);
    assert_eq!(groups(&cache, 128)[2].block_bytes, 12_800, "blocks are no smaller than asked");
    assert_eq!(cell_bytes(&made), 6_400);
    assert_eq!(cell_bytes(&[Group { block_bytes: 6_401, ..groups(&cache, 16).remove(0) }]), 6_464);
}

#[test]
fn a_cache_that_the_checkpoint_quantizes_has_smaller_blocks() {
    let bytes = |quantization: Value| {
        kv_cache(&with(llama(), json!({"quantization_config": quantization})), 1, false).map(|cache| cache.token_bytes)
    };
    assert_eq!(bytes(json!({"quant_method": "fp8"})), Ok(4096));
    assert_eq!(bytes(json!({"kv_cache_scheme": null})), Ok(4096));
    assert_eq!(bytes(json!({"kv_cache_scheme": {"num_bits": 8, "type": "float"}})), Ok(2048));
    assert_eq!(bytes(json!({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}})), Ok(2048));
    assert!(matches!(bytes(json!({"kv_cache_scheme": {"num_bits": 4, "type": "float"}})), Err(ModelError::UnknownCache { .. })));
}

#[test]
fn what_is_not_known_or_wrong_is_refused_with_the_reason() {
    let error = |changes| kv_cache(&with(llama(), changes), 3, false).unwrap_err();
    let unknown = error(json!({"model_type": "mllama"})).to_string();
    assert!(unknown.contains("\"mllama\"") && unknown.contains("gemma3_text") && unknown.contains("It logs the bytes"), "{unknown}");
    assert_eq!(error(json!({})), ModelError::Indivisible { key: "num_key_value_heads", number: 8, tp: 3 });
    assert_eq!(error(json!({"num_hidden_layers": null})), ModelError::Missing { key: "num_hidden_layers" });
    for value in [json!(0), json!(-1), json!(1.5), json!("32"), json!(1 << 30), json!([32])] {
        assert!(matches!(error(json!({"num_hidden_layers": value})), ModelError::Wrong { key: "num_hidden_layers", .. }), "{value}");
    }
    let gemma = |types: Value| {
        let config = json!({"model_type": "gemma2", "num_hidden_layers": 2, "sliding_window": 8, "layer_types": types});
        kv_cache(&with(llama(), config), 1, false)
    };
    assert_eq!(gemma(json!(["full_attention", "sliding_attention"])).unwrap().layers, [Kind::Full, Kind::Window(8)]);
    for types in [json!(["full_attention"]), json!(["full_attention", "other"]), json!(["full_attention", 3])] {
        assert!(matches!(gemma(types), Err(ModelError::Wrong { key: "layer_types", .. })));
    }
    let nemotron = json!({"model_type": "nemotron_h", "hybrid_override_pattern": "M-*", "mamba_num_heads": 128, "mamba_head_dim": 64,
        "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4});
    let of_ranks = |tp| kv_cache(&with(llama(), nemotron.clone()), tp, false).map(|cache| cache.state_bytes);
    assert_eq!(of_ranks(8), Ok((128 * 64 + 2 * 8 * 128) / 8 * 3 * 2 + 128 / 8 * 64 * 128 * 4));
    assert_eq!(of_ranks(16), Err(ModelError::Indivisible { key: "n_groups", number: 8, tp: 16 }));
    for config in [json!(null), json!([]), json!({"text_config": 3}), json!("llama")] {
        assert!(matches!(kv_cache(&config, 1, false), Err(ModelError::Unknown { .. })), "{config}");
    }
}

#[test]
fn the_largest_numbers_overflow_nothing() {
    const MOST: u64 = 1 << 20;
    for (kind, keys) in [
        ("nemotron_h", &["mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"][..]),
        ("granitemoehybrid", &["mamba_n_heads", "mamba_d_state", "mamba_expand", "mamba_n_groups", "mamba_d_conv", "mamba_d_head"]),
        (
            "qwen3_next",
            &["linear_key_head_dim", "linear_value_head_dim", "linear_num_value_heads", "linear_num_key_heads", "linear_conv_kernel_dim"],
        ),
        ("deepseek_v3", &["kv_lora_rank", "qk_rope_head_dim"]),
    ] {
        let types = if kind == "qwen3_next" { Value::Null } else { json!(["mamba"]) };
        let mut config = with(llama(), json!({"model_type": kind, "layer_types": types, "hybrid_override_pattern": "M*"}));
        for key in keys.iter().chain(&["num_key_value_heads", "hidden_size", "head_dim"]) {
            config[key] = json!(MOST);
        }
        config["num_hidden_layers"] = json!(if types == Value::Null { MOST } else { 1 });
        let made = groups(&kv_cache(&config, 1, false).unwrap(), MOST);
        assert!(cell_bytes(&made) > MOST, "{kind}");
    }
}
