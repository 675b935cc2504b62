// SPDX-License-Identifier: Apache-2.0
//! A side of the tests whose GPU copies payload.

use cxl_pool::coherence::Coherence;
use cxl_pool::copy::cuda::{CudaConfig, CudaEngine, GpuMemory};
use cxl_pool::copy::{Checksum, CopyEngine, ReadList, WriteList};
use cxl_pool::{Error, Result};
use std::sync::Arc;

/// The GPU, with memory of its own for one payload.
pub struct GpuSide {
    engine: Arc<CudaEngine>,
    on_gpu: GpuMemory,
}

impl GpuSide {
    /// GPU `device`, which must access the memory under test directly: with pinned buffers a CPU would do the accesses under test.
    /// CXL_CUDA_DMA decides whether its copies flush payload.
    ///
    /// # Errors
    /// [`cxl_pool::Error::NotFound`] without a driver or such a GPU; [`cxl_pool::Error::Gpu`] when it cannot be used, or the memory cannot
    /// be registered.
    pub fn open(device: u32, memory: &Arc<dyn Coherence>, len_bytes: usize) -> Result<GpuSide> {
        let config = CudaConfig { register_bytes: u64::MAX, ..CudaConfig::from_env()? };
        let engine = Arc::new(CudaEngine::open(&config, device, memory.clone())?);
        engine.register_ahead();
        if let Some(refusal) = engine.reach().refusal {
            return Err(Error::Gpu { device, what: format!("the memory under test is not registered: {refusal}") });
        }
        let on_gpu = engine.allocate(len_bytes)?;
        Ok(GpuSide { engine, on_gpu })
    }

    /// Copies `bytes` to the memory under test, by way of the GPU.
    pub fn put(&self, memory: &dyn Coherence, offset: u64, bytes: &[u8]) -> Result<()> {
        self.on_gpu.write(bytes)?;
        // SAFETY: memory of this GPU that this thread alone uses, and that lives until the call has ended.
        let mut list = unsafe { WriteList::lying_on(self.on_gpu.place()) };
        // SAFETY: as above.
        unsafe { list.push_raw(offset, self.on_gpu.range(0, bytes.len())?) };
        self.engine.publish(memory, &list, Checksum::Off).map(drop)
    }

    /// Copies from the memory under test into `into`, by way of the GPU.
    pub fn get(&self, memory: &dyn Coherence, offset: u64, into: &mut [u8]) -> Result<()> {
        // SAFETY: as above.
        let mut list = unsafe { ReadList::lying_on(self.on_gpu.place()) };
        // SAFETY: as above.
        unsafe { list.push_raw(offset, self.on_gpu.range(0, into.len())?) };
        self.engine.pull(memory, &mut list, Checksum::Off)?;
        self.on_gpu.read(into)
    }
}
