// SPDX-License-Identifier: Apache-2.0
//! Where the CUDA driver and the kernels are, when kernels are used, and how long the driver may take.

use crate::device::parse_size;
use crate::error::{Error, Result};
use std::str::FromStr;

/// The environment variable with the driver's library; `none` = GPU memory is not offered. The NIXL plugin's option `cuda_library` says the
/// same there.
pub const LIBRARY_ENVIRONMENT: &str = "CXL_CUDA_LIBRARY";
/// The environment variable with the time that a copy may take, in milliseconds.
pub const TIMEOUT_ENVIRONMENT: &str = "CXL_CUDA_TIMEOUT_MS";

/// The environment variable with where kernels come from: `builtin`, `none`, or the path of a file with PTX or a cubin.
pub const KERNELS_ENVIRONMENT: &str = "CXL_CUDA_KERNELS";
/// The environment variable with the mean length up to which pieces are moved by a kernel, in bytes.
pub const KERNEL_PIECE_ENVIRONMENT: &str = "CXL_CUDA_KERNEL_PIECE_BYTES";
/// The environment variable with the number of pieces from which on they are moved by a kernel.
pub const KERNEL_PIECES_ENVIRONMENT: &str = "CXL_CUDA_KERNEL_PIECES";
/// The environment variable with the number of pieces from which on copy engines are given them in one call.
pub const BATCH_PIECES_ENVIRONMENT: &str = "CXL_CUDA_BATCH_PIECES";

/// The environment variable with how many bytes of copies that streams order may be under way.
pub const QUEUED_BYTES_ENVIRONMENT: &str = "CXL_CUDA_QUEUED_BYTES";

/// The environment variable with whether this host's platform keeps what GPUs read and write out of its caches.
pub const DMA_ENVIRONMENT: &str = "CXL_CUDA_DMA";

/// The environment variable with whether the pool is registered while a GPU is opened for it.
pub const REGISTER_AT_START_ENVIRONMENT: &str = "CXL_CUDA_REGISTER_AT_START";
/// The environment variable with how much of the pool that is.
pub const REGISTER_BYTES_ENVIRONMENT: &str = "CXL_CUDA_REGISTER_BYTES";
/// The environment variable with whether a GPU for which that is refused is refused itself.
pub const REGISTER_REQUIRED_ENVIRONMENT: &str = "CXL_CUDA_REGISTER_REQUIRED";

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

/// The kernels that this library has.
pub(super) const BUILTIN: &str = "builtin";

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
    /// Where kernels come from: `builtin` = what this library has, `none` = there are none, else a file with PTX or a cubin.
    pub kernels: String,
    /// Pieces of at most so many bytes on average are moved by a kernel, longer ones by the GPU's copy engines; 0 = all by copy engines.
    /// Lists with checksums are moved by a kernel whatever this says, as the other way is through buffers.
    pub kernel_piece_bytes: u64,
    /// From so many pieces on they are moved by a kernel. Lists with checksums as above.
    pub kernel_pieces: usize,
    /// From so many pieces on copy engines are given them in one call, where the driver has batches; one by one otherwise.
    pub batch_pieces: usize,
    /// Blocks of 256 threads of a kernel: what it takes of the GPU, and how many KiB times 8 it has under way.
    pub kernel_blocks: u32,
    /// Bytes that a call gives the GPU at a time, where that reaches the pool itself: half of them a step. A list with a checksum is one
    /// step, however long. It bounds the GPU memory that a kernel's tables take: about a tenth of this.
    pub in_flight_bytes: u64,
    /// Bytes of the copies of one GPU that streams order and that have not ended ([`super::QueueRoom`]); a call that is above it waits, or
    /// is refused. It bounds the GPU memory that the tables of their kernels take: about a tenth of this.
    pub queued_bytes: u64,
    /// What this host's platform does with lines that a GPU reads and writes.
    pub dma: Dma,
    /// Whether the pool is registered ahead of the first copy, by [`super::CudaEngine::register_ahead`].
    pub register_at_start: bool,
    /// How much of the pool that is, in bytes from its beginning; 0 = all of it. The rest is registered when a copy first needs it.
    pub register_bytes: u64,
    /// Whether a pool that cannot be registered ahead is an error; otherwise copies go through pinned buffers.
    pub is_register_required: bool,
    /// Threads that register it.
    pub register_threads: u32,
}

