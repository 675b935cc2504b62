// SPDX-License-Identifier: Apache-2.0
//! The manager role: who has it, how it moves (LOCKS.md section 2).
//!
//! Each seat writes copies of its own of every manager line; the copy with the highest epoch counts. So a manager that was paused and goes
//! on is outvoted, not stopped, and nothing here relies on a time-out for more than progress.

mod bind;
mod grants;
mod heal;
mod hosts;
mod seats;
mod takeover;
mod watch;

use super::seat;
use crate::error::Result;
use crate::fault::{mutant, point};
use crate::host::segment::state;
use crate::host::{FenceStatus, Inner};
use crate::limits::MAX_NUMBER;
use crate::line::if_whole;
use crate::media::{Binding, DeathLine, FenceLine, GrantLine, Identity, MediaLine, SLOTS_PER_FENCE};
use crate::platform::{MachineLock, MachineLockGuard};
use hosts::HostView;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, TryLockError};
use watch::ManagerWatch;

/// The beat of a manager that gave the role up.
const RESIGNED: u64 = u64::MAX;

/// The beat of a seat that is not in charge, by the epoch that it claimed last; 0 = none yet.
fn beat_at_rest(epoch: u32) -> u64 {
    if epoch == 0 { 0 } else { RESIGNED }
}

/// This process's part in the manager role. Aligned, so that rounds of the service write to no line that operations read.
#[derive(Default)]
#[repr(align(64))]
pub(crate) struct Manager {
    /// Held while this process may write the machine's seat lines.
    guard: Option<MachineLockGuard>,
    /// The seat of this machine, once known.
    seat: Option<u64>,
    /// What this process sees of the manager in charge and of all hosts while it does not serve.
    watch: ManagerWatch,
    /// Set while this process serves.
    active: Option<Active>,
    looked_at_ns: u64,
    /// When this machine, which has no seat, may claim one next; 0 = not known yet.
    claim_at_ns: u64,
    /// No manager served when `claim_at_ns` was drawn.
    claim_is_urgent: bool,
    /// When this machine may look next for a seat whose damaged lines wait for it.
    mend_at_ns: u64,
    /// Attempts that failed in a row, up to a limit.
    claim_tries: u32,
    /// Why this machine could not claim a seat.
    claim_problem: Option<String>,
    /// The seat was claimed because the manager of this epoch did not serve: this machine need not wait again.
    serves_after: Option<u32>,
}

/// A manager that has claimed and adopted.
struct Active {
    seat: u64,
    epoch: u32,
    beat: u64,
    beat_at_ns: u64,
    /// This seat's own copies; `None` is a line that must not be served because a damaged copy could hide a higher tag.
    grants: Vec<Option<GrantLine>>,
    bindings: Vec<Option<Binding>>,
    /// This seat's own rows.
    fences: Vec<FenceLine>,
    deaths: Vec<DeathLine>,
    /// All seats' rows together, as of this round.
    standings: Vec<FenceStatus>,
    /// Whether all rows of a slot verified; else more may be fenced or dead than `standings` tells.
    is_whole: Vec<bool>,
    hosts: Vec<HostView>,
    /// Per lock the number of the last grant that was seen to end in good order, so that a later incarnation does not hide that.
    ended: Vec<u32>,
    /// Who waits, by lock, in the order of discovery.
    queues: Vec<VecDeque<u32>>,
    boxes_at_ns: u64,
    /// The epoch of this seat before its claim, if its line verified then.
    own_before: Option<u32>,
    /// Where the look at the own registers continues.
    mended: u64,
    /// Fences that the rule "fence before grant" would have published before (only with that rule dropped).
    late_fences: Vec<(u32, u32)>,
}

