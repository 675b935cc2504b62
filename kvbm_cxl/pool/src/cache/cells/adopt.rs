// SPDX-License-Identifier: Apache-2.0
//! Taking a chunk over, quarantine, and the way out of it (CACHE.md section 7).
//!
//! | seen in the line of the one claimant | may its payload still be written? | done |
//! |---|---|---|
//! | READY, EVICTING | no: its writer would have to pass WRITING and the fence check | stamped again, served |
//! | FREE | no | stamped again, free |
//! | WRITING, RETIRING | yes, until that claimant is proven to have ended | quarantine |
//! | anything else, or with several claimants | unknown: a late line may lie on the true one | quarantine |

use crate::cache::cells::OwnedCellState;
use crate::cache::cells::claims::{CellClaimant, FenceJudge};
use crate::cache::cells::store::CellStore;
use crate::cache::observe::events::Change;
use crate::cache::policy::QueueEnd;
use crate::cache::{BlockKey, Namespace};
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::host::Op;
use crate::line::if_whole;
use crate::lock::LockGuard;
use crate::media::{CELLS_PER_PIN, Descriptor, Identity, PinLine};

/// What all hosts' pin lines say of a cell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::cache) struct Use {
    pub pinned: bool,
    pub ticks: u8,
}

impl CellStore {
    pub(in crate::cache) fn stamp(&self, op_incarnation: u32, state: u8, content: Descriptor) -> Descriptor {
        Descriptor { crc: 0, state, owner: self.host.slot(), incarnation: op_incarnation, seq: self.local.next_sequence(), ..content }
    }

    /// Makes the cells of a chunk, which this host has claimed, this process's own. The caller holds the lock of the claims. Listeners are
    /// told of the blocks in it but for the `known` ones.
    pub(in crate::cache) fn take_over(
        &self,
        guard: &LockGuard<'_>,
        chunk: u64,
        claimants: &[CellClaimant],
        known: &[(u64, Descriptor)],
    ) -> Result<()> {
        let Some(class) = self.host.lines().layout().cell_class(chunk) else { return Ok(()) };
        self.cells().add_chunk(chunk, class);
        if let Err(error) = self.read_cells(guard.op(), chunk, claimants, known) {
            // The claim stays, so the sweep comes back to it. No event of it was emitted.
            self.cells().remove_chunk(chunk);
            return Err(error);
        }
        // Whatever becomes of that, its cells are what they are, and the upkeep looks after those in quarantine.
        self.release(guard.op(), chunk)
    }

    fn read_cells(&self, op: &Op<'_>, chunk: u64, claimants: &[CellClaimant], known: &[(u64, Descriptor)]) -> Result<()> {
        let cells: Vec<u64> = self.cells_of(chunk).collect();
        let mut fetched: Vec<Result<Descriptor>> = Vec::with_capacity(cells.len());
        self.host.lines().fetch_many(&cells, &mut fetched)?;
        point!("cache.adopt_read");
        self.host.check_fences(op)?;
        let tick = self.clock_now();
        let mut outcomes = Vec::with_capacity(cells.len());
        for (&cell, found) in cells.iter().zip(fetched) {
            let trusted = if_whole(found)?.filter(|found| is_trusted(found, claimants));
            let line = match trusted {
                Some(found) if found.state == Descriptor::EVICTING && mutant!("cache.adopt_frees_evicting") => {
                    self.stamp(op.incarnation(), Descriptor::FREE, Descriptor::default())
                }
                Some(found) if matches!(found.state, Descriptor::READY | Descriptor::EVICTING) => {
                    self.stamp(op.incarnation(), Descriptor::READY, found)
                }
                Some(found) if found.state == Descriptor::FREE || mutant!("cache.adopt_frees_writing") => {
                    self.stamp(op.incarnation(), Descriptor::FREE, Descriptor::default())
                }
                _ => {
                    outcomes.push((cell, None));
                    continue;
                }
            };
            self.host.lines().write(cell, line)?;
            point!("cache.restamped");
            outcomes.push((cell, Some(line)));
        }
        self.host.lines().fence_published();
        point!("cache.restamped_all");
        let adopted = outcomes.iter().filter(|(_, line)| line.is_some_and(|line| line.state == Descriptor::READY)).count();
        self.metrics.adopted_total.add(adopted as u64);
        let mut own = self.cells();
        let mut stored = Vec::new();
        for (cell, line) in outcomes {
            match line {
                Some(line) if line.state == Descriptor::READY => {
                    own.set_ready(cell, line, None, QueueEnd::Old, tick)?;
                    if !known.iter().any(|(of, before)| *of == cell && is_same_block(&line, before)) {
                        stored.push(told_of(cell, &line));
                    }
                }
                Some(_) => own.set_free(cell),
                None => own.quarantine(cell),
            }
        }
        self.events.emit_all(stored);
        Ok(())
    }

    /// Tells of blocks that this process had before a re-join, and has no more. No other thread of it works with its cells meanwhile.
    pub(in crate::cache) fn tell_lost(&self, known: &[(u64, Descriptor)]) {
        let own = self.cells();
        let is_lost = |(cell, before): &&(u64, Descriptor)| own.ready(*cell).is_none_or(|now| !is_same_block(&now, before));
        self.events.emit_all(known.iter().filter(is_lost).map(|&(cell, before)| {
            let (key, namespace) = (BlockKey(before.key), Namespace(before.namespace));
            Change::Removed { key, namespace, cell }
        }));
    }

