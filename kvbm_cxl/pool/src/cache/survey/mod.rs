// SPDX-License-Identifier: Apache-2.0
//! The contents of the cache of a pool, for tools: read from its lines alone, without a host, and without writing a byte.
//!
//! Nothing here is a snapshot. Hosts that use the pool change it while one looks, so two lines may tell of different moments. Anything may
//! stand in the memory: every line is verified, every number in it checked before it is used, and all work is bounded by the layout.

mod hosts;
mod listing;
mod summary;
mod why;

pub use hosts::{Claimant, OwnerStatus};
pub use listing::Listed;
pub use summary::{CacheSummary, ChunkCounts, ClassInfo, HintInfo, NamespaceInfo, OwnerInfo, StateCounts, WaitInfo};
pub use why::{Explanation, HintSeen, Verdict};

use super::index::Home;
use super::{BlockKey, Namespace};
use crate::error::{Error, Result};
use crate::limits::HINT_WINDOW;
use crate::line::Lines;
use crate::media::{CELLS_PER_PIN, CHUNKS_PER_CELL_CLAIM, CellClaim, Descriptor, Geometry, Hint, HintLine, MediaLine, PinLine};
use hosts::Hosts;

/// Cells that are looked at together: their pins fill whole lines.
pub const BATCH: u64 = 4 * CELLS_PER_PIN as u64;

crate::named::named_enum! {
    /// What a cell's descriptor says of it.
    CellState {
        /// Nothing in it.
        Free = "free",
        /// Reserved: its owner may be writing payload.
        Writing = "writing",
        /// Holds a complete block.
        Ready = "ready",
        /// Complete, and about to go unless a reader pins it.
        Evicting = "evicting",
        /// Content is void; about to be free unless a reader pins it.
        Retiring = "retiring",
        /// The descriptor does not verify: it counts as not READY, and its next owner keeps the cell in quarantine.
        Damaged = "damaged",
    }
}

impl CellState {
    fn of(descriptor: Option<&Descriptor>) -> Self {
        match descriptor.map(|found| found.state) {
            Some(Descriptor::FREE) => CellState::Free,
            Some(Descriptor::WRITING) => CellState::Writing,
            Some(Descriptor::READY) => CellState::Ready,
            Some(Descriptor::EVICTING) => CellState::Evicting,
            Some(_) => CellState::Retiring,
            None => CellState::Damaged,
        }
    }
}

/// A cell.
#[derive(Clone, Debug)]
pub struct CellInfo {
    /// Its number.
    pub cell: u64,
    /// Its cell chunk.
    pub chunk: u64,
    /// Its class.
    pub class: usize,
    /// Pool offset of its first byte.
    pub offset: u64,
    /// Its size in bytes.
    pub cell_bytes: u64,
    /// What its descriptor says.
    pub state: CellState,
    /// The descriptor; all zero where it does not verify.
    pub descriptor: Descriptor,
    /// How the incarnation stands that wrote the descriptor.
    pub standing: OwnerStatus,
    /// It is fenced, or that is unknown: a pull takes the descriptor for void.
    pub is_void: bool,
    /// Slots whose hosts have it pinned. A pin line that does not verify counts as a pin while its slot may be in use.
    pub pinned_by: Vec<u16>,
    /// Ticks at which hosts used it last: bit 1 to 7 for each number in a pin line.
    pub ticks: u8,
}

impl CellInfo {
    /// Key of the block.
    pub fn key(&self) -> BlockKey {
        BlockKey(self.descriptor.key)
    }

    /// Its namespace.
    pub fn namespace(&self) -> Namespace {
        Namespace(self.descriptor.namespace)
    }

    /// A block that a pull may get: complete, not longer than its cell, of an owner that is not fenced.
    pub fn is_served(&self) -> bool {
        self.state == CellState::Ready && u64::from(self.descriptor.len_bytes) <= self.cell_bytes && !self.is_void
    }
}

/// How the claims on a cell chunk stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkState {
    /// It has no claim: a host that needs cells takes it.
    Unclaimed,
    /// A host that is there has it.
    Claimed(Claimant),
    /// Only hosts that are fenced or gone claim it, and it can be adopted.
    Abandoned,
    /// Only hosts that are fenced or gone claim it, and not all of them are proven to have ended: no host may adopt it before.
    Waiting,
    /// More than one host that is there claims it, which the protocol rules out.
    Contested,
}

/// A cell chunk.
#[derive(Clone, Debug)]
pub struct ChunkInfo {
    /// Its number.
    pub chunk: u64,
    /// Class of its cells.
    pub class: usize,
    /// Every claim on it, with how the claimant stands.
    pub claimants: Vec<(Claimant, OwnerStatus)>,
    /// What follows from them.
    pub state: ChunkState,
}

