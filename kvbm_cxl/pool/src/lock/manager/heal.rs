// SPDX-License-Identifier: Apache-2.0
//! Lines of this machine's seat that do not verify any more: written again by the process that may write them, from what the machine knows
//! (LOCKS.md 12.18).
//!
//! | line | what the owner knows | without that |
//! |---|---|---|
//! | SEAT | the manager in charge, and the local segment of the machine: its epoch, as of a manager that resigned | the seat claims again, above every tag of its own copies |
//! | GR, BIND | the manager in charge: its copies | nothing; the next manager tells whether the copy can matter |
//! | FEN | the local segment of the machine | every incarnation that is bound counts as fenced |
//! | DEAD | the local segment of the machine | nothing counts as proven: the operator states it again |

use super::takeover::Tagged;
use super::{Active, beat_at_rest};
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::host::Inner;
use crate::limits::MAX_SLOTS;
use crate::line::{FETCHED_TOGETHER, if_whole};
use crate::lock::{claim, seat};
use crate::media::{Binding, DeathLine, FenceLine, GrantLine, Identity, MediaLine, SLOTS_PER_FENCE, Seat};
use std::sync::atomic::{AtomicU32, Ordering};

/// Registers of each kind that a manager looks at with each beat.
const LOOKED_AT: u64 = FETCHED_TOGETHER as u64;

impl Inner {
    /// What this manager wrote, looked at with each beat: its rows, and some of its registers in turn.
    pub(super) fn mend_what_is_served(&self, active: &mut Active) -> Result<()> {
        self.mend_rows(active.seat, &active.fences)?;
        self.mend_rows(active.seat, &active.deaths)?;
        active.mended = active.mended.wrapping_add(LOOKED_AT);
        self.mend_registers(active.seat, &active.grants, active.mended)?;
        self.mend_registers(active.seat, &active.bindings, active.mended)
    }

    /// Writes those lines of a seat's rows again that do not verify.
    fn mend_rows<T: MediaLine>(&self, seat: u64, rows: &[T]) -> Result<()> {
        let first = seat * self.geometry().fence_lines();
        let indexes: Vec<u64> = (first..first + rows.len() as u64).collect();
        self.mend(&indexes, rows.iter().map(|row| Some(*row)))
    }

    fn mend_registers<T: Tagged>(&self, seat: u64, own: &[Option<T>], from: u64) -> Result<()> {
        if mutant!("shared_grant_line") || own.is_empty() {
            return Ok(());
        }
        let lines = own.len() as u64;
        let places: Vec<u64> = (0..LOOKED_AT.min(lines)).map(|step| (from + step) % lines).collect();
        let indexes: Vec<u64> = places.iter().map(|place| seat * lines + place).collect();
        self.mend(&indexes, places.iter().map(|&place| own[place as usize]))
    }

    /// Writes those lines again that do not verify, where it is known what they said.
    fn mend<T: MediaLine>(&self, indexes: &[u64], known: impl Iterator<Item = Option<T>>) -> Result<()> {
        let mut fetched: Vec<Result<T>> = Vec::with_capacity(indexes.len());
        self.lines.fetch_many(indexes, &mut fetched)?;
        for ((&index, found), known) in indexes.iter().zip(fetched).zip(known) {
            if if_whole(found)?.is_none()
                && let Some(known) = known
            {
                self.lines.publish(index, known)?;
                self.damage.healed();
            }
        }
        Ok(())
    }

    /// Whether `seat` is still this session's: fixed, or given to it by the claim that counts.
    pub(super) fn owns_seat(&self, seat: u64) -> Result<bool> {
        if self.config.seats.get(seat as usize) == Some(&self.platform.machine()) {
            return Ok(true);
        }
        if self.geometry().slot_of(seat).is_some() {
            // The next owner of the slot writes its identity line before a line of the seat.
            let identity = if_whole(self.lines.fetch::<Identity>(self.slot().into()))?;
            let is_its = self.find_seat() == Some(seat) && identity.is_none_or(|identity| identity.nonce == self.nonce());
            return Ok(is_its);
        }
        let claim = if_whole(claim::decided(&self.lines, seat))?;
        let is_its = claim.is_some_and(|claim| claim.generation != 0 && claim.session == self.segment.session());
        Ok(is_its && !mutant!("heal.claimed_seats_are_left"))
    }

