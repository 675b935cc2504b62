// SPDX-License-Identifier: Apache-2.0
//! Blocks of several chunks in a row.

use super::heap::BlockSet;
use super::{Allocator, Block, Run, not_allocated};
use crate::background::held;
use crate::error::{Error, Result};
use crate::fault::point;
use crate::host::Op;
use crate::media::ChunkHead;

impl Allocator {
    pub(super) fn alloc_run(&self, len_bytes: u64, deadline_ns: u64) -> Result<Block> {
        let chunk_bytes = self.layout().geometry().chunk_bytes;
        let count = len_bytes.div_ceil(chunk_bytes);
        if count > self.layout().chunks() {
            let most = self.layout().chunks() * chunk_bytes;
            return Err(Error::Invalid(format!("a block of {len_bytes} bytes does not fit a pool of {most} bytes")));
        }
        // Spare chunks in the way of a row would otherwise only be free for this process.
        self.give_back_after(0, || self.lock_chunks_until(deadline_ns))?;
        let first = self.claim_row(count, deadline_ns)?;
        self.cut_run(first, count, deadline_ns)
    }

    /// Makes one block of chunks in a row, which are in no list.
    pub(super) fn cut_run(&self, first: u64, count: u64, deadline_ns: u64) -> Result<Block> {
        let len_bytes = count * self.layout().geometry().chunk_bytes;
        let cut = self.work_after(|| self.lock_chunks_until(deadline_ns)).and_then(|op| {
            for chunk in first + 1..first + count {
                self.publish_head(&op, chunk, ChunkHead::INSIDE, 0, first)?;
            }
            point!("alloc.run_inside");
            self.publish_head(&op, first, ChunkHead::RUN, len_bytes, count)
        });
        point!("alloc.run_cut");
        let mut other = held(&self.other);
        if let Err(error) = cut {
            // Whatever the heads say by now is harmless, because nothing is kept there.
            other.spare.extend(first..first + count);
            return Err(error);
        }
        other.runs.insert(first, Run { count, kept: false });
        drop(other);
        Ok(Block { offset: self.layout().chunk_offset(first)?, len_bytes })
    }

    /// Frees a block of several chunks in the pool; how many they are. They have no owner until they are spare.
    pub(super) fn free_run(&self, op: &Op<'_>, chunk: u64, offset: u64) -> Result<u64> {
        let _stripe = self.stripe(chunk);
        let run = held(&self.other).runs.get(&chunk).copied().filter(|_| self.is_chunk_start(chunk, offset));
        let run = run.ok_or_else(|| not_allocated(offset))?;
        if run.kept {
            self.publish_keep(op, chunk, 0, BlockSet::new(1).line(0))?;
            point!("alloc.run_unkept");
        }
        self.lines().memory().fence_all();
        // The first chunk first: a chunk inside a run that does not exist belongs to no block.
        for part in chunk..chunk + run.count {
            self.publish_head(op, part, ChunkHead::UNCUT, 0, 0)?;
        }
        point!("alloc.run_freed");
        held(&self.other).runs.remove(&chunk);
        Ok(run.count)
    }
}
