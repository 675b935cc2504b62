// SPDX-License-Identifier: Apache-2.0
//! Which CPU instruction does each step: the choices of this machine, the default, and how a choice is written.
//!
//! `cxlctl doctor` measures every available choice; `CXL_COHERENCE` or a configuration picks one. A choice is made once, when a mapping
//! is opened, so that a step costs one predictable branch.
//!
//! CLWB is offered for writing only: it may leave the line in the cache, so it cannot serve as the flush of a fetch.

use super::arch;
use crate::error::{Error, Result};
use crate::limits::LINE_BYTES;
use std::fmt;
use std::str::FromStr;

/// What this CPU offers beyond its architecture's base line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuFeatures {
    /// x86-64: MOVDIR64B, one 64-byte direct store.
    pub movdir64b: bool,
    /// x86-64: ENQCMD, which submits work to a device.
    pub enqcmd: bool,
    /// x86-64: AVX-512F, usable under this operating system.
    pub avx512: bool,
    /// x86-64: AVX2, usable under this operating system.
    pub avx2: bool,
    /// x86-64: CLFLUSHOPT.
    pub clflushopt: bool,
    /// x86-64: CLWB.
    pub clwb: bool,
    /// What one flush covers, in bytes. Anything but 64 is refused: a flush would touch lines of other owners, or half a line.
    pub line_bytes: usize,
}

impl CpuFeatures {
    /// Asks the CPU.
    pub fn detect() -> Self {
        arch::features()
    }
}

/// What one data cache maintenance operation covers on aarch64: CTR_EL0.DminLine is the logarithm of its 4-byte words.
#[cfg(any(target_arch = "aarch64", test))]
pub(super) fn arm_line_bytes(ctr_el0: u64) -> usize {
    4 << (ctr_el0 >> 16 & 0xf)
}

const X86: bool = cfg!(target_arch = "x86_64");
const ARM: bool = cfg!(target_arch = "aarch64");

