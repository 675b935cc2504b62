// SPDX-License-Identifier: Apache-2.0
//! Where the CUDA driver is, what this host's platform does with DMA, and the sizes that the engine works with.

use crate::device::parse_size;
use crate::error::{Error, Result};
use std::str::FromStr;

/// The environment variable with the driver's library; `none` = GPU memory is not offered. The NIXL plugin's option `cuda_library` says the
/// same there.
pub const LIBRARY_ENVIRONMENT: &str = "CXL_CUDA_LIBRARY";
/// The environment variable with whether this host's platform keeps what GPUs read and write out of its caches.
pub const DMA_ENVIRONMENT: &str = "CXL_CUDA_DMA";
/// The environment variable with how much of the pool is registered while a GPU is opened for it.
pub const REGISTER_BYTES_ENVIRONMENT: &str = "CXL_CUDA_REGISTER_BYTES";

/// The environment variable with how many threads register the pool, and flush around the copies of a GPU.
pub const THREADS_ENVIRONMENT: &str = "CXL_CUDA_THREADS";
/// Most threads.
const MAX_THREADS: u32 = 64;

/// Four flush as fast as a link of PCIe 5 moves bytes; fewer where that is more than half of the CPUs.
fn default_threads() -> u32 {
    let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
    (processors / 2).clamp(1, 4) as u32
}

/// What this host's platform does with the lines of the pool that a GPU reads and writes: a property of its BIOS settings and of the type
/// that the pool's memory has (docs/internals/gpu.md), which no program can see from within. Lines that the pool keeps for itself are
/// always flushed; this is about payload that a GPU copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dma {
    /// I/O may go through this host's caches: payload is flushed around the copies of a GPU. Right on every platform.
    #[default]
    Cached,
    /// The pool's memory is uncacheable here, and I/O leaves nothing in caches (DDIO is off): payload is not flushed around the copies of
    /// a GPU. On a platform for which that is not so, others see old bytes.
    Uncached,
}

impl Dma {
    const ALL: [(Dma, &'static str); 2] = [(Dma::Cached, "cached"), (Dma::Uncached, "uncached")];

    /// Its name.
    pub fn text(self) -> &'static str {
        Self::ALL.iter().find(|of| of.0 == self).map_or("cached", |of| of.1)
    }
}

impl FromStr for Dma {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || Error::Invalid(format!("DMA of GPUs is {text:?}: want cached or uncached"));
        Self::ALL.iter().find(|of| of.1 == text).map(|of| of.0).ok_or_else(wrong)
    }
}

/// What engines for GPUs are opened with. An operator decides the first four; the others have one right value outside of tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaConfig {
    /// The driver's library, a name that the loader finds or a path; `none` = GPU memory is not offered.
    pub library: String,
    /// What this host's platform does with lines that a GPU reads and writes.
    pub dma: Dma,
    /// Bytes of the pool, from its beginning, that [`super::CudaEngine::register_ahead`] registers; `u64::MAX` = all. A copy registers the
    /// rest when it first needs it.
    pub register_bytes: u64,
    /// Threads that register the pool, and that flush payload around the copies of a GPU; the thread that asks is one of them.
    pub threads: u32,
    /// Longest time for one call of an engine, in milliseconds: what the copy has to come after, and the copy.
    pub timeout_ms: u64,
    /// Bytes of the pool that are registered at a time, a power of two of at least 4096. It bounds how long the first use of a part of the
    /// pool takes. Registered parts are held in memory: holes of a file are filled.
    pub granule_bytes: u64,
    /// Bytes of each of the two pinned buffers of a copy that goes through them, a multiple of 64 of at least 4096.
    pub buffer_bytes: usize,
    /// Blocks of 256 threads of a kernel: what it takes of the GPU, and how many KiB times 8 it has under way.
    pub kernel_blocks: u32,
    /// Most bytes of a step of a call, where the GPU reaches the pool itself: it copies one while threads flush another. A list with a
    /// checksum is in one step, however long. It bounds the GPU memory that a kernel's tables take: about a tenth of this.
    pub part_bytes: usize,
    /// Bytes of the copies of one GPU that streams order and that have not ended ([`super::QueueRoom`]); a call that is above it waits, or
    /// is refused. It bounds the GPU memory that the tables of their kernels take: about a tenth of this.
    pub queued_bytes: u64,
}

impl Default for CudaConfig {
    fn default() -> Self {
        CudaConfig {
            library: "libcuda.so.1".into(),
            dma: Dma::Cached,
            register_bytes: u64::MAX,
            threads: default_threads(),
            timeout_ms: 10_000,
            granule_bytes: 256 << 20,
            buffer_bytes: 4 << 20,
            kernel_blocks: 32,
            part_bytes: 16 << 20,
            queued_bytes: 256 << 20,
        }
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
        if let Some(dma) = text(DMA_ENVIRONMENT)? {
            config.dma = dma.parse().map_err(|error| Error::Invalid(format!("{DMA_ENVIRONMENT}: {error}")))?;
        }
        if let Some(size) = text(REGISTER_BYTES_ENVIRONMENT)? {
            config.register_bytes = parse_size(&size).map_err(|error| Error::Invalid(format!("{REGISTER_BYTES_ENVIRONMENT}: {error}")))?;
        }
        if let Some(count) = text(THREADS_ENVIRONMENT)? {
            let threads = count.parse().ok().filter(|threads| (1..=MAX_THREADS).contains(threads));
            config.threads = threads.ok_or_else(|| Error::Invalid(format!("{THREADS_ENVIRONMENT}: {count:?}: want 1 to {MAX_THREADS}")))?;
        }
        Ok(config)
    }

    /// Refuses sizes of registrations and buffers that the engine cannot work with.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the number.
    pub fn check(&self) -> Result<()> {
        if self.granule_bytes < 4096 || !self.granule_bytes.is_power_of_two() {
            return Err(Error::Invalid(format!("{} bytes to register at a time: want a power of two from 4096 on", self.granule_bytes)));
        }
        if self.buffer_bytes < 4096 || !self.buffer_bytes.is_multiple_of(64) || self.buffer_bytes > 1 << 30 {
            return Err(Error::Invalid(format!("pinned buffers of {} bytes: want a multiple of 64 from 4096 to 2^30", self.buffer_bytes)));
        }
        Ok(())
    }
}
