// SPDX-License-Identifier: Apache-2.0
//! The cells that this process owns: the truth about them, in its own memory (CACHE.md D6). Descriptors are published from here and
//! never read back while the process has the chunk, because a stray of an earlier owner may lie on top of one.

pub(super) mod adopt;
pub(super) mod allocate;
pub(super) mod claims;
pub(super) mod evict;
pub(super) mod give_back;
pub(super) mod local;
pub(super) mod owner_requests;
pub(super) mod quota;
pub(super) mod recency;
pub(super) mod residue;
pub(super) mod store;
pub(super) mod usage;

use super::Few;
use super::policy::{Candidate, Entry, EvictionPolicy, PolicyKind, QueueEnd, Verdict};
use crate::error::Result;
use crate::limits::CELL_CLASSES;
use crate::media::{Descriptor, Geometry};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use usage::{NamespaceUsage, Share};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OwnedCellState {
    Free,
    /// In the hands of one operation of this process, which alone publishes its descriptor.
    Busy,
    /// Holds a block that can be pulled; the eviction policy follows it.
    Ready,
    /// A host that is not proven to have stopped may still write its payload, or has a pin on the block that was there.
    Quarantined,
    /// Lies in memory that this process has found to be bad. It is in no list, for as long as the process has the chunk.
    Bad,
}

#[derive(Clone, Copy)]
struct Cell {
    state: OwnedCellState,
    /// As last published; meaningless unless READY.
    descriptor: Descriptor,
    /// Key of the block before, where the publisher told.
    parent: Option<[u8; 16]>,
    /// Its namespace has it: READY, or taken out and neither gone nor back.
    counts: bool,
}

pub(super) struct CellChunk {
    class: usize,
    cells: Box<[Cell]>,
    free: u128,
    quarantined: u128,
    /// Not to be given out any more: it is about to be given back.
    draining: bool,
}

struct Class {
    /// Chunks that have free cells, and some that had: a cell that comes and goes leaves its chunk here.
    with_free: BTreeSet<u64>,
    free: u64,
    ready: u64,
    policy: Box<dyn EvictionPolicy>,
}

#[derive(Default)]
pub(in crate::cache) struct Pace {
    last_ns: AtomicU64,
}

impl Pace {
    /// Whether the last request was made at least `period_ns` ago; notes this one, if so.
    pub fn is_time(&self, now_ns: u64, period_ns: u64) -> bool {
        let (now_ns, last_ns) = (now_ns.max(1), self.last_ns.load(Ordering::Relaxed));
        let is_time = last_ns == 0 || now_ns.saturating_sub(last_ns) >= period_ns;
        if is_time {
            self.last_ns.store(now_ns, Ordering::Relaxed);
        }
        is_time
    }
}

/// A block as it was found: its cell may hold another one by the time of the next look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FoundBlock {
    pub cell: u64,
    stamp: (u32, u64),
}

impl FoundBlock {
    pub fn new(cell: u64, descriptor: &Descriptor) -> Self {
        FoundBlock { cell, stamp: (descriptor.incarnation, descriptor.seq) }
    }
}

pub(super) struct Cells {
    geometry: Geometry,
    chunks: BTreeMap<u64, CellChunk>,
    classes: [Option<Class>; CELL_CLASSES],
    pub usage: NamespaceUsage,
}

impl Cells {
    pub fn new(geometry: &Geometry, policy: PolicyKind) -> Self {
        let class = |class: usize| {
            (geometry.cells[class].chunks > 0).then(|| Class {
                with_free: BTreeSet::new(),
                free: 0,
                ready: 0,
                policy: policy.build(geometry.cell_count()),
            })
        };
        Cells { geometry: *geometry, chunks: BTreeMap::new(), classes: std::array::from_fn(class), usage: NamespaceUsage::default() }
    }

    fn per_chunk(&self) -> u64 {
        u64::from(self.geometry.cells_per_chunk.max(1))
    }

    fn place(&self, cell: u64) -> (u64, usize) {
        (cell / self.per_chunk(), (cell % self.per_chunk()) as usize)
    }

    fn cell(&self, cell: u64) -> Option<&Cell> {
        let (chunk, place) = self.place(cell);
        self.chunks.get(&chunk)?.cells.get(place)
    }

    pub fn has_chunk(&self, chunk: u64) -> bool {
        self.chunks.contains_key(&chunk)
    }