    /// Whether a line that this machine's seat can write again while another seat is in charge does not verify.
    pub(super) fn has_own_damage(&self, seat: u64) -> Result<bool> {
        let (fences, deaths) = self.row_indexes(seat);
        Ok(self.has_damage::<Seat>(&[seat])? || self.has_damage::<FenceLine>(&fences)? || self.has_damage::<DeathLine>(&deaths)?)
    }

    /// The lines of this machine's seat while another seat is in charge.
    ///
    /// Returns whether the seat has to claim again: its SEAT line does not verify, and this machine does not know its epoch. One that is
    /// remembered needs no look at the other seats, whose lines may be damaged as well.
    pub(super) fn mend_beside_manager(&self, seat: u64) -> Result<bool> {
        if !self.owns_seat(seat)? {
            return Ok(false);
        }
        self.own_rows(seat)?;
        if !self.has_damage::<Seat>(&[seat])? {
            return Ok(false);
        }
        if !self.remembers_epoch(seat) || mutant!("heal.seats_claim_anew") {
            return Ok(true);
        }
        let epoch = if mutant!("heal.seat_forgets") { 0 } else { self.segment.header().seat_epoch.load(Ordering::Acquire) };
        self.lines.publish(seat, self.seat_line(seat, epoch, beat_at_rest(epoch)))?;
        self.damage.healed();
        point!("manager.seat_mended");
        Ok(false)
    }

    /// Whether the segment of this machine holds the published state of `seat`: its rows and its epoch.
    fn remembers(&self, seat: u64) -> bool {
        self.segment.header().rows_of_seat.load(Ordering::Acquire) == seat as u32 + 1
    }

    /// Whether the segment of this machine holds the epoch of `seat`. A session that took a seat noted the epoch that it found there.
    fn remembers_epoch(&self, seat: u64) -> bool {
        self.remembers(seat) || self.claimed_seat() == Some(seat) && !mutant!("heal.epoch_is_noted_late")
    }

    fn has_damage<T: MediaLine>(&self, indexes: &[u64]) -> Result<bool> {
        let mut fetched: Vec<Result<T>> = Vec::with_capacity(indexes.len());
        self.lines.fetch_many(indexes, &mut fetched)?;
        fetched.into_iter().try_fold(false, |damaged, found| Ok(damaged | if_whole(found)?.is_none()))
    }

    fn row_indexes(&self, seat: u64) -> (Vec<u64>, Vec<u64>) {
        let per_seat = self.geometry().fence_lines();
        let rows: Vec<u64> = (seat * per_seat..(seat + 1) * per_seat).collect();
        (rows.clone(), rows)
    }

    /// This seat's fence and death rows: kept for ever, so they are read back from where this machine wrote them. One that does not verify
    /// is written again. The caller has the machine's lock on the role.
    pub(super) fn own_rows(&self, seat: u64) -> Result<(Vec<FenceLine>, Vec<DeathLine>)> {
        let (fence_indexes, death_indexes) = self.row_indexes(seat);
        let header = self.segment.header();
        let is_known = self.remembers(seat);
        let known = |rows: &[AtomicU32; MAX_SLOTS], line: usize, place: usize| {
            rows.get(line * SLOTS_PER_FENCE + place).map_or(0, |number| number.load(Ordering::Acquire))
        };
        let mut fences = Vec::with_capacity(fence_indexes.len());
        for (line, &index) in fence_indexes.iter().enumerate() {
            fences.push(match if_whole(self.lines.fetch::<FenceLine>(index))? {
                Some(row) => row,
                None => {
                    let row = if is_known {
                        let mut row = FenceLine::default();
                        row.fenced.iter_mut().enumerate().for_each(|(place, fenced)| *fenced = known(&header.fence_row, line, place));
                        row
                    } else {
                        self.careful_row(line)?
                    };
                    self.write_row(index, row)?
                }
            });
        }
        let mut deaths = Vec::with_capacity(death_indexes.len());
        for (line, &index) in death_indexes.iter().enumerate() {
            deaths.push(match if_whole(self.lines.fetch::<DeathLine>(index))? {
                Some(row) => row,
                None => {
                    let mut row = DeathLine::default();
                    if is_known {
                        row.dead.iter_mut().enumerate().for_each(|(place, dead)| *dead = known(&header.death_row, line, place));
                    }
                    self.write_row(index, row)?
                }
            });
        }
        for (line, (fence, death)) in fences.iter().zip(&deaths).enumerate() {
            for place in 0..SLOTS_PER_FENCE {
                self.remember(&header.fence_row, line * SLOTS_PER_FENCE + place, fence.fenced[place]);
                self.remember(&header.death_row, line * SLOTS_PER_FENCE + place, death.dead[place]);
            }
        }
        if let Some(line) = if_whole(self.lines.fetch::<Seat>(seat))? {
            header.seat_epoch.fetch_max(line.epoch, Ordering::AcqRel);
            header.rows_of_seat.store(seat as u32 + 1, Ordering::Release);
        }
        Ok((fences, deaths))
    }

