// SPDX-License-Identifier: Apache-2.0
//! The policies as one would write them down, with vectors that are searched from end to end. Index 0 is the old end.

use super::*;

/// What [`EvictionPolicy`] does, for a model.
pub trait Model {
    fn inserted(&mut self, entry: &Entry, place: QueueEnd, tick: u32);
    fn touched(&mut self, cell: u64, tick: u32);
    fn used_elsewhere(&mut self, cell: u64, tick: u32);
    fn removed(&mut self, cell: u64);
    fn victims(&mut self, count: usize, tick: u32, out: &mut Vec<Candidate>);
    fn settle(&mut self, cell: u64, verdict: Verdict) -> bool;
    fn len(&self) -> usize;
}

#[derive(Clone, Copy, Debug)]
struct Block {
    cell: u64,
    tick: u32,
    key: [u8; 16],
    uses: u8,
    in_main: bool,
    touched_since: bool,
}

fn block(entry: &Entry, tick: u32) -> Block {
    Block { cell: entry.cell, tick, key: entry.key, uses: 0, in_main: false, touched_since: false }
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
    /// Ticks of the last cycle are told apart, all before are one.
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
}

impl Model for LruModel {
    fn inserted(&mut self, entry: &Entry, place: QueueEnd, tick: u32) {
        self.now = self.now.max(tick);
        self.removed(entry.cell);
        match place {
            QueueEnd::Young => self.young(block(entry, 0), self.now),
            QueueEnd::Old => self.old(block(entry, 0)),
        }
    }

    fn touched(&mut self, cell: u64, tick: u32) {
        self.now = self.now.max(tick);
        if let Some(block) = take(&mut self.order, cell) {
            self.young(block, self.now);
        }
        for block in self.offered.iter_mut().filter(|block| block.cell == cell) {
            (block.tick, block.touched_since) = (self.now, true);
        }
    }

    fn used_elsewhere(&mut self, cell: u64, tick: u32) {
        self.now = self.now.max(tick);
        if self.order.iter().any(|block| block.cell == cell && block.tick < tick)
            && let Some(block) = take(&mut self.order, cell)
        {
            self.young(block, tick);
        }
    }

    fn removed(&mut self, cell: u64) {
        take(&mut self.order, cell);
        take(&mut self.offered, cell);
    }

    fn victims(&mut self, count: usize, tick: u32, out: &mut Vec<Candidate>) {
        self.now = self.now.max(tick);
        let count = count.min(self.order.len());
        out.extend(self.order[..count].iter().map(candidate));
        self.offered.extend(self.order.drain(..count));
    }

    fn settle(&mut self, cell: u64, verdict: Verdict) -> bool {
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

    fn len(&self) -> usize {
        self.order.len() + self.offered.len()
    }
}

#[derive(Default)]
pub struct S3FifoModel {
    small: Vec<Block>,
    main: Vec<Block>,
    offered: Vec<Block>,
    /// Keys in the order in which they were evicted from the small queue; `None` where one came back.
    ghost: Vec<Option<[u8; 16]>>,
    now: u32,
}

impl Model for S3FifoModel {
    fn inserted(&mut self, entry: &Entry, place: QueueEnd, tick: u32) {
        self.now = self.now.max(tick);
        self.removed(entry.cell);
        if place == QueueEnd::Old {
            return self.small.insert(0, block(entry, 0));
        }
        // The latest eviction of a key counts, an earlier one only takes up room.
        match self.ghost.iter().rposition(|&key| key == Some(entry.key)) {
            Some(_) => {
                self.ghost.iter_mut().filter(|key| **key == Some(entry.key)).for_each(|key| *key = None);
                self.main.push(Block { in_main: true, ..block(entry, self.now) });
            }
            None => self.small.push(block(entry, self.now)),
        }
    }

    fn touched(&mut self, cell: u64, tick: u32) {
        self.now = self.now.max(tick);
        for block in self.small.iter_mut().chain(&mut self.main).chain(&mut self.offered).filter(|block| block.cell == cell) {
            (block.tick, block.uses) = (self.now, 3.min(block.uses + 1));
        }
    }

    fn used_elsewhere(&mut self, cell: u64, tick: u32) {
        self.now = self.now.max(tick);
        for block in self.small.iter_mut().chain(&mut self.main).filter(|block| block.cell == cell && block.tick < tick) {
            (block.tick, block.uses) = (tick, 3.min(block.uses + 1));
        }
    }

    fn removed(&mut self, cell: u64) {
        take(&mut self.small, cell);
        take(&mut self.main, cell);
        take(&mut self.offered, cell);
    }

