// SPDX-License-Identifier: Apache-2.0
//! The seat of this machine: found, claimed when the pool lacks a manager or has a seat to spare, and released by the last process.

use super::{Manager, beat_at_rest};
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::host::segment::state;
use crate::host::{Inner, machine_text, witness};
use crate::line::if_whole;
use crate::lock::claim::{self, Claimed, Claimer};
use crate::lock::seat;
use crate::media::{Identity, Seat};
use crate::platform::{MachineId, MachineLock};
use std::fmt::Write;
use std::sync::atomic::Ordering;

/// Most doublings of the time between two attempts to get a seat.
const MAX_CLAIM_BACKOFF: u32 = 6;
/// Heartbeats between two looks for a seat whose damaged lines wait for this machine.
const MEND_PERIODS: u64 = 8;

/// The outcome of an attempt to get any seat.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Attempt {
    /// This one is had.
    Owned(u64),
    /// There was none to claim.
    None,
    /// There was, and another machine was quicker, or a line is damaged.
    Lost,
}

impl Inner {
    /// The seat of this machine: from the superblock's table, that of its slot, or the one that a process of this session claimed.
    pub(super) fn find_seat(&self) -> Option<u64> {
        self.reserved_seat().or_else(|| self.claimed_seat())
    }

    fn reserved_seat(&self) -> Option<u64> {
        let machine = self.platform.machine();
        let reserved = self.config.seats.iter().take(self.geometry().seats as usize).position(|owner| *owner == machine);
        reserved.map(|seat| seat as u64)
    }

    /// The seat that this session claimed, or has with its slot.
    pub(super) fn claimed_seat(&self) -> Option<u64> {
        let seat = u64::from(self.segment.header().seat.load(Ordering::Acquire)).checked_sub(1)?;
        (seat < self.geometry().all_seats()).then_some(seat)
    }

    fn is_fixed(&self, seat: usize) -> bool {
        self.config.seats.get(seat).is_some_and(|machine| !machine.is_none())
    }

    /// The line of this machine's seat.
    pub(super) fn seat_line(&self, seat: u64, epoch: u32, beat: u64) -> Seat {
        let line = Seat { epoch, beat, machine: self.platform.machine().0, ..Seat::default() };
        if self.claimed_seat() != Some(seat) {
            return line;
        }
        Seat { session: self.segment.session(), generation: self.segment.header().seat_generation.load(Ordering::Acquire), ..line }
    }

    /// Whether the line of this session's seat says that another session writes it: a statement that this one is over was wrong.
    pub(super) fn is_seat_lost(&self, seat: u64, line: &Seat) -> bool {
        self.claimed_seat() == Some(seat) && line.generation != 0 && line.session != self.segment.session()
    }

    /// Gives the seat up that another session writes.
    pub(super) fn forget_seat(&self) {
        self.segment.header().rows_of_seat.store(0, Ordering::Release);
        self.segment.header().seat.store(0, Ordering::Release);
    }

    /// Claims a seat for this machine, which has none, if there is a reason to: no manager serves, or a seat is to spare.
    pub(super) fn claim_seat(&self, manager: &mut Manager, now_ns: u64) -> Result<Option<u64>> {
        if self.geometry().slot_seats && self.state() != state::NONE {
            return self.sit_down_again(manager);
        }
        let lacks_manager = match self.is_manager_wanted(manager, None, now_ns) {
            Ok(lacks_manager) if lacks_manager || self.state() == state::LIVE => lacks_manager,
            // A host that joins, or that cannot tell who serves, may only have a seat whose damaged lines can be what it waits for.
            Ok(_) => return self.claim_seat_to_mend(manager, now_ns),
            Err(damage @ Error::BadLine { .. }) => {
                return self.claim_seat_to_mend(manager, now_ns)?.map_or(Err(damage), |seat| Ok(Some(seat)));
            }
            Err(other) => return Err(other),
        };
        let wait_ns = self.config.suspect_ms * 1_000_000;
        let has_become_urgent = lacks_manager && !manager.claim_is_urgent && !mutant!("failover.claim_keeps_its_time");
        if manager.claim_at_ns == 0 || has_become_urgent {
            // With a manager there is time: machines that see the same seat to spare must not all claim it at once.
            manager.claim_at_ns = if lacks_manager { now_ns } else { now_ns + self.platform.random() % wait_ns };
        }
        manager.claim_is_urgent = lacks_manager;
        if now_ns < manager.claim_at_ns {
            return Ok(None);
        }
        let claimed = self.try_to_claim(manager, false)?;
        manager.claim_tries = if claimed == Attempt::Lost { (manager.claim_tries + 1).min(MAX_CLAIM_BACKOFF) } else { 0 };
        if let Attempt::Owned(seat) = claimed {
            manager.serves_after = manager.watch.epoch().filter(|_| lacks_manager);
            return Ok(Some(seat));
        }
        // A look at seats that other machines have reads every place, so it is seldom where a manager serves.
        let base_ns = if lacks_manager { self.config.heartbeat_ms * 1_000_000 } else { 2 * wait_ns };
        manager.claim_at_ns = now_ns + base_ns / 4 + self.platform.random() % (base_ns << manager.claim_tries).max(1);
        Ok(None)
    }

