// SPDX-License-Identifier: Apache-2.0
//! Blocks that are next to go, and copies of them, for what keeps them elsewhere (docs/internals/l2.md).
//!
//! A copy is neither a pin nor a use: either would change the order of eviction, and keep the evictor from what it is about to take. The
//! owner can do without a pin: the second look of a pull (CACHE.md section 5) tells it whether the line was the block's under one stamp all
//! the while, and the payload is written under another stamp alone. A pin would only make a miss rarer.

use super::policy::{Candidate, Verdict};
use super::{BlockKey, Cache, Namespace, Pinned, Pulled};
use crate::copy::{LocalPlace, LocalRange};
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::limits::CELL_CLASSES;
use crate::media::Descriptor;
use crate::metrics::MissReason;

/// A block of this process, as it was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColdBlock {
    cell: u64,
    descriptor: Descriptor,
    parent: Option<BlockKey>,
}

impl ColdBlock {
    /// Its namespace.
    pub fn namespace(&self) -> Namespace {
        Namespace(self.descriptor.namespace)
    }

    /// Its key.
    pub fn key(&self) -> BlockKey {
        BlockKey(self.descriptor.key)
    }

    /// Key of the block before it in its chain, where its publisher told.
    pub fn parent(&self) -> Option<BlockKey> {
        self.parent
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.descriptor.len_bytes.into()
    }
}

impl Cache {
    /// Up to `limit` blocks of this process of each size of cells, first the one that its evictor would look at first; none of a size of
    /// which twice as many cells are free as its evictor would make. The order of eviction stays.
    pub fn coldest(&self, limit: usize) -> Vec<ColdBlock> {
        let store = &self.inner.store;
        let mut blocks = Vec::new();
        let mut candidates: Vec<Candidate> = Vec::new();
        for class in 0..CELL_CLASSES {
            candidates.clear();
            let tick = store.clock_now();
            let mut own = store.cells();
            let (free, _, all) = own.counts(class);
            // Whether the pool has more is known only once it has none, and a block has to go at once.
            if free * 100 > all * 2 * u64::from(self.inner.config.high_water_percent) {
                continue;
            }
            own.victims(class, limit, tick, &mut candidates);
            // Each goes to the old end, so the first of them goes last.
            for candidate in candidates.iter().rev() {
                own.settle(candidate.cell, Verdict::Kept);
            }
            blocks.extend(candidates.iter().filter_map(|&Candidate { cell, .. }| {
                let descriptor = own.ready(cell)?;
                Some(ColdBlock { cell, descriptor, parent: own.parent(cell).map(BlockKey) })
            }));
        }
        blocks
    }

    /// Copies a block of this process into `destination`, which may be longer, if it is what [`Cache::coldest`] found all the while; else
    /// it is a miss.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the destination is too short; [`Error::Fenced`]; those of the memory, except damage of the block itself.
    pub fn copy_cold(&self, block: &ColdBlock, destination: &mut [u8]) -> Result<Pulled> {
        let available = destination.len();
        let Some(wanted) = destination.get_mut(..block.len_bytes() as usize) else {
            return Err(Error::Invalid(format!("the destination has {available} bytes, the block {}", block.len_bytes())));
        };
        let address = std::ptr::NonNull::from(&mut *wanted).cast::<u8>();
        // SAFETY: the range is that of `destination`, which this call borrows, and which is ordinary memory of the caller.
        unsafe { self.copy_cold_raw(block, &[LocalRange { address, len_bytes: wanted.len() }]) }
    }

    /// As [`Cache::copy_cold`], into pieces by address, in order, which have the block's length together.
    ///
    /// # Safety
    /// Until this returns each range may be written, no other thread uses it, and it is not memory of the pool.
    ///
    /// # Errors
    /// As there.
    pub unsafe fn copy_cold_raw(&self, block: &ColdBlock, pieces: &[LocalRange]) -> Result<Pulled> {
        let op = self.inner.store.work()?;
        if self.inner.store.cells().ready(block.cell) != Some(block.descriptor) {
            return Ok(Pulled::Miss(MissReason::Absent));
        }
        point!("cache.cold_chosen");
        // What the second look is compared with. A stray may lie on the line, and makes this a miss.
        let is_its = |line: &Descriptor| Descriptor { crc: block.descriptor.crc, ..*line } == block.descriptor;
        let line = self.inner.index.descriptor(block.cell)?;
        let Some(descriptor) = line.filter(|line| mutant!("cache.cold_line_not_compared") || is_its(line)) else {
            return Ok(Pulled::Miss(MissReason::Changed));
        };
        let (offset, _) = self.inner.lines().layout().cell(block.cell)?;
        let inner = self.inner.clone();
        // Without a pin: nothing is given back when it is dropped.
        let own = Pinned { inner, cell: block.cell, offset, descriptor, incarnation: op.incarnation(), held: false };
        // SAFETY: as this function demands.
        let mut list = unsafe { own.scatter_in(LocalPlace::Host, pieces.iter().copied()) }?;
        if let Some(miss) = own.copy(&mut list)? {
            return Ok(Pulled::Miss(miss));
        }
        Ok(Pulled::Hit { len_bytes: block.len_bytes() })
    }
}

#[cfg(test)]
mod tests;
