// SPDX-License-Identifier: Apache-2.0
//! The whole cache in numbers.

use super::{BATCH, CacheView, CellInfo, CellState, ChunkInfo, ChunkState, Claimant, OwnerStatus, fetch_all};
use crate::cache::Namespace;
use crate::error::Result;
use crate::media::{Descriptor, HINTS_PER_LINE, Hint, HintLine, Region};
use std::collections::BTreeMap;

/// Hint lines that are looked at together.
const HINT_BATCH: u64 = 256;
/// Namespaces that are counted apart; blocks of any beyond that are counted together.
const MAX_NAMESPACES: usize = 1 << 16;

/// Cells by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateCounts([u64; CellState::ALL.len()]);

impl StateCounts {
    /// Cells in a state.
    pub fn of(&self, state: CellState) -> u64 {
        self.0[state as usize]
    }

    /// Cells in any state.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    fn count(&mut self, state: CellState) {
        self.0[state as usize] += 1;
    }
}

/// Cells of one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassInfo {
    /// Their size in bytes.
    pub cell_bytes: u64,
    /// What they are.
    pub cells: StateCounts,
    /// The chunks that they lie in.
    pub chunks: ChunkCounts,
}

/// Cell chunks by how the claims on them stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChunkCounts {
    /// A host that is there has them.
    pub claimed: u64,
    /// They have no claim.
    pub unclaimed: u64,
    /// Their hosts are fenced or gone, and any host may adopt them.
    pub abandoned: u64,
    /// Their hosts are fenced or gone, and no host may adopt them before all of these are proven to have ended.
    pub waiting: u64,
    /// Several hosts that are there claim them, which cannot be.
    pub contested: u64,
}

impl ChunkCounts {
    fn count(&mut self, state: ChunkState) {
        let counter = match state {
            ChunkState::Claimed(_) => &mut self.claimed,
            ChunkState::Unclaimed => &mut self.unclaimed,
            ChunkState::Abandoned => &mut self.abandoned,
            ChunkState::Waiting => &mut self.waiting,
            ChunkState::Contested => &mut self.contested,
        };
        *counter += 1;
    }
}

/// An incarnation that wrote descriptors or claims chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnerInfo {
    /// Slot and incarnation.
    pub owner: Claimant,
    /// How it stands.
    pub standing: OwnerStatus,
    /// Cells whose descriptors it wrote.
    pub cells: StateCounts,
    /// Bytes of blocks among them.
    pub len_bytes: u64,
    /// Cell chunks that it claims.
    pub chunks: u64,
}

/// What a namespace has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceInfo {
    /// The namespace; `None` for all those that were not counted apart.
    pub namespace: Option<Namespace>,
    /// Blocks that a pull may get.
    pub blocks: u64,
    /// Their length in bytes.
    pub len_bytes: u64,
    /// Bytes of the cells that they lie in.
    pub cell_bytes: u64,
}

/// How the hint table is filled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HintInfo {
    /// Places of the table.
    pub places: u64,
    /// Places that name a cell.
    pub used: u64,
    /// Places that were used once and make probes continue.
    pub tombs: u64,
    /// Hints whose cell holds no block of their fingerprint; the next insert that needs the place takes it.
    pub stale: u64,
    /// Lines that do not verify and count as four tombs each.
    pub damaged_lines: u64,
    /// Blocks that no lookup comes to, because their hint is gone; their owner's scrub inserts it again.
    pub unreachable_blocks: u64,
}

/// Cells that cannot be used before a host is proven to have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitInfo {
    /// Whose end is to be proven.
    pub awaited: Claimant,
    /// How it stands.
    pub standing: OwnerStatus,
    /// Cells that wait for it, perhaps among others.
    pub cells: u64,
    /// Their bytes.
    pub cell_bytes: u64,
}

/// The cache of a pool in numbers.
#[derive(Clone, Debug, Default)]
pub struct CacheSummary {
    /// Every cell.
    pub cells: StateCounts,
    /// Every cell chunk.
    pub chunks: ChunkCounts,
    /// By size of the cells.
    pub classes: Vec<ClassInfo>,
    /// By slot and incarnation.
    pub owners: Vec<OwnerInfo>,
    /// By namespace, the largest first.
    pub namespaces: Vec<NamespaceInfo>,
    /// Blocks that a pull may get.
    pub served: u64,
    /// Cells that any host has pinned.
    pub pinned: u64,
    /// Slots whose hosts have pinned cells, and how many.
    pub pins: Vec<(u16, u64)>,
    /// The hint table; `None` when it was not asked for.
    pub hints: Option<HintInfo>,
    /// Who is waited for.
    pub waits: Vec<WaitInfo>,
    /// Bytes of cells that wait for a proof.
    pub waiting_bytes: u64,
}

#[derive(Default)]
struct Sums {
    owners: BTreeMap<Claimant, (StateCounts, u64, u64)>,
    pins: BTreeMap<u16, u64>,
    namespaces: BTreeMap<Option<Namespace>, (u64, u64, u64)>,
    waits: BTreeMap<Claimant, (u64, u64)>,
}

