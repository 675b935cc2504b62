// SPDX-License-Identifier: Apache-2.0
//! Fences and proofs of death: reading the rows of all seats, and this host's check of its own (LOCKS.md A3, B2, section 6).

use super::Inner;
use super::segment::state;
use crate::error::{Error, Result};
use crate::fault::mutant;
use crate::limits::MAX_SEATS;
use crate::line::{Line, Lines};
use crate::media::{DeathLine, FenceLine, Identity, SLOTS_PER_FENCE};
use arrayvec::ArrayVec;
use std::sync::atomic::Ordering;

/// Where the incarnations of one slot stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Fenced up to here.
    pub fenced: u32,
    /// Death proven up to here.
    pub dead: u32,
}

/// Line numbers of every seat's fence (or death) line that holds `slot`, and the slot's place in it.
fn rows(lines: &Lines, slot: u32) -> (ArrayVec<u64, MAX_SEATS>, usize) {
    let geometry = lines.layout().geometry();
    let line = u64::from(slot) / SLOTS_PER_FENCE as u64;
    let rows = (0..u64::from(geometry.seats)).map(|seat| seat * geometry.fence_lines() + line).collect();
    (rows, slot as usize % SLOTS_PER_FENCE)
}

/// The incarnation up to which any seat fences `slot`.
pub(crate) fn fenced_up_to(lines: &Lines, slot: u32) -> Result<u32> {
    // On the path of every publish, so nothing here is on the heap.
    let (rows, place) = rows(lines, slot);
    let mut fetched = [Line::ZERO; MAX_SEATS];
    lines.fetch_some::<FenceLine>(&rows, &mut fetched)?.zip(&rows).try_fold(0, |most, (line, &row)| {
        let fenced = match line {
            Some(line) => line.fenced[place],
            // Perhaps seen in the middle of being written.
            None => lines.fetch::<FenceLine>(row)?.fenced[place],
        };
        Ok(most.max(fenced))
    })
}

/// The incarnation up to which any seat holds the death of `slot` for proven.
pub(crate) fn dead_up_to(lines: &Lines, slot: u32) -> Result<u32> {
    let (rows, place) = rows(lines, slot);
    let mut fetched: Vec<Result<DeathLine>> = Vec::with_capacity(rows.len());
    lines.fetch_many(&rows, &mut fetched)?;
    fetched.into_iter().try_fold(0, |most, line| Ok(most.max(line?.dead[place])))
}

/// Fence and death of every slot, over all seats.
pub(crate) fn standings(lines: &Lines) -> Result<Vec<Standing>> {
    let geometry = lines.layout().geometry();
    let mut standings = vec![Standing::default(); geometry.slots as usize];
    let all: Vec<u64> = (0..u64::from(geometry.seats) * geometry.fence_lines()).collect();
    let per_seat = geometry.fence_lines() as usize;
    let mut fences: Vec<Result<FenceLine>> = Vec::with_capacity(all.len());
    lines.fetch_many(&all, &mut fences)?;
    let mut deaths: Vec<Result<DeathLine>> = Vec::with_capacity(all.len());
    lines.fetch_many(&all, &mut deaths)?;
    for (index, (fence, death)) in fences.into_iter().zip(deaths).enumerate() {
        let (fence, death) = (fence?, death?);
        let first = index % per_seat * SLOTS_PER_FENCE;
        for (place, standing) in standings.iter_mut().skip(first).take(SLOTS_PER_FENCE).enumerate() {
            standing.fenced = standing.fenced.max(fence.fenced[place]);
            standing.dead = standing.dead.max(death.dead[place]);
        }
    }
    Ok(standings)
}

/// Whether nothing of (slot, incarnation) can write metadata or payload any more.
///
/// The bare re-join of a fenced host is no such proof: its processes went on with their payload (only `drained` tells that they did not).
pub(crate) fn is_proven_dead(lines: &Lines, slot: u32, incarnation: u32) -> Result<bool> {
    if mutant!("suspicion_is_proof") && fenced_up_to(lines, slot)? >= incarnation {
        return Ok(true);
    }
    if dead_up_to(lines, slot)? >= incarnation {
        return Ok(true);
    }
    let identity: Identity = lines.fetch(slot.into())?;
    Ok(identity.drained >= incarnation || (identity.state == Identity::LEFT && identity.incarnation >= incarnation))
}

/// Whether (slot, incarnation) is proven dead, or has acknowledged its fence: that is published when no operation of it runs any more.
pub(crate) fn has_ended(lines: &Lines, slot: u32, incarnation: u32) -> Result<bool> {
    let identity: Identity = lines.fetch(slot.into())?;
    Ok(identity.acknowledged >= incarnation || is_proven_dead(lines, slot, incarnation)?)
}

impl Inner {
    /// A3, B2: whether this incarnation may go on, read after everything it published.
    pub fn check_fences(&self, incarnation: u32) -> Result<()> {
        let slot = self.slot();
        let fenced = if mutant!("fence_row_of_granter_only") {
            let (rows, place) = rows(&self.lines, slot);
            let seat = self.segment.header().manager_seat.load(Ordering::Relaxed) as usize;
            self.lines.fetch::<FenceLine>(rows[seat])?.fenced[place]
        } else {
            self.patiently(|| fenced_up_to(&self.lines, slot))?
        };
        if fenced < incarnation {
            return Ok(());
        }
        self.note_fenced(incarnation);
        Err(Error::Fenced { slot: slot as u16, incarnation })
    }

    /// Stops this host's protected work: no operation begins until it has joined again.
    pub fn note_fenced(&self, incarnation: u32) {
        let header = self.segment.header();
        if self.incarnation() == incarnation {
            // Only LIVE becomes FENCED; a later incarnation cannot begin while an operation of this one is counted.
            let _ = header.state.compare_exchange(state::LIVE, state::FENCED, Ordering::SeqCst, Ordering::SeqCst);
        }
    }
}