impl ChunkInfo {
    /// Whose end has to be proven before the cell leaves quarantine, or the quarantine that awaits it with the next owner of its chunk.
    fn pending_claimants(&self, cell: &CellInfo) -> Vec<Claimant> {
        let stamp = Claimant { slot: cell.descriptor.owner, incarnation: cell.descriptor.incarnation };
        let doubtful = matches!(cell.state, CellState::Writing | CellState::Retiring | CellState::Damaged);
        let (waits, owner) = match self.state {
            ChunkState::Unclaimed | ChunkState::Contested => (false, None),
            ChunkState::Claimed(owner) => {
                (matches!(cell.state, CellState::Retiring | CellState::Damaged) || stamp != owner, Some(owner.slot))
            }
            ChunkState::Abandoned => (doubtful || self.claimants.iter().any(|(claimant, _)| *claimant != stamp), None),
            ChunkState::Waiting => (true, None),
        };
        let others = self.claimants.iter().filter(|(claimant, standing)| owner != Some(claimant.slot) && !standing.has_ended());
        others.filter(|_| waits).map(|(claimant, _)| *claimant).collect()
    }
}

/// The cache of a pool, with the fences and claims as they were when this was made; descriptors, pins and hints are read when asked for.
pub struct CacheView {
    lines: Lines,
    hosts: Hosts,
    /// Claim lines of all slots; `None` where one does not verify, which counts as a claim of everything in it.
    claims: Vec<Option<CellClaim>>,
}

impl CacheView {
    /// Reads who is there and who claims what.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the pool has no cells; those of the memory, except where only single lines fail.
    pub fn load(lines: &Lines) -> Result<Self> {
        let geometry = lines.layout().geometry();
        if geometry.cell_chunks() == 0 {
            return Err(Error::Invalid("the pool has no cells: it was formatted without a prefix cache".into()));
        }
        let claims = u64::from(geometry.slots) * geometry.cell_claim_lines();
        let claims = fetch_all(lines, &(0..claims).collect::<Vec<u64>>())?;
        Ok(CacheView { lines: lines.clone(), hosts: Hosts::load(lines)?, claims })
    }

    fn geometry(&self) -> &Geometry {
        self.lines.layout().geometry()
    }

    /// Cell chunks of the pool.
    pub(crate) fn cell_chunks(&self) -> u64 {
        self.geometry().cell_chunks()
    }

    /// Number of the claim line in which a slot's claim on a chunk stands.
    pub(crate) fn claim_line(&self, slot: u16, chunk: u64) -> u64 {
        u64::from(slot) * self.geometry().cell_claim_lines() + chunk / CHUNKS_PER_CELL_CLAIM as u64
    }

    /// What a hint for the block of a descriptor has in common with no other, as good as surely.
    pub(crate) fn fingerprint(geometry: &Geometry, found: &Descriptor) -> u64 {
        Home::of_key(geometry, Namespace(found.namespace), BlockKey(found.key)).fingerprint
    }

    /// Cells of the pool.
    pub fn cell_count(&self) -> u64 {
        self.geometry().cell_count()
    }

    /// How an incarnation of a slot stands.
    pub fn standing(&self, claimant: Claimant) -> OwnerStatus {
        self.hosts.standing(claimant)
    }