impl CacheView {
    /// Looks at every cell, and with `hints` at the hint table as well.
    ///
    /// # Errors
    /// Those of the memory, except where only single lines fail.
    pub fn summary(&self, hints: bool) -> Result<CacheSummary> {
        let (mut summary, mut sums) = (CacheSummary::default(), Sums::default());
        let classes = self.geometry().cells.iter().take_while(|class| class.chunks > 0);
        summary.classes = classes.map(|class| ClassInfo { cell_bytes: class.cell_bytes, ..ClassInfo::default() }).collect();
        let mut chunk: Option<ChunkInfo> = None;
        let mut unreachable_blocks = 0;
        for first in (0..self.cell_count()).step_by(BATCH as usize) {
            let mut served = Vec::new();
            for cell in self.cells(first, BATCH)? {
                let info = match chunk.take().filter(|known| known.chunk == cell.chunk) {
                    Some(known) => known,
                    None => {
                        let next = self.chunk(cell.chunk)?;
                        count_chunk(&next, &mut summary, &mut sums);
                        next
                    }
                };
                count_cell(&cell, &info, &mut summary, &mut sums);
                chunk = Some(info);
                if cell.is_served() {
                    served.push(cell);
                }
            }
            if hints {
                unreachable_blocks += self.are_reachable(&served)?.iter().filter(|found| !**found).count() as u64;
            }
        }
        if hints {
            summary.hints = Some(HintInfo { unreachable_blocks, ..self.hint_info()? });
        }
        for (owner, (cells, len_bytes, chunks)) in sums.owners {
            let standing = self.hosts.standing(owner);
            if standing != OwnerStatus::NoHost {
                summary.owners.push(OwnerInfo { owner, standing, cells, len_bytes, chunks });
            }
        }
        summary.pins = sums.pins.into_iter().collect();
        for (awaited, (cells, cell_bytes)) in sums.waits {
            summary.waits.push(WaitInfo { awaited, standing: self.hosts.standing(awaited), cells, cell_bytes });
        }
        for (namespace, (blocks, len_bytes, cell_bytes)) in sums.namespaces {
            summary.namespaces.push(NamespaceInfo { namespace, blocks, len_bytes, cell_bytes });
        }
        summary.namespaces.sort_by_key(|found| (found.namespace.is_none(), std::cmp::Reverse(found.cell_bytes), found.namespace));
        Ok(summary)
    }

    /// Looks at every hint, and at the descriptors that they name.
    fn hint_info(&self) -> Result<HintInfo> {
        let lines = self.lines.layout().span(Region::Hint).lines;
        let mut info = HintInfo { places: lines * HINTS_PER_LINE as u64, ..HintInfo::default() };
        for first in (0..lines).step_by(HINT_BATCH as usize) {
            let batch: Vec<u64> = (first..lines.min(first + HINT_BATCH)).collect();
            let fetched: Vec<Option<HintLine>> = fetch_all(&self.lines, &batch)?;
            info.damaged_lines += fetched.iter().filter(|line| line.is_none()).count() as u64;
            let mut named = Vec::new();
            for hint in fetched.iter().flatten().flat_map(HintLine::iter) {
                match hint {
                    Hint::Empty => {}
                    Hint::Tomb => info.tombs += 1,
                    Hint::Cell { fingerprint, cell } => {
                        info.used += 1;
                        named.push((fingerprint, cell));
                    }
                }
            }
            let (inside, outside): (Vec<_>, Vec<_>) = named.into_iter().partition(|(_, cell)| *cell < self.cell_count());
            info.stale += outside.len() as u64;
            let cells: Vec<u64> = inside.iter().map(|(_, cell)| *cell).collect();
            let found: Vec<Option<Descriptor>> = fetch_all(&self.lines, &cells)?;
            let is_stale = |((fingerprint, _), found): &(&(u64, u64), &Option<Descriptor>)| !self.backs(*fingerprint, found.as_ref());
            info.stale += inside.iter().zip(&found).filter(is_stale).count() as u64;
        }
        Ok(info)
    }

    /// Whether a descriptor is one that a hint with this fingerprint may stand for.
    pub(crate) fn backs(&self, fingerprint: u64, found: Option<&Descriptor>) -> bool {
        found.is_some_and(|found| {
            let is_block = matches!(found.state, Descriptor::WRITING | Descriptor::READY | Descriptor::EVICTING);
            is_block && Self::fingerprint(self.geometry(), found) == fingerprint
        })
    }
}

fn count_chunk(chunk: &ChunkInfo, summary: &mut CacheSummary, sums: &mut Sums) {
    summary.chunks.count(chunk.state);
    if let Some(class) = summary.classes.get_mut(chunk.class) {
        class.chunks.count(chunk.state);
    }
    for (claimant, _) in &chunk.claimants {
        sums.owners.entry(*claimant).or_default().2 += 1;
    }
}

fn count_cell(cell: &CellInfo, chunk: &ChunkInfo, summary: &mut CacheSummary, sums: &mut Sums) {
    summary.cells.count(cell.state);
    if let Some(class) = summary.classes.get_mut(cell.class) {
        class.cells.count(cell.state);
    }
    if cell.state != CellState::Damaged {
        let owner = Claimant { slot: cell.descriptor.owner, incarnation: cell.descriptor.incarnation };
        let counted = sums.owners.entry(owner).or_default();
        counted.0.count(cell.state);
        if cell.state == CellState::Ready {
            counted.1 += u64::from(cell.descriptor.len_bytes);
        }
    }
    summary.pinned += u64::from(!cell.pinned_by.is_empty());
    cell.pinned_by.iter().for_each(|&slot| *sums.pins.entry(slot).or_default() += 1);
    if cell.is_served() {
        summary.served += 1;
        let namespace = Some(cell.namespace());
        let is_apart = sums.namespaces.len() < MAX_NAMESPACES || sums.namespaces.contains_key(&namespace);
        let counted = sums.namespaces.entry(namespace.filter(|_| is_apart)).or_default();
        counted.0 += 1;
        counted.1 += u64::from(cell.descriptor.len_bytes);
        counted.2 += cell.cell_bytes;
    }
    let awaited = chunk.pending_claimants(cell);
    if !awaited.is_empty() {
        summary.waiting_bytes += cell.cell_bytes;
    }
    for claimant in awaited {
        let counted = sums.waits.entry(claimant).or_default();
        counted.0 += 1;
        counted.1 += cell.cell_bytes;
    }
}