    /// Claims a seat that [`Inner::waits_for_this_machine`], at a pace of its own: the claim of a seat in a pool without a manager is not
    /// put off by it.
    fn claim_seat_to_mend(&self, manager: &mut Manager, now_ns: u64) -> Result<Option<u64>> {
        if now_ns < manager.mend_at_ns || mutant!("heal.claim_waits_for_join") {
            return Ok(None);
        }
        let period_ns = MEND_PERIODS * self.config.heartbeat_ms * 1_000_000;
        manager.mend_at_ns = now_ns + period_ns / 2 + self.platform.random() % period_ns.max(1);
        match self.try_to_claim(manager, true)? {
            Attempt::Owned(seat) => Ok(Some(seat)),
            Attempt::None | Attempt::Lost => Ok(None),
        }
    }

    /// In pools whose slots have seats no member keeps one of the others, so a damaged line of one has no writer. It costs every host that
    /// reads all seats, so the host that serves claims such a seat, writes its lines again and gives it back.
    pub(super) fn mend_claimed_seats(&self, manager: &mut Manager, now_ns: u64) -> Result<()> {
        if !self.geometry().slot_seats || now_ns < manager.mend_at_ns || mutant!("heal.open_seats_are_left") {
            return Ok(());
        }
        manager.mend_at_ns = now_ns + MEND_PERIODS * self.config.heartbeat_ms * 1_000_000;
        // A machine with a reserved seat leaves that of its slot alone.
        let unused = self.geometry().seat_of(self.slot()).filter(|_| self.reserved_seat().is_some());
        for seat in (0..u64::from(self.geometry().seats)).chain(unused) {
            // One that no machine ever had counts as empty.
            let is_ours = !self.is_fixed(seat as usize) && self.find_seat() != Some(seat);
            if !is_ours || !self.has_own_damage(seat)? || self.is_vacant(seat)? {
                continue;
            }
            match self.mend_claimed_seat(seat, Some(seat) == unused) {
                // Another damaged line hides the state that this needs.
                Ok(()) | Err(Error::BadLine { .. } | Error::Full { .. }) => {}
                Err(other) => return Err(other),
            }
        }
        Ok(())
    }

    fn mend_claimed_seat(&self, seat: u64, is_own: bool) -> Result<()> {
        let Some(_claiming) = self.platform.try_lock(MachineLock::Claim, true)? else { return Ok(()) };
        let mut line = Seat { machine: self.platform.machine().0, ..Seat::default() };
        if !is_own {
            let session = self.segment.session();
            let claimer = Claimer { lines: &self.lines, platform: &*self.platform };
            let Claimed::Owned { generation } = claimer.claim(seat, &session)? else { return Ok(()) };
            line = Seat { session, generation, state: Seat::RELEASED, ..line };
        }
        self.rewrite_rows(seat)?;
        let epoch = self.found_in_seat(seat)?.epoch;
        self.lines.publish(seat, Seat { epoch, beat: beat_at_rest(epoch), ..line })?;
        self.damage.healed();
        point!("manager.open_seat_mended");
        Ok(())
    }

