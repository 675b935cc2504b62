// SPDX-License-Identifier: Apache-2.0
//! Fences and proofs of death: reading the rows of all seats, and this host's check of its own (LOCKS.md A3, B2, section 6).

use super::Inner;
use super::segment::state;
use crate::error::{Error, Result};
use crate::fault::mutant;
use crate::limits::MAX_SEATS;
use crate::line::{FETCHED_TOGETHER, Line, Lines, if_whole};
use crate::media::{DeathLine, FenceLine, Identity, MediaLine, SLOTS_PER_FENCE};
use arrayvec::ArrayVec;
use std::sync::atomic::Ordering;

/// Where the incarnations of one slot stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FenceStatus {
    /// Fenced up to here.
    pub fenced: u32,
    /// Death proven up to here.
    pub dead: u32,
}

/// Line numbers of every seat's fence (or death) line that holds `slot`, and the slot's place in it.
fn rows(lines: &Lines, slot: u32) -> (ArrayVec<u64, MAX_SEATS>, usize) {
    let geometry = lines.layout().geometry();
    let line = u64::from(slot) / SLOTS_PER_FENCE as u64;
    let rows = (0..geometry.all_seats()).map(|seat| seat * geometry.fence_lines() + line).collect();
    (rows, slot as usize % SLOTS_PER_FENCE)
}

/// The incarnation up to which any seat holds the death of `slot` for proven.
pub(crate) fn dead_up_to(lines: &Lines, slot: u32) -> Result<u32> {
    let (rows, place) = rows(lines, slot);
    let mut fetched: Vec<Result<DeathLine>> = Vec::with_capacity(rows.len());
    lines.fetch_many(&rows, &mut fetched)?;
    fetched.into_iter().try_fold(0, |most, line| Ok(most.max(line?.dead[place])))
}

