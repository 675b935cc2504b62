// SPDX-License-Identifier: Apache-2.0
//! What a process sees of the manager and of all hosts while it does not serve, and when it takes the role (LOCKS.md 12.7, 12.21).
//!
//! One silence is waited for, that of the manager. An observer hears every host meanwhile, so the silence of a host that died with the
//! manager is over when its locks have to pass on, and no observer waits for one that it knows to be silent.

use super::{Manager, RESIGNED};
use crate::error::Result;
use crate::failure_detector::FailureDetector;
use crate::fault::mutant;
use crate::host::segment::state;
use crate::host::{HostConfig, Inner};
use crate::line::if_whole;
use crate::lock::seat::{self, Newest};
use crate::media::{Identity, Seat, Summary};

/// Most doublings of the patience with managers. Without them seats too slow for the time-out would take the role from each other for ever.
const MAX_UNREST: u32 = 6;
/// Beats of one manager after which one doubling is taken back.
const BEATS_TO_CALM: u64 = 64;
/// Looks within a heartbeat while no manager serves.
const VACANT_LOOKS: u64 = 8;

/// A host's heartbeat and the incarnation that it belongs to, and how long it has not moved.
#[derive(Clone, Copy)]
pub(super) struct Pulse {
    beat: (u32, u64),
    pub silence: FailureDetector,
}

impl Pulse {
    /// Of a host that was not heard yet.
    pub fn since(now_ns: u64) -> Pulse {
        Pulse { beat: (0, 0), silence: FailureDetector::since(now_ns) }
    }

    /// True when the heartbeat moved.
    pub fn note(&mut self, summary: &Summary, now_ns: u64) -> bool {
        let beat = (summary.incarnation, summary.heartbeat);
        let moved = self.beat != beat;
        if moved {
            *self = Pulse { beat, silence: FailureDetector::since(now_ns) };
        }
        moved
    }
}

/// The seat in charge, as last seen.
struct SeatWatch {
    seat: u64,
    epoch: u32,
    beat: u64,
    machine: [u8; 16],
    silence: FailureDetector,
}

impl SeatWatch {
    fn of(newest: Option<&Newest>, now_ns: u64) -> SeatWatch {
        let silence = FailureDetector::since(now_ns);
        match newest {
            Some(newest) => SeatWatch { seat: newest.seat, epoch: newest.epoch, beat: newest.beat, machine: newest.machine, silence },
            None => SeatWatch { seat: 0, epoch: 0, beat: 0, machine: [0; 16], silence },
        }
    }
}

/// What a process that does not serve sees of the others.
#[derive(Default)]
pub(super) struct ManagerWatch {
    /// `None` before the first look.
    seat: Option<SeatWatch>,
    /// By slot; none before the first look.
    pulses: Vec<Pulse>,
    /// Doublings of the patience with managers: the role moved lately, for no reason.
    unrest: u32,
    /// A host whose manager was taken for dead, and its heartbeat then: one that resumes was only slow.
    deposed: Option<(u32, (u32, u64))>,
    /// No manager serves, as of the last look.
    is_vacant: bool,
}

impl ManagerWatch {
    /// Of a manager that another seat took the role from. A slow one was taken for dead, and meets the next ones with more patience; one
    /// that claimed at the same time as others was not.
    pub fn after_deposition(&self, was_slow: bool) -> ManagerWatch {
        let more = u32::from(was_slow && !mutant!("failover.no_patience_with_the_slow"));
        ManagerWatch { unrest: (self.unrest + more).min(MAX_UNREST), ..ManagerWatch::default() }
    }

    /// The epoch in charge, as last seen.
    pub fn epoch(&self) -> Option<u32> {
        self.seat.as_ref().map(|seat| seat.epoch)
    }

    /// Time between two looks.
    pub fn period_ns(&self, config: &HostConfig) -> u64 {
        let heartbeat_ns = config.heartbeat_ms * 1_000_000;
        if self.is_vacant { heartbeat_ns / VACANT_LOOKS } else { heartbeat_ns }
    }

    /// The observations of `incarnation` of a slot. Those of another one say nothing about it: its pulse begins now.
    pub fn pulse_of(&self, slot: usize, incarnation: u32, now_ns: u64) -> Pulse {
        let is_its = |pulse: &&Pulse| pulse.beat.0 == incarnation || mutant!("failover.silence_of_another_life");
        let seen = self.pulses.get(slot).filter(is_its).filter(|_| !mutant!("failover.silence_counts_anew"));
        seen.copied().unwrap_or(Pulse::since(now_ns))
    }
}

