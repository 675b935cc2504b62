// SPDX-License-Identifier: Apache-2.0
//! Which session of which machine has a manager seat (LOCKS.md 12.15): decided among machines that know nothing of each other.
//!
//! A *session* is the time from the first process of a machine that joins until its last one has left or died. A machine first gets a
//! *place*, lines of its own, through a splitter; then it votes under a ballot: claim, collect, publish, check. A choice is never
//! taken back, except by proof that the session is over.

use super::seat::next_epoch;
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::host::fence;
use crate::limits::MAX_NUMBER;
use crate::line::{Line, Lines, empty_line, if_whole};
use crate::media::{Claimant, Identity, MediaLine, Seat, SeatClaim, Splitter};
use crate::platform::{MachineId, Platform};

/// The outcome of an attempt to get a seat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claimed {
    /// This session has the seat, for good: as its `generation`th owner.
    Owned {
        /// Sessions that the seat was given to, this one included.
        generation: u32,
    },
    /// Another session has it, and nothing proves that it is over.
    Taken(SeatClaim),
    /// Another machine claimed under a higher ballot meanwhile: nothing is decided, try again later.
    Superseded,
}

/// One machine's part in the vote over seats. The caller holds [`crate::platform::MachineLock::Claim`] while it uses this.
pub struct Claimer<'a> {
    /// The pool's lines.
    pub lines: &'a Lines,
    /// The machine below.
    pub platform: &'a dyn Platform,
}

/// The copy of `seat`'s register with the highest tag, over all places.
///
/// # Errors
/// [`Error::BadLine`] when a copy does not verify: it may have the highest tag.
pub fn decided(lines: &Lines, seat: u64) -> Result<SeatClaim> {
    Ok(newest(&copies_of(lines, seat)?.into_iter().collect::<Result<Vec<_>>>()?))
}

/// The copy with the highest tag.
fn newest(copies: &[SeatClaim]) -> SeatClaim {
    copies.iter().copied().max_by_key(|copy| copy.tag).unwrap_or_default()
}

/// Every place's copy of `seat`'s register.
fn copies_of(lines: &Lines, seat: u64) -> Result<Vec<Result<SeatClaim>>> {
    let geometry = lines.layout().geometry();
    let indexes: Vec<u64> = (0..geometry.places()).map(|place| place * u64::from(geometry.seats) + seat).collect();
    let mut copies = Vec::with_capacity(indexes.len());
    lines.fetch_many(&indexes, &mut copies)?;
    Ok(copies)
}

fn claimants(lines: &Lines) -> Result<Vec<Claimant>> {
    let indexes: Vec<u64> = (0..lines.layout().geometry().places()).collect();
    let mut found: Vec<Result<Claimant>> = Vec::with_capacity(indexes.len());
    lines.fetch_many(&indexes, &mut found)?;
    found.into_iter().collect()
}

