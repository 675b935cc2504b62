// SPDX-License-Identifier: Apache-2.0
//! LRU as one would write it down, with vectors that are searched from end to end. Index 0 is the old end.

use super::*;

#[derive(Clone, Copy, Debug)]
struct Block {
    cell: u64,
    tick: u32,
    touched_since: bool,
}

fn block(entry: &Entry, tick: u32) -> Block {
    Block { cell: entry.cell, tick, touched_since: false }
}

fn take(blocks: &mut Vec<Block>, cell: u64) -> Option<Block> {
    let index = blocks.iter().position(|block| block.cell == cell)?;
    Some(blocks.remove(index))
}

fn candidate(block: &Block) -> Candidate {
    Candidate { cell: block.cell, tick: block.tick }
}

#[derive(Default)]
pub struct LruModel {
    order: Vec<Block>,
    offered: Vec<Block>,
    now: u32,
}

impl LruModel {
    /// Ticks of the last cycle are distinct, all before are one.
    fn rank(&self, tick: u32) -> u32 {
        if self.now - tick < 7 { tick + 1 } else { 0 }
    }

    fn young(&mut self, mut block: Block, tick: u32) {
        (block.tick, block.touched_since) = (tick, false);
        let index = self.order.iter().take_while(|other| self.rank(other.tick) <= self.rank(tick)).count();
        self.order.insert(index, block);
    }

    fn old(&mut self, block: Block) {
        let index = self.order.iter().take_while(|other| self.rank(other.tick) < self.rank(block.tick)).count();
        self.order.insert(index, block);
    }

    pub fn on_insert(&mut self, entry: &Entry, place: QueueEnd, tick: u32) {
        self.now = self.now.max(tick);
        self.on_remove(entry.cell);
        match place {
            QueueEnd::Young => self.young(block(entry, 0), self.now),
            QueueEnd::Old => self.old(block(entry, 0)),
        }
    }

    pub fn on_use(&mut self, cell: u64, tick: u32) {
        self.now = self.now.max(tick);
        if let Some(block) = take(&mut self.order, cell) {
            self.young(block, self.now);
        }
        for block in self.offered.iter_mut().filter(|block| block.cell == cell) {
            (block.tick, block.touched_since) = (self.now, true);
        }
    }

    pub fn used_elsewhere(&mut self, cell: u64, tick: u32) {
        self.now = self.now.max(tick);
        if self.order.iter().any(|block| block.cell == cell && block.tick < tick)
            && let Some(block) = take(&mut self.order, cell)
        {
            self.young(block, tick);
        }
    }

    pub fn on_remove(&mut self, cell: u64) {
        take(&mut self.order, cell);
        take(&mut self.offered, cell);
    }

    pub fn victims(&mut self, count: usize, tick: u32, out: &mut Vec<Candidate>) {
        self.now = self.now.max(tick);
        let count = count.min(self.order.len());
        out.extend(self.order[..count].iter().map(candidate));
        self.offered.extend(self.order.drain(..count));
    }

    pub fn settle(&mut self, cell: u64, verdict: Verdict) -> bool {
        let Some(block) = take(&mut self.offered, cell) else { return false };
        match verdict {
            Verdict::Evicted => return true,
            Verdict::InUse => self.young(block, self.now),
            Verdict::Younger { tick } => {
                self.now = self.now.max(tick);
                self.young(block, tick.max(block.tick));
            }
            Verdict::Kept if block.touched_since => self.young(block, block.tick),
            Verdict::Kept => self.old(block),
        }
        false
    }

    pub fn len(&self) -> usize {
        self.order.len() + self.offered.len()
    }
}
