// SPDX-License-Identifier: Apache-2.0
//! The pool's cells: one order of eviction for all of them, or cells that belong to the instance that took them, as the cache has it.
//!
//! With owners, an instance takes a chunk of cells when it has none free, until all are taken, and evicts blocks in its own cells alone. It
//! knows its own uses of them in their order, and those of others by their tick. After each publish it evicts for some free cells.

use super::{Setup, gib_blocks};
use crate::counted::CountedCache;
use crate::planner::error::Planned;
use crate::planner::trace::Trace;
use cxl_pool::cache::policy::PolicyKind;

/// Tokens that an engine computes in a step, and so publishes together.
const STEP_TOKENS: u64 = 2048;
/// Blocks that one round evicts for water at most.
const MOST_A_ROUND: usize = 256;
const NOWHERE: u16 = u16::MAX;

/// Blocks that are published together.
fn step_blocks(trace: &Trace) -> usize {
    (STEP_TOKENS / trace.block_tokens.max(1)).max(1) as usize
}

struct Owner {
    cache: CountedCache,
    /// It wanted more cells, and there were none.
    has_exhausted: bool,
}

pub struct PoolCells<'a> {
    trace: &'a Trace,
    owners: Vec<Owner>,
    /// Which of them has a block.
    holds: Vec<u16>,
    /// Cells that none of them has taken, how many are taken at a time, and all.
    untaken: usize,
    chunk: usize,
    cells: usize,
    low: f64,
    high: f64,
}

impl<'a> PoolCells<'a> {
    /// Empty ones, in so much memory, for so many instances.
    pub fn new(setup: &Setup<'a>, gib: f64, instances: usize, eviction: PolicyKind) -> Self {
        let (rack, blocks) = (setup.rack, setup.trace.blocks.len());
        let cells = gib_blocks(gib, setup.block_bytes());
        let count = if rack.owners != 0.0 { instances } else { 1 };
        let owner = |_| Owner { cache: CountedCache::with_more_to_come(eviction, cells, blocks), has_exhausted: false };
        PoolCells {
            trace: setup.trace,
            owners: (0..count).map(owner).collect(),
            holds: vec![NOWHERE; blocks],
            untaken: cells,
            // In one order it makes no difference who takes them.
            chunk: if count > 1 { rack.chunk_cells as usize } else { 1 },
            cells,
            low: rack.low_water_percent / 100.0,
            high: rack.high_water_percent / 100.0,
        }
    }

    fn owner_of(&self, block: u32) -> Option<(usize, &Owner)> {
        let owner = usize::from(*self.holds.get(block as usize)?);
        self.owners.get(owner).map(|found| (owner, found))
    }

    pub fn has(&self, block: u32) -> bool {
        self.owner_of(block).is_some()
    }

    /// The device that has a block, or will have it, where devices are filled one after the other. A full pool puts it wherever a block
    /// goes.
    pub fn device(&self, block: u32, devices: usize) -> usize {
        let share = self.cells / self.owners.len().max(1);
        let cell = self.owner_of(block).and_then(|(owner, found)| Some(owner * share + found.cache.cell(block)? as usize));
        let next = || Some(self.owners.iter().map(|owner| owner.cache.len()).sum()).filter(|&cell| cell < self.cells);
        match cell.or_else(next) {
            Some(cell) => (cell as u128 * devices as u128 / self.cells.max(1) as u128) as usize,
            None => block as usize % devices.max(1),
        }
    }

    pub fn touch(&mut self, instance: usize, block: u32, tick: u32) {
        let Some(&owner) = self.holds.get(block as usize) else { return };
        let is_own = self.owners.len() == 1 || usize::from(owner) == instance;
        if let Some(owner) = self.owners.get_mut(usize::from(owner)) {
            if is_own { owner.cache.touch(block, tick) } else { owner.cache.touch_elsewhere(block, tick) }
        }
    }

    /// An instance publishes the missing blocks of a chain, step by step, the end of each first. It does not count as a use of the others.
    pub fn publish(&mut self, instance: usize, chain: &[u32], tick: u32) -> Planned<()> {
        let trace = self.trace;
        let own = if self.owners.len() == 1 { 0 } else { instance };
        for blocks in chain.chunks(step_blocks(trace)) {
            let missing: Vec<u32> = blocks.iter().copied().filter(|&block| !self.has(block)).collect();
            self.make_room(own, missing.len(), tick)?;
            for &block in missing.iter().rev() {
                let (Some(owner), Some(named)) = (self.owners.get_mut(own), trace.blocks.get(block as usize)) else { continue };
                let evicted = owner.cache.insert(block, named.key, named.parent, tick)?;
                self.forget(evicted);
                if self.owners.get(own).is_some_and(|owner| owner.cache.has(block))
                    && let Some(held) = self.holds.get_mut(block as usize)
                {
                    *held = own as u16;
                }
            }
        }
        self.keep_water(own, tick)
    }

    fn forget(&mut self, gone: impl IntoIterator<Item = u32>) {
        for block in gone {
            if let Some(held) = self.holds.get_mut(block as usize) {
                *held = NOWHERE;
            }
        }
    }

    /// Free cells for so many blocks: those that are free, then chunks, then by eviction.
    fn make_room(&mut self, own: usize, wanted: usize, tick: u32) -> Planned<()> {
        let Some(owner) = self.owners.get_mut(own) else { return Ok(()) };
        while owner.cache.free_cells() < wanted {
            if self.untaken == 0 {
                owner.has_exhausted = true;
                break;
            }
            let chunk = self.chunk.min(self.untaken);
            owner.cache.grow(chunk);
            self.untaken -= chunk;
        }
        let gone = owner.cache.make_free(wanted.min(owner.cache.room()), tick)?;
        self.forget(gone);
        Ok(())
    }

    fn keep_water(&mut self, own: usize, tick: u32) -> Planned<()> {
        let Some(owner) = self.owners.get_mut(own) else { return Ok(()) };
        let (free, all) = (owner.cache.free_cells(), owner.cache.room() as f64);
        if !owner.has_exhausted || free as f64 >= all * self.low {
            return Ok(());
        }
        let wanted = ((all * self.high).ceil() as usize).min(free + MOST_A_ROUND);
        let gone = owner.cache.make_free(wanted, tick)?;
        self.forget(gone);
        Ok(())
    }
}