    /// Frees the quarantined cells of a chunk if all other claimants have ended, except those that are pinned.
    pub(in crate::cache) fn release(&self, op: &Op<'_>, chunk: u64) -> Result<()> {
        let (row, bit) = self.row_of(chunk)?;
        let mut judge = FenceJudge::new(&self.host);
        for claimant in row.claimants(bit, self.host.slot()) {
            if !judge.has_ended(claimant)? && !mutant!("cache.released_before_the_end") {
                return Ok(());
            }
            if mutant!("cache.released_beside_a_third") {
                break;
            }
        }
        let cells = self.cells().take_quarantined(chunk);
        if cells.is_empty() {
            return Ok(());
        }
        let result = self.retire_quarantined(op, &cells);
        if result.is_err() {
            let mut own = self.cells();
            cells
                .iter()
                .filter(|&&cell| own.state(cell) == Some(OwnedCellState::Busy))
                .copied()
                .collect::<Vec<_>>()
                .into_iter()
                .for_each(|cell| own.quarantine(cell));
        }
        result
    }

    fn retire_quarantined(&self, op: &Op<'_>, cells: &[u64]) -> Result<()> {
        self.host.check_fences(op)?;
        let state = if mutant!("cache.release_marks_evicting") { Descriptor::EVICTING } else { Descriptor::RETIRING };
        for &cell in cells {
            let content = match state {
                Descriptor::RETIRING => Descriptor::default(),
                _ => if_whole(self.host.lines().fetch::<Descriptor>(cell))?.unwrap_or_default(),
            };
            self.host.lines().write(cell, self.stamp(op.incarnation(), state, content))?;
        }
        self.host.lines().fence_published();
        point!("cache.retiring");
        let uses = if mutant!("cache.release_no_scan") { vec![Use::default(); cells.len()] } else { self.uses(cells)? };
        self.host.check_fences(op)?;
        let free = cells.iter().zip(&uses).filter(|(_, seen)| !seen.pinned).map(|(&cell, _)| cell);
        let free: Vec<u64> = free.collect();
        for &cell in &free {
            self.host.lines().write(cell, self.stamp(op.incarnation(), Descriptor::FREE, Descriptor::default()))?;
        }
        self.host.lines().fence_published();
        point!("cache.released");
        let mut own = self.cells();
        for (&cell, seen) in cells.iter().zip(&uses) {
            if seen.pinned { own.quarantine(cell) } else { own.set_free(cell) }
        }
        Ok(())
    }

    /// What all hosts' pin lines say of `cells`: one line per host and neighbourhood. A pin counts unless its incarnation is fenced or
    /// over; ticks of hosts that this process has heard to be gone do not.
    pub(in crate::cache) fn uses(&self, cells: &[u64]) -> Result<Vec<Use>> {
        let geometry = self.host.geometry();
        let slots = u64::from(geometry.slots);
        let mut judge = FenceJudge::new(&self.host);
        let mut uses = vec![Use::default(); cells.len()];
        let mut rows: Vec<u64> = cells.iter().map(|cell| cell / CELLS_PER_PIN as u64).collect();
        rows.sort_unstable();
        rows.dedup();
        let mut fetched: Vec<Result<PinLine>> = Vec::with_capacity(slots as usize);
        for row in rows {
            let indexes: Vec<u64> = (0..slots).map(|slot| slot * geometry.pin_lines() + row).collect();
            self.host.lines().fetch_many(&indexes, &mut fetched)?;
            for (slot, line) in fetched.iter().enumerate() {
                let line = match line {
                    Ok(line) if line.nibbles == [0; 7] => continue,
                    Ok(line) => *line,
                    // It may say anything: every cell counts as pinned while the slot's host may be there.
                    Err(Error::BadLine { .. }) => match self.incarnation_of(slot as u64)? {
                        _ if mutant!("cache.torn_pins_are_none") => continue,
                        0 => continue,
                        incarnation => PinLine { crc: 0, incarnation, nibbles: [0x8888_8888_8888_8888; 7] },
                    },
                    Err(_) => return Err(Error::Invalid("the pin lines cannot be read".into())),
                };
                let ticks_count = self.recency.counts(slot, line.incarnation);
                for (&cell, seen) in cells.iter().zip(&mut uses).filter(|(cell, _)| *cell / CELLS_PER_PIN as u64 == row) {
                    let nibble = line.nibble((cell % CELLS_PER_PIN as u64) as usize);
                    if ticks_count {
                        seen.ticks |= (1u8 << (nibble & PinLine::TICK)) & !1;
                    }
                    if nibble & PinLine::PINNED != 0 && !seen.pinned {
                        seen.pinned = judge.is_live(CellClaimant { slot: slot as u16, incarnation: line.incarnation, is_certain: true })?;
                    }
                }
            }
        }
        Ok(uses)
    }

    /// The incarnation that has a slot, as it says itself; the highest there is where that does not verify.
    pub(in crate::cache) fn incarnation_of(&self, slot: u64) -> Result<u32> {
        match self.host.lines().fetch::<Identity>(slot) {
            Ok(identity) => Ok(identity.incarnation),
            Err(Error::BadLine { .. }) => Ok(u32::MAX),
            Err(error) => Err(error),
        }
    }
}

fn is_same_block(one: &Descriptor, other: &Descriptor) -> bool {
    (one.key, one.namespace) == (other.key, other.namespace)
}

fn told_of(cell: u64, block: &Descriptor) -> Change {
    let (key, namespace) = (BlockKey(block.key), Namespace(block.namespace));
    Change::Stored { key, parent: None, namespace, cell, len_bytes: block.len_bytes.into() }
}

/// Whether a line is the last word of the only claimant.
fn is_trusted(found: &Descriptor, claimants: &[CellClaimant]) -> bool {
    let stamp = CellClaimant { slot: found.owner, incarnation: found.incarnation, is_certain: true };
    match claimants {
        [claimant] => stamp == *claimant,
        several => mutant!("cache.trust_several_claimants") && several.contains(&stamp),
    }
}

#[cfg(test)]
mod tests;
