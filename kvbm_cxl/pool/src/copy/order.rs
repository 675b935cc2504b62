// SPDX-License-Identifier: Apache-2.0
//! The steps of order in a copy, each in one place so that a test can drop it: also for worker threads, which take the choice along.

use super::cuda::Dma;
use crate::coherence::Coherence;
use crate::error::Result;
use crate::fault::mutant;

/// Which steps are made. All of them, unless a test drops one on the thread that asks for the copy.
#[derive(Clone, Copy)]
pub(super) struct Order {
    publish_fence: bool,
    edge_flush: bool,
    moved_flush: bool,
    pull_flush: bool,
    full_fence: bool,
    load_fence: bool,
    thread_fence: bool,
    /// Whether devices' reads and writes of the pool go through this host's caches.
    is_dma_cached: bool,
}

impl Order {
    pub(super) fn now() -> Self {
        Order {
            publish_fence: !mutant!("copy.publish_no_fence"),
            edge_flush: !mutant!("copy.dma_no_edge_flush"),
            moved_flush: !mutant!("copy.dma_no_flush"),
            pull_flush: !mutant!("copy.pull_no_flush"),
            full_fence: !mutant!("copy.pull_no_full_fence"),
            load_fence: !mutant!("copy.pull_no_load_fence"),
            thread_fence: !mutant!("copy.dma_thread_unfenced"),
            is_dma_cached: true,
        }
    }

    /// The choice of this thread, where this host's platform may keep what devices read and write out of its caches. Of the steps around
    /// a device's copies that drops the flushes, never a fence.
    pub(super) fn around(dma: Dma) -> Self {
        Order { is_dma_cached: dma == Dma::Cached, ..Self::now() }
    }

    pub(super) fn is_dma_flushed(self) -> bool {
        self.is_dma_cached
    }

    /// After the last store of a publish: no later line of this thread is seen before its payload (I4).
    pub(super) fn published(self, memory: &dyn Coherence) {
        if self.publish_fence {
            memory.fence_stores();
        }
    }

    /// Before a write by a device to a part of the line at `offset`, with [`Order::flushed`] between: what it leaves as it is must be what
    /// the memory holds.
    pub(super) fn flush_edge(self, memory: &dyn Coherence, offset: u64) -> Result<()> {
        if self.edge_flush && self.is_dma_cached { memory.flush_range(offset, 1) } else { Ok(()) }
    }

    /// After a write by a device that may have left it in this host's caches; [`Order::published`] comes after.
    pub(super) fn flush_moved(self, memory: &dyn Coherence, offset: u64, len_bytes: u64) -> Result<()> {
        if self.moved_flush && self.is_dma_cached { memory.flush_range(offset, len_bytes) } else { memory.check(offset, len_bytes) }
    }

    /// Before a read by a device, with [`Order::flushed`] between: what this host's caches have must not answer it.
    pub(super) fn flush_for_read(self, memory: &dyn Coherence, offset: u64, len_bytes: u64) -> Result<()> {
        if self.is_dma_cached { self.flush(memory, offset, len_bytes) } else { memory.check(offset, len_bytes) }
    }

    pub(super) fn flush(self, memory: &dyn Coherence, offset: u64, len_bytes: u64) -> Result<()> {
        if self.pull_flush { memory.flush_range(offset, len_bytes) } else { Ok(()) }
    }

    /// After the flushes of a thread around a device's copies, before it reports: they are complete.
    pub(super) fn flushed_by_thread(self, memory: &dyn Coherence, is_written: bool) {
        match is_written {
            _ if !self.thread_fence => {}
            true => self.published(memory),
            false => self.flushed(memory),
        }
    }

    /// Between flushes and the loads of the flushed lines.
    pub(super) fn flushed(self, memory: &dyn Coherence) {
        if self.full_fence {
            memory.fence_all();
        }
    }

    /// After the last load of a pull: a fetch of the entry that comes next is not older than the payload. Where the destination was written
    /// past the caches, also those stores are complete, so that any thread or device of this host may read it.
    pub(super) fn pulled(self, memory: &dyn Coherence, streamed: bool) {
        match streamed {
            _ if !self.load_fence => {}
            true => memory.fence_all(),
            false => memory.fence_loads(),
        }
    }
}
