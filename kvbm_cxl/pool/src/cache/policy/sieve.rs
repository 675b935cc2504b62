// SPDX-License-Identifier: Apache-2.0
//! SIEVE: Zhang, Yang, Yue, Vigfusson, Rashmi, *SIEVE is simpler than LRU: an efficient turn-key eviction algorithm for web caches*,
//! NSDI 2024.
//!
//! One queue in order of entry, and a hand that goes from its old end to its young end and round. A use sets a flag. The hand clears flags
//! and passes on; a block without one is evicted. What stays keeps its place, so blocks that came since the hand passed are looked at
//! before those that have proven themselves.
//!
//! Where we differ: a candidate that another host has used goes back to the place just behind the hand, as if the hand had found its flag.
//! Blocks to be evicted first enter right where the hand is.

use super::cells::{Cells, List, ListState, NONE};
use super::{Candidate, Entry, EvictionPolicy, QueueEnd, Verdict};
use crate::error::Result;

const USED: u8 = 1;

/// One queue in order of entry, and a hand that spares what was used since it last came by.
pub struct Sieve {
    /// `mark` is [`USED`] or 0.
    cells: Cells<()>,
    queue: List,
    /// The next to be looked at; [`NONE`] for the old end.
    hand: u32,
    now: u32,
}

impl Sieve {
    /// An empty one for cells with numbers below `cells`.
    pub fn new(cells: u64) -> Self {
        Sieve { cells: Cells::new(cells), queue: List::default(), hand: NONE, now: 0 }
    }

    fn unlink(&mut self, cell: u32) {
        if self.hand == cell {
            self.hand = self.cells.get(cell).map_or(NONE, |node| node.younger);
        }
        self.cells.unlink(&mut self.queue, cell);
    }

    fn push_young(&mut self, cell: u32) {
        self.cells.push_young(&mut self.queue, cell);
    }

    /// Puts a cell where the hand has just been.
    fn push_behind_hand(&mut self, cell: u32) {
        match self.hand {
            NONE => self.cells.push_young(&mut self.queue, cell),
            hand => self.cells.push_before(&mut self.queue, cell, hand),
        }
    }

    /// Puts a cell where the hand looks next.
    fn push_at_hand(&mut self, cell: u32) {
        match self.hand {
            NONE => self.cells.push_old(&mut self.queue, cell),
            hand => {
                self.cells.push_before(&mut self.queue, cell, hand);
                self.hand = cell;
            }
        }
    }

    /// Takes the next to be evicted out of the queue. Each step but the last clears a flag.
    fn next(&mut self) -> Option<u32> {
        loop {
            let cell = if self.hand == NONE { self.queue.oldest } else { self.hand };
            let node = self.cells.get_mut(cell)?;
            self.hand = node.younger;
            if node.mark != USED {
                self.unlink(cell);
                return Some(cell);
            }
            node.mark = 0;
        }
    }
}

impl EvictionPolicy for Sieve {
    fn inserted(&mut self, entry: &Entry, place: QueueEnd, tick: u32) -> Result<()> {
        self.now = self.now.max(tick);
        self.removed(entry.cell);
        let tick = if place == QueueEnd::Young { self.now } else { 0 };
        let cell = self.cells.follow(entry.cell, tick, ())?;
        match place {
            QueueEnd::Young => self.push_young(cell),
            QueueEnd::Old => self.push_at_hand(cell),
        }
        Ok(())
    }

    fn touched(&mut self, cell: u64, tick: u32) {
        self.now = self.now.max(tick);
        let now = self.now;
        if let Some(node) = self.cells.find(cell).and_then(|cell| self.cells.get_mut(cell)) {
            (node.tick, node.mark) = (now, USED);
            if node.state == ListState::Offered {
                node.state = ListState::Recalled;
            }
        }
    }

    fn used_elsewhere(&mut self, cell: u64, tick: u32) {
        self.now = self.now.max(tick);
        if let Some(node) = self.cells.find(cell).and_then(|cell| self.cells.get_mut(cell))
            && node.state == ListState::Listed
            && node.tick < tick
        {
            (node.tick, node.mark) = (tick, USED);
        }
    }

    fn removed(&mut self, cell: u64) {
        if let Some(cell) = self.cells.find(cell) {
            if self.cells.get(cell).is_some_and(|node| node.state == ListState::Listed) {
                self.unlink(cell);
            }
            self.cells.forget(cell);
        }
    }

    fn victims(&mut self, count: usize, tick: u32, out: &mut Vec<Candidate>) {
        self.now = self.now.max(tick);
        for _ in 0..count {
            let Some(cell) = self.next() else { return };
            if let Some(node) = self.cells.get_mut(cell) {
                node.state = ListState::Offered;
                out.push(Candidate { cell: cell.into(), tick: node.tick });
            }
        }
    }

    fn settle(&mut self, cell: u64, verdict: Verdict) -> bool {
        let Some(number) = self.cells.find(cell) else { return false };
        let now = self.now;
        let Some(node) = self.cells.get_mut(number).filter(|node| node.state != ListState::Listed) else { return false };
        if verdict == Verdict::Evicted {
            self.cells.forget(number);
            return true;
        }
        node.state = ListState::Listed;
        match verdict {
            Verdict::InUse => {
                (node.tick, node.mark) = (now, 0);
                self.push_young(number);
            }
            Verdict::Younger { tick } => {
                node.tick = node.tick.max(tick);
                self.push_behind_hand(number);
            }
            // With the flag set where it was used since the offer, so that the hand passes it.
            _ => self.push_at_hand(number),
        }
        false
    }

    fn len(&self) -> usize {
        self.cells.len()
    }
}