    fn victims(&mut self, count: usize, tick: u32, out: &mut Vec<Candidate>) {
        self.now = self.now.max(tick);
        let mut left = count;
        while left > 0 && self.small.len() + self.main.len() > 0 {
            let from_small = !self.small.is_empty() && (self.main.is_empty() || 10 * self.small.len() >= self.len());
            let mut block = if from_small { self.small.remove(0) } else { self.main.remove(0) };
            if from_small && block.uses >= 2 {
                (block.uses, block.in_main) = (0, true);
                self.main.push(block);
            } else if !from_small && block.uses > 0 {
                block.uses -= 1;
                self.main.push(block);
            } else {
                out.push(candidate(&block));
                self.offered.push(block);
                left -= 1;
            }
        }
    }

    fn settle(&mut self, cell: u64, verdict: Verdict) -> bool {
        let cells = self.len();
        let Some(mut block) = take(&mut self.offered, cell) else { return false };
        let tick = match verdict {
            Verdict::Evicted => {
                if !block.in_main {
                    self.ghost.push(Some(block.key));
                    let most = cells - cells / 10;
                    self.ghost.drain(..self.ghost.len().saturating_sub(most));
                }
                return true;
            }
            Verdict::Kept => {
                let queue = if block.in_main { &mut self.main } else { &mut self.small };
                queue.insert(0, block);
                return false;
            }
            Verdict::InUse => self.now,
            Verdict::Younger { tick } => tick,
        };
        (block.tick, block.uses, block.in_main) = (block.tick.max(tick), 0, true);
        self.main.push(block);
        false
    }

    fn len(&self) -> usize {
        self.small.len() + self.main.len() + self.offered.len()
    }
}

/// The queue in two parts: what the hand has passed is at the old side of `hand`.
#[derive(Default)]
pub struct SieveModel {
    order: Vec<Block>,
    offered: Vec<Block>,
    /// Index of the next to be looked at; the length of the queue means that the hand starts again at the old end.
    hand: usize,
    now: u32,
}

impl SieveModel {
    fn push_young(&mut self, block: Block) {
        let from_start = self.hand == self.order.len();
        self.order.push(block);
        if from_start {
            self.hand = self.order.len();
        }
    }

    fn push_at_hand(&mut self, block: Block) {
        if self.hand == self.order.len() {
            self.order.insert(0, block);
            self.hand = self.order.len();
        } else {
            self.order.insert(self.hand, block);
        }
    }
}

impl Model for SieveModel {
    fn inserted(&mut self, entry: &Entry, place: QueueEnd, tick: u32) {
        self.now = self.now.max(tick);
        self.removed(entry.cell);
        match place {
            QueueEnd::Young => self.push_young(block(entry, self.now)),
            QueueEnd::Old => self.push_at_hand(block(entry, 0)),
        }
    }

    fn touched(&mut self, cell: u64, tick: u32) {
        self.now = self.now.max(tick);
        for block in self.order.iter_mut().chain(&mut self.offered).filter(|block| block.cell == cell) {
            (block.tick, block.uses) = (self.now, 1);
        }
    }

    fn used_elsewhere(&mut self, cell: u64, tick: u32) {
        self.now = self.now.max(tick);
        for block in self.order.iter_mut().filter(|block| block.cell == cell && block.tick < tick) {
            (block.tick, block.uses) = (tick, 1);
        }
    }

    fn removed(&mut self, cell: u64) {
        if let Some(index) = self.order.iter().position(|block| block.cell == cell) {
            self.order.remove(index);
            self.hand -= usize::from(index < self.hand);
        }
        take(&mut self.offered, cell);
    }

    fn victims(&mut self, count: usize, tick: u32, out: &mut Vec<Candidate>) {
        self.now = self.now.max(tick);
        let mut left = count;
        while left > 0 && !self.order.is_empty() {
            if self.hand == self.order.len() {
                self.hand = 0;
            }
            if self.order[self.hand].uses == 1 {
                self.order[self.hand].uses = 0;
                self.hand += 1;
            } else {
                let block = self.order.remove(self.hand);
                out.push(candidate(&block));
                self.offered.push(block);
                left -= 1;
            }
        }
    }

    fn settle(&mut self, cell: u64, verdict: Verdict) -> bool {
        let Some(mut block) = take(&mut self.offered, cell) else { return false };
        match verdict {
            Verdict::Evicted => return true,
            Verdict::InUse => {
                (block.tick, block.uses) = (self.now, 0);
                self.push_young(block);
            }
            Verdict::Younger { tick } => {
                block.tick = block.tick.max(tick);
                self.order.insert(self.hand, block);
                self.hand += 1;
            }
            Verdict::Kept => self.push_at_hand(block),
        }
        false
    }

    fn len(&self) -> usize {
        self.order.len() + self.offered.len()
    }
}
