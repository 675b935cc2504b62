// SPDX-License-Identifier: Apache-2.0
//! A cache that counts and holds no bytes: which blocks are in how many cells, and which of them goes by the pool's own eviction policies.

use cxl_pool::cache::policy::{Candidate, Entry, EvictionPolicy, PolicyKind, QueueEnd, Verdict};
use cxl_pool::{Error, Result};

const NAMESPACE: [u8; 16] = [1; 16];
/// In no cell.
const NOWHERE: u32 = u32::MAX;

/// Blocks by number in a limited number of cells.
pub struct CountedCache {
    policy: Box<dyn EvictionPolicy>,
    /// The block in each cell that was ever used.
    cells: Vec<u32>,
    room: usize,
    /// Those of them that hold none now.
    free: Vec<u32>,
    /// The cell of each block.
    holds: Vec<u32>,
    offered: Vec<Candidate>,
}

fn damaged() -> Error {
    Error::Invalid("the cache names a block that the trace does not have".into())
}

impl CountedCache {
    /// An empty one of `room` cells, for blocks with numbers below `blocks`. With no cell it keeps nothing.
    pub fn new(kind: PolicyKind, room: usize, blocks: usize) -> Self {
        // There are never more cells in use than blocks.
        let room = room.min(blocks);
        CountedCache {
            policy: kind.build(room as u64),
            cells: Vec::new(),
            free: Vec::new(),
            room,
            holds: vec![NOWHERE; blocks],
            offered: Vec::new(),
        }
    }

    /// An empty one without a cell, for so many in the end.
    pub fn with_more_to_come(kind: PolicyKind, room: usize, blocks: usize) -> Self {
        CountedCache { room: 0, ..CountedCache::new(kind, room, blocks) }
    }

    pub fn has(&self, block: u32) -> bool {
        self.cell(block).is_some()
    }

    pub fn cell(&self, block: u32) -> Option<u32> {
        self.holds.get(block as usize).copied().filter(|&cell| cell != NOWHERE)
    }

    pub fn len(&self) -> usize {
        self.policy.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The block was used now; nothing where it is in no cell.
    pub fn touch(&mut self, block: u32, tick: u32) {
        if let Some(cell) = self.cell(block) {
            self.policy.on_use(cell.into(), tick);
        }
    }

    /// Another host used the block in this tick; its order within the tick is not known.
    pub fn touch_elsewhere(&mut self, block: u32, tick: u32) {
        if let Some(cell) = self.cell(block) {
            self.policy.used_elsewhere(cell.into(), tick);
        }
    }

    /// Cells that hold no block.
    pub fn free_cells(&self) -> usize {
        self.room - self.cells.len() + self.free.len()
    }

    pub fn room(&self) -> usize {
        self.room
    }

    pub fn grow(&mut self, cells: usize) {
        self.room += cells;
    }

    /// Evicts until so many cells are free, as far as there are blocks, and gives the evicted.
    ///
    /// # Errors
    /// As [`CountedCache::insert`].
    pub fn make_free(&mut self, wanted: usize, tick: u32) -> Result<Vec<u32>> {
        let mut gone = Vec::new();
        while self.free_cells() < wanted {
            let Some((cell, evicted)) = self.evict(tick)? else { break };
            self.free.push(cell);
            gone.push(evicted);
        }
        Ok(gone)
    }

    /// Puts a block that is in no cell into one, and gives the block that was evicted for it. `parent` is the key of the block before it.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the number of the block is too high, or the policy does not let go of what it offers.
    pub fn insert(&mut self, block: u32, key: [u8; 16], parent: Option<[u8; 16]>, tick: u32) -> Result<Option<u32>> {
        let (cell, evicted) = if let Some(cell) = self.free.pop() {
            (cell, None)
        } else if self.cells.len() < self.room {
            self.cells.push(block);
            (self.cells.len() as u32 - 1, None)
        } else {
            let Some((cell, evicted)) = self.evict(tick)? else { return Ok(None) };
            (cell, Some(evicted))
        };
        let (Some(holder), Some(held)) = (self.cells.get_mut(cell as usize), self.holds.get_mut(block as usize)) else {
            return Err(damaged());
        };
        (*holder, *held) = (block, cell);
        self.policy.on_insert(&Entry { cell: cell.into(), key, namespace: NAMESPACE, parent }, QueueEnd::Young, tick)?;
        Ok(evicted)
    }

    /// Empties a cell; none where the cache has no cell.
    fn evict(&mut self, tick: u32) -> Result<Option<(u32, u32)>> {
        self.offered.clear();
        self.policy.victims(1, tick, &mut self.offered);
        let Some(&Candidate { cell, .. }) = self.offered.first() else { return Ok(None) };
        if !self.policy.settle(cell, Verdict::Evicted) {
            return Err(Error::Invalid(format!("the policy does not let go of cell {cell}, which it offered")));
        }
        let evicted = self.cells.get(cell as usize).copied().ok_or_else(damaged)?;
        *self.holds.get_mut(evicted as usize).ok_or_else(damaged)? = NOWHERE;
        Ok(Some((cell as u32, evicted)))
    }
}

#[cfg(test)]
mod tests;