/// Whether it is proven that `claim`'s session writes no line of its seat any more; `copies` are all copies of the seat's register.
///
/// # Errors
/// Those of the memory. A line that does not verify proves nothing.
fn is_over(lines: &Lines, seat: u64, claim: &SeatClaim, copies: &[SeatClaim]) -> Result<bool> {
    // The session's own last word.
    let line = if_whole(lines.fetch::<Seat>(seat))?;
    let is_named = |line: &Seat| line.session == claim.session || mutant!("claim.release_not_compared");
    if line.is_some_and(|line| line.state == Seat::RELEASED && is_named(&line)) {
        return Ok(true);
    }
    if copies.iter().any(|copy| copy.ended == claim.session) {
        return Ok(true);
    }
    // An incarnation that the session itself published as its own is proven dead.
    let half = first_half(&claim.session);
    for slot in 0..lines.layout().geometry().slots {
        let Some(identity) = if_whole(lines.fetch::<Identity>(slot.into()))? else { continue };
        let is_its = identity.session == half && identity.machine == claim.machine && identity.incarnation != 0;
        // Where slots have seats a session gives its claimed one back before it has joined, else after it has left.
        if is_its && identity.state == Identity::LEFT && lines.layout().geometry().slot_seats {
            return Ok(true);
        }
        if is_its && if_whole(fence::dead_up_to(lines, slot))?.is_some_and(|dead| dead >= identity.incarnation) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// What an identity line says of a session.
pub(crate) fn first_half(session: &[u8; 16]) -> u64 {
    let mut half = [0; 8];
    half.copy_from_slice(&session[..8]);
    u64::from_le_bytes(half)
}

/// The session that has `seat`, and whether it is proven to be over: for operators.
///
/// # Errors
/// As [`decided`].
pub fn standing(lines: &Lines, seat: u64) -> Result<(SeatClaim, bool)> {
    let copies = copies_of(lines, seat)?.into_iter().collect::<Result<Vec<_>>>()?;
    let claim = newest(&copies);
    let over = claim.generation != 0 && is_over(lines, seat, &claim, &copies)?;
    Ok((claim, over))
}

impl Claimer<'_> {
    fn machine(&self) -> MachineId {
        self.platform.machine()
    }

    /// Who has a place: the machines of one kernel together, which that kernel lets in one at a time, where the slots have the seats that
    /// machines keep. Else each machine for itself, so that machines which come and go use the places up.
    fn kernel(&self) -> u64 {
        if self.lines.layout().geometry().slot_seats { self.platform.witness() } else { 0 }
    }

    /// Tries to get `seat` for `session` of this machine. The caller also holds [`crate::platform::MachineLock::Manager`], and no other
    /// session of this machine runs.
    ///
    /// # Errors
    /// [`Error::Full`] when places or numbers are used up; [`Error::BadLine`] when a damaged line may hide what counts.
    pub fn claim(&self, seat: u64, session: &[u8; 16]) -> Result<Claimed> {
        let geometry = self.lines.layout().geometry();
        let Some(_alone) = self.platform.lock_place()? else { return Ok(Claimed::Superseded) };
        let place = self.place()?;
        let early = if mutant!("claim.collect_before_claim") { Some(self.collect(seat, place)?) } else { None };
        let ballot = self.announce(place)?;
        let (found, copies) = match early {
            Some(early) => early,
            None => self.collect(seat, place)?,
        };
        point!("claim.collected");
        let generation = if found.session == *session && found.generation != 0 {
            found.generation
        } else if self.may_take(seat, &found, &copies)? {
            found.generation + 1
        } else {
            return Ok(Claimed::Taken(found));
        };
        if generation >= MAX_NUMBER {
            return Err(Error::Full { what: "sessions of a manager seat", limit: MAX_NUMBER.into(), advice: "format the pool anew" });
        }
        let index = place * u64::from(geometry.seats) + seat;
        let ended = copies[place as usize].ended;
        let claim = SeatClaim { tag: ballot, generation, machine: self.machine().0, session: *session, ended, ..SeatClaim::default() };
        self.lines.publish(index, claim)?;
        point!("claim.published");
        if !mutant!("claim.accept_without_check") && claimants(self.lines)?.iter().any(|other| other.ballot > ballot) {
            return Ok(Claimed::Superseded);
        }
        point!("claim.accepted");
        Ok(Claimed::Owned { generation })
    }

    /// States, as an operator of this machine, that `session` of `seat` is over: no process of it writes to the pool any more.
    ///
    /// A wrong statement gives the seat's lines two writers.
    ///
    /// # Errors
    /// As [`Claimer::claim`].
    pub fn state_ended(&self, seat: u64, session: &[u8; 16]) -> Result<()> {
        let Some(_alone) = self.platform.lock_place()? else {
            return Err(Error::Timeout { what: "another process of this machine's kernel that claims a seat".into(), timeout_ms: 0 });
        };
        let place = self.place()?;
        let index = place * u64::from(self.lines.layout().geometry().seats) + seat;
        let own: SeatClaim = self.lines.fetch(index)?;
        self.lines.publish(index, SeatClaim { ended: *session, ..own })
    }

    /// This machine's place, or its kernel's, taken now if there is none.
    fn place(&self) -> Result<u64> {
        let (machine, kernel) = (self.machine().0, self.kernel());
        let is_own = |claimant: &Claimant| match kernel {
            0 => claimant.machine == machine && claimant.witness == 0,
            kernel => claimant.witness == kernel,
        };
        match claimants(self.lines)?.iter().position(is_own) {
            Some(place) => Ok(place as u64),
            None => self.take_place(),
        }
    }

    fn claimant(&self, ballot: u32) -> Claimant {
        Claimant { ballot, machine: self.machine().0, witness: self.kernel(), ..Claimant::default() }
    }

    /// Moir and Anderson's splitter at one place after the other: at most one machine gets through each, and one that is alone does.
    fn take_place(&self) -> Result<u64> {
        let places = self.lines.layout().geometry().places();
        for place in 0..places {
            let (name, door) = (2 * place, 2 * place + 1);
            if !self.is_open(door)? {
                continue;
            }
            let mut attempt = [0; 16];
            attempt[..8].copy_from_slice(&self.platform.random().to_le_bytes());
            attempt[8..].copy_from_slice(&self.platform.random().to_le_bytes());
            let own = Splitter { attempt, ..Splitter::default() };
            self.lines.publish(name, own)?;
            point!("claim.named");
            if !mutant!("claim.no_door_check") && !self.is_open(door)? {
                continue;
            }
            self.lines.publish(door, Splitter { closed: 1, ..Splitter::default() })?;
            point!("claim.closed");
            if !mutant!("claim.no_name_check") && self.raw(name)? != self.lines.seal(name, own) {
                continue;
            }
            self.lines.publish(place, self.claimant(0))?;
            point!("claim.placed");
            return Ok(place);
        }
        let advice = "too many machines came and went without a manager; format the pool anew, and give machines ids that stay";
        Err(Error::Full { what: "places of machines that claimed a manager seat", limit: places, advice })
    }

    /// Whether a door is as the format left it. One that does not verify was touched.
    fn is_open(&self, door: u64) -> Result<bool> {
        Ok(self.raw(door)? == empty_line(self.lines, Splitter::REGION, door))
    }

    fn raw(&self, index: u64) -> Result<Line> {
        self.lines.fetch_raw(self.lines.layout().line_offset(Splitter::REGION, index)?)
    }

    /// Publishes a ballot above every one so far.
    fn announce(&self, place: u64) -> Result<u32> {
        let ballots = claimants(self.lines)?;
        let seen = ballots.iter().map(|other| other.ballot).max().unwrap_or(0);
        let ballot = match next_epoch(place, ballots.len() as u64, seen) {
            _ if mutant!("claim.ballots_not_unique") => u64::from(seen) + 1,
            unique => unique,
        };
        if ballot >= MAX_NUMBER.into() {
            return Err(Error::Full { what: "ballots over manager seats", limit: MAX_NUMBER.into(), advice: "format the pool anew" });
        }
        let ballot = ballot as u32;
        point!("claim.before_ballot");
        self.lines.publish(place, self.claimant(ballot))?;
        point!("claim.announced");
        Ok(ballot)
    }

    /// The copy that counts, and all of them. A copy at this machine's own place that does not verify was being written by a session of
    /// this machine that is over, and counts as never written.
    fn collect(&self, seat: u64, place: u64) -> Result<(SeatClaim, Vec<SeatClaim>)> {
        let mut copies = Vec::new();
        for (at, copy) in copies_of(self.lines, seat)?.into_iter().enumerate() {
            copies.push(match copy {
                Err(Error::BadLine { .. }) if at as u64 == place => SeatClaim::default(),
                other => other?,
            });
        }
        let own = place as usize;
        let found = if mutant!("claim.no_collect") { newest(&copies[own..=own]) } else { newest(&copies) };
        Ok((found, copies))
    }

    fn may_take(&self, seat: u64, found: &SeatClaim, copies: &[SeatClaim]) -> Result<bool> {
        // Another session of this very machine is over, or this one would not run (J1).
        if found.generation == 0 || found.machine == self.machine().0 || mutant!("claim.suspicion_is_proof") {
            return Ok(true);
        }
        if is_over(self.lines, seat, found, copies)? {
            return Ok(true);
        }
        if !self.has_ended_here(found)? {
            return Ok(false);
        }
        point!("claim.ended_here");
        // What that process left in this machine's caches must not come out over this session's lines.
        self.lines.flush_regions()?;
        Ok(true)
    }

    /// Whether the session's only process has ended, by the word of the kernel that this process runs under. In pools whose slots have
    /// seats a session has a claimed one for as long as its first process joins, which is marked before it claims.
    ///
    /// # Errors
    /// Those of the memory and of the system.
    pub(crate) fn has_ended_here(&self, claim: &SeatClaim) -> Result<bool> {
        let kernel = self.kernel();
        let Some(tag) = claim.tag.checked_sub(1).filter(|_| kernel != 0 && claim.generation != 0) else { return Ok(false) };
        // A session writes its own claim alone, in the place that the ballot names.
        let place = u64::from(tag) % self.lines.layout().geometry().places();
        let is_ours = if_whole(self.lines.fetch::<Claimant>(place))?.is_some_and(|claimant| claimant.witness == kernel);
        Ok((is_ours || mutant!("witness.claim_kernel_not_compared")) && !self.platform.is_marked(MachineId(claim.machine))?)
    }
}
