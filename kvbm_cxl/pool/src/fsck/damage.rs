// SPDX-License-Identifier: Apache-2.0
//! Lines that do not verify: what each one's loss means, and what may be written in its place.
//!
//! The rule for every remedy: the repair may make the pool more careful than the lost line would have, never less. It may fence, wait and
//! hold back more; it may not hide a higher tag, forget a fence, or take a lock or chunk away from its owner. Where no such content follows
//! from what survived, the remedy is a [`Remedy::Loss`], which assumes that no stopped host ever resumes.

use super::places;
use super::report::{Remedy, Report, Severity};
use super::view::{Table, View, add_finding};
use crate::alloc::LOST_NUMBERS;
use crate::limits::{INTENTS, MAX_NUMBER};
use crate::lock::{LOCK_OBJECTS, LOCK_TABLE, seat::next_epoch};
use crate::media::*;
use bytemuck::Zeroable;

/// Epochs that a lost seat line is set ahead of everything seen, so that claims which left no other trace stay below it.
pub(super) const EPOCH_MARGIN: u32 = 1 << 16;
/// Grant numbers that a lost grant is set ahead of everything seen.
const GRANT_MARGIN: u32 = 1 << 16;

/// A severity, what the loss means, and the remedy.
pub(super) type LossVerdict = (Severity, &'static str, Remedy);

/// Reports every line of the loaded tables that does not verify.
pub(super) fn check(view: &View<'_>, report: &mut Report) {
    each(report, &view.seats, |index| seat(view, index));
    each(report, &view.grants, |index| grant(view, index));
    each(report, &view.bindings, |index| binding(view, index));
    each(report, &view.fences, |index| fence(view, index));
    each(report, &view.deaths, |index| death(view, index));
    each(report, &view.boxes, |index| join_box(view, index));
    each(report, &view.identities, |index| identity(view, index));
    each(report, &view.summaries, |index| summary(view, index));
    each(report, &view.requests, |index| request(view, index));
    each(report, &view.intents, |index| intent(view, index));
    each(report, &view.records, |index| record(view, index));
    each(report, &view.claims, |index| claim(view, index));
    each(report, &view.free_boxes, |index| free_box(view, index));
    each(report, &view.free_acks, |index| free_ack(view, index));
    each(report, &view.stats, |index| stats(view, index));
    each(report, &view.asks, |index| ask(view, index));
    each(report, &view.splitters, |index| places::splitter(view, index));
    each(report, &view.claimants, |index| places::claimant(view, index));
    each(report, &view.seat_claims, |index| places::seat_claim(view, index));
}

fn each<T: MediaLine>(report: &mut Report, table: &Table<T>, verdict: impl Fn(u64) -> LossVerdict) {
    for (index, reason) in &table.bad {
        let (severity, meaning, remedy) = verdict(*index);
        add_finding(report, severity, "line.damaged", (T::REGION, *index), format!("{reason}: {meaning}"), remedy);
    }
}

pub(super) fn safe<T: MediaLine>(view: &View<'_>, index: u64, what: &'static str, value: T) -> Remedy {
    Remedy::Safe { what, writes: vec![view.write(index, value)] }
}

pub(super) fn loss<T: MediaLine>(view: &View<'_>, index: u64, what: &'static str, value: T) -> Remedy {
    Remedy::Loss { what, writes: vec![view.write(index, value)] }
}

pub(super) fn empty<T: MediaLine>(view: &View<'_>, index: u64) -> Remedy {
    safe(view, index, "writes the empty line that stood there: it was never bound", T::zeroed())
}

fn seat(view: &View<'_>, index: u64) -> LossVerdict {
    let meaning = "the epoch this seat claimed is unknown and may be the highest: no manager can take over, no grant is accepted";
    let claim = &view.decided_seats[index as usize];
    let is_bound = claim.hidden || claim.best.generation != 0;
    if view.seat_machine(index).is_none() && !is_bound && !has_copies(view, index) {
        return (Severity::Error, meaning, empty::<Seat>(view, index));
    }
    let highest = highest_epoch(view).saturating_add(EPOCH_MARGIN);
    let epoch = next_epoch(index, view.geometry.all_seats(), highest);
    if epoch >= MAX_NUMBER.into() {
        return (Severity::Error, meaning, Remedy::None("the epochs are used up: format the pool again"));
    }
    let machine = view.seat_machine(index).map_or([0; 16], |machine| machine.0);
    let what = "claims an epoch far above every one that left a trace; a host that is only paused and not off could act on the lost one";
    // Of a slot's seat no vote tells the session: the next one that has the slot writes its own.
    let is_voted = view.geometry.slot_of(index).is_none();
    let (generation, session) = if is_voted { (claim.best.generation, claim.best.session) } else { (0, [0; 16]) };
    let line = Seat { epoch: epoch as u32, beat: u64::MAX, machine, generation, session, ..Seat::default() };
    (Severity::Error, meaning, loss(view, index, what, line))
}

fn has_copies(view: &View<'_>, seat: u64) -> bool {
    let own = |per_seat: u64| seat * per_seat..(seat + 1) * per_seat;
    own(view.geometry.grant_lines()).any(|line| view.grants.get(line).is_none_or(|copy| copy.tag != 0))
        || own(view.geometry.bindings()).any(|line| view.bindings.get(line).is_none_or(|copy| copy.tag != 0))
}

fn highest_epoch(view: &View<'_>) -> u32 {
    let seats = view.seats.iter().map(|(_, line)| line.epoch);
    let grants = view.grants.iter().map(|(_, line)| line.tag);
    let bindings = view.bindings.iter().map(|(_, line)| line.tag);
    seats.chain(grants).chain(bindings).max().unwrap_or(0)
}

/// The tag for a copy that only has to be outvoted, when that is certain.
fn outvoted_tag(view: &View<'_>, seat: u64, best_tag: u32) -> Option<u32> {
    view.is_outvoted(seat, best_tag).then(|| view.seats.get(seat).map_or(0, |line| line.epoch))
}

fn grant(view: &View<'_>, index: u64) -> LossVerdict {
    let (seat, line) = (index / view.geometry.grant_lines(), index % view.geometry.grant_lines());
    let best = view.decided_grants[line as usize].best;
    if let Some(tag) = outvoted_tag(view, seat, best.tag) {
        let value = if tag == 0 { GrantLine::default() } else { GrantLine { tag, ..best } };
        let what = "copies the grants that count, under this seat's older epoch: they outvote whatever stood there";
        return (Severity::Error, "one of the copies of these locks' grants is lost; a newer copy counts", safe(view, index, what, value));
    }
    let meaning = "the newest grants of these locks may have stood there: the locks are blocked";
    let Some(tag) = view.seats.get(seat).map(|line| line.epoch) else {
        return (Severity::Error, meaning, Remedy::None("the seat's own line has to be repaired first"));
    };
    let mut value = GrantLine { tag, ..best };
    for (place, grant) in value.grants.iter_mut().enumerate() {
        let lock = line as u32 * LOCKS_PER_GRANT as u32 + place as u32;
        if lock < view.geometry.locks {
            // Held by no host that could still be running: incarnation 0 is over as soon as its slot was ever joined, and is repaired
            // after.
            let number = highest_grant(view, lock).saturating_add(GRANT_MARGIN).min(MAX_NUMBER - 1);
            *grant = Grant { number, flags: Grant::REPAIR, ..Grant::default() };
        }
    }
    let what =
        "ends the grants of these locks, so that the next holders repair; a holder that is only paused loses its lock without knowing";
    (Severity::Error, meaning, loss(view, index, what, value))
}

fn highest_grant(view: &View<'_>, lock: u32) -> u32 {
    let copies = (0..view.geometry.all_seats()).filter_map(|seat| {
        let line = view.grants.get(seat * view.geometry.grant_lines() + u64::from(lock) / LOCKS_PER_GRANT as u64)?;
        Some(line.grants[lock as usize % LOCKS_PER_GRANT].number)
    });
    let intents = view.intents.iter().filter(|(_, intent)| intent.lock == lock).map(|(_, intent)| intent.grant);
    let records = view.records.iter().filter(|(index, _)| record_lock(view, index % view.geometry.records()) == lock);
    copies.chain(intents).chain(records.map(|(_, record)| record.grant)).max().unwrap_or(0)
}

pub(super) fn record_lock(view: &View<'_>, number: u64) -> u32 {
    if number < view.geometry.lock_table_records() { LOCK_TABLE } else { LOCK_OBJECTS }
}

fn binding(view: &View<'_>, index: u64) -> LossVerdict {
    let (seat, line) = (index / view.geometry.bindings(), index % view.geometry.bindings());
    let best = view.decided_bindings[line as usize].best;
    if let Some(tag) = outvoted_tag(view, seat, best.tag) {
        let value = if tag == 0 { Binding::default() } else { Binding { tag, ..best } };
        let what = "copies the binding that counts, under this seat's older epoch: it outvotes whatever stood there";
        return (Severity::Error, "one of the copies of this binding is lost; a newer copy counts", safe(view, index, what, value));
    }
    let meaning = "the newest binding of this slot may have stood there: no machine can be bound to it";
    let Some(tag) = view.seats.get(seat).map(|line| line.epoch) else {
        return (Severity::Error, meaning, Remedy::None("the seat's own line has to be repaired first"));
    };
    let mut value = Binding { tag, ..best };
    // The slot's own line is a witness of a binding that was accepted.
    if let Some(identity) = view.identities.get(line)
        && identity.incarnation > best.incarnation
    {
        value = Binding { tag, incarnation: identity.incarnation, machine: identity.machine, nonce: identity.nonce, ..Binding::default() };
    }
    let what = "writes the newest binding that left a trace; a machine bound since then, and only paused, would share its slot";
    (Severity::Error, meaning, loss(view, index, what, value))
}

fn fence(view: &View<'_>, index: u64) -> LossVerdict {
    let first = index % view.geometry.fence_lines() * SLOTS_PER_FENCE as u64;
    let mut value = FenceLine::default();
    for (place, fenced) in value.fenced.iter_mut().enumerate() {
        let slot = first + place as u64;
        if slot < view.geometry.slots.into() {
            *fenced = view.fenced[slot as usize].max(view.highest_bound[slot as usize]).max(view.dead[slot as usize]);
        }
    }
    let what = "fences every incarnation bound so far: a fence too many costs that host a re-join, a lost one could cost data";
    (Severity::Error, "fences may be forgotten: no host can check whether it is fenced", safe(view, index, what, value))
}

fn death(view: &View<'_>, index: u64) -> LossVerdict {
    let first = index % view.geometry.fence_lines() * SLOTS_PER_FENCE as u64;
    let mut value = DeathLine::default();
    for (place, dead) in value.dead.iter_mut().enumerate() {
        // Only what other rows tell: a proof may be given again, but not made up.
        *dead = view.dead.get((first + place as u64) as usize).copied().unwrap_or(0);
    }
    let what = "writes the proofs that other rows hold; a death that only this row told of has to be declared again";
    (Severity::Error, "proofs of death may be forgotten: no host can adopt what dead hosts left", safe(view, index, what, value))
}

fn join_box(view: &View<'_>, index: u64) -> LossVerdict {
    let what = "empties the box";
    (Severity::Warning, "a request for a slot is lost; the machine asks again", safe(view, index, what, JoinBox::default()))
}

fn identity(view: &View<'_>, index: u64) -> LossVerdict {
    if view.is_never_bound(index) {
        return (Severity::Error, "no host has this slot", empty::<Identity>(view, index));
    }
    let meaning = "it is unknown whether this host left or stopped: what it held stays held until its machine joins again";
    let register = &view.decided_bindings[index as usize];
    if register.hidden {
        return (Severity::Error, meaning, Remedy::None("the slot's binding has to be repaired first"));
    }
    let Binding { incarnation, machine, nonce, .. } = register.best;
    let what = "writes who is bound to the slot, as running: proves nothing about it";
    let value = Identity { incarnation, state: Identity::LIVE, machine, nonce, ..Identity::default() };
    (Severity::Error, meaning, safe(view, index, what, value))
}

/// The incarnation for a line that a repair writes for a slot: the one that joined last.
pub(super) fn joined_incarnation(view: &View<'_>, slot: u64) -> u32 {
    view.identities.get(slot).map_or_else(|| view.bound(slot), |identity| identity.incarnation)
}

fn summary(view: &View<'_>, index: u64) -> LossVerdict {
    let slot = index / view.geometry.summary_lines();
    if view.is_never_bound(slot) {
        return (Severity::Error, "no host has this slot", empty::<Summary>(view, index));
    }
    let what = "writes a heartbeat that stands still; the host writes its own again when it beats";
    let value = Summary { incarnation: joined_incarnation(view, slot), ..Summary::default() };
    (Severity::Error, "this host's heartbeat cannot be seen: it will be fenced", safe(view, index, what, value))
}

fn request(view: &View<'_>, index: u64) -> LossVerdict {
    let (slot, line) = (index / view.geometry.request_lines(), index % view.geometry.request_lines());
    if view.is_never_bound(slot) {
        return (Severity::Error, "no host has this slot", empty::<RequestLine>(view, index));
    }
    let first = line as u32 * LOCKS_PER_REQUEST as u32;
    let incarnation = joined_incarnation(view, slot);
    let meaning = "what this host wants and has given back is unknown: every grant to it counts as held";
    let mut value = RequestLine { incarnation, ..RequestLine::default() };
    for (place, request) in value.requests.iter_mut().enumerate() {
        let lock = first + place as u32;
        if lock >= view.geometry.locks {
            continue;
        }
        if view.decided_grants[lock as usize / LOCKS_PER_GRANT].hidden {
            return (Severity::Error, meaning, Remedy::None("the grants of these locks have to be repaired first"));
        }
        let grant = view.grant(lock);
        if grant.number != 0 && u64::from(grant.slot) == slot && grant.incarnation == incarnation {
            *request = Request { number: grant.request.into(), flags: Request::WANT | Request::DIRTY };
        }
    }
    let what = "writes that this host holds every grant to it, in need of repair: it ends with its next join or the proof of its death";
    (Severity::Error, meaning, safe(view, index, what, value))
}

fn intent(view: &View<'_>, index: u64) -> LossVerdict {
    let slot = index / INTENTS as u64;
    if view.is_never_bound(slot) {
        return (Severity::Error, "no host has this slot", empty::<Intent>(view, index));
    }
    let what = "empties it; what the host was writing when it stopped is then no longer quarantined. Its next join empties it without loss";
    let value = Intent { incarnation: joined_incarnation(view, slot), ..Intent::default() };
    let meaning = "what this host was about to write is unknown: the next holder repairs everything it could have been";
    (Severity::Error, meaning, loss(view, index, what, value))
}

fn record(view: &View<'_>, index: u64) -> LossVerdict {
    let (slot, number) = (index / view.geometry.records(), index % view.geometry.records());
    if view.is_never_bound(slot) {
        return (Severity::Error, "no host has this slot", empty::<Record>(view, index));
    }
    let lock = record_lock(view, number);
    let register = &view.decided_grants[lock as usize / LOCKS_PER_GRANT];
    let grant = view.grant(lock);
    let best = (0..u64::from(view.geometry.slots))
        .filter_map(|slot| view.records.get(slot * view.geometry.records() + number).map(|copy| (copy.grant, slot)))
        .max();
    // The copy that counts is of the newest grant, which another slot holds: whatever stood here is older.
    let is_outvoted =
        best.is_some_and(|(number, _)| !register.hidden && number == grant.number && number != 0) && u64::from(grant.slot) != slot;
    if is_outvoted {
        let what = "empties this copy: another one, of the newest grant, counts";
        return (
            Severity::Error,
            "one of the copies of this record is lost; a newer copy counts",
            safe(view, index, what, Record::zeroed()),
        );
    }
    let what = "empties this copy; if it was the newest one, the record falls back to its value before";
    (Severity::Error, "the newest value of this record may have stood there: it cannot be read", loss(view, index, what, Record::zeroed()))
}

fn claim(view: &View<'_>, index: u64) -> LossVerdict {
    let slot = index / view.lines.layout().claim_lines();
    if view.is_never_bound(slot) {
        return (Severity::Error, "no host has this slot", empty::<Claim>(view, index));
    }
    let first = index % view.lines.layout().claim_lines() * CHUNKS_PER_CLAIM as u64;
    let mut value = Claim { incarnation: joined_incarnation(view, slot), ..Claim::zeroed() };
    for place in 0..(CHUNKS_PER_CLAIM as u64).min(view.lines.layout().chunks().saturating_sub(first)) {
        if !is_claimed_by_another(view, slot, first + place) {
            value.bits[place as usize / 8] |= 1 << (place % 8);
        }
    }
    let what = "claims for this slot every chunk that no other slot claims; its next join gives back the empty ones";
    (Severity::Error, "which of these chunks this host owns is unknown: they cannot be claimed", safe(view, index, what, value))
}

fn is_claimed_by_another(view: &View<'_>, slot: u64, chunk: u64) -> bool {
    let per_slot = view.lines.layout().claim_lines();
    let place = (chunk % CHUNKS_PER_CLAIM as u64) as usize;
    (0..u64::from(view.geometry.slots)).filter(|other| *other != slot).any(|other| {
        let line = view.claims.get(other * per_slot + chunk / CHUNKS_PER_CLAIM as u64);
        line.is_some_and(|line| line.bits[place / 8] >> (place % 8) & 1 == 1)
    })
}

fn free_box(view: &View<'_>, index: u64) -> LossVerdict {
    let slots = u64::from(view.geometry.slots);
    let (slot, receiver) = (index / slots, index % slots);
    if view.is_never_bound(slot) {
        return (Severity::Error, "no host has this slot", empty::<FreeBox>(view, index));
    }
    let what = "empties the box; blocks that were on their way to be freed stay allocated until their host joins again";
    // A number that no message had, as its host would choose it.
    let taken = view.free_acks.get(receiver * slots + slot).map_or(0, |ack| ack.sequence);
    let sequence = taken.saturating_add(LOST_NUMBERS).min(MAX_NUMBER);
    let value = FreeBox { incarnation: joined_incarnation(view, slot), sequence, ..FreeBox::default() };
    (Severity::Error, "blocks that this host gave back to their owner are lost on the way", loss(view, index, what, value))
}

fn free_ack(view: &View<'_>, index: u64) -> LossVerdict {
    let slots = u64::from(view.geometry.slots);
    let (slot, sender) = (index / slots, index % slots);
    if view.is_never_bound(slot) {
        return (Severity::Error, "no host has this slot", empty::<FreeAck>(view, index));
    }
    // Not the other way round: blocks of it that are free by now may be another owner's, and would be freed once more.
    let what = "says that the message was taken; blocks of it that were not freed yet stay allocated";
    let message = view.free_boxes.get(sender * slots + slot).copied().unwrap_or_default();
    let value = FreeAck {
        incarnation: joined_incarnation(view, slot),
        sender: message.incarnation,
        sequence: message.sequence,
        ..FreeAck::default()
    };
    (Severity::Error, "what this host took out of a free box is unknown: its sender waits", loss(view, index, what, value))
}

fn stats(view: &View<'_>, index: u64) -> LossVerdict {
    let meaning = "what this host counted is not shown; nothing else depends on it";
    (Severity::Warning, meaning, safe(view, index, "empties it; a host that runs writes it again", StatsLine::zeroed()))
}

fn ask(view: &View<'_>, index: u64) -> LossVerdict {
    let meaning = "what this host asked the owners of cells to do is lost; the caller that waits for it asks again";
    (Severity::Warning, meaning, safe(view, index, "empties it", Ask::default()))
}