/// Defines one role: its instructions in order of preference, their names, and what makes each available.
macro_rules! role {
    ($(#[$doc:meta])* $role:ident, $what:literal, |$cpu:ident| {
        $($(#[$variant_doc:meta])* $variant:ident = $name:literal if $available:expr),* $(,)?
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $role {
            $($(#[$variant_doc])* $variant,)*
        }

        impl $role {
            /// Every choice there is, on whatever machine, in order of preference.
            pub const ALL: &'static [$role] = &[$($role::$variant),*];

            /// How the choice is written.
            pub fn name(self) -> &'static str {
                match self {
                    $($role::$variant => $name,)*
                }
            }

            /// Whether a machine with these features has it.
            pub fn is_available(self, $cpu: &CpuFeatures) -> bool {
                match self {
                    $($role::$variant => $available,)*
                }
            }

            /// The choices of this machine, in order of preference. Never empty.
            pub fn available() -> Vec<$role> {
                let cpu = CpuFeatures::detect();
                $role::ALL.iter().copied().filter(|choice| choice.is_available(&cpu)).collect()
            }

            fn best(cpu: &CpuFeatures) -> Result<$role> {
                $role::ALL.iter().copied().find(|choice| choice.is_available(cpu)).ok_or_else(|| Self::missing("this CPU"))
            }

            fn missing(text: &str) -> Error {
                let names: Vec<_> = Self::available().iter().map(|choice| choice.name()).collect();
                Error::Invalid(format!("{text} has no part in {}; this machine offers {}", $what, names.join(", ")))
            }
        }

        impl fmt::Display for $role {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }

        impl FromStr for $role {
            type Err = Error;

            fn from_str(text: &str) -> Result<Self> {
                $role::ALL.iter().copied().find(|choice| choice.name() == text).ok_or_else(|| Self::missing(text))
            }
        }
    };
}

role! {
    /// Writes a whole line.
    LineWrite, "writing a line", |cpu| {
        /// x86-64: MOVDIR64B, architecturally one 64-byte write.
        Movdir64b = "movdir64b" if cpu.movdir64b,
        /// x86-64: one 64-byte non-temporal store.
        Avx512 = "avx512" if cpu.avx512,
        /// aarch64: eight stores, then DC CVAC (write back, keep). A write-back between the stores tears the line.
        StoresDcCvac = "stores-dccvac" if ARM,
        /// x86-64: eight stores, then CLWB: the line stays, for the next write to it, and a fetch drops it as it drops any other. A
        /// write-back between the stores tears the line.
        StoresClwb = "stores-clwb" if cpu.clwb,
        /// Eight stores, then the flush of [`LineFlush`]. A write-back between the stores tears the line.
        StoresFlush = "stores-flush" if true,
    }
}

role! {
    /// Writes a line back and drops it.
    LineFlush, "flushing a line", |cpu| {
        /// x86-64: CLFLUSH. Ordered against other flushes and stores; the default for metadata.
        Clflush = "clflush" if X86,
        /// x86-64: CLFLUSHOPT. Flushes overlap; the default for ranges.
        Clflushopt = "clflushopt" if cpu.clflushopt,
        /// aarch64: DC CIVAC.
        DcCivac = "dccivac" if ARM,
    }
}

role! {
    /// Copies whole lines into the pool past the caches.
    LineCopy, "copying in", |cpu| {
        /// x86-64: 64-byte non-temporal stores.
        Avx512 = "avx512" if cpu.avx512,
        /// x86-64: 32-byte non-temporal stores.
        Avx2 = "avx2" if cpu.avx2,
        /// x86-64: 16-byte non-temporal stores.
        Sse2 = "sse2" if X86,
        /// aarch64: STNP, then DC CVAC, because the non-temporal hint alone does not leave the cache.
        Stnp = "stnp" if ARM,
    }
}

role! {
    /// Loads a whole line.
    LineLoad, "loading a line", |cpu| {
        /// x86-64: one 64-byte load.
        Avx512 = "avx512" if cpu.avx512,
        /// Loads of 8 bytes, on x86-64 of 16.
        Words = "words" if true,
    }
}

/// One instruction for each role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Instructions {
    /// Whole-line writes.
    pub write: LineWrite,
    /// Flushes of single lines, that is of metadata.
    pub flush: LineFlush,
    /// Flushes of ranges, that is of payload. The callers' fences make both kinds equally safe.
    pub range: LineFlush,
    /// Copies into the pool.
    pub copy: LineCopy,
    /// Whole-line loads.
    pub load: LineLoad,
}

impl Instructions {
    /// The defaults for this machine.
    ///
    /// # Errors
    /// [`Error::Invalid`] when its cache line is not 64 bytes.
    pub fn best() -> Result<Self> {
        let cpu = CpuFeatures::detect();
        let flush = LineFlush::best(&cpu)?;
        let range = if cpu.clflushopt { LineFlush::Clflushopt } else { flush };
        let best = Instructions { write: LineWrite::best(&cpu)?, flush, range, copy: LineCopy::best(&cpu)?, load: LineLoad::best(&cpu)? };
        best.check(&cpu)?;
        Ok(best)
    }

    /// Reads `role=instruction` pairs separated by commas, such as `write=avx512,flush=clflushopt`; roles not named keep their default.
    pub fn parse(text: &str) -> Result<Self> {
        let mut chosen = Self::best()?;
        for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some(("write", name)) => chosen.write = name.parse()?,
                Some(("flush", name)) => chosen.flush = name.parse()?,
                Some(("range", name)) => chosen.range = name.parse()?,
                Some(("copy", name)) => chosen.copy = name.parse()?,
                Some(("load", name)) => chosen.load = name.parse()?,
                _ => return Err(Error::Invalid(format!("{pair:?}: want write=, flush=, range=, copy= or load= and an instruction"))),
            }
        }
        chosen.check(&CpuFeatures::detect())?;
        Ok(chosen)
    }

    /// Whether a line is written by one instruction and loaded by one.
    pub fn keep_lines_whole(&self) -> bool {
        matches!(self.write, LineWrite::Movdir64b | LineWrite::Avx512) && self.load == LineLoad::Avx512
    }

    /// Refuses what a machine with these features would not survive executing.
    pub fn check(&self, cpu: &CpuFeatures) -> Result<()> {
        if cpu.line_bytes != LINE_BYTES {
            return Err(Error::Invalid(format!("this CPU flushes {} bytes at a time, the pool needs {LINE_BYTES}", cpu.line_bytes)));
        }
        let roles = [
            (self.write.is_available(cpu), self.write.name()),
            (self.flush.is_available(cpu), self.flush.name()),
            (self.range.is_available(cpu), self.range.name()),
            (self.copy.is_available(cpu), self.copy.name()),
            (self.load.is_available(cpu), self.load.name()),
        ];
        match roles.iter().find(|(available, _)| !available) {
            Some((_, name)) => Err(Error::Invalid(format!("this CPU has no {name}"))),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Instructions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "write={},flush={},range={},copy={},load={}", self.write, self.flush, self.range, self.copy, self.load)
    }
}

#[cfg(test)]
mod tests;
