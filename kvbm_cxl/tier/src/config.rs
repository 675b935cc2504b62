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
mod tests {
    use super::*;

    fn with(pairs: &[(&str, &str)]) -> Result<TierConfig> {
        let pairs: Vec<(String, String)> = pairs.iter().map(|&(name, value)| (name.into(), value.into())).collect();
        TierConfig::from(move |asked| pairs.iter().find(|(name, _)| name == asked).map(|(_, value)| value.clone()))
    }

    #[test]
    fn every_variable_is_heard() {
        let config =
            with(&[(ENV_POOL, "/dev/shm/some-pool,size=64M"), (ENV_CHECKSUMS, "On"), (ENV_LOW_WATER, "7"), (ENV_HIGH_WATER, " 21 ")])
                .unwrap();
        assert_eq!(config.pool.size_bytes(), Some(64 << 20));
        assert_eq!((config.cache.checksums, config.cache.low_water_percent, config.cache.high_water_percent), (true, 7, 21));
        let config = with(&[(ENV_POOL, "/dev/dax0.0"), (ENV_CHECKSUMS, "no")]).unwrap();
        let otherwise = CacheConfig::default();
        assert_eq!((config.cache.checksums, config.cache.low_water_percent), (false, otherwise.low_water_percent));
    }

    #[test]
    fn a_record_takes_a_folder_and_a_salt() {
        let pool = (ENV_POOL, "/dev/dax0.0");
        let said = with(&[pool, (ENV_RECORD_DIR, "/records"), (ENV_RECORD_SALT, "s3cret"), (ENV_RECORD_MAX_BYTES, "4096")]).unwrap();
        let record = said.record.clone().unwrap();
        assert_eq!((record.directory, record.salt.as_str(), record.most_bytes), ("/records".into(), "s3cret", 4096));
        assert!(!format!("{said:?}").contains("s3cret"));
        assert!(with(&[pool, (ENV_RECORD_SALT, "s3cret")]).unwrap().record.is_none());
        let told = with(&[pool, (ENV_RECORD_DIR, "/records")]).unwrap_err().to_string();
        assert!(told.contains(ENV_RECORD_SALT), "{told}");
        let told = with(&[pool, (ENV_RECORD_DIR, "/r"), (ENV_RECORD_SALT, "s"), (ENV_RECORD_MAX_BYTES, "9")]).unwrap_err().to_string();
        assert!(told.contains(ENV_RECORD_MAX_BYTES) && told.contains('9'), "{told}");
    }

    #[test]
    fn a_wrong_value_names_its_variable() {
        for (name, wrong) in [(ENV_CHECKSUMS, "perhaps"), (ENV_LOW_WATER, "91"), (ENV_HIGH_WATER, "-1"), (ENV_HIGH_WATER, "5%")] {
            let told = with(&[(ENV_POOL, "/dev/dax0.0"), (name, wrong)]).unwrap_err().to_string();
            assert!(told.contains(name) && told.contains(wrong), "{told}");
        }
        assert!(matches!(with(&[(ENV_POOL, "")]), Err(Error::Pool(_))));
    }
}
