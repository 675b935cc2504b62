// SPDX-License-Identifier: Apache-2.0
//! Blocks of the cache that a stream of a GPU orders.

use super::cache::{bytes_at, with_open_cache};
use super::{items, writable};
use crate::pool::OpenPool;
use crate::queued::{self, Call, QueuedBlock, range_of};
use crate::status::{Failure, Outcome, status_of};
use crate::types::{CxlGpuQueued, CxlPool, GpuBlock, GpuPart};
use cxl_pool::cache::Cache;
use std::ffi::c_int;
use std::ptr::with_exposed_provenance;

/// A call as C makes it.
///
/// # Safety
/// `blocks` is null or `count` blocks, each with as many parts as it says and a parent that is null or 16 readable bytes.
unsafe fn call(device: u32, stream: u64, blocks: *const GpuBlock, count: usize, wait_ms: u64) -> Outcome<Call> {
    // SAFETY: as this function demands; the same below.
    let blocks = unsafe { items(blocks, count, "blocks") }?;
    let block = |block: &GpuBlock| {
        // SAFETY: as above.
        let (parts, parent) = unsafe {
            let parts = with_exposed_provenance::<GpuPart>(block.parts);
            (items(parts, block.count, "parts")?, bytes_at(with_exposed_provenance(block.parent)))
        };
        let parts = parts.iter().map(range_of).collect::<Outcome<_>>()?;
        Ok(QueuedBlock { name_space: block.name_space, key: block.key, parent, parts })
    };
    Ok(Call { on: queued::on(device, stream), blocks: blocks.iter().map(block).collect::<Outcome<_>>()?, wait_ms })
}

/// Has `with` queue a call, and tells its number.
///
/// # Safety
/// `queued` is null or writable.
unsafe fn queue(
    pool: *mut CxlPool,
    queued: *mut CxlGpuQueued,
    call: impl FnOnce() -> Outcome<Call>,
    with: impl FnOnce(&Call, &OpenPool, &Cache) -> Outcome<CxlGpuQueued>,
) -> Outcome<()> {
    writable(queued, "number of the blocks")?;
    let call = call()?;
    let number = with_open_cache(pool, |pool, cache| with(&call, pool, cache.cache()))?;
    // SAFETY: not null, so writable.
    unsafe { queued.write(number) };
    Ok(())
}

/// # Safety
/// `blocks` is null or `count` blocks, each with as many parts as it says and a parent that is null or 16 readable bytes; their memory and
/// the stream stay as the header says; `queued` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_gpu_queue_publish(
    pool: *mut CxlPool,
    device: u32,
    stream: u64,
    blocks: *const GpuBlock,
    count: usize,
    wait_ms: u64,
    queued: *mut CxlGpuQueued,
) -> c_int {
    // SAFETY: as demanded of the caller; the same within.
    let call = || unsafe { call(device, stream, blocks, count, wait_ms) };
    // SAFETY: as demanded of the caller.
    status_of(|| unsafe { queue(pool, queued, call, |call, pool, cache| call.publish(pool, cache)) })
}

/// # Safety
/// As [`cxl_shm_gpu_queue_publish`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_gpu_queue_pull(
    pool: *mut CxlPool,
    device: u32,
    stream: u64,
    blocks: *const GpuBlock,
    count: usize,
    wait_ms: u64,
    queued: *mut CxlGpuQueued,
) -> c_int {
    // SAFETY: as demanded of the caller; the same within.
    let call = || unsafe { call(device, stream, blocks, count, wait_ms) };
    // SAFETY: as demanded of the caller.
    status_of(|| unsafe { queue(pool, queued, call, |call, pool, cache| call.pull(pool, cache)) })
}

/// # Safety
/// `outcomes` is null or `count` writable numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_gpu_queued_wait(queued: CxlGpuQueued, timeout_ms: u64, outcomes: *mut i32, count: usize) -> c_int {
    status_of(|| {
        let mut found = Vec::new();
        found.try_reserve_exact(count).map_err(|_| Failure::invalid(format!("{count} outcomes are more than there can be")))?;
        found.resize(count, 0);
        if count > 0 {
            writable(outcomes, "outcomes")?;
        }
        queued::wait(queued, timeout_ms, &mut found)?;
        for (at, outcome) in found.into_iter().enumerate() {
            // SAFETY: not null, so `count` writable numbers.
            unsafe { outcomes.add(at).write(outcome) };
        }
        Ok(())
    })
}

/// # Safety
/// The stream is there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cxl_shm_gpu_queued_hold(queued: CxlGpuQueued, stream: u64) -> c_int {
    // SAFETY: as demanded of the caller.
    status_of(|| unsafe { queued::hold(queued, stream) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_gpu_queued_release(queued: CxlGpuQueued) -> c_int {
    status_of(|| queued::release(queued))
}
