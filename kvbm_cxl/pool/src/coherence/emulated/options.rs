// SPDX-License-Identifier: Apache-2.0
//! The emulator's settings, and how they are written.

use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// The emulator's settings, written as `seed=7,noise=4,copy_mib=256`; what is not named keeps its default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmulatorOptions {
    /// Seed of the noise and of the order in which fences apply pending steps.
    pub seed: u64,
    /// One step in `noise` evicts, writes back or prefetches some line that was used lately, or applies a pending step early; 0 never.
    pub noise: u32,
    /// How much of the pool the view holds from the start, in MiB. See [`super::Emulated`].
    pub copy_mib: u32,
}

impl Default for EmulatorOptions {
    fn default() -> Self {
        EmulatorOptions { seed: 1, noise: 16, copy_mib: 256 }
    }
}

impl FromStr for EmulatorOptions {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut options = Self::default();
        for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let invalid = |_| Error::Invalid(format!("emulator: {pair:?} is not a number that fits"));
            match pair.split_once('=') {
                Some(("seed", value)) => options.seed = value.parse().map_err(invalid)?,
                Some(("noise", value)) => options.noise = value.parse().map_err(invalid)?,
                Some(("copy_mib", value)) => options.copy_mib = value.parse().map_err(invalid)?,
                _ => return Err(Error::Invalid(format!("emulator: {pair:?}: want seed=, noise= or copy_mib= and a number"))),
            }
        }
        Ok(options)
    }
}

impl fmt::Display for EmulatorOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed={},noise={},copy_mib={}", self.seed, self.noise, self.copy_mib)
    }
}