    /// One attempt to get a seat, which is noted.
    fn try_to_claim(&self, manager: &mut Manager, mends_only: bool) -> Result<Attempt> {
        let claimed = match self.claim_any_seat(manager, mends_only) {
            Ok(claimed) => claimed,
            // A damaged line or a full table keeps this machine from having a seat, not from using the pool under another manager.
            Err(error @ (Error::BadLine { .. } | Error::Full { .. })) => {
                manager.claim_problem = Some(error.to_string());
                Attempt::Lost
            }
            Err(other) => return Err(other),
        };
        if let Attempt::Owned(seat) = claimed {
            (manager.claim_at_ns, manager.claim_problem, manager.seat) = (0, None, Some(seat));
        }
        Ok(claimed)
    }

    /// Tries every seat that seems to be free; with `mends_only` those that [`Inner::waits_for_this_machine`].
    fn claim_any_seat(&self, manager: &mut Manager, mends_only: bool) -> Result<Attempt> {
        let mut candidates = self.seats_to_claim()?;
        if mends_only {
            let waiting = |seat| self.waits_for_this_machine(seat).map(|waits| waits.then_some(seat)).transpose();
            candidates = candidates.into_iter().filter_map(waiting).collect::<Result<_>>()?;
        }
        if candidates.is_empty() {
            return Ok(Attempt::None);
        }
        if manager.guard.is_none() {
            manager.guard = self.platform.try_lock(MachineLock::Manager, true)?;
        }
        // Another process of this machine sees to it.
        if manager.guard.is_none() {
            return Ok(Attempt::None);
        }
        let Some(_claiming) = self.platform.try_lock(MachineLock::Claim, true)? else { return Ok(Attempt::None) };
        let claimer = Claimer { lines: &self.lines, platform: &*self.platform };
        let session = self.segment.session();
        for seat in candidates {
            match claimer.claim(seat, &session)? {
                Claimed::Taken(_) => {}
                Claimed::Superseded => return Ok(Attempt::Lost),
                Claimed::Owned { generation } => {
                    self.sit_down(seat, generation)?;
                    return Ok(Attempt::Owned(seat));
                }
            }
        }
        Ok(Attempt::Lost)
    }

    /// The line of a seat; of one that does not verify the epoch by the seat's own tags, as of a seat that claims again: nothing that it
    /// claimed above them was served.
    fn found_in_seat(&self, seat: u64) -> Result<Seat> {
        if let Some(found) = if_whole(self.lines.fetch::<Seat>(seat))? {
            return Ok(found);
        }
        let epoch = self.highest_tag_of(seat)?;
        Ok(Seat { epoch, beat: beat_at_rest(epoch), ..Seat::default() })
    }

    /// C7: this session's first write to a line of its seat. What the session before wrote there stays: the lines of a seat are its memory.
    fn sit_down(&self, seat: u64, generation: u32) -> Result<()> {
        let header = self.segment.header();
        let found = self.found_in_seat(seat)?;
        // The rows known before are of another seat, or of another session in this one.
        header.rows_of_seat.store(0, Ordering::Release);
        header.seat_epoch.store(found.epoch, Ordering::Release);
        header.seat_generation.store(generation, Ordering::Release);
        header.seat.store(seat as u32 + 1, Ordering::Release);
        self.lines.publish(seat, self.seat_line(seat, found.epoch, found.beat))?;
        point!("manager.seated");
        Ok(())
    }

    /// The slot is this machine's now, and with it the slot's seat. A seat that was claimed to get there goes back at once, for the next
    /// machine that finds no manager, and the role continues in the slot's seat. For the first process of a session, alone on the machine.
    pub(crate) fn take_seat_of_slot(&self) -> Result<()> {
        let Some(seat) = self.geometry().seat_of(self.slot()).filter(|_| self.reserved_seat().is_none()) else { return Ok(()) };
        let served = self.release_claimed_seat()?;
        let Some(mut manager) = self.poll_manager() else { return Ok(()) };
        if !self.take_guard(&mut manager)? {
            return Err(Error::Timeout { what: "the former process in the manager's role to end".into(), timeout_ms: 0 });
        }
        match self.sit_down(seat, self.incarnation()) {
            // A damaged line of the seat: tried again in the rounds of the service.
            Err(Error::BadLine { .. }) => return Ok(()),
            other => other?,
        }
        manager.seat = Some(seat);
        if served {
            manager.active = match self.take_over(seat, &manager.watch) {
                Err(Error::BadLine { .. }) => None,
                other => other?,
            };
        }
        Ok(())
    }