/// Raises the number of `slot` in the rows of a seat, which only ever grow; false when it is there already.
fn raise<T>(rows: &mut [T], slot: u32, incarnation: u32, numbers: impl Fn(&mut T) -> &mut [u32; SLOTS_PER_FENCE]) -> bool {
    let number = &mut numbers(&mut rows[slot as usize / SLOTS_PER_FENCE])[slot as usize % SLOTS_PER_FENCE];
    let higher = *number < incarnation;
    *number = incarnation.max(*number);
    higher
}

impl Inner {
    /// The manager's work, if this machine has a seat and this process the role; true while a lock is about to change hands.
    pub(crate) fn manage(&self) -> Result<bool> {
        let Ok(mut manager) = self.manager.try_lock() else { return Ok(false) };
        // Asked under the mutex: a round that began before this process resigned must not claim the role once more.
        if self.closed.load(Ordering::SeqCst) {
            return Ok(false);
        }
        if let Some(active) = &mut manager.active {
            return match self.serve(active)? {
                Some(busy) => {
                    self.mend_claimed_seats(&mut manager, self.platform.now_ns())?;
                    Ok(busy)
                }
                None => {
                    let silent_ns = self.platform.now_ns().saturating_sub(active.beat_at_ns);
                    let was_slow = silent_ns >= self.least_silence_ns() || mutant!("failover.duel_is_unrest");
                    manager.active = None;
                    manager.watch = manager.watch.after_deposition(was_slow);
                    Ok(false)
                }
            };
        }
        let now_ns = self.platform.now_ns();
        if manager.looked_at_ns != 0 && now_ns.saturating_sub(manager.looked_at_ns) < manager.watch.period_ns(&self.config) {
            return Ok(false);
        }
        manager.looked_at_ns = now_ns.max(1);
        manager.seat = self.find_seat();
        // First, since a damaged line of a seat without an owner may be what keeps a member from the seat of its slot.
        if manager.seat.is_some() || self.state() == state::LIVE {
            self.mend_claimed_seats(&mut manager, now_ns)?;
        }
        if manager.seat.is_none() {
            self.claim_seat(&mut manager, now_ns)?;
        }
        let Some(seat) = manager.seat else { return Ok(false) };
        self.learn_rows(seat)?;
        self.publish_deaths_beside_manager(&mut manager, seat)?;
        // Only the process with the machine's lock on the role may write: the first one takes it where there is something to mend.
        let claims_anew = self.has_own_damage(seat)? && self.take_guard(&mut manager)? && self.mend_beside_manager(seat)?;
        let is_wanted = claims_anew || self.is_manager_wanted(&mut manager, Some(seat), now_ns)?;
        let serves_after = manager.serves_after.take();
        let is_same = serves_after.is_some() && manager.watch.epoch() == serves_after;
        if !is_wanted && !is_same {
            return Ok(false);
        }
        let is_first = manager.guard.is_none();
        if !self.take_guard(&mut manager)? {
            return Ok(false);
        }
        if is_first && mutant!("restart_clears_seat_rows") {
            self.clear_rows(seat)?;
        }
        manager.active = self.take_over(seat, &manager.watch)?;
        Ok(true)
    }

    /// Whether this process manages nothing, or a pool in which no lock is held or wanted.
    pub(crate) fn manages_nothing(&self) -> bool {
        self.manager.try_lock().is_ok_and(|manager| manager.active.as_ref().is_none_or(Active::is_idle))
    }

    /// Takes the machine's lock on the role, under which its seat's lines are written; false while another process of the machine has it.
    fn take_guard(&self, manager: &mut Manager) -> Result<bool> {
        if manager.guard.is_none() {
            manager.guard = self.platform.try_lock(MachineLock::Manager, true)?;
        }
        Ok(manager.guard.is_some())
    }

    /// Whether `seat` is this machine's (only asked where the self-grant shortcut is tried).
    pub(super) fn is_own_seat(&self, seat: u64) -> bool {
        self.config.seats.get(seat as usize) == Some(&self.platform.machine())
    }