impl Default for CudaConfig {
    fn default() -> Self {
        CudaConfig {
            library: "libcuda.so.1".into(),
            timeout_ms: 10_000,
            granule_bytes: 256 << 20,
            buffer_bytes: 4 << 20,
            kernels: BUILTIN.into(),
            kernel_piece_bytes: 32 << 10,
            kernel_pieces: 16,
            batch_pieces: 2,
            kernel_blocks: 32,
            in_flight_bytes: 256 << 20,
            queued_bytes: 256 << 20,
            dma: Dma::Cached,
            register_at_start: true,
            register_bytes: 0,
            is_register_required: false,
            register_threads: 8,
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
        let number = |name: &str, what: &str, kept: u64| match text(name)? {
            Some(number) => number.parse().map_err(|_| Error::Invalid(format!("{name}: {number:?} is no number of {what}"))),
            None => Ok(kept),
        };
        config.timeout_ms = number(TIMEOUT_ENVIRONMENT, "milliseconds", config.timeout_ms)?;
        config.kernel_piece_bytes = number(KERNEL_PIECE_ENVIRONMENT, "bytes", config.kernel_piece_bytes)?;
        let pieces = |name: &str, kept: usize| Ok::<_, Error>(usize::try_from(number(name, "pieces", kept as u64)?).unwrap_or(usize::MAX));
        config.kernel_pieces = pieces(KERNEL_PIECES_ENVIRONMENT, config.kernel_pieces)?;
        config.batch_pieces = pieces(BATCH_PIECES_ENVIRONMENT, config.batch_pieces)?;
        if let Some(kernels) = text(KERNELS_ENVIRONMENT)? {
            config.kernels = kernels;
        }
        if let Some(size) = text(QUEUED_BYTES_ENVIRONMENT)? {
            config.queued_bytes = parse_size(&size).map_err(|error| Error::Invalid(format!("{QUEUED_BYTES_ENVIRONMENT}: {error}")))?;
        }
        if let Some(dma) = text(DMA_ENVIRONMENT)? {
            config.dma = dma.parse().map_err(|error| Error::Invalid(format!("{DMA_ENVIRONMENT}: {error}")))?;
        }
        let flag = |name: &str, kept: bool| match text(name)?.as_deref() {
            None => Ok(kept),
            Some("1") => Ok(true),
            Some("0") => Ok(false),
            Some(other) => Err(Error::Invalid(format!("{name}: {other:?}: want 1 or 0"))),
        };
        config.register_at_start = flag(REGISTER_AT_START_ENVIRONMENT, config.register_at_start)?;
        config.is_register_required = flag(REGISTER_REQUIRED_ENVIRONMENT, config.is_register_required)?;
        if let Some(size) = text(REGISTER_BYTES_ENVIRONMENT)? {
            config.register_bytes = parse_size(&size).map_err(|error| Error::Invalid(format!("{REGISTER_BYTES_ENVIRONMENT}: {error}")))?;
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
        if !(1..=65_535).contains(&self.kernel_blocks) {
            return Err(Error::Invalid(format!("kernels of {} blocks: want 1 to 65535", self.kernel_blocks)));
        }
        if !(8192..=1 << 40).contains(&self.in_flight_bytes) {
            return Err(Error::Invalid(format!("{} bytes under way: want 8192 to 2^40", self.in_flight_bytes)));
        }
        if !(8192..=1 << 40).contains(&self.queued_bytes) {
            return Err(Error::Invalid(format!("{} bytes of copies that streams order: want 8192 to 2^40", self.queued_bytes)));
        }
        if !(1..=64).contains(&self.register_threads) {
            return Err(Error::Invalid(format!("{} threads to register the pool: want 1 to 64", self.register_threads)));
        }
        Ok(())
    }
}
