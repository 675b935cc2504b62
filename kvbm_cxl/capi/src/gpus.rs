// SPDX-License-Identifier: Apache-2.0
//! GPUs and the copies that were started on them, by number.
//!
//! A copy stays in the table until its end is known, whatever its caller does: what the GPU may still use is never let go of.

use crate::handle;
use crate::numbers::Handles;
use crate::pool::OpenPool;
use crate::status::{Failure, Outcome, Status};
use crate::types::{self, CxlGpu, CxlGpuCopy, CxlPool, GpuInfo, GpuOptions};
use bytemuck::Zeroable;
use cxl_pool::copy::CopyEngine;
use cxl_pool::copy::cuda::{CudaConfig, CudaEngine, Direction, Dma, Ending, GpuCopy, GpuPiece, HostPlace};
use std::sync::Arc;

struct GpuEntry {
    engine: Arc<CudaEngine>,
    /// The handle of the pool.
    pool: usize,
    timeout_ms: u64,
}

struct CopyEntry {
    copy: GpuCopy,
    timeout_ms: u64,
}

static GPUS: Handles<GpuEntry> = Handles::new("open GPU");
static COPIES: Handles<CopyEntry> = Handles::new("copy of a GPU");

/// What a GPU is opened with: as the caller says, then the environment.
fn config(library: Option<&str>, options: &GpuOptions) -> Outcome<CudaConfig> {
    let mut config = match library {
        Some(library) => CudaConfig { library: library.to_owned(), ..CudaConfig::from_env()? },
        None => CudaConfig::from_env()?,
    };
    if options.register_bytes != 0 {
        config.register_bytes = options.register_bytes;
    }
    config.dma = match options.dma {
        types::GPU_DMA_DEFAULT => config.dma,
        types::GPU_DMA_CACHED => Dma::Cached,
        types::GPU_DMA_UNCACHED => Dma::Uncached,
        other => return Err(Failure::invalid(format!("{other} is no CXL_SHM_GPU_DMA_..."))),
    };
    Ok(config)
}

pub fn count(library: Option<&str>) -> Outcome<u32> {
    Ok(cxl_pool::copy::cuda::devices(&config(library, &GpuOptions::zeroed())?.library)?)
}

/// Opens a GPU for copies to and from a pool.
pub fn open(pool: *mut CxlPool, device: u32, library: Option<&str>, options: &GpuOptions) -> Outcome<CxlGpu> {
    let config = config(library, options)?;
    let entry = handle::with_handle(pool, |handle, pool| {
        let engine = CudaEngine::open(&config, device, pool.pool().lines().memory().clone())?;
        Ok(GpuEntry { engine: Arc::new(engine), pool: handle, timeout_ms: pool.timeout_ms(types::TIMEOUT_DEFAULT) })
    })?;
    // Without the pool's handle, which others use meanwhile: it may take minutes. The engine keeps the mapping.
    entry.engine.register_ahead();
    Ok(GPUS.add(entry))
}

pub fn close(number: CxlGpu) -> Outcome<()> {
    GPUS.find(number)?;
    // The engine ends without the table's lock, because the driver may take its time.
    drop(GPUS.remove(number));
    Ok(())
}

/// What there is to know of a GPU.
pub fn info(number: CxlGpu) -> Outcome<GpuInfo> {
    let engine = &GPUS.find(number)?.engine;
    let (reach, copied) = (engine.reach(), engine.counters());
    let copied = copied.first().copied().unwrap_or_default();
    let mut info = GpuInfo {
        struct_size: size_of::<GpuInfo>(),
        registered_bytes: reach.registered_bytes,
        to_pool_bytes: copied.published_bytes,
        from_pool_bytes: copied.pulled_bytes,
        failed: copied.failed_lists,
        device: engine.device(),
        dma: if reach.dma == Dma::Uncached { types::GPU_DMA_UNCACHED } else { types::GPU_DMA_CACHED },
        unflushed_bytes: copied.unflushed_bytes,
        ..GpuInfo::zeroed()
    };
    // The last byte stays zero, so that the text ends.
    let room = info.refusal.len() - 1;
    let text = reach.refusal.unwrap_or_default();
    info.refusal[..room].iter_mut().zip(text.bytes()).for_each(|(place, byte)| *place = byte);
    Ok(info)
}

