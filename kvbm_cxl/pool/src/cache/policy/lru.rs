// SPDX-License-Identifier: Apache-2.0
//! Least recently used first (TraCT section 4.2), with the uses of other hosts fitted in at the grain of a tick.
//!
//! Local uses keep their exact order. For those of other hosts only the tick is known, so the order is kept as one list per tick of the
//! last cycle and one for all before it: a cell goes to the young end of the list of its tick in one step. When a tick falls out of the
//! cycle its list is appended to the old one.

use super::cells::{Cells, List, ListState};
use super::tick::CYCLE_TICKS;
use super::{Candidate, Entry, EvictionPolicy, QueueEnd, Verdict};
use crate::error::Result;

/// Least recently used first: this process's uses in their exact order, those of other hosts by tick.
pub struct Lru {
    cells: Cells<()>,
    /// By tick modulo the cycle.
    recent: [List; CYCLE_TICKS as usize],
    before: List,
    now: u32,
}

impl Lru {
    /// An empty one for cells with numbers below `cells`.
    pub fn new(cells: u64) -> Self {
        Lru { cells: Cells::new(cells), recent: [List::default(); CYCLE_TICKS as usize], before: List::default(), now: 0 }
    }

    fn advance(&mut self, tick: u32) {
        for step in 1..=tick.saturating_sub(self.now).min(CYCLE_TICKS) {
            // The list that tick `now + step` takes over holds those a full cycle older, the oldest of the cycle.
            if let Some(list) = self.recent.get_mut(((self.now % CYCLE_TICKS + step) % CYCLE_TICKS) as usize) {
                self.cells.append(&mut self.before, list);
            }
        }
        self.now = self.now.max(tick);
    }

    fn list(&mut self, tick: u32) -> (&mut Cells<()>, &mut List) {
        let is_recent = self.now.saturating_sub(tick) < CYCLE_TICKS;
        let recent = self.recent.get_mut((tick % CYCLE_TICKS) as usize).filter(|_| is_recent);
        (&mut self.cells, recent.unwrap_or(&mut self.before))
    }

    /// Puts a cell that is in no list at the young end of its tick.
    fn use_at(&mut self, cell: u32, tick: u32) {
        if let Some(node) = self.cells.get_mut(cell) {
            (node.tick, node.state) = (tick, ListState::Listed);
            let (cells, list) = self.list(tick);
            cells.push_young(list, cell);
        }
    }

    fn push_old(&mut self, cell: u32) {
        if let Some(node) = self.cells.get_mut(cell) {
            node.state = ListState::Listed;
            let tick = node.tick;
            let (cells, list) = self.list(tick);
            cells.push_old(list, cell);
        }
    }

    fn unlink(&mut self, cell: u32) {
        if let Some(tick) = self.cells.get(cell).filter(|node| node.state == ListState::Listed).map(|node| node.tick) {
            let (cells, list) = self.list(tick);
            cells.unlink(list, cell);
        }
    }

    fn pop(&mut self) -> Option<u32> {
        if let Some(cell) = self.cells.pop_old(&mut self.before) {
            return Some(cell);
        }
        for step in 1..=CYCLE_TICKS {
            let list = self.recent.get_mut(((self.now % CYCLE_TICKS + step) % CYCLE_TICKS) as usize)?;
            if let Some(cell) = self.cells.pop_old(list) {
                return Some(cell);
            }
        }
        None
    }
}

impl EvictionPolicy for Lru {
    fn on_insert(&mut self, entry: &Entry, place: QueueEnd, tick: u32) -> Result<()> {
        self.advance(tick);
        self.on_remove(entry.cell);
        let cell = self.cells.follow(entry.cell, 0, ())?;
        match place {
            QueueEnd::Young => self.use_at(cell, self.now),
            QueueEnd::Old => self.push_old(cell),
        }
        Ok(())
    }

    fn on_use(&mut self, cell: u64, tick: u32) {
        self.advance(tick);
        let Some(cell) = self.cells.find(cell) else { return };
        match self.cells.get_mut(cell) {
            Some(node) if node.state != ListState::Listed => (node.tick, node.state) = (self.now, ListState::Recalled),
            _ => {
                self.unlink(cell);
                self.use_at(cell, self.now);
            }
        }
    }

    fn used_elsewhere(&mut self, cell: u64, tick: u32) {
        self.advance(tick);
        let Some(cell) = self.cells.find(cell) else { return };
        if self.cells.get(cell).is_some_and(|node| node.state == ListState::Listed && node.tick < tick) {
            self.unlink(cell);
            self.use_at(cell, tick);
        }
    }

    fn on_remove(&mut self, cell: u64) {
        if let Some(cell) = self.cells.find(cell) {
            self.unlink(cell);
            self.cells.forget(cell);
        }
    }

    fn victims(&mut self, count: usize, tick: u32, out: &mut Vec<Candidate>) {
        self.advance(tick);
        for _ in 0..count {
            let Some(cell) = self.pop() else { return };
            if let Some(node) = self.cells.get_mut(cell) {
                node.state = ListState::Offered;
                out.push(Candidate { cell: cell.into(), tick: node.tick });
            }
        }
    }

    fn settle(&mut self, cell: u64, verdict: Verdict) -> bool {
        let Some(number) = self.cells.find(cell) else { return false };
        let (state, known) = self.cells.get(number).map_or((ListState::Absent, 0), |node| (node.state, node.tick));
        if state == ListState::Listed {
            return false;
        }
        match verdict {
            Verdict::Evicted => self.on_remove(cell),
            Verdict::InUse => self.use_at(number, self.now),
            Verdict::Younger { tick } => {
                self.advance(tick);
                self.use_at(number, tick.max(known));
            }
            Verdict::Kept if state == ListState::Recalled => self.use_at(number, known),
            Verdict::Kept => self.push_old(number),
        }
        verdict == Verdict::Evicted
    }

    fn len(&self) -> usize {
        self.cells.len()
    }
}