    /// A cell chunk, which must be one of the pool's.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn chunk(&self, chunk: u64) -> Result<ChunkInfo> {
        let limit_bytes = self.geometry().cell_chunks();
        let Some(class) = self.lines.layout().cell_class(chunk) else {
            return Err(Error::OutOfRange { what: "cell chunk", offset: chunk, len_bytes: 1, limit_bytes });
        };
        let lines = self.geometry().cell_claim_lines();
        let (line, bit) = (chunk / CHUNKS_PER_CELL_CLAIM as u64, (chunk % CHUNKS_PER_CELL_CLAIM as u64) as usize);
        let claim = |slot: u16| self.claims.get((u64::from(slot) * lines + line) as usize).copied().flatten();
        let claimants = (0..self.geometry().slots as u16).filter_map(|slot| {
            let claimant = match claim(slot) {
                Some(claim) if claim.has(bit) => Claimant { slot, incarnation: claim.incarnation },
                Some(_) => return None,
                None if self.hosts.was_joined(slot) => self.hosts.latest(slot),
                None => return None,
            };
            Some((claimant, self.hosts.standing(claimant)))
        });
        let claimants: Vec<_> = claimants.collect();
        let mut live = claimants.iter().filter(|(_, standing)| standing.is_there()).map(|(claimant, _)| *claimant);
        let state = match (live.next(), live.next()) {
            (Some(_), Some(_)) => ChunkState::Contested,
            (Some(owner), None) => ChunkState::Claimed(owner),
            (None, _) if claimants.is_empty() => ChunkState::Unclaimed,
            (None, _) if claimants.len() == 1 && claimants[0].1 != OwnerStatus::Unknown => ChunkState::Abandoned,
            (None, _) if claimants.iter().all(|(_, standing)| standing.has_ended()) => ChunkState::Abandoned,
            (None, _) => ChunkState::Waiting,
        };
        Ok(ChunkInfo { chunk, class, claimants, state })
    }

    /// Up to `count` cells from `first` on; fewer at the end of the pool.
    ///
    /// # Errors
    /// Those of the memory, except where only single lines fail.
    pub fn cells(&self, first: u64, count: u64) -> Result<Vec<CellInfo>> {
        let end = first.saturating_add(count).min(self.cell_count());
        let cells: Vec<u64> = (first..end).collect();
        self.look_at(&cells)
    }

    /// These cells of the pool, in this order.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] when one does not exist; those of the memory, except where only single lines fail.
    pub fn look_at(&self, cells: &[u64]) -> Result<Vec<CellInfo>> {
        let descriptors: Vec<Option<Descriptor>> = fetch_all(&self.lines, cells)?;
        let mut found = Vec::with_capacity(cells.len());
        for (&cell, descriptor) in cells.iter().zip(descriptors) {
            let (offset, cell_bytes) = self.lines.layout().cell(cell)?;
            let chunk = cell / u64::from(self.geometry().cells_per_chunk.max(1));
            let state = CellState::of(descriptor.as_ref());
            let descriptor = descriptor.unwrap_or_default();
            let stamp = Claimant { slot: descriptor.owner, incarnation: descriptor.incarnation };
            let standing = if state == CellState::Damaged { OwnerStatus::NoHost } else { self.hosts.standing(stamp) };
            let class = self.lines.layout().cell_class(chunk).unwrap_or(0);
            found.push(CellInfo {
                cell,
                chunk,
                class,
                offset,
                cell_bytes,
                state,
                descriptor,
                standing,
                is_void: self.hosts.is_void(stamp),
                pinned_by: Vec::new(),
                ticks: 0,
            });
        }
        self.add_pins(&mut found)?;
        Ok(found)
    }

    /// Adds what the pin lines of every slot that was ever joined say.
    fn add_pins(&self, cells: &mut [CellInfo]) -> Result<()> {
        let mut rows: Vec<u64> = cells.iter().map(|cell| cell.cell / CELLS_PER_PIN as u64).collect();
        rows.sort_unstable();
        rows.dedup();
        for slot in (0..self.geometry().slots as u16).filter(|&slot| self.hosts.was_joined(slot)) {
            let indexes: Vec<u64> = rows.iter().map(|row| u64::from(slot) * self.geometry().pin_lines() + row).collect();
            let lines: Vec<Option<PinLine>> = fetch_all(&self.lines, &indexes)?;
            for cell in cells.iter_mut() {
                let Ok(at) = rows.binary_search(&(cell.cell / CELLS_PER_PIN as u64)) else { continue };
                let (nibble, claimant) = match &lines[at] {
                    Some(line) => {
                        let claimant = Claimant { slot, incarnation: line.incarnation };
                        (line.nibble((cell.cell % CELLS_PER_PIN as u64) as usize), claimant)
                    }
                    None => (PinLine::PINNED, self.hosts.latest(slot)),
                };
                cell.ticks |= (1u8 << (nibble & PinLine::TICK)) & !1;
                if nibble & PinLine::PINNED != 0 && self.hosts.standing(claimant).is_there() {
                    cell.pinned_by.push(slot);
                }
            }
        }
        Ok(())
    }

    /// For each of these blocks, whether a lookup of its key comes to its cell.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn are_reachable(&self, blocks: &[CellInfo]) -> Result<Vec<bool>> {
        let homes: Vec<Home> = blocks.iter().map(|block| Home::of_key(self.geometry(), block.namespace(), block.key())).collect();
        let mut reachable = vec![false; blocks.len()];
        let mut pending: Vec<usize> = (0..blocks.len()).collect();
        for step in 0..HINT_WINDOW {
            if pending.is_empty() {
                break;
            }
            let indexes: Vec<u64> = pending.iter().map(|&at| homes[at].hint_line(self.geometry(), step)).collect();
            let lines: Vec<Option<HintLine>> = fetch_all(&self.lines, &indexes)?;
            let mut next = Vec::new();
            for (&at, line) in pending.iter().zip(&lines) {
                // A line that does not verify is four tombs.
                let Some(line) = line else {
                    next.push(at);
                    continue;
                };
                let wanted = Hint::Cell { fingerprint: homes[at].fingerprint, cell: blocks[at].cell };
                match line.iter().find(|hint| *hint == Hint::Empty || *hint == wanted) {
                    Some(Hint::Empty) => {}
                    Some(_) => reachable[at] = true,
                    None => next.push(at),
                }
            }
            pending = next;
        }
        Ok(reachable)
    }
}

/// Lines of one region by number; `None` where a line does not verify or its memory fails.
fn fetch_all<T: MediaLine>(lines: &Lines, indexes: &[u64]) -> Result<Vec<Option<T>>> {
    let mut fetched: Vec<Result<T>> = Vec::with_capacity(indexes.len());
    if matches!(lines.fetch_many(indexes, &mut fetched), Err(Error::Poisoned { .. } | Error::DeviceLost { .. })) {
        // Poison or loss ends the whole batch; line by line it is only the line itself.
        fetched = indexes.iter().map(|&index| lines.fetch(index)).collect();
    }
    fetched
        .into_iter()
        .map(|line| match line {
            Ok(line) => Ok(Some(line)),
            Err(Error::BadLine { .. } | Error::Poisoned { .. } | Error::DeviceLost { .. }) => Ok(None),
            Err(error) => Err(error),
        })
        .collect()
}

#[cfg(test)]
mod tests;