/// Refuses a range that is not memory of a GPU.
pub fn check(number: CxlGpu, address: u64, len_bytes: usize) -> Outcome<()> {
    Ok(GPUS.find(number)?.engine.check_memory(address, len_bytes as u64)?)
}

/// Where bytes of the host lie: in the blocks of this pool, or in no pool.
fn place(pool: &OpenPool, address: usize, len_bytes: usize) -> Outcome<HostPlace> {
    if address == 0 {
        return Err(Failure::invalid(format!("the pointer to {len_bytes} bytes of the host is NULL")));
    }
    if let Some(offset) = pool.offset_of(address) {
        pool.check_range(offset, len_bytes)?;
        return Ok(HostPlace::Pool(offset));
    }
    let last =
        address.checked_add(len_bytes - 1).ok_or_else(|| Failure::invalid(format!("{len_bytes} bytes at {address:#x} do not exist")))?;
    if handle::is_in_pool(address) || handle::is_in_pool(last) {
        return Err(Failure::not_in_pool(format!("{address:#x} (+{len_bytes} bytes) does not lie in the blocks of the GPU's pool alone")));
    }
    Ok(HostPlace::Process(address))
}

/// Starts copies.
///
/// # Safety
/// The memory of the pieces may be used until the end of the copies is reported.
pub unsafe fn start(number: CxlGpu, direction: u32, is_buffered: bool, pieces: &[types::GpuPiece]) -> Outcome<CxlGpuCopy> {
    let direction = match direction {
        types::GPU_TO_HOST => Direction::ToHost,
        types::GPU_FROM_HOST => Direction::FromHost,
        _ => return Err(Failure::invalid(format!("{direction} is no direction of a copy of a GPU"))),
    };
    let GpuEntry { engine, pool, timeout_ms } = &*GPUS.find(number)?;
    let used = pieces.iter().filter(|piece| piece.len_bytes > 0);
    let copy = handle::with(std::ptr::without_provenance_mut(*pool), |pool| {
        let piece = |piece: &types::GpuPiece| {
            Ok(GpuPiece { gpu: piece.device, host: place(pool, piece.host, piece.len_bytes)?, len_bytes: piece.len_bytes })
        };
        let pieces = used.map(piece).collect::<Outcome<Vec<_>>>()?;
        // SAFETY: as this function demands.
        Ok(unsafe { engine.start(direction, &pieces, is_buffered) }?)
    })?;
    Ok(COPIES.add(CopyEntry { copy, timeout_ms: *timeout_ms }))
}

fn outcome(ending: Ending) -> Outcome<()> {
    ending.map_err(|error| Failure::from(&*error))
}

/// Waits for the end of copies, and says how they ended.
pub fn wait(number: CxlGpuCopy, timeout_ms: u64) -> Outcome<()> {
    let entry = COPIES.find(number)?;
    let timeout_ms = if timeout_ms == types::TIMEOUT_DEFAULT { entry.timeout_ms } else { timeout_ms };
    let ending = match timeout_ms {
        0 => entry.copy.poll(),
        _ => entry.copy.wait(timeout_ms.min(crate::pool::MAX_TIMEOUT_MS)),
    };
    match ending {
        Some(ending) => outcome(ending),
        None => Err(Failure::new(Status::E_TIMEOUT, "the GPU has not ended with the copies yet")),
    }
}

/// Begins nothing more.
pub fn cancel(number: CxlGpuCopy) -> Outcome<()> {
    COPIES.find(number)?.copy.cancel();
    Ok(())
}

/// Forgets copies whose end is known.
pub fn release(number: CxlGpuCopy) -> Outcome<()> {
    if COPIES.find(number)?.copy.poll().is_none() {
        return Err(Failure::new(Status::E_BUSY, "the GPU may still use the memory of these copies: wait for their end"));
    }
    COPIES.remove(number);
    Ok(())
}