/// Fence and death of every slot, over all seats.
pub(crate) fn standings(lines: &Lines) -> Result<Vec<FenceStatus>> {
    let geometry = lines.layout().geometry();
    let mut standings = vec![FenceStatus::default(); geometry.slots as usize];
    let all: Vec<u64> = (0..geometry.all_seats() * geometry.fence_lines()).collect();
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

impl Inner {
    pub fn fenced_up_to(&self, slot: u32) -> Result<u32> {
        // On the path of every publish, so nothing here is on the heap.
        let (rows, place) = rows(&self.lines, slot);
        let mut fetched = [Line::ZERO; FETCHED_TOGETHER];
        rows.chunks(FETCHED_TOGETHER).try_fold(0, |most, rows| {
            self.lines.fetch_some::<FenceLine>(rows, &mut fetched)?.zip(rows).try_fold(most, |most, (line, &row)| {
                let fenced = match line {
                    Some(line) => line.fenced[place],
                    // Perhaps seen in the middle of being written.
                    None => self.row::<FenceLine>(row)?.fenced[place],
                };
                Ok(most.max(fenced))
            })
        })
    }

    /// The incarnation up to which any seat holds the death of `slot` for proven.
    pub fn dead_up_to(&self, slot: u32) -> Result<u32> {
        let (rows, place) = rows(&self.lines, slot);
        rows.into_iter().try_fold(0, |most, row| Ok(most.max(self.row::<DeathLine>(row)?.dead[place])))
    }

    /// One line of a seat's fence or death row. One that does not verify is empty if its seat was never given to a machine.
    pub fn row<T: MediaLine>(&self, index: u64) -> Result<T> {
        match self.lines.fetch(index) {
            Err(error @ Error::BadLine { .. }) => match self.is_vacant(index / self.geometry().fence_lines()) {
                Ok(true) => Ok(T::zeroed()),
                // Which of the two lines it is that cannot be read says more.
                Ok(false) | Err(Error::BadLine { .. }) => Err(error),
                Err(other) => Err(other),
            },
            fetched => fetched,
        }
    }

    /// Fence and death of every slot, over all seats; with whether all of its rows were read: else more may be fenced or dead
    /// than the rest tells.
    pub fn standings(&self) -> Result<Vec<(FenceStatus, bool)>> {
        let geometry = self.geometry();
        let mut standings = vec![(FenceStatus::default(), true); geometry.slots as usize];
        let all: Vec<u64> = (0..geometry.all_seats() * geometry.fence_lines()).collect();
        let mut fences: Vec<Result<FenceLine>> = Vec::with_capacity(all.len());
        self.lines.fetch_many(&all, &mut fences)?;
        let mut deaths: Vec<Result<DeathLine>> = Vec::with_capacity(all.len());
        self.lines.fetch_many(&all, &mut deaths)?;
        for ((index, fence), death) in all.into_iter().zip(fences).zip(deaths) {
            let fence = if_whole(fence.or_else(|_| self.row(index)))?;
            let death = if_whole(death.or_else(|_| self.row(index)))?;
            let first = (index % geometry.fence_lines()) as usize * SLOTS_PER_FENCE;
            for (place, (standing, is_whole)) in standings.iter_mut().skip(first).take(SLOTS_PER_FENCE).enumerate() {
                *is_whole &= fence.is_some() && death.is_some();
                standing.fenced = standing.fenced.max(fence.map_or(0, |line| line.fenced[place]));
                standing.dead = standing.dead.max(death.map_or(0, |line| line.dead[place]));
            }
        }
        Ok(standings)
    }

    /// Whether nothing of (slot, incarnation) can write metadata or payload any more.
    ///
    /// The bare re-join of a fenced host is no such proof: its processes kept writing their payload (only `drained` tells that they did
    /// not).
    pub fn is_proven_dead(&self, slot: u32, incarnation: u32) -> Result<bool> {
        if mutant!("suspicion_is_proof") && self.fenced_up_to(slot)? >= incarnation {
            return Ok(true);
        }
        if self.dead_up_to(slot)? >= incarnation {
            return Ok(true);
        }
        let identity: Identity = self.lines.fetch(slot.into())?;
        Ok(identity.drained >= incarnation || (identity.state == Identity::LEFT && identity.incarnation >= incarnation))
    }

    /// Whether (slot, incarnation) is proven dead, or has acknowledged its fence: that is published when no operation of it runs any more.
    pub fn has_ended(&self, slot: u32, incarnation: u32) -> Result<bool> {
        let identity: Identity = self.lines.fetch(slot.into())?;
        Ok(identity.acknowledged >= incarnation || self.is_proven_dead(slot, incarnation)?)
    }

    /// A3, B2: whether this incarnation may continue, read after everything it published.
    pub fn check_fences(&self, incarnation: u32) -> Result<()> {
        if self.patiently(|| self.own_fence())? < incarnation {
            return Ok(());
        }
        self.note_fenced(incarnation);
        Err(Error::Fenced { slot: self.slot() as u16, incarnation })
    }

    pub fn own_fence(&self) -> Result<u32> {
        let slot = self.slot();
        if !mutant!("fence_row_of_granter_only") {
            return self.fenced_up_to(slot);
        }
        let (rows, place) = rows(&self.lines, slot);
        let seat = self.segment.header().manager_seat.load(Ordering::Relaxed) as usize;
        Ok(self.lines.fetch::<FenceLine>(rows[seat])?.fenced[place])
    }

    /// Stops this host's protected work: no operation begins until it has joined again.
    pub fn note_fenced(&self, incarnation: u32) {
        let header = self.segment.header();
        if self.incarnation() == incarnation {
            // Only LIVE becomes FENCED; a later incarnation cannot begin while an operation of this one is counted.
            let _ = header.state.compare_exchange(state::LIVE, state::FENCED, Ordering::SeqCst, Ordering::SeqCst);
            // It joins again.
            self.wake_service();
        }
    }
}
