// SPDX-License-Identifier: Apache-2.0
//! How a mapping is to be used, and the one constructor for it.
//!
//! `CXL_COHERENCE` is `native` (the default), `native:` and [`Instructions`] as text, or `emulated:` and [`EmulatorOptions`] as text:
//!
//! ```text
//! CXL_COHERENCE=native:write=avx512,flush=clflushopt
//! CXL_COHERENCE=emulated:seed=7,noise=4
//! ```

use super::Coherence;
use super::emulated::{Emulated, EmulatorOptions};
use super::faultmap::FaultMap;
use super::instructions::Instructions;
use super::mapping::Mapping;
use super::native::Native;
use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The environment variable that [`CoherenceOptions::from_env`] reads.
pub const ENVIRONMENT: &str = "CXL_COHERENCE";

/// How a mapping is to be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CoherenceOptions {
    /// Instructions to use; `None` means the best of this machine.
    pub instructions: Option<Instructions>,
    /// The pool is in `hardware` coherence mode: flushes are elided. Says the superblock, never a user.
    pub hardware: bool,
    /// Emulates a host that is not coherent with others, instead of using the mapping directly.
    pub emulator: Option<EmulatorOptions>,
}

impl CoherenceOptions {
    /// The options that `CXL_COHERENCE` gives, or the defaults where it is not set.
    pub fn from_env() -> Result<Self> {
        match std::env::var(ENVIRONMENT) {
            Ok(text) => text.parse(),
            Err(std::env::VarError::NotPresent) => Ok(Self::default()),
            Err(error) => Err(Error::Invalid(format!("{ENVIRONMENT}: {error}"))),
        }
    }
}

impl FromStr for CoherenceOptions {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (kind, rest) = text.trim().split_once(':').unwrap_or((text.trim(), ""));
        match kind {
            "" | "native" if rest.is_empty() => Ok(Self::default()),
            "native" => Ok(CoherenceOptions { instructions: Some(Instructions::parse(rest)?), ..Self::default() }),
            "emulated" => Ok(CoherenceOptions { emulator: Some(rest.parse()?), ..Self::default() }),
            _ => Err(Error::Invalid(format!("{ENVIRONMENT}: {text:?} begins with neither \"native\" nor \"emulated\""))),
        }
    }
}

/// A pool in use: the steps on it, and its damage.
#[derive(Clone)]
pub struct MappedMemory {
    /// The steps.
    pub memory: Arc<dyn Coherence>,
    /// Poisoned ranges and lost devices.
    pub faults: Arc<FaultMap>,
    /// What the steps are made of, for reports.
    pub description: String,
}

impl fmt::Debug for MappedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MappedMemory({})", self.description)
    }
}

/// Puts a mapping to use: takes it under guard and sets the chosen implementation on it.
///
/// # Errors
/// [`Error::Invalid`] when mapping or options contradict themselves or this CPU, [`Error::Full`] when too many mappings are open.
pub fn over_mapping(mapping: Mapping, options: &CoherenceOptions) -> Result<MappedMemory> {
    let faults = Arc::new(FaultMap::new(mapping)?);
    let instructions = match options.instructions {
        Some(instructions) => instructions,
        None => Instructions::best()?,
    };
    if options.hardware && options.emulator.is_some() {
        return Err(Error::Invalid("a pool in hardware coherence mode has no use for an emulator of hosts without coherence".into()));
    }
    let (memory, description): (Arc<dyn Coherence>, String) = match &options.emulator {
        Some(emulator) => (Arc::new(Emulated::new(faults.clone(), *emulator)?), format!("emulated:{emulator}")),
        None => {
            let elided = if options.hardware { " (hardware coherence: no flushes)" } else { "" };
            (Arc::new(Native::new(faults.clone(), instructions, options.hardware)?), format!("native:{instructions}{elided}"))
        }
    };
    Ok(MappedMemory { memory, faults, description })
}

#[cfg(test)]
mod tests;
