// SPDX-License-Identifier: Apache-2.0
//! The emulator's settings, and how they are written.

use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// The emulator's settings, written as `seed=7,noise=4,copy_mib=256,dma=uncached`; an unnamed setting keeps its default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmulatorOptions {
    /// Seed of the noise and of the order in which fences apply pending steps.
    pub seed: u64,
    /// One step in `noise` evicts, writes back or prefetches some line that was used lately, or applies a pending step early; 0 never.
    pub noise: u32,
    /// How much of the pool the view holds from the start, in MiB. See [`super::Emulated`].
    pub copy_mib: u32,
    /// Devices of the host read and write the memory itself, past its view: a platform whose memory is uncacheable and whose I/O leaves
    /// nothing in caches. Without it, all that a device reads and writes lies in the view.
    pub is_dma_uncached: bool,
}

impl Default for EmulatorOptions {
    fn default() -> Self {
        EmulatorOptions { seed: 1, noise: 16, copy_mib: 256, is_dma_uncached: false }
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
                Some(("dma", "cached")) => options.is_dma_uncached = false,
                Some(("dma", "uncached")) => options.is_dma_uncached = true,
                _ => {
                    let wanted = "want seed=, noise= or copy_mib= and a number, or dma=cached or dma=uncached";
                    return Err(Error::Invalid(format!("emulator: {pair:?}: {wanted}")));
                }
            }
        }
        Ok(options)
    }
}

impl fmt::Display for EmulatorOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dma = if self.is_dma_uncached { "uncached" } else { "cached" };
        write!(f, "seed={},noise={},copy_mib={},dma={dma}", self.seed, self.noise, self.copy_mib)
    }
}