impl Inner {
    /// Watches the manager in charge and all hosts; true when it is this machine's turn to take the role: there is no manager, it resigned,
    /// or it has not moved for long enough on our own clock.
    ///
    /// `seat` is this machine's; `None` = it has none yet and would have to claim one.
    pub(super) fn is_manager_wanted(&self, manager: &mut Manager, seat: Option<u64>, now_ns: u64) -> Result<bool> {
        let watch = &mut manager.watch;
        if mutant!("no_takeover") && watch.epoch().is_some_and(|epoch| epoch > 0) {
            return Ok(false);
        }
        self.hear_hosts(watch, now_ns)?;
        let newest = seat::newest(self)?;
        self.note_manager(watch, newest.as_ref(), now_ns)?;
        let patience_ns = (self.config.suspect_ms * 1_000_000) << watch.unrest;
        let Some(seen) = &mut watch.seat else { return Ok(false) };
        let (epoch, still_ns) = (seen.epoch, seen.silence.goes_on(now_ns, patience_ns));
        // The kernel's word that its processes have ended is as good as a resignation. It is asked for once the manager misses two beats.
        let missed_ns = still_ns.saturating_sub(2 * self.config.heartbeat_ms * 1_000_000);
        let (has_resigned, still_ns) = match newest {
            _ if seen.beat == RESIGNED => (true, still_ns),
            Some(newest) if missed_ns > 0 && self.has_manager_ended(&newest)? => (true, missed_ns),
            _ => (false, still_ns),
        };
        let vacant_ns = if has_resigned { Some(still_ns) } else { still_ns.checked_sub(patience_ns + 1) };
        watch.is_vacant = epoch == 0 || vacant_ns.is_some();
        if epoch == 0 {
            let is_first = seat.map_or(self.config.seats.iter().all(|machine| machine.is_none()), |seat| seat == 0);
            let rank = seat.unwrap_or(self.geometry().seats.into());
            return Ok(is_first || vacant_ns.is_some_and(|vacant_ns| vacant_ns >= self.turn_ns(watch, rank, true, false)));
        }
        let machine = self.platform.machine().0;
        let is_own = newest.is_some_and(|newest| seat.map_or(newest.machine == machine, |seat| newest.seat == seat));
        // The process that served for this very seat may have died; its lock on the machine tells, so there is nothing to wait for.
        if is_own {
            return Ok(true);
        }
        let Some(vacant_ns) = vacant_ns else { return Ok(false) };
        let is_member = self.state() == state::LIVE;
        let rank = self.living_before(watch, newest.as_ref(), patience_ns / 2)?;
        Ok(vacant_ns >= self.turn_ns(watch, rank, is_member, has_resigned))
    }

    /// How long a vacant role is left to the `rank` machines that come before this one. The longest of it is part of what a
    /// failover may last, however many there are.
    fn turn_ns(&self, watch: &ManagerWatch, rank: u64, is_member: bool, has_resigned: bool) -> u64 {
        let (heartbeat_ns, suspect_ns) = (self.config.heartbeat_ms * 1_000_000, self.config.suspect_ms * 1_000_000);
        // Twice the time in which the one before sees the same.
        let (step_ns, longest_ns) =
            if has_resigned { (heartbeat_ns / 4, heartbeat_ns * 3 / 4) } else { (2 * heartbeat_ns, suspect_ns / 4) };
        let (step_ns, longest_ns) = (step_ns << watch.unrest, longest_ns << watch.unrest);
        if mutant!("failover.seats_wait_in_turn") {
            return (suspect_ns << watch.unrest).saturating_mul(rank);
        }
        match rank.saturating_mul(step_ns) {
            turn_ns if is_member && turn_ns < longest_ns => turn_ns,
            _ => longest_ns - self.platform.random() % (longest_ns / 2 + 1),
        }
    }

    /// Machines that live and whose turn comes before this one's: that of the seat in charge, where another process may take the role at
    /// once; then those with seats, by seat; then those without, by slot; then those that join. `limit_ns`: a host silent for longer is not
    /// waited for. All of it is from lines that every observer reads, so that no two have the same turn.
    fn living_before(&self, watch: &ManagerWatch, newest: Option<&Newest>, limit_ns: u64) -> Result<u64> {
        let owners = self.owners_of_seats()?;
        let turn_of = |machine: [u8; 16], slot: u64| {
            let seat = owners.iter().position(|owner| *owner == Some(machine));
            seat.map_or(owners.len() as u64 + slot, |seat| seat as u64)
        };
        let machine = self.platform.machine().0;
        let slot = if self.state() == state::LIVE { self.slot() } else { self.geometry().slots };
        let own = turn_of(machine, slot.into());
        if mutant!("failover.seats_wait_in_turn") {
            return Ok(own);
        }
        let lives = |(_, pulse): &(u64, &Pulse)| pulse.silence.lasted_ns() < limit_ns;
        let slots: Vec<u64> = (0..).zip(&watch.pulses).filter(lives).map(|(slot, _)| slot).collect();
        let mut identities: Vec<Result<Identity>> = Vec::with_capacity(slots.len());
        self.lines.fetch_many(&slots, &mut identities)?;
        let mut before = 0;
        for (slot, identity) in slots.into_iter().zip(identities) {
            let Some(identity) = if_whole(identity)?.filter(|found| found.state == Identity::LIVE) else { continue };
            let is_in_charge = newest.is_some_and(|newest| newest.machine == identity.machine);
            let is_before = is_in_charge || turn_of(identity.machine, slot) < own;
            before += u64::from(identity.machine != machine && is_before);
        }
        Ok(before)
    }

