// SPDX-License-Identifier: Apache-2.0
//! How the cache of a process behaves.

use super::Namespace;
use super::policy::PolicyKind;
use crate::copy::{CopyConfig, CudaConfig};
use crate::error::{Error, Result};
use crate::host::Host;
use crate::metrics::Metrics;
use std::collections::HashMap;
use std::sync::Arc;

/// How the cache of a process behaves.
#[derive(Clone, Debug)]
pub struct CacheConfig {
    /// Order in which this process evicts its blocks.
    pub policy: PolicyKind,
    /// Computes a checksum of every payload while it is copied in, and compares it while a whole block is copied out.
    pub checksums: bool,
    /// The background evictor begins when less than this part of this process's cells is free, in hundredths, and no chunk is left to
    /// claim.
    pub low_water_percent: u32,
    /// It continues until this part is free, in hundredths.
    pub high_water_percent: u32,
    /// Bytes of cells that a namespace may take of this process's, reserved ones and those of blocks together; others may take what they
    /// find.
    pub quotas: HashMap<Namespace, u64>,
    /// The same for each namespace that `quotas` does not name; `None` = no bound.
    pub quota_bytes: Option<u64>,
    /// Longest wait for a lock of the cache, in milliseconds; `None` = [`crate::host::HostConfig::default_timeout_ms`] of the host.
    pub lock_timeout_ms: Option<u64>,
    /// Period of the service, in milliseconds.
    pub service_ms: u64,
    /// Period of what the service does less often (other hosts' chunks, scrub, counters), in milliseconds.
    pub upkeep_ms: u64,
    /// Keys whose cell this process remembers, 8 bytes each; no more than eight for each cell of the pool.
    pub remembered_keys: usize,
    /// How payload is copied; `None` = as `CXL_COPY` says.
    pub copy: Option<CopyConfig>,
    /// How payload is copied to and from GPUs; `None` = as the environment says.
    pub cuda: Option<CudaConfig>,
    /// What the cache counts with; `None` = metrics of its own. A membership ([`crate::host::Host`]) has one place among its host's
    /// counters, so whatever else counts for the same one has to use the same.
    pub metrics: Option<Arc<Metrics>>,
}

impl Default for CacheConfig {
    fn default() -> Self {
        CacheConfig {
            policy: PolicyKind::default(),
            checksums: false,
            low_water_percent: 5,
            high_water_percent: 10,
            quotas: HashMap::new(),
            quota_bytes: None,
            lock_timeout_ms: None,
            service_ms: 20,
            upkeep_ms: 500,
            remembered_keys: 1 << 16,
            copy: None,
            cuda: None,
            metrics: None,
        }
    }
}

impl CacheConfig {
    /// Bytes of this process's cells that a namespace may take, if there is a bound.
    pub(super) fn quota_of(&self, namespace: &Namespace) -> Option<u64> {
        self.quotas.get(namespace).copied().or(self.quota_bytes)
    }

    /// Longest wait for a lock of the cache of `host`.
    pub fn lock_timeout_ms(&self, host: &Host) -> u64 {
        self.lock_timeout_ms.unwrap_or_else(|| host.config().default_timeout_ms())
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.low_water_percent > self.high_water_percent || self.high_water_percent > 90 {
            return Err(Error::Invalid(format!(
                "the water marks {} and {} percent cannot be: low must not be above high, nor high above 90",
                self.low_water_percent, self.high_water_percent
            )));
        }
        if self.service_ms == 0 || self.upkeep_ms == 0 || self.remembered_keys > 1 << 30 {
            return Err(Error::Invalid("the periods of the service must be at least a millisecond, the keys at most 2^30".into()));
        }
        Ok(())
    }
}
