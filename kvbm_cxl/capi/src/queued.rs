// SPDX-License-Identifier: Apache-2.0
//! Blocks of the cache that a stream of a GPU orders, by number.

use crate::numbers::Handles;
use crate::pool::OpenPool;
use crate::status::{Failure, Outcome, Status};
use crate::types::{self, CxlGpuQueued, GpuPart};
use cxl_pool::cache::queued::Queued;
use cxl_pool::cache::tier::Answer;
use cxl_pool::cache::{BlockKey, Cache, Namespace, PublishRequest};
use cxl_pool::copy::{After, LocalRange, OnGpu};
use cxl_pool::metrics::RefusalReason;
use std::ptr::{NonNull, with_exposed_provenance_mut};

struct QueuedEntry {
    queued: Queued,
    timeout_ms: u64,
}

static QUEUED: Handles<QueuedEntry> = Handles::new("queued call of a GPU");

/// A block of a call, and the parts of the GPU's memory where it lies.
pub struct QueuedBlock {
    pub name_space: [u8; 16],
    pub key: [u8; 16],
    /// Key of the block before it.
    pub parent: Option<[u8; 16]>,
    /// Where it lies, or goes to.
    pub parts: Vec<LocalRange>,
}

/// A call that queues blocks.
pub struct Call {
    /// The GPU, and the caller's stream there.
    pub on: OnGpu,
    pub blocks: Vec<QueuedBlock>,
    /// Longest wait for room, in milliseconds.
    pub wait_ms: u64,
}

/// The place of memory of a GPU whose use a stream orders.
pub fn on(device: u32, stream: u64) -> OnGpu {
    OnGpu { device, after: After::Stream(stream) }
}

pub fn range_of(part: &GpuPart) -> Outcome<LocalRange> {
    match NonNull::new(with_exposed_provenance_mut::<u8>(part.device as usize)) {
        Some(address) => Ok(LocalRange { address, len_bytes: part.len_bytes }),
        None if part.len_bytes == 0 => Ok(LocalRange { address: NonNull::dangling(), len_bytes: 0 }),
        None => Err(Failure::invalid("a part of some bytes begins at address 0 of the GPU")),
    }
}

impl Call {
    /// Queues a publish.
    ///
    /// # Safety
    /// The memory is the GPU's until the end is reported, and the stream exists.
    pub unsafe fn publish(&self, pool: &OpenPool, cache: &Cache) -> Outcome<CxlGpuQueued> {
        let request = |block: &QueuedBlock| PublishRequest {
            namespace: Namespace(block.name_space),
            key: BlockKey(block.key),
            parent: block.parent.map(BlockKey),
            len_bytes: block.parts.iter().fold(0, |sum: u64, part| sum.saturating_add(part.len_bytes as u64)),
        };
        let requests: Vec<PublishRequest> = self.blocks.iter().map(request).collect();
        let parts = |at: usize| self.blocks[at].parts.iter().copied();
        // SAFETY: as this function demands.
        let queued = unsafe { cache.queue_publish(&requests, self.on, pool.timeout_ms(self.wait_ms), parts) }?;
        Ok(keep(pool, queued))
    }

    /// Queues a pull.
    ///
    /// # Safety
    /// As [`Call::publish`].
    pub unsafe fn pull(&self, pool: &OpenPool, cache: &Cache) -> Outcome<CxlGpuQueued> {
        let keys: Vec<BlockKey> = self.blocks.iter().map(|block| BlockKey(block.key)).collect();
        let name_space = self.blocks.first().map_or([0; 16], |block| block.name_space);
        if self.blocks.iter().any(|block| block.name_space != name_space) {
            return Err(Failure::invalid("the blocks of a pull are of several namespaces: pull those of each by themselves"));
        }
        let parts = |at: usize, _| self.blocks[at].parts.iter().copied();
        // SAFETY: as this function demands.
        let queued = unsafe { cache.queue_pull(Namespace(name_space), &keys, self.on, pool.timeout_ms(self.wait_ms), parts) }?;
        Ok(keep(pool, queued))
    }
}

fn keep(pool: &OpenPool, queued: Queued) -> CxlGpuQueued {
    QUEUED.add(QueuedEntry { queued, timeout_ms: pool.timeout_ms(types::TIMEOUT_DEFAULT) })
}

fn status_of(answer: &Answer) -> Status {
    match answer {
        Answer::Done => Status::OK,
        Answer::Exists => Status::E_EXISTS,
        Answer::Refused(RefusalReason::Busy) => Status::E_BUSY,
        Answer::Refused(_) => Status::E_FULL,
        Answer::Failed(error) => Failure::from(&**error).status,
        Answer::Dropped => Status::E_CLOSED,
        _ => Status::E_NOT_FOUND,
    }
}

/// Waits for the end of blocks; what became of each.
pub fn wait(number: CxlGpuQueued, timeout_ms: u64, outcomes: &mut [i32]) -> Outcome<()> {
    let entry = QUEUED.find(number)?;
    let timeout_ms = if timeout_ms == types::TIMEOUT_DEFAULT { entry.timeout_ms } else { timeout_ms.min(crate::pool::MAX_TIMEOUT_MS) };
    let Some(answers) = entry.queued.wait(timeout_ms) else {
        return Err(Failure::new(Status::E_TIMEOUT, "the GPU has not ended with the blocks yet"));
    };
    if answers.len() != outcomes.len() {
        let (blocks, room) = (answers.len(), outcomes.len());
        return Err(Failure::invalid(format!("{blocks} blocks were queued, and there is room for {room} outcomes: give one for each")));
    }
    outcomes.iter_mut().zip(answers.iter()).for_each(|(outcome, answer)| *outcome = status_of(answer) as i32);
    Ok(())
}

/// Has a stream come after the copies.
///
/// # Safety
/// The stream is there.
pub unsafe fn hold(number: CxlGpuQueued, stream: u64) -> Outcome<()> {
    // SAFETY: as this function demands.
    Ok(unsafe { QUEUED.find(number)?.queued.hold(stream) }?)
}

/// Forgets blocks whose end is known.
pub fn release(number: CxlGpuQueued) -> Outcome<()> {
    if QUEUED.find(number)?.queued.poll().is_none() {
        return Err(Failure::new(Status::E_BUSY, "the GPU may still use the memory of these blocks: wait for their end"));
    }
    QUEUED.remove(number);
    Ok(())
}
