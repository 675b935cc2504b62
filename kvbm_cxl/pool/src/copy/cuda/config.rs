// SPDX-License-Identifier: Apache-2.0
//! Where the CUDA driver is, and how long it may take.

use crate::error::{Error, Result};

/// The environment variable with the driver's library; `none` = GPU memory is not offered. The NIXL plugin's option `cuda_library` says the
/// same there.
pub const LIBRARY_ENVIRONMENT: &str = "CXL_CUDA_LIBRARY";
/// The environment variable with the time that a copy may take, in milliseconds.
pub const TIMEOUT_ENVIRONMENT: &str = "CXL_CUDA_TIMEOUT_MS";

/// What engines for GPUs are opened with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaConfig {
    /// The driver's library, a name that the loader finds or a path; `none` = GPU memory is not offered.
    pub library: String,
    /// Longest time for one call of an engine, in milliseconds: what the copy has to come after, and the copy.
    pub timeout_ms: u64,
    /// Bytes of the pool that are registered at a time, a power of two of at least 4096. It bounds how long the first use of a part of the
    /// pool takes. What is registered is held in memory: of a file that has holes, they are filled.
    pub granule_bytes: u64,
    /// Bytes of each of the two pinned buffers of a copy that goes through them, a multiple of 64 of at least 4096.
    pub buffer_bytes: usize,
}

impl Default for CudaConfig {
    fn default() -> Self {
        CudaConfig { library: "libcuda.so.1".into(), timeout_ms: 10_000, granule_bytes: 256 << 20, buffer_bytes: 4 << 20 }
    }
}

impl CudaConfig {
    /// What the environment says, the defaults where it says nothing.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the variable that is wrong.
    pub fn from_env() -> Result<Self> {
        let text = |name: &str| match std::env::var(name) {
            Ok(text) if !text.is_empty() => Ok(Some(text)),
            Ok(_) | Err(std::env::VarError::NotPresent) => Ok(None),
            Err(error) => Err(Error::Invalid(format!("{name}: {error}"))),
        };
        let mut config = Self::default();
        if let Some(library) = text(LIBRARY_ENVIRONMENT)? {
            config.library = library;
        }
        if let Some(number) = text(TIMEOUT_ENVIRONMENT)? {
            let wrong = || Error::Invalid(format!("{TIMEOUT_ENVIRONMENT}: {number:?} is no number of milliseconds"));
            config.timeout_ms = number.parse().map_err(|_| wrong())?;
        }
        config.check().map(|()| config)
    }

    /// Refuses numbers that cannot be meant.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the number.
    pub fn check(&self) -> Result<()> {
        if !(1..=3_600_000).contains(&self.timeout_ms) {
            return Err(Error::Invalid(format!("time for a copy of a GPU: {} ms is not between 1 ms and an hour", self.timeout_ms)));
        }
        if self.granule_bytes < 4096 || !self.granule_bytes.is_power_of_two() {
            return Err(Error::Invalid(format!("{} bytes to register at a time: want a power of two from 4096 on", self.granule_bytes)));
        }
        if self.buffer_bytes < 4096 || !self.buffer_bytes.is_multiple_of(64) || self.buffer_bytes > 1 << 30 {
            return Err(Error::Invalid(format!("pinned buffers of {} bytes: want a multiple of 64 from 4096 to 2^30", self.buffer_bytes)));
        }
        Ok(())
    }
}
