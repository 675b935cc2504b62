// SPDX-License-Identifier: Apache-2.0
//! The manager role: who has it, how it moves (LOCKS.md section 2).
//!
//! Each seat writes copies of its own of every manager line; the copy with the highest epoch counts. So a manager that was paused and goes
//! on is outvoted, not stopped, and nothing here relies on a time-out for more than progress.

mod bind;
mod grants;
mod hosts;
mod takeover;

use super::seat;
use crate::error::Result;
use crate::fault::mutant;
use crate::host::{Inner, Standing, fence};
use crate::limits::MAX_NUMBER;
use crate::media::{Binding, DeathLine, FenceLine, GrantLine, MediaLine, SLOTS_PER_FENCE, Seat};
use crate::platform::{MachineLock, MachineLockGuard};
use crate::silence::Silence;
use hosts::HostView;
use std::collections::VecDeque;
use std::sync::TryLockError;
use std::sync::atomic::Ordering;

/// Most doublings of the patience with managers. Without them seats too slow for the time-out would take the role from each other for ever.
const MAX_UNREST: u32 = 6;
/// Beats of one manager after which one doubling is taken back.
const BEATS_TO_CALM: u64 = 64;
/// The beat of a manager that gave the role up.
const RESIGNED: u64 = u64::MAX;

/// This process's part in the manager role. Aligned, so that rounds of the service write to no line that operations read.
#[derive(Default)]
#[repr(align(64))]
pub(crate) struct Manager {
    /// Held while this process may write the machine's seat lines.
    guard: Option<MachineLockGuard>,
    /// The seat of this machine, once known.
    seat: Option<u64>,
    /// What was last seen of the manager in charge, and when that last changed.
    watch: Option<Watch>,
    /// Set while this process serves.
    active: Option<Active>,
    looked_at_ns: u64,
    /// Doublings of the patience with managers: the role moved lately, perhaps for no reason.
    unrest: u32,
}

struct Watch {
    epoch: u32,
    beat: u64,
    silence: Silence,
}

