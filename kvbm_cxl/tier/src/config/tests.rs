// SPDX-License-Identifier: Apache-2.0

use super::*;

fn with(pairs: &[(&str, &str)]) -> Result<TierConfig> {
    let pairs: Vec<(String, String)> = pairs.iter().map(|&(name, value)| (name.into(), value.into())).collect();
    TierConfig::from(move |asked| pairs.iter().find(|(name, _)| name == asked).map(|(_, value)| value.clone()))
}

#[test]
fn every_variable_is_heard() {
    let config =
        with(&[(ENV_POOL, "/dev/shm/some-pool,size=64M"), (ENV_CHECKSUMS, "On"), (ENV_LOW_WATER, "7"), (ENV_HIGH_WATER, " 21 ")]).unwrap();
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
