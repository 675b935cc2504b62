// SPDX-License-Identifier: Apache-2.0
//! What the layers of a model keep in the KV cache, from its config.json.

use super::ModelError;
use serde_json::Value;
use std::path::Path;

/// Bytes of a number in vLLM's cache: its `--dtype auto` computes in 16 bits.
const NUMBER_BYTES: u64 = 2;
/// Above every number that is read of a real config.json; products of three and four fit in 64 bits.
const MOST: u64 = 1 << 20;

/// What one layer keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Keys and values, or a latent, of every token.
    Full,
    /// Keys and values of so many last tokens.
    Window(u64),
    /// Keys and values of the current chunk of so many tokens.
    Chunk(u64),
    /// One state for all tokens before.
    State,
}

/// The KV cache of one tensor-parallel rank.
#[derive(Debug, PartialEq, Eq)]
pub struct KvCache {
    /// Layers that keep something, in the order of the model.
    pub layers: Vec<Kind>,
    /// Bytes of a token in an attention layer.
    pub token_bytes: u64,
    /// Bytes of a state in a recurrent layer; 0 without such layers.
    pub state_bytes: u64,
}

/// How a family's layers differ.
#[derive(Clone, Copy)]
enum Layers {
    /// Not at all.
    Equal,
    /// By `layer_types`; without it, all but every `sliding_window_pattern`th layer (by default this) have a window.
    Windows(u64),
    /// Every second layer has a window, from the first on.
    Alternating,
    /// By `no_rope_layers`: chunks where it is not 0; without it, all but every `no_rope_layer_interval`th.
    Chunks,
    /// One latent for all heads (MLA).
    Latent,
    /// By `layer_types`; without it, all but every `full_attention_interval`th layer are gated delta nets.
    DeltaNets,
    /// By `layer_types`: `attention` or Mamba 2.
    Granite,
    /// By `hybrid_override_pattern`: `*` attention, `M` Mamba 2, others keep nothing.
    Nemotron,
}

/// Model types whose caches are known. Tests compare each with vLLM.
const FAMILIES: [(&str, Layers); 27] = [
    ("cohere2", Layers::Windows(4)),
    ("deepseek_v2", Layers::Latent),
    ("deepseek_v3", Layers::Latent),
    ("gemma2", Layers::Windows(2)),
    ("gemma3_text", Layers::Windows(6)),
    ("glm4", Layers::Equal),
    ("glm4_moe", Layers::Equal),
    ("gpt_oss", Layers::Alternating),
    ("granite", Layers::Equal),
    ("granitemoehybrid", Layers::Granite),
    ("kimi_k2", Layers::Latent),
    ("llama", Layers::Equal),
    ("llama4_text", Layers::Chunks),
    ("mistral", Layers::Equal),
    ("mixtral", Layers::Equal),
    ("nemotron_h", Layers::Nemotron),
    ("olmo2", Layers::Equal),
    ("phi3", Layers::Equal),
    ("qwen2", Layers::Equal),
    ("qwen2_moe", Layers::Equal),
    ("qwen2_vl", Layers::Equal),
    ("qwen2_vl_text", Layers::Equal),
    ("qwen3", Layers::Equal),
    ("qwen3_5_moe_text", Layers::DeltaNets),
    ("qwen3_5_text", Layers::DeltaNets),
    ("qwen3_moe", Layers::Equal),
    ("qwen3_next", Layers::DeltaNets),
];

/// Numbers that published files of a model type leave out.
const DEFAULTS: [(&str, &str, u64); 8] = [
    ("gemma3_text", "num_attention_heads", 8),
    ("gemma3_text", "num_key_value_heads", 4),
    ("gemma3_text", "head_dim", 256),
    ("gemma2", "head_dim", 256),
    ("gpt_oss", "head_dim", 64),
    ("nemotron_h", "head_dim", 128),
    ("qwen3", "head_dim", 128),
    ("glm4", "head_dim", 128),
];

/// Reads the cache of the model in this folder, or of this config.json, for one of `tp` ranks.
pub fn read(path: &Path, tp: u64, is_fp8: bool) -> Result<KvCache, ModelError> {
    let path = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
    let text = std::fs::read_to_string(&path).map_err(|error| ModelError::Unread { path: path.clone(), reason: error.to_string() })?;
    let config = serde_json::from_str(&text).map_err(|error| ModelError::Unread { path, reason: error.to_string() })?;
    kv_cache(&config, tp, is_fp8)
}