/// A manager that has claimed and adopted.
struct Active {
    seat: u64,
    epoch: u32,
    beat: u64,
    beat_at_ns: u64,
    /// This seat's own copies; `None` is a line that nobody may serve because a damaged copy could hide a higher tag.
    grants: Vec<Option<GrantLine>>,
    bindings: Vec<Option<Binding>>,
    /// This seat's own rows.
    fences: Vec<FenceLine>,
    deaths: Vec<DeathLine>,
    /// All seats' rows together, as of this round.
    standings: Vec<Standing>,
    hosts: Vec<HostView>,
    /// Per lock the number of the last grant that was seen to end in good order, so that a later incarnation does not hide that.
    ended: Vec<u32>,
    /// Who waits, by lock, in the order of discovery.
    queues: Vec<VecDeque<u32>>,
    boxes_at_ns: u64,
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
                Some(busy) => Ok(busy),
                None => {
                    // Somebody took this manager for dead, and it was only slow: meet the next ones with more patience.
                    manager.unrest = (manager.unrest + 1).min(MAX_UNREST);
                    manager.active = None;
                    manager.watch = None;
                    Ok(false)
                }
            };
        }
        let now_ns = self.platform.now_ns();
        let period_ns = self.config.heartbeat_ms * 1_000_000;
        if manager.looked_at_ns != 0 && now_ns.saturating_sub(manager.looked_at_ns) < period_ns {
            return Ok(false);
        }
        manager.looked_at_ns = now_ns.max(1);
        if manager.seat.is_none() {
            manager.seat = self.find_seat()?;
        }
        let Some(seat) = manager.seat else { return Ok(false) };
        self.publish_deaths_beside_manager(&mut manager, seat)?;
        if !self.is_manager_wanted(&mut manager, seat, now_ns)? {
            return Ok(false);
        }
        if manager.guard.is_none() {
            manager.guard = self.platform.try_lock(MachineLock::Manager, true)?;
            if manager.guard.is_none() {
                return Ok(false);
            }
            if mutant!("restart_clears_seat_rows") {
                self.clear_rows(seat)?;
            }
        }
        manager.active = self.take_over(seat)?;
        Ok(true)
    }

    /// Whether `seat` is this machine's (only asked where the self-grant shortcut is tried).
    pub(super) fn is_own_seat(&self, seat: u64) -> bool {
        self.config.seats.get(seat as usize) == Some(&self.platform.machine())
    }

    /// The seat of this machine: from the superblock's table, or bound while the pool runs and accepted as a slot is (J4).
    fn find_seat(&self) -> Result<Option<u64>> {
        let machine = self.platform.machine();
        let geometry = self.geometry();
        if let Some(seat) = self.config.seats.iter().take(geometry.seats as usize).position(|owner| *owner == machine) {
            return Ok(Some(seat as u64));
        }
        let Some(newest) = seat::newest(&self.lines)? else { return Ok(None) };
        let first = newest.seat * geometry.bindings() + u64::from(geometry.slots);
        let indexes: Vec<u64> = (first..first + u64::from(geometry.seats)).collect();
        let mut bindings: Vec<Result<Binding>> = Vec::with_capacity(indexes.len());
        self.lines.fetch_many(&indexes, &mut bindings)?;
        for (seat, binding) in bindings.into_iter().enumerate() {
            let binding = binding?;
            if binding.tag != 0 && binding.incarnation != 0 && binding.machine == machine.0 {
                let superseded = seat::newest(&self.lines)?.is_some_and(|newest| newest.epoch > binding.tag);
                return Ok((!superseded).then_some(seat as u64));
            }
        }
        Ok(None)
    }

    /// Watches the manager in charge; true when there is none, it resigned, or it has not moved for long enough on our own clock.
    fn is_manager_wanted(&self, manager: &mut Manager, seat: u64, now_ns: u64) -> Result<bool> {
        if mutant!("no_takeover") && manager.watch.as_ref().is_some_and(|watch| watch.epoch > 0) {
            return Ok(false);
        }
        let newest = seat::newest(&self.lines)?;
        let (epoch, beat) = newest.map_or((0, 0), |newest| (newest.epoch, newest.beat));
        let moved = manager.watch.as_ref().is_none_or(|watch| (watch.epoch, watch.beat) != (epoch, beat));
        if moved {
            let took_over = manager.watch.as_ref().is_some_and(|watch| watch.epoch != epoch);
            manager.unrest = if took_over { (manager.unrest + 1).min(MAX_UNREST) } else { manager.unrest };
            if beat != 0 && beat.is_multiple_of(BEATS_TO_CALM) {
                manager.unrest = manager.unrest.saturating_sub(1);
            }
            manager.watch = Some(Watch { epoch, beat, silence: Silence::since(now_ns) });
        }
        let unrest = manager.unrest;
        let Some(watch) = &mut manager.watch else { return Ok(false) };
        let still_ns = watch.silence.goes_on(now_ns, (self.config.suspect_ms * 1_000_000) << unrest);
        // Higher seats wait longer and everybody a random bit, so that claimants rarely duel.
        let patience_ns = |base_ms: u64| {
            let base_ns = (base_ms * 1_000_000) << unrest;
            base_ns * (seat + 1) + self.platform.random() % (base_ns / 2 + 1)
        };
        if epoch == 0 {
            return Ok(seat == 0 || still_ns > patience_ns(self.config.suspect_ms));
        }
        if beat == RESIGNED {
            return Ok(newest.is_some_and(|newest| newest.seat == seat) || still_ns > patience_ns(self.config.heartbeat_ms));
        }
        // The process that served for this very seat may have died; its lock on the machine tells, so there is nothing to wait for.
        if newest.is_some_and(|newest| newest.seat == seat) {
            return Ok(true);
        }
        Ok(still_ns > patience_ns(self.config.suspect_ms))
    }

    /// One round of serving; `None` when a higher epoch ended this manager.
    fn serve(&self, active: &mut Active) -> Result<Option<bool>> {
        let seats = seat::all(&self.lines)?;
        if seats.iter().any(|seat| seat.epoch > active.epoch) && !mutant!("shared_grant_line") {
            return Ok(None);
        }
        let now_ns = self.platform.now_ns();
        let period_ns = self.config.heartbeat_ms * 1_000_000;
        if now_ns.saturating_sub(active.beat_at_ns) >= period_ns {
            active.beat_at_ns = now_ns;
            active.beat += 1;
            self.publish_seat(active, active.beat)?;
            self.publish_declared_deaths(active)?;
            self.adopt_blocked(active, now_ns)?;
        }
        for (slot, incarnation) in std::mem::take(&mut active.late_fences) {
            self.publish_fence(active, slot, incarnation)?;
        }
        active.standings = fence::standings(&self.lines)?;
        let news = self.look_at_hosts(active, now_ns)?;
        self.suspect_hosts(active, now_ns)?;
        if now_ns.saturating_sub(active.boxes_at_ns) >= self.config.poll_us * 1_000 {
            active.boxes_at_ns = now_ns;
            self.serve_join_boxes(active, now_ns)?;
            self.seat_machines(active)?;
        }
        let waiting = self.serve_locks(active)?;
        Ok(Some(news || waiting))
    }

    fn publish_seat(&self, active: &Active, beat: u64) -> Result<()> {
        let seat = Seat { epoch: active.epoch, beat, machine: self.platform.machine().0, ..Seat::default() };
        self.lines.publish(active.seat, seat)
    }

    /// FEN\[k\]\[slot\] = incarnation, in this seat's own row.
    fn publish_fence(&self, active: &mut Active, slot: u32, incarnation: u32) -> Result<()> {
        if !raise(&mut active.fences, slot, incarnation, |row| &mut row.fenced) {
            return Ok(());
        }
        active.standings[slot as usize].fenced = active.standings[slot as usize].fenced.max(incarnation);
        self.publish_row(active.seat, slot, &active.fences)
    }

    /// What operators of this machine stated: slots with the incarnation up to which they are dead. The segment is ordinary memory that a
    /// broken process may have written to, so a number that nobody accepts is left out.
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
                self.publish_row(active.seat, slot, &active.deaths)?;
            }
        }
        Ok(())
    }

    /// The same on a machine whose seat is not the one in charge: the rows of every seat count.
    fn publish_deaths_beside_manager(&self, manager: &mut Manager, seat: u64) -> Result<()> {
        if self.declared_deaths().next().is_none() {
            return Ok(());
        }
        if manager.guard.is_none() {
            manager.guard = self.platform.try_lock(MachineLock::Manager, true)?;
            if manager.guard.is_none() {
                // Another process of this machine writes the seat's lines, and this as well.
                return Ok(());
            }
        }
        let (mut fences, mut deaths) = self.own_rows(seat)?;
        for (slot, incarnation) in self.declared_deaths() {
            if raise(&mut fences, slot, incarnation, |row| &mut row.fenced) {
                self.publish_row(seat, slot, &fences)?;
            }
            if raise(&mut deaths, slot, incarnation, |row| &mut row.dead) {
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

    /// Gives the role up for good, so that another seat need not wait for a time-out.
    pub(crate) fn resign(&self) -> Result<()> {
        // Polled and not waited for: on simulated hosts a round of this very thread may be suspended inside the mutex.
        let mut round = 0;
        let mut manager = loop {
            match self.manager.try_lock() {
                Ok(manager) => break manager,
                Err(TryLockError::Poisoned(_)) => return Ok(()),
                Err(TryLockError::WouldBlock) => self.platform.relax(round),
            }
            round += 1;
        };
        if let Some(active) = manager.active.take() {
            self.publish_seat(&active, RESIGNED)?;
        }
        manager.guard = None;
        manager.seat = None;
        Ok(())
    }
}
