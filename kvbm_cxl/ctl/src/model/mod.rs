// SPDX-License-Identifier: Apache-2.0
//! `cxlctl cells`, and the cells of `cxlctl format --model`: bytes of a model's KV blocks.

mod config;
mod groups;

use crate::cli::{CellsArgs, EngineArgs, KvCacheDtype};
use crate::output::{Exit, Failure, Out};
use crate::text::{bytes, table};
use config::Kind;
use groups::{Group, cell_bytes, groups};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Why the blocks of a model are not known.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// The file cannot be read.
    #[error("{path}: {reason}", path = path.display())]
    Unread {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A model type that is not known.
    #[error(
        "model type {model_type:?} is not known ({known}): start an engine of it with a pool of any cells. It logs the bytes of its blocks \
         (\"CxlConnector: ... cells of N bytes\") or, if they do not fit, the `cxlctl format` command"
    )]
    Unknown {
        /// What config.json says.
        model_type: String,
        /// Those that are.
        known: String,
    },
    /// The checkpoint asks for a KV cache of a type that is not known.
    #[error("the KV cache is quantized as {asked}, whose size is not known: an engine logs it (\"CxlConnector: ... cells of N bytes\")")]
    UnknownCache {
        /// What config.json says.
        asked: String,
    },
    /// A number is missing.
    #[error("config.json has no {key}")]
    Missing {
        /// The number.
        key: &'static str,
    },
    /// A number makes no sense.
    #[error("config.json: {key} is {value}")]
    Wrong {
        /// The number.
        key: &'static str,
        /// Its value.
        value: String,
    },
    /// vLLM refuses this number of ranks.
    #[error("{key} ({number}) cannot be divided among {tp} tensor-parallel ranks")]
    Indivisible {
        /// The heads or numbers that are divided.
        key: &'static str,
        /// How many.
        number: u64,
        /// The ranks.
        tp: u64,
    },
}

/// The groups of the model in this folder or config.json.
fn groups_of(model: &Path, engine: &EngineArgs) -> Result<Vec<Group>, Failure> {
    let block_size = engine.block_size.ok_or_else(|| Failure::usage("--model needs --block-size"))?;
    let is_fp8 = matches!(engine.kv_cache_dtype, KvCacheDtype::Fp8);
    let cache = config::read(model, engine.tp, is_fp8).map_err(|error| Failure::usage(format!("--model: {error}")))?;
    Ok(groups(&cache, block_size))
}

/// Bytes of the cells that hold every block of a model.
pub fn cell_bytes_of(model: &Path, engine: &EngineArgs) -> Result<u64, Failure> {
    Ok(cell_bytes(&groups_of(model, engine)?))
}

/// `cxlctl cells`.
pub fn run(args: &CellsArgs, out: &mut Out) -> Result<Exit, Failure> {
    let groups = groups_of(&args.model, &args.engine)?;
    let cell = cell_bytes(&groups);
    let as_json = || {
        let groups = groups.iter().map(|group| {
            json!({"kind": kind_text(group.kind), "layers": group.layers, "tokens": group.tokens, "block_bytes": group.block_bytes})
        });
        json!({"cell_bytes": cell, "groups": groups.collect::<Vec<_>>()})
    };
    let as_text = || format!("{}cells for all groups: cxlctl format --cells {cell}:75%\n", groups_text(&groups));
    out.answer(as_json, as_text)?;
    Ok(Exit::Done)
}

fn groups_text(groups: &[Group]) -> String {
    let mut rows = vec![["group", "layers keep", "layers", "tokens", "bytes", ""].map(String::from).to_vec()];
    for (number, group) in groups.iter().enumerate() {
        let numbers = [number.to_string(), kind_text(group.kind), group.layers.to_string(), group.tokens.to_string()];
        rows.push([&numbers[..], &[group.block_bytes.to_string(), bytes(group.block_bytes)]].concat());
    }
    table(&rows)
}

fn kind_text(kind: Kind) -> String {
    match kind {
        Kind::Full => "every token".into(),
        Kind::Window(tokens) => format!("the last {tokens} tokens"),
        Kind::Chunk(tokens) => format!("chunks of {tokens} tokens"),
        Kind::State => "a state".into(),
    }
}

#[cfg(test)]
mod tests;