    /// A member whose slot's seat could not be taken when it joined, or went to another session by a wrong statement, has the slot and so
    /// the seat.
    fn sit_down_again(&self, manager: &mut Manager) -> Result<Option<u64>> {
        let Some(seat) = self.geometry().seat_of(self.slot()).filter(|_| self.state() == state::LIVE) else { return Ok(None) };
        let incarnation = self.incarnation();
        let identity = if_whole(self.lines.fetch::<Identity>(self.slot().into()))?;
        let is_ours = identity.is_some_and(|identity| (identity.nonce, identity.incarnation) == (self.nonce(), incarnation));
        if !is_ours || self.dead_up_to(self.slot())? >= incarnation || !self.take_guard(manager)? {
            return Ok(None);
        }
        self.sit_down(seat, incarnation)?;
        manager.seat = Some(seat);
        Ok(Some(seat))
    }

    /// Before the slot of a dead host goes to another machine, which overwrites its identity line: what that line proves of the host's
    /// seat is stated for good. False when it could not be stated now.
    pub(super) fn keep_proof_of_seat(&self, slot: u32) -> Result<bool> {
        let Some(identity) = if_whole(self.lines.fetch::<Identity>(slot.into()))? else { return Ok(true) };
        if identity.session == 0 || self.dead_up_to(slot)? < identity.incarnation {
            return Ok(true);
        }
        for seat in (0..self.geometry().seats as usize).filter(|&seat| !self.is_fixed(seat)) {
            // Where the vote cannot be read nothing can be claimed either; an operator acts on both.
            let Some(claim) = if_whole(claim::decided(&self.lines, seat as u64))? else { continue };
            let is_its = claim.generation != 0 && claim.machine == identity.machine;
            if !is_its || claim::first_half(&claim.session) != identity.session {
                continue;
            }
            let Some(_claiming) = self.platform.try_lock(MachineLock::Claim, true)? else { return Ok(false) };
            let claimer = Claimer { lines: &self.lines, platform: &*self.platform };
            match claimer.state_ended(seat as u64, &claim.session) {
                Ok(()) => {}
                Err(Error::Timeout { .. }) => return Ok(false),
                // No room for a statement: the slot goes to the other machine all the same, and the seat waits for its own or an operator.
                Err(Error::Full { .. } | Error::BadLine { .. }) => {}
                Err(other) => return Err(other),
            }
        }
        Ok(true)
    }

    /// Whether a line of `seat` does not verify, and its claim, made or only begun, names this machine: then no other one writes it again.
    fn waits_for_this_machine(&self, seat: u64) -> Result<bool> {
        let claim = if_whole(claim::decided(&self.lines, seat))?;
        Ok(claim.is_some_and(|claim| claim.generation != 0 && claim.machine == self.platform.machine().0) && self.has_own_damage(seat)?)
    }

    /// Seats worth a claim, the best first: of this machine before, never given to a machine, released, proven to be over.
    fn seats_to_claim(&self) -> Result<Vec<u64>> {
        let machine = self.platform.machine().0;
        let mut candidates = Vec::new();
        for (seat, line) in seat::each(&self.lines)?.into_iter().take(self.geometry().seats as usize).enumerate() {
            if self.is_fixed(seat) {
                continue;
            }
            let Some(line) = if_whole(line)? else {
                let (claim, is_over) = claim::standing(&self.lines, seat as u64)?;
                if claim.generation == 0 || claim.machine == machine || is_over {
                    candidates.push((4, seat as u64));
                }
                continue;
            };
            let rank = match line {
                Seat { generation: 0, .. } => 1,
                line if line.machine == machine => 0,
                Seat { state: Seat::RELEASED, .. } => 2,
                _ => {
                    let (claim, is_over) = claim::standing(&self.lines, seat as u64)?;
                    let claimer = Claimer { lines: &self.lines, platform: &*self.platform };
                    match is_over || claimer.has_ended_here(&claim)? {
                        true => 3,
                        false => continue,
                    }
                }
            };
            candidates.push((rank, seat as u64));
        }
        candidates.sort_unstable();
        Ok(candidates.into_iter().map(|(_, seat)| seat).collect())
    }