    /// One round of serving; `None` when a higher epoch ended this manager.
    fn serve(&self, active: &mut Active) -> Result<Option<bool>> {
        // A seat line that cannot be read may hide a higher epoch: to serve on is safe (M5), and hosts accept nothing meanwhile (H3).
        let mut is_own_whole = true;
        for (seat, line) in (0..).zip(seat::each(&self.lines)?) {
            match if_whole(line)? {
                Some(line) if line.epoch > active.epoch && !mutant!("shared_grant_line") => return Ok(None),
                Some(line) if seat == active.seat && self.is_seat_lost(seat, &line) => {
                    self.forget_seat();
                    return Ok(None);
                }
                None if seat == active.seat => is_own_whole = false,
                _ => {}
            }
        }
        if !is_own_whole && self.owns_seat(active.seat)? {
            self.publish_seat(active, active.beat)?;
            self.damage.healed();
        }
        let now_ns = self.platform.now_ns();
        let period_ns = self.config.heartbeat_ms * 1_000_000;
        if now_ns.saturating_sub(active.beat_at_ns) >= period_ns {
            active.beat_at_ns = now_ns;
            active.beat += 1;
            self.publish_seat(active, active.beat)?;
            self.publish_declared_deaths(active)?;
            self.publish_reported_deaths(active)?;
            self.adopt_blocked(active, now_ns)?;
            self.mend_what_is_served(active)?;
        }
        for (slot, incarnation) in std::mem::take(&mut active.late_fences) {
            self.publish_fence(active, slot, incarnation)?;
        }
        (active.standings, active.is_whole) = self.standings()?.into_iter().unzip();
        let news = self.look_at_hosts(active, now_ns)?;
        self.suspect_hosts(active, now_ns)?;
        if now_ns.saturating_sub(active.boxes_at_ns) >= self.config.poll_us * 1_000 {
            active.boxes_at_ns = now_ns;
            self.serve_join_boxes(active, now_ns)?;
        }
        let waiting = self.serve_locks(active)?;
        Ok(Some(news || waiting))
    }

    fn publish_seat(&self, active: &Active, beat: u64) -> Result<()> {
        self.lines.publish(active.seat, self.seat_line(active.seat, active.epoch, beat))
    }

    /// FEN\[k\]\[slot\] = incarnation, in this seat's own row.
    fn publish_fence(&self, active: &mut Active, slot: u32, incarnation: u32) -> Result<()> {
        if !raise(&mut active.fences, slot, incarnation, |row| &mut row.fenced) {
            return Ok(());
        }
        if !mutant!("fence.row_not_remembered") {
            self.remember(&self.segment.header().fence_row, slot as usize, incarnation);
        }
        if mutant!("fence.row_not_published") {
            return Ok(());
        }
        self.publish_row(active.seat, slot, &active.fences)
    }

    /// What operators of this machine stated: slots with the incarnation up to which they are dead. The segment is ordinary memory that a
    /// broken process may have written to, so a number that no host accepts is left out.
    fn declared_deaths(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        let declared = self.segment.header().declared_dead.iter().take(self.geometry().slots as usize);
        let stated = declared.enumerate().map(|(slot, incarnation)| (slot as u32, incarnation.load(Ordering::Acquire)));
        stated.filter(|(_, incarnation)| (1..MAX_NUMBER).contains(incarnation))
    }

    /// DEAD\[k\]: what operators of this machine stated. A fence goes before each, so that every dead incarnation is a fenced one.
    fn publish_declared_deaths(&self, active: &mut Active) -> Result<()> {
        for (slot, incarnation) in self.declared_deaths() {
            self.publish_fence(active, slot, incarnation)?;
            if raise(&mut active.deaths, slot, incarnation, |row| &mut row.dead) {
                self.remember(&self.segment.header().death_row, slot as usize, incarnation);
                self.publish_row(active.seat, slot, &active.deaths)?;
            }
        }
        Ok(())
    }