    /// The machine of each seat: the one that the format reserved it for, or that has claimed it.
    fn owners_of_seats(&self) -> Result<Vec<Option<[u8; 16]>>> {
        let mut owners = Vec::new();
        for (seat, line) in seat::each(&self.lines)?.into_iter().enumerate() {
            let claimed = if_whole(line)?.filter(|line| line.generation != 0 && line.state != Seat::RELEASED).map(|line| line.machine);
            let fixed = self.config.seats.get(seat).filter(|machine| !machine.is_none()).map(|machine| machine.0);
            owners.push(fixed.or(claimed));
        }
        Ok(owners)
    }

    /// Looks at every slot's heartbeat.
    fn hear_hosts(&self, watch: &mut ManagerWatch, now_ns: u64) -> Result<()> {
        let geometry = self.geometry();
        watch.pulses.resize(geometry.slots as usize, Pulse::since(now_ns));
        let firsts: Vec<u64> = (0..u64::from(geometry.slots)).map(|slot| slot * geometry.summary_lines()).collect();
        let mut summaries: Vec<Result<Summary>> = Vec::with_capacity(firsts.len());
        self.lines.fetch_many(&firsts, &mut summaries)?;
        let patience_ns = self.config.suspect_ms * 1_000_000;
        for (pulse, summary) in watch.pulses.iter_mut().zip(summaries) {
            let moved = if_whole(summary)?.is_some_and(|summary| pulse.note(&summary, now_ns));
            if !moved {
                pulse.silence.goes_on(now_ns, patience_ns);
            }
        }
        Ok(())
    }

    /// Notes who is in charge, and whether the role moved for no reason.
    fn note_manager(&self, watch: &mut ManagerWatch, newest: Option<&Newest>, now_ns: u64) -> Result<()> {
        if let Some((slot, beat)) = watch.deposed
            && let Some(goes_on) = self.goes_on(watch, slot, beat)?
        {
            let is_slow = goes_on && !mutant!("failover.no_patience_with_the_slow");
            watch.unrest = (watch.unrest + u32::from(is_slow)).min(MAX_UNREST);
            watch.deposed = None;
        }
        let (epoch, beat) = newest.map_or((0, 0), |newest| (newest.epoch, newest.beat));
        if watch.seat.as_ref().is_some_and(|seen| (seen.epoch, seen.beat) == (epoch, beat)) {
            return Ok(());
        }
        if let Some((before, newest)) = watch.seat.as_ref().zip(newest)
            && self.was_deposed(before, newest)?
        {
            watch.unrest = (watch.unrest + u32::from(mutant!("failover.patience_with_the_dead"))).min(MAX_UNREST);
            watch.deposed = self.slot_of(before.machine)?.map(|slot| (slot, watch.pulses[slot as usize].beat));
        }
        if beat != 0 && beat != RESIGNED && beat.is_multiple_of(BEATS_TO_CALM) {
            watch.unrest = watch.unrest.saturating_sub(1);
        }
        watch.seat = Some(SeatWatch::of(newest, now_ns));
        Ok(())
    }

    /// A shorter silence of a manager is not what the role moved for, on the clock of any host.
    pub(super) fn least_silence_ns(&self) -> u64 {
        self.config.suspect_ms * 1_000_000 / 2
    }

    /// Whether another machine is in charge than at the last look, and the one before was taken for dead.
    fn was_deposed(&self, before: &SeatWatch, newest: &Newest) -> Result<bool> {
        if before.epoch == 0 || before.epoch == newest.epoch || before.machine == newest.machine || before.beat == RESIGNED {
            return Ok(false);
        }
        // Two that claimed at the same time: the first one was not silent.
        if before.silence.lasted_ns() < self.least_silence_ns() && !mutant!("failover.duel_is_unrest") {
            return Ok(false);
        }
        // It may have resigned since.
        Ok(if_whole(self.lines.fetch::<Seat>(before.seat))?.is_none_or(|line| line.beat != RESIGNED))
    }

    /// Whether a host whose manager was taken for dead resumes; `None` while this is unknown. One that died and came back is no reason
    /// for patience.
    fn goes_on(&self, watch: &ManagerWatch, slot: u32, before: (u32, u64)) -> Result<Option<bool>> {
        let beat = watch.pulses[slot as usize].beat;
        if beat == before {
            return Ok(None);
        }
        if beat.0 == before.0 {
            return Ok(Some(true));
        }
        let identity = if_whole(self.lines.fetch::<Identity>(slot.into()))?;
        Ok(Some(identity.is_some_and(|identity| identity.drained < before.0)))
    }

    /// The slot that `machine` has.
    fn slot_of(&self, machine: [u8; 16]) -> Result<Option<u32>> {
        let slots: Vec<u64> = (0..self.geometry().slots.into()).collect();
        let mut identities: Vec<Result<Identity>> = Vec::with_capacity(slots.len());
        self.lines.fetch_many(&slots, &mut identities)?;
        for (slot, identity) in (0..).zip(identities) {
            if if_whole(identity)?.is_some_and(|found| found.machine == machine && found.state == Identity::LIVE) {
                return Ok(Some(slot));
            }
        }
        Ok(None)
    }
}
