// SPDX-License-Identifier: Apache-2.0
//! Chunks without any block: those that a process keeps for later, where they come from, and how they go back to the pool.

use super::{Allocator, ChunkUse, Other, remains};
use crate::background::{held, try_held};
use crate::error::Result;
use crate::fault::{mutant, point};
use crate::lock::LockGuard;
use crate::media::ChunkHead;

impl Other {
    fn pop(&mut self) -> Option<u64> {
        let chunk = self.spare.pop()?;
        self.flushed.remove(&chunk);
        Some(chunk)
    }

    /// A spare chunk beyond the youngest `spare` of them that is to be brought out of the caches, and is noted as if it were: if it is used
    /// meanwhile, that goes.
    fn next_to_flush(&mut self, spare: usize) -> Option<u64> {
        let beyond = self.spare.len().saturating_sub(spare);
        let chunk = self.spare.iter().take(beyond).copied().find(|chunk| !self.flushed.contains(chunk))?;
        self.flushed.insert(chunk);
        Some(chunk)
    }

    fn take_flushed(&mut self, spare: usize) -> Option<u64> {
        let beyond = self.spare.len().saturating_sub(spare);
        let place = self.spare.iter().take(beyond).position(|chunk| self.flushed.contains(chunk))?;
        let chunk = self.spare.remove(place);
        self.flushed.remove(&chunk);
        Some(chunk)
    }
}

impl Allocator {
    pub(super) fn has_spare(&self) -> bool {
        !held(&self.other).spare.is_empty()
    }

    pub(super) fn pop_spare(&self) -> Option<u64> {
        held(&self.other).pop()
    }

    /// Takes chunks `first` to `first + count - 1` out of the spare ones; false, and nothing taken, unless all of them are there.
    pub(super) fn take_spares(&self, first: u64, count: u64) -> bool {
        let mut other = held(&self.other);
        let wanted = first..first + count;
        let found = other.spare.iter().filter(|chunk| wanted.contains(chunk)).count() as u64;
        if found == count {
            other.spare.retain(|chunk| !wanted.contains(chunk));
            other.flushed.retain(|chunk| !wanted.contains(chunk));
        }
        found == count
    }

    /// Moves up to `limit` chunks without any block beyond the first `spare` of class `class` to the spare ones.
    pub(super) fn uncut_empty(&self, class: usize, spare: usize, limit: usize) -> Result<usize> {
        let chunks = {
            let mut heap = held(&self.heaps[class]);
            let chunks = heap.remove_empty(spare, limit);
            chunks.iter().for_each(|&chunk| self.set_place(chunk, ChunkUse::Other));
            chunks
        };
        if chunks.is_empty() {
            return Ok(0);
        }
        let op = self.work();
        let mut published = Ok(());
        for &chunk in &chunks {
            // A head that could not be published says how the chunk was cut; that is harmless, because nothing in it is kept.
            if let Ok(op) = &op {
                published = published.and(self.publish_head(op, chunk, ChunkHead::UNCUT, 0, 0));
            }
            held(&self.other).spare.push(chunk);
        }
        op?;
        published?;
        point!("alloc.emptied");
        Ok(chunks.len())
    }

    /// A chunk that some class has and does not use.
    pub(super) fn steal_empty(&self) -> Result<Option<u64>> {
        for class in 0..self.heaps.len() {
            if self.uncut_empty(class, 0, 1)? > 0 {
                break;
            }
        }
        Ok(self.pop_spare())
    }

    pub(super) fn give_back(&self, spare: usize) -> Result<()> {
        self.give_back_after(spare, || self.lock_chunks())
    }

    /// [`Allocator::give_back`], which takes the chunk lock by `lock` if it has to.
    pub(super) fn give_back_after<'a>(&'a self, spare: usize, lock: impl FnOnce() -> Result<LockGuard<'a>>) -> Result<()> {
        if held(&self.other).spare.len() <= spare {
            return Ok(());
        }
        let Some(_turn) = try_held(&self.giving) else { return Ok(()) };
        // What takes its time is done before the lock, which others want meanwhile. Who uses one of them says so.
        loop {
            let next = held(&self.other).next_to_flush(spare);
            let Some(chunk) = next else { break };
            if let Err(error) = self.flush_stores(chunk) {
                held(&self.other).flushed.remove(&chunk);
                return Err(error);
            }
        }
        let guard = lock()?;
        loop {
            let next = held(&self.other).take_flushed(spare);
            let Some(chunk) = next else { return Ok(()) };
            if let Err(error) = self.unclaim(&guard, chunk) {
                held(&self.other).spare.push(chunk);
                return Err(error);
            }
            self.set_place(chunk, ChunkUse::None);
        }
    }

    pub(super) fn flush_stores(&self, chunk: u64) -> Result<()> {
        if mutant!("alloc.unclaimed_unflushed") { Ok(()) } else { remains::flush_chunk(self.lines(), chunk) }
    }

    pub(super) fn is_in_kept_run(&self, chunk: u64) -> bool {
        let other = held(&self.other);
        let before = other.runs.range(..=chunk).next_back();
        before.is_some_and(|(&first, run)| run.kept && chunk < first + run.count)
    }

    /// Forgets a chunk that is not this host's any more.
    pub(super) fn forget(&self, chunk: u64) {
        if let ChunkUse::Heap { class, place } = self.place(chunk) {
            held(&self.heaps[class]).remove(place, chunk);
        }
        held(&self.untold).retain(|(_, begun)| !begun.is_in(chunk));
        let mut other = held(&self.other);
        other.spare.retain(|&spare| spare != chunk);
        other.flushed.remove(&chunk);
        other.runs.remove(&chunk);
        other.bad.remove(&chunk);
        self.set_place(chunk, ChunkUse::None);
    }
}