/// As `read`, of the parsed file.
pub fn kv_cache(config: &Value, tp: u64, is_fp8: bool) -> Result<KvCache, ModelError> {
    // Models of several modalities keep the numbers of the language model apart.
    let text = config.get("text_config").unwrap_or(config);
    let model_type = text["model_type"].as_str().unwrap_or_default();
    let known = FAMILIES.iter().find(|(name, _)| *name == model_type);
    let &(model_type, layers) = known.ok_or_else(|| ModelError::Unknown { model_type: model_type.to_owned(), known: known_types() })?;
    let numbers = Numbers { text, model_type, tp };
    let number_bytes = if is_fp8 || has_fp8_cache(config)? || has_fp8_cache(text)? { 1 } else { NUMBER_BYTES };
    let layers_of_model = numbers.layers(layers)?;
    let state_bytes = if layers_of_model.contains(&Kind::State) { numbers.state_bytes(layers)? } else { 0 };
    let token_bytes = match layers {
        Layers::Latent => numbers.get("kv_lora_rank")? + numbers.get("qk_rope_head_dim")?,
        _ => 2 * numbers.kv_heads()? * numbers.head_dim()?,
    };
    Ok(KvCache { layers: layers_of_model, token_bytes: token_bytes * number_bytes, state_bytes })
}

fn known_types() -> String {
    FAMILIES.map(|(name, _)| name).join(", ")
}

/// The checkpoint asks for a cache of 8-bit numbers, which vLLM's `--kv-cache-dtype auto` follows.
fn has_fp8_cache(config: &Value) -> Result<bool, ModelError> {
    let Some(quantization) = config.get("quantization_config").or_else(|| config.get("compression_config")) else { return Ok(false) };
    let parts = [quantization, &quantization["quantization"]];
    let asked = parts.iter().flat_map(|part| [&part["kv_cache_scheme"], &part["kv_cache_quant_algo"]]).find(|value| !value.is_null());
    match asked {
        None => Ok(false),
        Some(scheme) if scheme["num_bits"] == 8 && scheme["type"] == "float" => Ok(true),
        Some(Value::String(name)) if name.eq_ignore_ascii_case("fp8") => Ok(true),
        Some(other) => Err(ModelError::UnknownCache { asked: other.to_string() }),
    }
}

/// The numbers of a config.json, and the ranks that they are divided by.
struct Numbers<'a> {
    text: &'a Value,
    model_type: &'a str,
    tp: u64,
}

