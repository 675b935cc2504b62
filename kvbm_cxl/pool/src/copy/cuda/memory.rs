// SPDX-License-Identifier: Apache-2.0
//! Memory of a GPU of the library's own, for programs that measure and try the engine.

use super::started::{GpuPiece, HostPlace};
use super::{CudaEngine, Direction};
use crate::copy::{After, CopyEngine, LocalPlace, LocalRange, OnGpu};
use crate::error::{Error, Result};
use std::ptr::{NonNull, with_exposed_provenance_mut};
use std::sync::Arc;

/// Memory of a GPU. It is given back when this is dropped, unless the GPU may still use it.
pub struct GpuMemory {
    engine: Arc<CudaEngine>,
    address: u64,
    len_bytes: usize,
}

impl CudaEngine {
    /// Memory of this GPU, with undefined content.
    ///
    /// # Errors
    /// [`Error::Gpu`] when there is not so much, [`Error::NotFound`] of a driver that gives none.
    pub fn allocate(self: &Arc<Self>, len_bytes: usize) -> Result<GpuMemory> {
        let address = self.gpu.enter()?.allocate(len_bytes.max(1))?;
        Ok(GpuMemory { engine: self.clone(), address, len_bytes })
    }
}

impl GpuMemory {
    /// The place of lists of its ranges, after nothing.
    pub fn place(&self) -> LocalPlace {
        LocalPlace::Gpu(OnGpu { device: self.engine.device(), after: After::Nothing })
    }

    /// A range of it, for a list.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn range(&self, offset: usize, len_bytes: usize) -> Result<LocalRange> {
        let limit_bytes = self.len_bytes as u64;
        let out = || Error::OutOfRange { what: "memory of a GPU", offset: offset as u64, len_bytes: len_bytes as u64, limit_bytes };
        offset.checked_add(len_bytes).filter(|&end| end <= self.len_bytes).ok_or_else(out)?;
        let address = NonNull::new(with_exposed_provenance_mut::<u8>(self.address as usize + offset)).ok_or_else(out)?;
        Ok(LocalRange { address, len_bytes })
    }

    /// Writes its first bytes.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Gpu`], [`Error::Timeout`].
    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        self.copy(Direction::FromHost, bytes.as_ptr().expose_provenance(), bytes.len())
    }

    /// Reads its first bytes.
    ///
    /// # Errors
    /// As [`GpuMemory::write`].
    pub fn read(&self, into: &mut [u8]) -> Result<()> {
        self.copy(Direction::ToHost, into.as_mut_ptr().expose_provenance(), into.len())
    }

    fn copy(&self, direction: Direction, host: usize, len_bytes: usize) -> Result<()> {
        self.range(0, len_bytes)?;
        let piece = GpuPiece { gpu: self.address, host: HostPlace::Process(host), len_bytes };
        // SAFETY: the range is this memory's; the caller's is not touched by the GPU, because everything goes through buffers, and by this
        // library only within the two calls below.
        let copy = unsafe { self.engine.start(direction, &[piece], true) }?;
        let timeout_ms = self.engine.config.timeout_ms;
        match copy.wait(timeout_ms) {
            Some(Ok(())) => Ok(()),
            Some(Err(error)) => Err(self.engine.gpu.failed_again(&error)),
            None => Err(Error::Timeout { what: format!("a copy of {len_bytes} bytes of GPU {}", self.engine.device()), timeout_ms }),
        }
    }
}

impl Drop for GpuMemory {
    fn drop(&mut self) {
        if !self.engine.is_settled(0) {
            return;
        }
        if let Ok(entered) = self.engine.gpu.enter() {
            // SAFETY: allocated by the engine, which has no copy under way that was given up, and the others have ended.
            unsafe { entered.free(self.address) };
        }
    }
}
