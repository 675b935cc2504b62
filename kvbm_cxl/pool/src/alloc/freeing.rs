// SPDX-License-Identifier: Apache-2.0
//! Freeing blocks of this process, in two steps: the block is free in the pool, and it may be allocated.

use super::heap::Freed;
use super::{Allocator, ChunkUse, not_allocated};
use crate::background::held;
use crate::error::Result;
use crate::fault::point;
use crate::host::Op;

/// A block that is free in the pool, and that is not allocated before [`Allocator::finish_free`].
#[derive(Debug)]
pub(super) enum Begun {
    /// A block of a chunk that is cut.
    Block { class: usize, place: u32, chunk: u64, block: u32 },
    /// One of several chunks.
    Run { first: u64, count: u64 },
}

impl Begun {
    pub fn is_in(&self, chunk: u64) -> bool {
        match *self {
            Begun::Block { chunk: of, .. } => of == chunk,
            Begun::Run { first, count } => (first..first + count).contains(&chunk),
        }
    }
}

impl Allocator {
    /// Frees a block of this process; false when the chunk is not this process's.
    pub(super) fn free_here(&self, chunk: u64, offset: u64) -> Result<bool> {
        // Most blocks are freed so: with one look into the heap.
        if let ChunkUse::Heap { class, place } = self.place(chunk)
            && let Some(block) = self.block_at(class, chunk, offset)
            && held(&self.heaps[class]).free(place, chunk, block) == Freed::Done
        {
            return Ok(true);
        }
        self.begin_free(chunk, offset, |begun| self.finish_free(begun))
    }

    /// The first step; false when the chunk is not this process's. `then` gets the block while this host still works under the incarnation
    /// under which the block was freed, so that the chunk is still its own.
    pub(super) fn begin_free(&self, chunk: u64, offset: u64, then: impl FnOnce(Begun)) -> Result<bool> {
        match self.place(chunk) {
            ChunkUse::None => return Ok(false),
            ChunkUse::Other => {
                let op = self.work()?;
                let count = self.free_run(&op, chunk, offset)?;
                then(Begun::Run { first: chunk, count });
            }
            ChunkUse::Heap { class, place } => {
                let block = self.block_at(class, chunk, offset).ok_or_else(|| not_allocated(offset))?;
                let freed = held(&self.heaps[class]).begin_free(place, chunk, block);
                match freed {
                    Freed::NotAllocated => return Err(not_allocated(offset)),
                    Freed::Done => then(Begun::Block { class, place, chunk, block }),
                    Freed::IsKept => {
                        let op = self.work()?;
                        self.unkeep(&op, (class, place), chunk, block)?;
                        then(Begun::Block { class, place, chunk, block });
                    }
                }
            }
        }
        Ok(true)
    }

    /// The second step: it may be allocated.
    pub(super) fn finish_free(&self, begun: Begun) {
        match begun {
            Begun::Block { class, place, chunk, block } => held(&self.heaps[class]).finish_free(place, chunk, block),
            Begun::Run { first, count } => held(&self.other).spare.extend(first..first + count),
        }
    }

    fn unkeep(&self, op: &Op<'_>, (class, place): (usize, u32), chunk: u64, block: u32) -> Result<()> {
        let _stripe = self.stripe(chunk);
        let line = held(&self.heaps[class]).unkeep(place, chunk, block);
        let line = line.ok_or_else(|| not_allocated(self.block(class, (chunk, block)).offset))?;
        point!("alloc.unkeep");
        self.publish_keep(op, chunk, line.line, line.bits)?;
        // Arrived, not only ordered: after a crash the block must not be kept again, because the caller takes it for free.
        self.lines().memory().fence_all();
        point!("alloc.unkept");
        Ok(())
    }
}
