// SPDX-License-Identifier: Apache-2.0
//! Flushes of payload around the copies of a GPU. One thread flushes less than half of what the link moves, so several share a part, while
//! the GPU copies another one.

use super::Direction;
use crate::background::held;
use crate::coherence::Coherence;
use crate::copy::list::{ListPieces, Piece};
use crate::copy::order::Order;
use crate::copy::thread_pool::{CopyThreads, Task};
use crate::error::Error;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

/// Parts from so many bytes on are shared: below, waking a thread takes as long as the flush.
pub(super) const SHARED_FROM_BYTES: u64 = 512 << 10;

/// The threads that flush for one engine. The thread that asks is one of them.
pub(super) struct Flusher {
    threads: CopyThreads,
}

impl Flusher {
    pub(super) fn new(threads: u32) -> Self {
        Flusher { threads: CopyThreads::new(threads.max(1) as usize - 1, None) }
    }

    /// Flushes stretches of the pool, each of a list: after a GPU wrote them, or before a GPU reads them. Each thread fences what it has
    /// flushed before it reports. Returns the lists of which memory could not be flushed.
    pub(super) fn flush(&self, memory: &dyn Coherence, order: Order, direction: Direction, runs: &[(usize, Piece)]) -> Vec<(usize, Error)> {
        let total_bytes = runs.iter().map(|(_, piece)| piece.len_bytes as u64).sum();
        let flush = |piece: &Piece| match direction {
            Direction::ToHost => order.flush_moved(memory, piece.offset, piece.len_bytes as u64),
            Direction::FromHost => order.flush_for_read(memory, piece.offset, piece.len_bytes as u64),
        };
        let report = || order.flushed_by_thread(memory, direction == Direction::ToHost);
        if total_bytes < SHARED_FROM_BYTES || !order.is_dma_flushed() {
            let failed = runs.iter().filter_map(|(list, piece)| flush(piece).err().map(|error| (*list, error))).collect();
            report();
            return failed;
        }
        let shares: Vec<ListPieces<'_>> =
            runs.iter().map(|(list, piece)| ListPieces { list: *list, pieces: std::slice::from_ref(piece) }).collect();
        let outcomes = self.threads.run(self.threads.divide(&shares, total_bytes, false), |task: &Task| {
            let flushed = task.pieces.iter().try_for_each(flush);
            report();
            vec![(task.list, flushed.map(|()| None))]
        });
        outcomes.into_iter().filter_map(|(list, outcome)| outcome.err().map(|error| (list, error))).collect()
    }
}

/// A flush that a stream orders: a thread of the driver's makes it, so that its caller does not, before the GPU reads the memory.
pub(super) struct QueuedFlush {
    pub(super) memory: Arc<dyn Coherence>,
    pub(super) flusher: Arc<Flusher>,
    pub(super) order: Order,
    pub(super) runs: Vec<(usize, Piece)>,
    /// The lists of which memory could not be flushed; `None` until all is flushed.
    pub(super) failed: Mutex<Option<Vec<(usize, Error)>>>,
}

impl QueuedFlush {
    /// As the driver calls it.
    ///
    /// # Safety
    /// The argument is an [`Arc`] of one of these, which is taken.
    pub(super) unsafe extern "C" fn run(argument: *mut c_void) {
        // SAFETY: as this function demands.
        let flush = unsafe { Arc::from_raw(argument.cast::<QueuedFlush>()) };
        let failed = flush.flusher.flush(&*flush.memory, flush.order, Direction::FromHost, &flush.runs);
        *held(&flush.failed) = Some(failed);
    }
}