    /// Writes the damaged rows of a seat that this session claimed just now, of which no machine remembers anything.
    pub(super) fn rewrite_rows(&self, seat: u64) -> Result<()> {
        let (fences, deaths) = self.row_indexes(seat);
        for (line, (&fence, &death)) in fences.iter().zip(&deaths).enumerate() {
            if if_whole(self.lines.fetch::<FenceLine>(fence))?.is_none() {
                self.lines.publish(fence, self.careful_row(line)?)?;
            }
            if if_whole(self.lines.fetch::<DeathLine>(death))?.is_none() {
                self.lines.publish(death, DeathLine::default())?;
            }
        }
        Ok(())
    }

    /// The substitute for a fence row that no process remembers: every incarnation that is bound counts as fenced.
    fn careful_row(&self, line: usize) -> Result<FenceLine> {
        let mut row = FenceLine::default();
        for (place, fenced) in row.fenced.iter_mut().enumerate() {
            *fenced = if mutant!("heal.row_forgets") { 0 } else { self.highest_bound(line * SLOTS_PER_FENCE + place)? };
        }
        Ok(row)
    }

    /// Keeps this seat's rows in the machine's memory before a line of them can be lost, if they stand there whole.
    pub(super) fn learn_rows(&self, seat: u64) -> Result<()> {
        let header = self.segment.header();
        if self.remembers(seat) || self.has_own_damage(seat)? {
            return Ok(());
        }
        // Another process of the machine may raise them meanwhile, and remembers what it raises.
        let (fences, deaths) = self.row_indexes(seat);
        for (line, (&fence, &death)) in fences.iter().zip(&deaths).enumerate() {
            let (fence, death) = (self.lines.fetch::<FenceLine>(fence)?, self.lines.fetch::<DeathLine>(death)?);
            for place in 0..SLOTS_PER_FENCE {
                self.remember(&header.fence_row, line * SLOTS_PER_FENCE + place, fence.fenced[place]);
                self.remember(&header.death_row, line * SLOTS_PER_FENCE + place, death.dead[place]);
            }
        }
        header.seat_epoch.fetch_max(self.lines.fetch::<Seat>(seat)?.epoch, Ordering::AcqRel);
        header.rows_of_seat.store(seat as u32 + 1, Ordering::Release);
        Ok(())
    }

    fn write_row<T: MediaLine>(&self, index: u64, row: T) -> Result<T> {
        if !self.owns_seat(index / self.geometry().fence_lines())? {
            return Err(Error::BadLine {
                region: T::REGION.name(),
                index,
                reason: "checksum differs, and its seat may be another session's",
            });
        }
        self.lines.publish(index, row)?;
        self.damage.healed();
        Ok(row)
    }

    /// Keeps in the machine's memory a number that is in a row, or is about to be.
    pub(super) fn remember(&self, row: &[AtomicU32; MAX_SLOTS], slot: usize, number: u32) {
        if let Some(known) = row.get(slot) {
            known.fetch_max(number, Ordering::AcqRel);
        }
    }

    /// The highest incarnation that any seat's copy binds a slot to: what a row that this machine wrote can have fenced at most. What an
    /// operator fenced beyond that was never bound, and never is: the next binding is above all that is bound.
    fn highest_bound(&self, slot: usize) -> Result<u32> {
        let geometry = self.geometry();
        if slot >= geometry.slots as usize {
            return Ok(0);
        }
        let indexes: Vec<u64> = (0..geometry.all_seats()).map(|seat| seat * geometry.bindings() + slot as u64).collect();
        let mut copies: Vec<Result<Binding>> = Vec::with_capacity(indexes.len());
        self.lines.fetch_many(&indexes, &mut copies)?;
        let best = copies.iter().flatten().map(|copy| copy.tag).max().unwrap_or(0);
        (0..).zip(copies).try_fold(0, |most, (seat, copy)| match copy {
            // An older copy than the best one, whatever it says: what it bound beyond that one was never accepted.
            Err(Error::BadLine { .. }) if !self.may_hide_more(u64::MAX, None, seat, best)? => Ok(most),
            copy => Ok(most.max(copy?.incarnation)),
        })
    }

