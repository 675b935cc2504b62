// SPDX-License-Identifier: Apache-2.0
//! Configuration, with the names and habits of KVBM's own (`DYN_KVBM_*`; `1`, `true`, `on` and `yes` are true).

use crate::error::{Error, Result};
use cxl_pool::cache::CacheConfig;
use cxl_pool::device::PoolSpec;
use std::path::PathBuf;

/// The pool: `/dev/dax0.0`, or `/dev/shm/pool,size=4G`. Without it `CXL_POOL` is used.
pub const ENV_POOL: &str = "DYN_KVBM_CXL_POOL";
/// Whether every block has a checksum that is compared at each get; off by default.
pub const ENV_CHECKSUMS: &str = "DYN_KVBM_CXL_CHECKSUMS";
/// Percent of this process's cells: when fewer are free the evictor begins.
pub const ENV_LOW_WATER: &str = "DYN_KVBM_CXL_LOW_WATER_PERCENT";
/// Percent of this process's cells: it runs until so many are free.
pub const ENV_HIGH_WATER: &str = "DYN_KVBM_CXL_HIGH_WATER_PERCENT";

/// A folder for a record of what this process asks for and stores, as salted ids of blocks: for `cxlctl record` and `cxl-plan`. Without it
/// nothing is recorded.
pub const ENV_RECORD_DIR: &str = "DYN_KVBM_CXL_RECORD_DIR";
/// A secret that the recorded ids depend on, the same on all hosts whose records are to be merged.
pub const ENV_RECORD_SALT: &str = "DYN_KVBM_CXL_RECORD_SALT";
/// Longest record of a process, in bytes; a gibibyte by default. Later entries are dropped and counted.
pub const ENV_RECORD_MAX_BYTES: &str = "DYN_KVBM_CXL_RECORD_MAX_BYTES";

/// Where a process records what it asks for and stores.
#[derive(Clone)]
pub struct RecordConfig {
    /// The folder.
    pub directory: PathBuf,
    /// The secret that ids depend on.
    pub salt: String,
    /// Longest file, in bytes.
    pub most_bytes: u64,
}

impl std::fmt::Debug for RecordConfig {
    /// Without the salt.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RecordConfig {{ directory: {:?}, most_bytes: {} }}", self.directory, self.most_bytes)
    }
}

/// Which pool, and how its cache behaves.
#[derive(Clone, Debug)]
pub struct TierConfig {
    /// The pool. It was formatted before, with cells that hold a block.
    pub pool: PoolSpec,
    /// Checksums and water marks among others.
    pub cache: CacheConfig,
    /// Where requests are recorded, if they are.
    pub record: Option<RecordConfig>,
}

impl TierConfig {
    /// A pool with the defaults of the cache.
    pub fn new(pool: PoolSpec) -> TierConfig {
        TierConfig { pool, cache: CacheConfig::default(), record: None }
    }

    /// What the environment says.
    ///
    /// # Errors
    /// [`Error::Variable`] for a value that cannot be used; [`Error::Pool`] when the pool is not named or its name cannot be read.
    pub fn from_env() -> Result<TierConfig> {
        Self::from(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    fn from(said: impl Fn(&str) -> Option<String>) -> Result<TierConfig> {
        let pool = match said(ENV_POOL) {
            Some(text) => PoolSpec::parse(&text)?,
            None => PoolSpec::from_env()?,
        };
        let mut config = TierConfig::new(pool);
        if let Some(value) = said(ENV_CHECKSUMS) {
            config.cache.checksums = truth(ENV_CHECKSUMS, value)?;
        }
        if let Some(value) = said(ENV_LOW_WATER) {
            config.cache.low_water_percent = percent(ENV_LOW_WATER, value)?;
        }
        if let Some(value) = said(ENV_HIGH_WATER) {
            config.cache.high_water_percent = percent(ENV_HIGH_WATER, value)?;
        }
        config.record = record(&said)?;
        Ok(config)
    }
}

fn record(said: &impl Fn(&str) -> Option<String>) -> Result<Option<RecordConfig>> {
    let not_empty = |name| said(name).filter(|value| !value.is_empty());
    let Some(directory) = not_empty(ENV_RECORD_DIR) else { return Ok(None) };
    let expected = "set it to a secret for the ids that are recorded, the same on all hosts whose records are to be merged";
    let missing = || Error::Variable { name: ENV_RECORD_SALT, value: String::new(), expected };
    let salt = not_empty(ENV_RECORD_SALT).ok_or_else(missing)?;
    let most_bytes = match said(ENV_RECORD_MAX_BYTES) {
        None => 1 << 30,
        Some(value) => match value.trim().parse() {
            Ok(number @ 1024..) => number,
            _ => return Err(Error::Variable { name: ENV_RECORD_MAX_BYTES, value, expected: "set it to a number of bytes, at least 1024" }),
        },
    };
    Ok(Some(RecordConfig { directory: directory.into(), salt, most_bytes }))
}

fn truth(name: &'static str, value: String) -> Result<bool> {
    match value.trim().to_ascii_lowercase().as_str() {
        "1" | "true" | "on" | "yes" => Ok(true),
        "0" | "false" | "off" | "no" | "" => Ok(false),
        _ => Err(Error::Variable { name, value, expected: "set it to 1, true, on or yes, or to 0, false, off or no" }),
    }
}

fn percent(name: &'static str, value: String) -> Result<u32> {
    match value.trim().parse() {
        Ok(number @ 0..=90) => Ok(number),
        _ => Err(Error::Variable { name, value, expected: "set it to a number from 0 to 90" }),
    }
}

#[cfg(test)]
mod tests;
