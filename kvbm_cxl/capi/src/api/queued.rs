// SPDX-License-Identifier: Apache-2.0
//! Blocks of the cache that a stream of a GPU orders.

use super::args::{In, Out};
use super::cache::with_open_cache;
use crate::queued::{self, Call, QueuedBlock, range_of};
use crate::status::{Failure, Outcome, status_of};
use crate::types::{CxlGpuQueued, CxlPool, GpuBlock, GpuPart};
use std::ffi::c_int;

const NUMBER: &str = "number of the blocks";

fn call(device: u32, stream: u64, blocks: &[GpuBlock], wait_ms: u64) -> Outcome<Call> {
    let block = |block: &GpuBlock| {
        let parts = In::<GpuPart>::at_address(block.parts);
        let parts = parts.items(block.count, "parts")?.iter().map(range_of).collect::<Outcome<_>>()?;
        Ok(QueuedBlock { name_space: block.name_space, key: block.key, parent: In::at_address(block.parent).id(), parts })
    };
    Ok(Call { on: queued::on(device, stream), blocks: blocks.iter().map(block).collect::<Outcome<_>>()?, wait_ms })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_gpu_queue_publish(
    pool: *mut CxlPool,
    device: u32,
    stream: u64,
    blocks: In<GpuBlock>,
    count: usize,
    wait_ms: u64,
    queued: Out<CxlGpuQueued>,
) -> c_int {
    status_of(|| {
        queued.fill(NUMBER, || {
            let call = call(device, stream, blocks.items(count, "blocks")?, wait_ms)?;
            // SAFETY: the caller of C leaves the blocks' memory and the stream as the header says.
            with_open_cache(pool, |pool, cache| unsafe { call.publish(pool, cache.cache()) })
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_gpu_queue_pull(
    pool: *mut CxlPool,
    device: u32,
    stream: u64,
    blocks: In<GpuBlock>,
    count: usize,
    wait_ms: u64,
    queued: Out<CxlGpuQueued>,
) -> c_int {
    status_of(|| {
        queued.fill(NUMBER, || {
            let call = call(device, stream, blocks.items(count, "blocks")?, wait_ms)?;
            // SAFETY: as in `cxl_shm_gpu_queue_publish`.
            with_open_cache(pool, |pool, cache| unsafe { call.pull(pool, cache.cache()) })
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_gpu_queued_wait(queued: CxlGpuQueued, timeout_ms: u64, outcomes: Out<i32>, count: usize) -> c_int {
    status_of(|| {
        let mut found = Vec::new();
        found.try_reserve_exact(count).map_err(|_| Failure::invalid(format!("{count} outcomes are more than there can be")))?;
        found.resize(count, 0);
        if count > 0 {
            outcomes.check("outcomes")?;
        }
        queued::wait(queued, timeout_ms, &mut found)?;
        outcomes.write_items(count, &found);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_gpu_queued_hold(queued: CxlGpuQueued, stream: u64) -> c_int {
    // SAFETY: the caller of C vouches for the stream.
    status_of(|| unsafe { queued::hold(queued, stream) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cxl_shm_gpu_queued_release(queued: CxlGpuQueued) -> c_int {
    status_of(|| queued::release(queued))
}