impl Numbers<'_> {
    /// A number, if it is there or has a default.
    fn find(&self, key: &'static str) -> Result<Option<u64>, ModelError> {
        match &self.text[key] {
            Value::Null => Ok(DEFAULTS.iter().find(|(name, of, _)| (*name, *of) == (self.model_type, key)).map(|default| default.2)),
            value => match value.as_u64().filter(|number| (1..=MOST).contains(number)) {
                Some(number) => Ok(Some(number)),
                None => Err(ModelError::Wrong { key, value: value.to_string() }),
            },
        }
    }

    fn get(&self, key: &'static str) -> Result<u64, ModelError> {
        self.find(key)?.ok_or(ModelError::Missing { key })
    }

    /// What a rank has of these heads or numbers.
    fn divided(&self, key: &'static str, number: u64) -> Result<u64, ModelError> {
        match number.is_multiple_of(self.tp) {
            true => Ok(number / self.tp),
            false => Err(ModelError::Indivisible { key, number, tp: self.tp }),
        }
    }

    /// KV heads of a rank: each head has several ranks if there are more ranks than heads.
    fn kv_heads(&self) -> Result<u64, ModelError> {
        let heads = match self.find("num_key_value_heads")? {
            Some(heads) => heads,
            None => self.get("num_attention_heads")?,
        };
        if self.tp > heads && self.tp.is_multiple_of(heads) { Ok(1) } else { self.divided("num_key_value_heads", heads) }
    }

    fn head_dim(&self) -> Result<u64, ModelError> {
        match self.find("head_dim")? {
            Some(size) => Ok(size),
            None => Ok(self.get("hidden_size")? / self.get("num_attention_heads")?),
        }
    }

    /// What each layer keeps.
    fn layers(&self, layers: Layers) -> Result<Vec<Kind>, ModelError> {
        if let Layers::Nemotron = layers {
            let pattern = self.text["hybrid_override_pattern"].as_str().ok_or(ModelError::Missing { key: "hybrid_override_pattern" })?;
            let kind = |layer| match layer {
                '*' => Some(Kind::Full),
                'M' => Some(Kind::State),
                _ => None,
            };
            return Ok(pattern.chars().filter_map(kind).collect());
        }
        let count = self.get("num_hidden_layers")?;
        // All but every nth.
        let every = |period: u64, kind| (1..=count).map(|layer| if layer % period == 0 { Kind::Full } else { kind }).collect();
        match layers {
            Layers::Alternating => Ok(every(2, Kind::Window(self.get("sliding_window")?))),
            Layers::Windows(period) => {
                let window = Kind::Window(self.get("sliding_window")?);
                let period = self.find("sliding_window_pattern")?.unwrap_or(period);
                Ok(self.typed(count, "sliding_attention", window)?.unwrap_or_else(|| every(period, window)))
            }
            Layers::DeltaNets => {
                let period = self.find("full_attention_interval")?.unwrap_or(4);
                Ok(self.typed(count, "linear_attention", Kind::State)?.unwrap_or_else(|| every(period, Kind::State)))
            }
            Layers::Granite => self.typed(count, "mamba", Kind::State)?.ok_or(ModelError::Missing { key: "layer_types" }),
            Layers::Chunks => {
                let chunk = Kind::Chunk(self.get("attention_chunk_size")?);
                let period = self.find("no_rope_layer_interval")?.unwrap_or(4);
                match self.text["no_rope_layers"].as_array().filter(|layers| !layers.is_empty()) {
                    Some(layers) => Ok(layers.iter().map(|rope| if *rope == 0 { Kind::Full } else { chunk }).collect()),
                    None => Ok(every(period, chunk)),
                }
            }
            Layers::Equal | Layers::Latent | Layers::Nemotron => Ok(vec![Kind::Full; count as usize]),
        }
    }

    /// By `layer_types`, if it is there: `kind` where it says `name`, else full attention.
    fn typed(&self, count: u64, name: &str, kind: Kind) -> Result<Option<Vec<Kind>>, ModelError> {
        let Some(types) = self.text["layer_types"].as_array() else { return Ok(None) };
        let layer = |layer: &Value| match layer.as_str() {
            Some("full_attention" | "attention") => Ok(Kind::Full),
            Some(other) if other == name => Ok(kind),
            _ => Err(ModelError::Wrong { key: "layer_types", value: layer.to_string() }),
        };
        if types.len() as u64 != count {
            return Err(ModelError::Wrong { key: "layer_types", value: format!("{} of {count} layers", types.len()) });
        }
        types.iter().map(layer).collect::<Result<_, _>>().map(Some)
    }

    /// Bytes of a recurrent layer's state on a rank: the last inputs of its convolution, and the state of each head.
    fn state_bytes(&self, layers: Layers) -> Result<u64, ModelError> {
        let (conv, kernel, heads, of_head, number_bytes) = match layers {
            Layers::DeltaNets => {
                let (key, value) = (self.get("linear_key_head_dim")?, self.get("linear_value_head_dim")?);
                let heads = self.get("linear_num_value_heads")?;
                let conv = 2 * key * self.get("linear_num_key_heads")? + value * heads;
                (conv, self.get("linear_conv_kernel_dim")?, heads, key * value, self.state_number_bytes("mamba_ssm_dtype", NUMBER_BYTES))
            }
            Layers::Granite => {
                let (heads, state) = (self.get("mamba_n_heads")?, self.get("mamba_d_state")?);
                let conv = self.get("mamba_expand")? * self.get("hidden_size")? + 2 * self.state_groups("mamba_n_groups")? * state;
                (conv, self.get("mamba_d_conv")?, heads, self.get("mamba_d_head")? * state, NUMBER_BYTES)
            }
            _ => {
                let (heads, head, state) = (self.get("mamba_num_heads")?, self.get("mamba_head_dim")?, self.get("ssm_state_size")?);
                let conv = heads * head + 2 * self.state_groups("n_groups")? * state;
                (conv, self.get("conv_kernel")?, heads, head * state, self.state_number_bytes("mamba_ssm_cache_dtype", 4))
            }
        };
        let inputs = self.divided("recurrent inputs", conv)? * (kernel - 1) * NUMBER_BYTES;
        let states = self.divided("recurrent heads", heads)?.saturating_mul(of_head).saturating_mul(number_bytes);
        Ok(states.saturating_add(inputs))
    }

    /// Groups of a Mamba 2 layer over all ranks, of which each has a copy of a single one.
    fn state_groups(&self, key: &'static str) -> Result<u64, ModelError> {
        let groups = self.get(key)?;
        if groups == 1 { Ok(self.tp) } else { self.divided(key, groups).map(|_| groups) }
    }

    /// Bytes of a number of the state.
    fn state_number_bytes(&self, key: &str, default: u64) -> u64 {
        match self.text[key].as_str() {
            Some("float32") => 4,
            Some("float16" | "bfloat16") => NUMBER_BYTES,
            _ => default,
        }
    }
}
