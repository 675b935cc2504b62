// SPDX-License-Identifier: Apache-2.0
//! Leaves first: no block goes before the cached blocks that continue it.
//!
//! A block is of use only with all blocks before it in its chain, and what follows an evicted one is dead weight. LRU sees blocks alone,
//! and evicts a chain from its root wherever the root was used first. This policy wraps LRU and holds back what LRU offers too early: such
//! a block waits, still a candidate of LRU, until the last block that continues it is offered, and is then offered next. So a chain that
//! has become old goes from its end to its root, in one batch where the evictor wants many.
//!
//! A block whose parent is not known (adopted, or owned by another process) holds nothing back. Parents that go round in a circle can only
//! come of wrong keys; when nothing else is left the block that waits longest goes.
//!
//! Bytes per cell: a node of 32 as well as that of LRU, and 30 to 60 for its name in the hash table, which doubles as it grows.

use super::cells::{Cells, List, NONE, Node};
use super::{Candidate, Entry, EvictionPolicy, Lru, QueueEnd, Verdict, fingerprint};
use crate::error::Result;
use std::collections::HashMap;

/// Where a cell is, in `queue`. The inner policy follows it as one of its own.
const INNER: u8 = 0;
const WAITING: u8 = 1;
/// Offered by the inner policy, held back before, and now free to go.
const READY: u8 = 2;
/// Offered to the evictor.
const OUT: u8 = 3;

/// Flags in `mark`.
const HAS_PARENT: u8 = 1;
const IN_CIRCLE: u8 = 2;

/// Fingerprints of a block and its parent, in halves so that a node needs no padding.
#[derive(Clone, Copy, Default)]
struct Names {
    own: [u32; 2],
    parent: [u32; 2],
}

const _: () = assert!(size_of::<Node<Names>>() == 32);

fn halves(name: u64) -> [u32; 2] {
    [name as u32, (name >> 32) as u32]
}

fn whole([low, high]: [u32; 2]) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

#[derive(Clone, Copy)]
pub(super) struct Link {
    /// The cell that has the block, the latest of several; [`NONE`] where none has.
    cell: u32,
    children: u32,
    out: u32,
}

const UNKNOWN: Link = Link { cell: NONE, children: 0, out: 0 };

/// Holds back what [`Lru`] would evict before the blocks that continue it.
pub struct LeafFirst {
    inner: Lru,
    cells: Cells<Names>,
    pub(super) links: HashMap<u64, Link>,
    waiting: List,
    ready: List,
    out: usize,
    offered: Vec<Candidate>,
}

impl LeafFirst {
    /// An empty one for cells with numbers below `cells`.
    pub fn new(cells: u64) -> Self {
        let (inner, cells, links) = (Lru::new(cells), Cells::new(cells), HashMap::new());
        LeafFirst { inner, cells, links, waiting: List::default(), ready: List::default(), out: 0, offered: Vec::new() }
    }

    /// The children of a cell's block, and how many of them are offered. Of several cells with one block only the latest has them.
    fn children(&self, cell: u32) -> (u32, u32) {
        let link = self.cells.get(cell).and_then(|node| self.links.get(&whole(node.extra.own)));
        link.filter(|link| link.cell == cell).map_or((0, 0), |link| (link.children, link.out))
    }

    fn leave_queue(&mut self, cell: u32) {
        match self.cells.get(cell).map(|node| node.queue) {
            Some(WAITING) => self.cells.unlink(&mut self.waiting, cell),
            Some(READY) => self.cells.unlink(&mut self.ready, cell),
            Some(OUT) => {
                self.out -= 1;
                self.count_child(cell, |link| link.out -= 1);
            }
            _ => {}
        }
    }

    fn enter_queue(&mut self, cell: u32, queue: u8) {
        let Some(node) = self.cells.get_mut(cell) else { return };
        node.queue = queue;
        match queue {
            WAITING => self.cells.push_young(&mut self.waiting, cell),
            READY => self.cells.push_young(&mut self.ready, cell),
            OUT => {
                self.out += 1;
                self.count_child(cell, |link| link.out += 1);
            }
            _ => {}
        }
    }

    /// Puts a cell that the inner policy offered where its children allow.
    fn hold(&mut self, cell: u32) {
        let (children, out) = self.children(cell);
        let queue = if children == out { READY } else { WAITING };
        if self.cells.get(cell).is_some_and(|node| node.queue != queue) {
            self.leave_queue(cell);
            self.enter_queue(cell, queue);
        }
    }

    /// Changes the counts of a cell's parent, and moves the parent if it is held back.
    fn count_child(&mut self, cell: u32, change: impl FnOnce(&mut Link)) {
        let Some(node) = self.cells.get(cell).filter(|node| node.mark & HAS_PARENT != 0) else { return };
        let name = whole(node.extra.parent);
        let link = self.links.entry(name).or_insert(UNKNOWN);
        change(link);
        let parent = link.cell;
        if parent == NONE && link.children == 0 {
            self.links.remove(&name);
        }
        self.review(parent);
    }