    /// Gives up this session's seat, if it is one that goes by a vote, so that it can be given to any machine: nothing of this session
    /// writes a line of the seat after this. For the first process of a session or the last, alone on the machine. The seat of a slot goes
    /// with the slot.
    pub(crate) fn release_seat(&self) -> Result<()> {
        self.release_claimed_seat()?;
        self.forget_seat();
        Ok(())
    }

    /// As [`Inner::release_seat`]; true when this process served in that seat.
    fn release_claimed_seat(&self) -> Result<bool> {
        let Some(seat) = self.claimed_seat().filter(|seat| self.geometry().slot_of(*seat).is_none()) else { return Ok(false) };
        let Some(mut manager) = self.poll_manager() else { return Ok(false) };
        let deadline_ns = self.platform.now_ns() + self.config.suspect_ms * 1_000_000;
        let mut round = 0;
        // A process that detached just before may still be giving the role up.
        while manager.guard.is_none() && self.platform.now_ns() < deadline_ns {
            manager.guard = self.platform.try_lock(MachineLock::Manager, true)?;
            self.platform.relax(round);
            round += 1;
        }
        let served = manager.active.take();
        let found = if_whole(self.lines.fetch::<Seat>(seat))?;
        if let (Some(_), Some(found)) = (&manager.guard, found)
            && !self.is_seat_lost(seat, &found)
        {
            point!("manager.before_release");
            let line = self.seat_line(seat, found.epoch, beat_at_rest(found.epoch));
            self.lines.publish(seat, Seat { state: Seat::RELEASED, ..line })?;
            point!("manager.released");
        }
        self.forget_seat();
        manager.guard = None;
        manager.seat = None;
        Ok(served.is_some())
    }

    /// Whether every process of the machine that serves in `newest` has ended, by the word of this machine's kernel: then there is nothing
    /// to wait for. About time alone: a takeover is safe whenever it comes.
    pub(super) fn has_manager_ended(&self, newest: &seat::Newest) -> Result<bool> {
        let Some(slot) = self.geometry().slot_of(newest.seat) else { return Ok(false) };
        let Some(identity) = if_whole(self.lines.fetch::<Identity>(slot.into()))? else { return Ok(false) };
        Ok(identity.machine == newest.machine && witness::has_ended_here(&self.lines, &*self.platform, slot.into(), &identity)?)
    }

    /// Why no manager answers: which machines have the seats, and what an operator can do.
    pub(crate) fn why_no_manager(&self) -> String {
        let mut told = String::from("a manager to bind a slot");
        if let Some(problem) = self.manager.try_lock().ok().and_then(|manager| manager.claim_problem.clone()) {
            let _ = write!(told, " (this machine could not claim a seat: {problem})");
        }
        let Ok(seats) = seat::all(&self.lines) else { return told + "; a seat line is damaged: run `cxlctl fsck`" };
        for (seat, line) in seats.iter().take(self.geometry().seats as usize).enumerate() {
            if let Some(fixed) = self.config.seats.get(seat).filter(|machine| !machine.is_none()) {
                let _ = write!(told, "; seat {seat} is reserved by the format for machine {fixed}: start that machine");
            } else if line.generation != 0 && line.state != Seat::RELEASED {
                let _ = write!(
                    told,
                    "; seat {seat} belongs to machine {}: start it, or, if it is gone for good, run `cxlctl seats release --seat {seat}`",
                    machine_text(&self.lines, MachineId(line.machine))
                );
            }
        }
        told
    }
}
