// SPDX-License-Identifier: Apache-2.0
//! S3-FIFO: Yang, Zhang, Qiu, Yue, Rashmi, *FIFO queues are all you need for cache eviction*, SOSP 2023.
//!
//! New blocks enter a small queue of a tenth of the cells. Its oldest goes to the main queue if it was used at least twice meanwhile, else
//! it is evicted and its name kept in a ghost: a block that comes back while its name is there enters the main queue at once. The
//! oldest of the main queue goes round again once for each of its uses, of which three are counted.
//!
//! Where we differ: a cell's share changes while a process gains and loses chunks, so "a tenth" is of the cells followed at the moment, and
//! the ghost remembers nine tenths of that number. A use by another host, learnt at eviction, brings a block to the young end of the main
//! queue: its uses were not counted, and that there are some is what the small queue was to find out.

use super::cells::{Cells, List, ListState, Node};
use super::{Candidate, Entry, EvictionPolicy, QueueEnd, Verdict, fingerprint};
use crate::error::Result;
use std::collections::{HashMap, VecDeque};

/// One of how many cells the small queue has.
const SMALL_SHARE: usize = 10;
/// Uses in the small queue that earn a place in the main one.
const PROMOTING_USES: u8 = 2;
/// Uses counted.
const MAX_USES: u8 = 3;

const SMALL: u8 = 0;
const MAIN: u8 = 1;

/// Names of the last evictions.
#[derive(Default)]
struct Ghost {
    order: VecDeque<u64>,
    /// Name to the number of its eviction.
    names: HashMap<u64, u64>,
    evictions: u64,
}

impl Ghost {
    /// A name that has been taken keeps its place in the order, as an entry that expires counts whether it was used or not.
    fn insert(&mut self, name: u64, most: usize) {
        self.names.insert(name, self.evictions);
        self.order.push_back(name);
        self.evictions += 1;
        while self.order.len() > most {
            let number = self.evictions - self.order.len() as u64;
            if let Some(oldest) = self.order.pop_front()
                && self.names.get(&oldest) == Some(&number)
            {
                self.names.remove(&oldest);
            }
        }
    }

    fn take(&mut self, name: u64) -> bool {
        self.names.remove(&name).is_some()
    }
}

/// A block's name in halves, so that a node needs no padding.
type Name = [u32; 2];

const _: () = assert!(size_of::<Node<Name>>() == 24);

/// A small queue in which new blocks prove themselves, a main one for those that did, and the names of those that did not.
pub struct S3Fifo {
    /// `mark` counts uses, `queue` is [`SMALL`] or [`MAIN`].
    cells: Cells<Name>,
    small: List,
    main: List,
    ghost: Ghost,
    now: u32,
}

impl S3Fifo {
    /// An empty one for cells with numbers below `cells`.
    pub fn new(cells: u64) -> Self {
        S3Fifo { cells: Cells::new(cells), small: List::default(), main: List::default(), ghost: Ghost::default(), now: 0 }
    }

    fn list(&mut self, queue: u8) -> (&mut Cells<Name>, &mut List) {
        (&mut self.cells, if queue == MAIN { &mut self.main } else { &mut self.small })
    }

    /// Puts a cell that is in no list into a queue. At the young end its uses count from here.
    fn push(&mut self, cell: u32, queue: u8, place: QueueEnd) {
        if let Some(node) = self.cells.get_mut(cell) {
            (node.queue, node.state) = (queue, ListState::Listed);
            let (cells, list) = self.list(queue);
            match place {
                QueueEnd::Young => cells.push_young(list, cell),
                QueueEnd::Old => cells.push_old(list, cell),
            }
        }
    }

    /// Takes the next to be evicted out of its queue. Each step but the last consumes a counted use, or empties the small queue by one.
    fn next(&mut self) -> Option<u32> {
        loop {
            let small_is_full = self.small.len * SMALL_SHARE >= self.cells.len();
            let queue = if self.main.len == 0 || small_is_full && self.small.len > 0 { SMALL } else { MAIN };
            let (cells, list) = self.list(queue);
            let cell = cells.pop_old(list)?;
            let node = cells.get_mut(cell)?;
            match (queue, node.mark) {
                (SMALL, PROMOTING_USES..) => node.mark = 0,
                (MAIN, 1..) => node.mark -= 1,
                _ => return Some(cell),
            }
            self.push(cell, MAIN, QueueEnd::Young);
        }
    }

    fn use_by_another(&mut self, cell: u32, tick: u32) {
        if let Some(node) = self.cells.get_mut(cell) {
            (node.mark, node.tick) = (0, node.tick.max(tick));
            self.push(cell, MAIN, QueueEnd::Young);
        }
    }
}

impl EvictionPolicy for S3Fifo {
    fn inserted(&mut self, entry: &Entry, place: QueueEnd, tick: u32) -> Result<()> {
        self.now = self.now.max(tick);
        self.removed(entry.cell);
        let name = fingerprint(&entry.namespace, &entry.key);
        let tick = if place == QueueEnd::Young { self.now } else { 0 };
        let cell = self.cells.follow(entry.cell, tick, [name as u32, (name >> 32) as u32])?;
        let queue = if place == QueueEnd::Young && self.ghost.take(name) { MAIN } else { SMALL };
        self.push(cell, queue, place);
        Ok(())
    }

    fn touched(&mut self, cell: u64, tick: u32) {
        self.now = self.now.max(tick);
        let now = self.now;
        if let Some(node) = self.cells.find(cell).and_then(|cell| self.cells.get_mut(cell)) {
            (node.tick, node.mark) = (now, (node.mark + 1).min(MAX_USES));
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
            (node.tick, node.mark) = (tick, (node.mark + 1).min(MAX_USES));
        }
    }

    fn removed(&mut self, cell: u64) {
        if let Some(cell) = self.cells.find(cell) {
            if let Some(queue) = self.cells.get(cell).filter(|node| node.state == ListState::Listed).map(|node| node.queue) {
                let (cells, list) = self.list(queue);
                cells.unlink(list, cell);
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
        let Some(&Node { state, queue, extra: [low, high], .. }) = self.cells.get(number) else { return false };
        if state == ListState::Listed {
            return false;
        }
        match verdict {
            Verdict::Evicted => {
                if queue == SMALL {
                    let most = self.cells.len() - self.cells.len() / SMALL_SHARE;
                    self.ghost.insert(u64::from(high) << 32 | u64::from(low), most);
                }
                self.removed(cell);
            }
            Verdict::InUse => self.use_by_another(number, self.now),
            Verdict::Younger { tick } => self.use_by_another(number, tick),
            // A use since the offer is counted and decides when the queue's turn comes.
            Verdict::Kept => self.push(number, queue, QueueEnd::Old),
        }
        verdict == Verdict::Evicted
    }

    fn len(&self) -> usize {
        self.cells.len()
    }
}