    fn review(&mut self, cell: u32) {
        if self.cells.get(cell).is_some_and(|node| matches!(node.queue, WAITING | READY)) {
            self.hold(cell);
        }
    }

    fn forget(&mut self, cell: u32) {
        self.leave_queue(cell);
        self.count_child(cell, |link| link.children -= 1);
        let Some(name) = self.cells.get(cell).map(|node| whole(node.extra.own)) else { return };
        if let Some(link) = self.links.get_mut(&name).filter(|link| link.cell == cell) {
            link.cell = NONE;
            if link.children == 0 {
                self.links.remove(&name);
            }
        }
        self.cells.forget(cell);
    }

    /// Gives a cell back to the inner policy, which has it as a candidate.
    fn back(&mut self, cell: u32, verdict: Verdict) {
        self.leave_queue(cell);
        self.enter_queue(cell, INNER);
        self.inner.settle(cell.into(), verdict);
    }

    fn take_out(&mut self, cell: u32, out: &mut Vec<Candidate>) {
        if let Some(tick) = self.cells.get(cell).map(|node| node.tick) {
            self.leave_queue(cell);
            self.enter_queue(cell, OUT);
            out.push(Candidate { cell: cell.into(), tick });
        }
    }
}

impl EvictionPolicy for LeafFirst {
    fn on_insert(&mut self, entry: &Entry, place: QueueEnd, tick: u32) -> Result<()> {
        self.on_remove(entry.cell);
        let own = fingerprint(&entry.namespace, &entry.key);
        let parent = entry.parent.map(|key| fingerprint(&entry.namespace, &key)).filter(|&parent| parent != own);
        let names = Names { own: halves(own), parent: parent.map_or([0; 2], halves) };
        let cell = self.cells.follow(entry.cell, 0, names)?;
        if let Err(error) = self.inner.on_insert(entry, place, tick) {
            self.cells.forget(cell);
            return Err(error);
        }
        if let Some(node) = self.cells.get_mut(cell) {
            node.mark = if parent.is_some() { HAS_PARENT } else { 0 };
        }
        let before = std::mem::replace(&mut self.links.entry(own).or_insert(UNKNOWN).cell, cell);
        self.review(before);
        self.count_child(cell, |link| link.children += 1);
        Ok(())
    }

    fn on_use(&mut self, cell: u64, tick: u32) {
        if let Some(number) = self.cells.find(cell)
            && self.cells.get(number).is_some_and(|node| matches!(node.queue, WAITING | READY))
        {
            self.back(number, Verdict::Kept);
        }
        self.inner.on_use(cell, tick);
    }

    fn used_elsewhere(&mut self, cell: u64, tick: u32) {
        if let Some(number) = self.cells.find(cell)
            && self.cells.get(number).is_some_and(|node| matches!(node.queue, WAITING | READY) && node.tick < tick)
        {
            self.back(number, Verdict::Younger { tick });
        }
        self.inner.used_elsewhere(cell, tick);
    }

    fn on_remove(&mut self, cell: u64) {
        if let Some(number) = self.cells.find(cell) {
            self.forget(number);
            self.inner.on_remove(cell);
        }
    }

    fn victims(&mut self, count: usize, tick: u32, out: &mut Vec<Candidate>) {
        let enough = out.len().saturating_add(count);
        while out.len() < enough {
            if self.ready.len > 0 {
                self.take_out(self.ready.oldest, out);
                continue;
            }
            self.offered.clear();
            self.inner.victims(1, tick, &mut self.offered);
            if let Some(&Candidate { cell, tick }) = self.offered.first() {
                let Some(cell) = self.cells.find(cell) else { continue };
                if let Some(node) = self.cells.get_mut(cell) {
                    node.tick = tick;
                }
                self.hold(cell);
            } else if self.out == 0 && self.waiting.len > 0 {
                let cell = self.waiting.oldest;
                if let Some(node) = self.cells.get_mut(cell) {
                    node.mark |= IN_CIRCLE;
                }
                self.take_out(cell, out);
            } else {
                return;
            }
        }
    }

    fn settle(&mut self, cell: u64, verdict: Verdict) -> bool {
        let Some(number) = self.cells.find(cell) else { return false };
        let Some(node) = self.cells.get_mut(number) else { return false };
        if node.queue != OUT {
            return false;
        }
        let in_circle = node.mark & IN_CIRCLE != 0;
        node.mark &= !IN_CIRCLE;
        if verdict != Verdict::Evicted {
            self.back(number, verdict);
            return false;
        }
        if self.children(number).0 > 0 && !in_circle {
            self.hold(number);
            return false;
        }
        self.forget(number);
        self.inner.settle(cell, verdict)
    }

    fn len(&self) -> usize {
        self.cells.len()
    }
}