    /// DEAD\[k\]: what hosts without a seat report in their identity lines. A statement stays true, however old the line is.
    fn publish_reported_deaths(&self, active: &mut Active) -> Result<()> {
        for slot in (0..self.geometry().slots).filter(|slot| active.bound(*slot).is_some()).collect::<Vec<_>>() {
            let Some((dead, incarnation)) = if_whole(self.lines.fetch::<Identity>(slot.into()))?.and_then(|line| line.reported()) else {
                continue;
            };
            // One that is not known to have been is left for a manager that knows it.
            if dead >= self.geometry().slots || active.bound(dead).is_none_or(|bound| incarnation > bound) {
                continue;
            }
            self.publish_fence(active, dead, incarnation)?;
            if raise(&mut active.deaths, dead, incarnation, |row| &mut row.dead) {
                self.remember(&self.segment.header().death_row, dead as usize, incarnation);
                self.publish_row(active.seat, dead, &active.deaths)?;
                point!("manager.reported");
            }
        }
        Ok(())
    }

    /// The same on a machine whose seat is not the one in charge: the rows of every seat count.
    fn publish_deaths_beside_manager(&self, manager: &mut Manager, seat: u64) -> Result<()> {
        if self.declared_deaths().next().is_none() {
            return Ok(());
        }
        if !self.take_guard(manager)? {
            // Another process of this machine writes the seat's lines, and this as well.
            return Ok(());
        }
        let (mut fences, mut deaths) = self.own_rows(seat)?;
        for (slot, incarnation) in self.declared_deaths() {
            if raise(&mut fences, slot, incarnation, |row| &mut row.fenced) {
                self.remember(&self.segment.header().fence_row, slot as usize, incarnation);
                self.publish_row(seat, slot, &fences)?;
            }
            if raise(&mut deaths, slot, incarnation, |row| &mut row.dead) {
                self.remember(&self.segment.header().death_row, slot as usize, incarnation);
                self.publish_row(seat, slot, &deaths)?;
            }
        }
        Ok(())
    }

    /// Publishes the line of a seat's row that holds `slot`.
    fn publish_row<T: MediaLine>(&self, seat: u64, slot: u32, rows: &[T]) -> Result<()> {
        let line = slot as usize / SLOTS_PER_FENCE;
        self.lines.publish(seat * self.geometry().fence_lines() + line as u64, rows[line])
    }

    /// This process's part in the role; none where a thread panicked in it. Polled and not waited for: on simulated hosts a round of this
    /// very thread may be suspended inside the mutex.
    fn poll_manager(&self) -> Option<MutexGuard<'_, Manager>> {
        let mut round = 0;
        loop {
            match self.manager.try_lock() {
                Ok(manager) => return Some(manager),
                Err(TryLockError::Poisoned(_)) => return None,
                Err(TryLockError::WouldBlock) => self.platform.relax(round),
            }
            round += 1;
        }
    }

    /// Gives the role up for good, so that another seat need not wait for a time-out.
    pub(crate) fn resign(&self) -> Result<()> {
        let Some(mut manager) = self.poll_manager() else { return Ok(()) };
        if let Some(active) = manager.active.take() {
            self.publish_seat(&active, RESIGNED)?;
        }
        manager.guard = None;
        manager.seat = None;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_a_row_only_grow() {
        let mut rows = [FenceLine::default(), FenceLine::default()];
        let slot = SLOTS_PER_FENCE as u32 + 3;
        let mut raise_to = |incarnation| (raise(&mut rows, slot, incarnation, |row| &mut row.fenced), rows[1].fenced[3]);
        assert_eq!([5, 5, 4, 6].map(&mut raise_to), [(true, 5), (false, 5), (false, 5), (true, 6)]);
        assert_eq!(rows.map(|row| row.fenced.iter().sum::<u32>()), [0, 6], "no other slot");
    }
}