    /// M1 where this seat's own line does not verify: its epoch as this machine remembers it; else the epoch up to which it can have
    /// served, which is the highest tag of its copies. What it claimed above that it never came to serve under.
    ///
    /// # Errors
    /// [`Error::BadLine`] when the machine does not remember and one of the copies does not verify either.
    pub(super) fn highest_own_epoch(&self, seat: u64) -> Result<u32> {
        if self.remembers_epoch(seat) {
            return Ok(self.segment.header().seat_epoch.load(Ordering::Acquire));
        }
        self.highest_tag_of(seat)
    }

    /// The epoch up to which any session of `seat` can have served: the highest tag of its copies.
    pub(super) fn highest_tag_of(&self, seat: u64) -> Result<u32> {
        if mutant!("heal.claim_ignores_tags") {
            return Ok(0);
        }
        let geometry = self.geometry();
        let grants = self.highest_tag::<GrantLine>(seat, geometry.grant_lines())?;
        Ok(grants.max(self.highest_tag::<Binding>(seat, geometry.bindings())?))
    }

    fn highest_tag<T: Tagged>(&self, seat: u64, per_seat: u64) -> Result<u32> {
        let indexes: Vec<u64> = (seat * per_seat..(seat + 1) * per_seat).collect();
        let mut copies: Vec<Result<T>> = Vec::with_capacity(indexes.len());
        self.lines.fetch_many(&indexes, &mut copies)?;
        copies.into_iter().try_fold(0, |most, copy| Ok(most.max(copy?.tag())))
    }

    /// Whether a copy of `seat` that does not verify can have a tag above `best`: a seat tags with epochs that it has claimed, so not above
    /// its SEAT line as it is fetched after the copy. Of this manager's own seat the epoch before its claim counts, `own_before`.
    pub(super) fn may_hide_more(&self, own_seat: u64, own_before: Option<u32>, seat: u64, best: u32) -> Result<bool> {
        if mutant!("heal.adopt_best_readable") {
            return Ok(false);
        }
        let claimed = if seat == own_seat { own_before } else { if_whole(self.lines.fetch::<Seat>(seat))?.map(|line| line.epoch) };
        match claimed {
            Some(epoch) => Ok(epoch > best),
            None if seat == own_seat => Ok(true),
            // A seat that was never given away has no copies.
            None => Ok(!self.is_vacant(seat)?),
        }
    }

    /// The copies of a register that keep the manager in charge from adopting it, if that is why it does not serve it: the first of them.
    pub(crate) fn blocked_grant(&self, line: u64) -> Result<Option<Error>> {
        self.blocked_register::<GrantLine>(self.geometry().grant_lines(), line)
    }

    /// As [`Inner::blocked_grant`], of the binding of a slot.
    pub(crate) fn blocked_binding(&self, slot: u64) -> Result<Option<Error>> {
        self.blocked_register::<Binding>(self.geometry().bindings(), slot)
    }

    fn blocked_register<T: Tagged>(&self, per_seat: u64, line: u64) -> Result<Option<Error>> {
        let Some(newest) = seat::newest(self)? else { return Ok(None) };
        let geometry = self.geometry();
        let own = if_whole(self.lines.fetch::<T>(seat::copy_of(newest.seat) * per_seat + line))?;
        if own.is_none_or(|own| own.tag() == newest.epoch) {
            return Ok(None);
        }
        let indexes: Vec<u64> = (0..geometry.all_seats()).map(|seat| seat * per_seat + line).collect();
        let mut copies: Vec<Result<T>> = Vec::with_capacity(indexes.len());
        self.lines.fetch_many(&indexes, &mut copies)?;
        let best = copies.iter().flatten().map(Tagged::tag).max().unwrap_or(0);
        for (seat, copy) in (0..).zip(copies) {
            if let Err(error) = copy
                && self.may_hide_more(newest.seat, None, seat, best)?
            {
                return Ok(Some(error));
            }
        }
        Ok(None)
    }
}