    pub fn chunks(&self) -> impl Iterator<Item = u64> + '_ {
        self.chunks.keys().copied()
    }

    /// Takes a chunk in; every cell is busy until [`Cells::set_free`], [`Cells::set_ready`] or [`Cells::quarantine`] says what it is.
    pub fn add_chunk(&mut self, chunk: u64, class: usize) {
        let busy = Cell { state: OwnedCellState::Busy, descriptor: Descriptor::default(), parent: None, counts: false };
        let cells = vec![busy; self.per_chunk() as usize].into_boxed_slice();
        self.remove_chunk(chunk);
        self.chunks.insert(chunk, CellChunk { class, cells, free: 0, quarantined: 0, draining: false });
    }

    /// Forgets a chunk with all its cells; returns the blocks that were in it, with their cells.
    pub fn remove_chunk(&mut self, chunk: u64) -> Vec<(u64, Descriptor)> {
        let first = chunk * self.per_chunk();
        let mut blocks = Vec::new();
        if self.has_chunk(chunk) {
            for cell in first..first + self.per_chunk() {
                blocks.extend(self.ready(cell).map(|descriptor| (cell, descriptor)));
                self.make_busy(cell);
            }
            self.chunks.remove(&chunk);
        }
        blocks
    }

    /// Takes a cell out of whatever list it is in, and what it held out of its namespace's share.
    fn make_busy(&mut self, number: u64) {
        if let Some((namespace, cell_bytes)) = self.take_out(number, false) {
            self.usage.settle(&namespace, cell_bytes);
        }
    }

    /// Takes a cell out of whatever list it is in. Returns the namespace that has it, and its bytes, if it does not count any more: unless
    /// it `may_come_back`.
    fn take_out(&mut self, number: u64, may_come_back: bool) -> Option<([u8; 16], u64)> {
        let (chunk_number, place) = self.place(number);
        let chunk = self.chunks.get_mut(&chunk_number)?;
        let class = self.classes.get_mut(chunk.class).and_then(Option::as_mut)?;
        let cell = chunk.cells.get_mut(place)?;
        match cell.state {
            OwnedCellState::Free => {
                chunk.free &= !(1 << place);
                if !chunk.draining {
                    class.free -= 1;
                }
            }
            OwnedCellState::Quarantined => chunk.quarantined &= !(1 << place),
            OwnedCellState::Ready => {
                class.policy.on_remove(number);
                class.ready -= 1;
                self.usage.is_going(&cell.descriptor.namespace);
            }
            OwnedCellState::Busy | OwnedCellState::Bad => {}
        }
        cell.state = OwnedCellState::Busy;
        if !cell.counts || may_come_back {
            return None;
        }
        cell.counts = false;
        Some((cell.descriptor.namespace, self.geometry.cells[chunk.class].cell_bytes))
    }

    fn cell_bytes(&self, cell: u64) -> u64 {
        let class = self.chunks.get(&self.place(cell).0).map_or(0, |chunk| chunk.class);
        self.geometry.cells[class].cell_bytes
    }

    pub fn set_free(&mut self, number: u64) {
        self.make_busy(number);
        let (chunk_number, place) = self.place(number);
        let Some(chunk) = self.chunks.get_mut(&chunk_number) else { return };
        let Some(class) = self.classes.get_mut(chunk.class).and_then(Option::as_mut) else { return };
        let Some(cell) = chunk.cells.get_mut(place) else { return };
        cell.state = OwnedCellState::Free;
        chunk.free |= 1 << place;
        if !chunk.draining {
            class.free += 1;
            class.with_free.insert(chunk_number);
        }
    }

    /// A cell that holds a block, with the descriptor as published.
    pub fn set_ready(&mut self, number: u64, descriptor: Descriptor, parent: Option<[u8; 16]>, age: QueueEnd, tick: u32) -> Result<()> {
        self.make_busy(number);
        let (chunk_number, place) = self.place(number);
        let Some(chunk) = self.chunks.get_mut(&chunk_number) else { return Ok(()) };
        let cell_bytes = self.geometry.cells[chunk.class].cell_bytes;
        let Some(class) = self.classes.get_mut(chunk.class).and_then(Option::as_mut) else { return Ok(()) };
        let Some(cell) = chunk.cells.get_mut(place) else { return Ok(()) };
        let entry = Entry { cell: number, key: descriptor.key, namespace: descriptor.namespace, parent };
        class.policy.on_insert(&entry, age, tick)?;
        class.ready += 1;
        *cell = Cell { state: OwnedCellState::Ready, descriptor, parent, counts: true };
        self.usage.add(descriptor.namespace, cell_bytes);
        Ok(())
    }

    /// A cell that must not be used until its other claimants are proven to have stopped.
    pub fn quarantine(&mut self, number: u64) {
        self.make_busy(number);
        let (chunk, place) = self.place(number);
        let Some(chunk) = self.chunks.get_mut(&chunk) else { return };
        let Some(cell) = chunk.cells.get_mut(place) else { return };
        cell.state = OwnedCellState::Quarantined;
        chunk.quarantined |= 1 << place;
    }

    pub fn set_bad(&mut self, number: u64) {
        self.make_busy(number);
        let (chunk, place) = self.place(number);
        if let Some(cell) = self.chunks.get_mut(&chunk).and_then(|chunk| chunk.cells.get_mut(place)) {
            cell.state = OwnedCellState::Bad;
        }
    }

    /// The descriptor of a cell that holds a block.
    pub fn ready(&self, cell: u64) -> Option<Descriptor> {
        self.cell(cell).filter(|cell| cell.state == OwnedCellState::Ready).map(|cell| cell.descriptor)
    }

    /// Key of the block before the one in a cell.
    pub fn parent(&self, cell: u64) -> Option<[u8; 16]> {
        self.cell(cell)?.parent
    }

    pub fn state(&self, cell: u64) -> Option<OwnedCellState> {
        self.cell(cell).map(|cell| cell.state)
    }

    /// Takes up to `count` free cells of a class, neighbours where there are some, so that their pins share lines.
    pub fn take_free(&mut self, class: usize, count: usize, out: &mut Few<u64>) {
        let per_chunk = self.per_chunk();
        let Some(class) = self.classes.get_mut(class).and_then(Option::as_mut) else { return };
        let wanted = out.len() + count;
        while out.len() < wanted {
            let Some(number) = class.with_free.first().copied() else { return };
            let Some(chunk) = self.chunks.get_mut(&number).filter(|chunk| chunk.free != 0) else {
                class.with_free.remove(&number);
                continue;
            };
            // As `make_busy`, which would look up the chunk for each; one that is drained is not among these.
            while chunk.free != 0 && out.len() < wanted {
                let place = chunk.free.trailing_zeros();
                chunk.free &= chunk.free - 1;
                class.free -= 1;
                if let Some(cell) = chunk.cells.get_mut(place as usize) {
                    cell.state = OwnedCellState::Busy;
                }
                out.push(number * per_chunk + u64::from(place));
            }
        }
    }

    /// Takes a particular block out of its list, if it is still there; it counts until the cell is put into a list again.
    pub fn take_ready(&mut self, found: FoundBlock) -> Option<Descriptor> {
        let descriptor = self.ready(found.cell).filter(|descriptor| FoundBlock::new(found.cell, descriptor) == found)?;
        self.take_out(found.cell, true);
        Some(descriptor)
    }

    /// Takes the quarantined cells of a chunk out of quarantine; the caller puts each into a list.
    pub fn take_quarantined(&mut self, chunk: u64) -> Vec<u64> {
        let first = chunk * self.per_chunk();
        let bits = self.chunks.get(&chunk).map_or(0, |chunk| chunk.quarantined);
        let cells: Vec<u64> = (0..self.per_chunk()).filter(|place| bits >> place & 1 == 1).map(|place| first + place).collect();
        cells.iter().for_each(|&cell| self.make_busy(cell));
        cells
    }

    pub fn count_quarantined(&self) -> u64 {
        self.chunks.values().map(|chunk| u64::from(chunk.quarantined.count_ones())).sum()
    }

    pub fn chunks_in_quarantine(&self) -> Vec<u64> {
        self.chunks.iter().filter(|(_, chunk)| chunk.quarantined != 0).map(|(&number, _)| number).collect()
    }

    /// Candidates of a class for eviction. Each is out of the order until [`Cells::settle`].
    pub fn victims(&mut self, class: usize, count: usize, tick: u32, out: &mut Vec<Candidate>) {
        if let Some(class) = self.classes.get_mut(class).and_then(Option::as_mut) {
            class.policy.victims(count, tick, out);
        }
    }

    /// Answers for a candidate. With [`Verdict::Evicted`], and if the policy agrees, the cell is busy and its descriptor returned.
    pub fn settle(&mut self, cell: u64, verdict: Verdict) -> Option<Descriptor> {
        let class = self.chunks.get(&self.place(cell).0)?.class;
        let agreed = self.classes.get_mut(class)?.as_mut()?.policy.settle(cell, verdict);
        if agreed { self.take_ready(FoundBlock::new(cell, &self.ready(cell)?)) } else { None }
    }

    /// News that this process used a block.
    pub fn on_use(&mut self, cell: u64, tick: u32) {
        let Some(chunk) = self.chunks.get(&self.place(cell).0) else { return };
        if let Some(class) = self.classes.get_mut(chunk.class).and_then(Option::as_mut) {
            class.policy.on_use(cell, tick);
        }
    }

    /// News that another host used a block at a tick.
    pub fn used_elsewhere(&mut self, cell: u64, tick: u32) {
        let Some(chunk) = self.chunks.get(&self.place(cell).0) else { return };
        if let Some(class) = self.classes.get_mut(chunk.class).and_then(Option::as_mut) {
            class.policy.used_elsewhere(cell, tick);
        }
    }

    pub fn chunks_from(&self, from: u64, limit: usize) -> Vec<u64> {
        self.chunks.range(from..).map(|(&chunk, _)| chunk).take(limit).collect()
    }

    /// Blocks that hold what `wanted` says.
    pub fn blocks(&self, mut wanted: impl FnMut(&Descriptor) -> bool) -> Vec<FoundBlock> {
        let per_chunk = self.per_chunk();
        let cells = self
            .chunks
            .iter()
            .flat_map(|(number, chunk)| chunk.cells.iter().enumerate().map(move |(place, cell)| (number * per_chunk + place as u64, cell)));
        let ready = cells.filter(|(_, cell)| cell.state == OwnedCellState::Ready && wanted(&cell.descriptor));
        ready.map(|(number, cell)| FoundBlock::new(number, &cell.descriptor)).collect()
    }

    /// The blocks of a namespace, those published first in front, each with the bytes of its cell.
    pub fn blocks_of(&self, namespace: &[u8; 16]) -> Vec<(FoundBlock, u64)> {
        let mut blocks = self.blocks(|found| found.namespace == *namespace);
        blocks.sort_unstable_by_key(|found| found.stamp);
        blocks.into_iter().map(|found| (found, self.cell_bytes(found.cell))).collect()
    }

    /// The blocks in a chunk.
    pub fn blocks_in(&self, chunk: u64) -> Vec<FoundBlock> {
        let first = chunk * self.per_chunk();
        (first..first + self.per_chunk()).filter_map(|cell| self.ready(cell).map(|descriptor| FoundBlock::new(cell, &descriptor))).collect()
    }

    /// Free cells, blocks, and all cells of a class.
    pub fn counts(&self, class: usize) -> (u64, u64, u64) {
        let Some(counted) = self.classes.get(class).and_then(Option::as_ref) else { return (0, 0, 0) };
        let chunks = self.chunks.values().filter(|chunk| chunk.class == class).count() as u64;
        (counted.free, counted.ready, chunks * self.per_chunk())
    }

    /// Up to `limit` blocks from cell `from` on.
    pub fn ready_from(&self, from: u64, limit: usize) -> Vec<(u64, Descriptor)> {
        let per_chunk = self.per_chunk();
        let cells = self
            .chunks
            .range(from / per_chunk..)
            .flat_map(|(number, chunk)| chunk.cells.iter().enumerate().map(move |(place, cell)| (number * per_chunk + place as u64, cell)));
        let ready = cells.filter(|(number, cell)| *number >= from && cell.state == OwnedCellState::Ready);
        ready.take(limit).map(|(number, cell)| (number, cell.descriptor)).collect()
    }

    pub fn share(&self, namespace: &[u8; 16]) -> Share {
        self.usage.share(namespace)
    }

    /// Stops giving out cells of a chunk; its free ones stay where they are.
    pub fn drain(&mut self, chunk_number: u64, draining: bool) {
        let Some(chunk) = self.chunks.get_mut(&chunk_number) else { return };
        if chunk.draining == draining {
            return;
        }
        chunk.draining = draining;
        let Some(class) = self.classes.get_mut(chunk.class).and_then(Option::as_mut) else { return };
        let free = u64::from(chunk.free.count_ones());
        if draining {
            class.free -= free;
            class.with_free.remove(&chunk_number);
        } else {
            class.free += free;
            if free > 0 {
                class.with_free.insert(chunk_number);
            }
        }
    }

    /// Whether every cell of a chunk is free.
    pub fn is_all_free(&self, chunk: u64) -> bool {
        self.chunks.get(&chunk).is_some_and(|chunk| chunk.cells.iter().all(|cell| cell.state == OwnedCellState::Free))
    }

    /// The chunks of a class without busy or quarantined cells, those with the fewest blocks first.
    pub fn emptiest(&self, class: usize) -> Vec<u64> {
        let settled = |chunk: &CellChunk| {
            chunk.class == class && chunk.cells.iter().all(|cell| matches!(cell.state, OwnedCellState::Free | OwnedCellState::Ready))
        };
        let mut chunks: Vec<(u32, u64)> =
            self.chunks.iter().filter(|(_, chunk)| settled(chunk)).map(|(&number, chunk)| (chunk.free.count_ones(), number)).collect();
        chunks.sort_unstable_by_key(|&(free, number)| (std::cmp::Reverse(free), number));
        chunks.into_iter().map(|(_, number)| number).collect()
    }
}

#[cfg(test)]
mod tests;
