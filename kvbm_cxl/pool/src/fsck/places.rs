// SPDX-License-Identifier: Apache-2.0
//! The vote over manager seats: splitters, ballots, and each place's copy of which session has a seat (LOCKS.md 12.15).

use super::damage::{EPOCH_MARGIN, LossVerdict, empty, loss, safe};
use super::report::{Finding, FindingPlace, Remedy, Report, Severity};
use super::seats::{FOREIGN_WRITER, USED_UP};
use super::view::{View, add_finding};
use crate::limits::MAX_NUMBER;
use crate::lock::seat::next_epoch;
use crate::media::*;
use bytemuck::Zeroable;

pub(super) fn check(view: &View<'_>, report: &mut Report) {
    let places = view.geometry.places() as u32;
    for (index, line) in view.claimants.iter() {
        let mut wrong =
            |meaning| add_finding(report, Severity::Error, "claimant.ballot", (Region::Claimant, index), meaning, FOREIGN_WRITER);
        if line.ballot != 0 && (line.ballot - 1) % places != index as u32 {
            wrong(format!("ballot {} belongs to place {}, not to this one", line.ballot, (line.ballot - 1) % places));
        }
        if line.ballot >= MAX_NUMBER {
            wrong(format!("ballot {} is beyond the limit of {MAX_NUMBER}", line.ballot));
        }
    }
    for (index, line) in view.seat_claims.iter() {
        let place = index / u64::from(view.geometry.seats);
        let mut wrong =
            |rule, meaning: String| add_finding(report, Severity::Error, rule, (Region::SeatClaim, index), meaning, FOREIGN_WRITER);
        let is_empty = line.generation == 0 || line.machine == [0; 16] || line.session == [0; 16];
        if line.tag == 0 && !is_empty {
            wrong("seat_claim.untagged", "names a machine, but was written under no ballot".into());
        } else if line.tag != 0 && is_empty {
            wrong("seat_claim.empty", "written under a ballot, but names no machine, session or generation".into());
        } else if line.tag != 0 && (line.tag - 1) % places != place as u32 {
            wrong("seat_claim.tag", format!("tag {} belongs to place {}, not to this one", line.tag, (line.tag - 1) % places));
        } else if let Some(claimant) = view.claimants.get(place)
            && line.tag > claimant.ballot
        {
            wrong("seat_claim.tag", format!("tag {} is above ballot {}, the highest of its place", line.tag, claimant.ballot));
        }
    }
    seat_lines(view, report);
    used_up(view, report);
}

/// Places and ballots are numbers that only a format gives back: without one a machine that is new here never gets a seat.
fn used_up(view: &View<'_>, report: &mut Report) {
    let places = view.geometry.places();
    let highest = view.claimants.iter().max_by_key(|(_, line)| line.ballot);
    if let Some((index, line)) = highest
        && u64::from(line.ballot) + places >= MAX_NUMBER.into()
    {
        let meaning = "no machine can claim a manager seat any more";
        add_finding(report, Severity::Error, "claimant.used_up", (Region::Claimant, index), meaning, USED_UP);
    }
    let is_open = |place: u64| view.splitters.get(2 * place + 1).is_some_and(|door| door.closed == 0);
    if (0..places).any(is_open) {
        return;
    }
    let meaning = format!(
        "each of the {places} places for machines that claim a manager seat is taken: a machine that has none joins only while another \
         machine manages the pool"
    );
    let place = FindingPlace::Lines { region: Region::Splitter, first: 0, count: 2 * places };
    report.add(Finding { severity: Severity::Error, rule: "splitter.full", place, meaning, remedy: free_places(view) });
}

/// One place keeps all that the vote decided, under a ballot above every other one; the others are as the format left them.
fn free_places(view: &View<'_>) -> Remedy {
    if !view.claimants.bad.is_empty() || !view.seat_claims.bad.is_empty() {
        return Remedy::None("the damaged lines of the vote have to be repaired first");
    }
    let (places, seats) = (view.geometry.places(), u64::from(view.geometry.seats));
    let Some((keeper, newest)) = view.claimants.iter().max_by_key(|(_, line)| line.ballot) else { return USED_UP };
    let ballot = next_epoch(keeper, places, newest.ballot.saturating_add(EPOCH_MARGIN));
    if ballot >= MAX_NUMBER.into() {
        return USED_UP;
    }
    let ballot = ballot as u32;
    // What counts is in place before anything is emptied: a repair that is cut off leaves a vote with the same outcome.
    let mut writes = vec![view.write(keeper, Claimant { ballot, ..*newest })];
    for (seat, register) in (0..seats).zip(&view.decided_seats) {
        let owner = register.best;
        if owner.generation != 0 {
            let is_over = view.seat_claims.iter().any(|(index, copy)| index % seats == seat && copy.ended == owner.session);
            let ended = if is_over { owner.session } else { [0; 16] };
            writes.push(view.write(keeper * seats + seat, SeatClaim { tag: ballot, ended, ..owner }));
        }
    }
    for place in (0..places).filter(|place| *place != keeper) {
        writes.extend((0..seats).map(|seat| view.write(place * seats + seat, SeatClaim::zeroed())));
        writes.push(view.write(place, Claimant::zeroed()));
        writes.extend([2 * place, 2 * place + 1].map(|line| view.write(line, Splitter::zeroed())));
    }
    let what = "keeps who has which seat and frees the places; a machine that is only paused in a claim would share its place with another";
    Remedy::Loss { what, writes }
}

/// A seat's own line never runs ahead of the vote.
fn seat_lines(view: &View<'_>, report: &mut Report) {
    for (seat, register) in view.decided_seats.iter().enumerate().take(view.geometry.seats as usize) {
        let Some(line) = view.seats.get(seat as u64).filter(|line| line.generation != 0 && !register.hidden) else { continue };
        let (voted, session) = (register.best.generation, register.best.session);
        if line.generation > voted || (line.generation == voted && line.session != session) {
            let meaning = format!(
                "written by session {} as owner {} of the seat, but the vote gave it to session {} as owner {voted}",
                crate::platform::MachineId(line.session),
                line.generation,
                crate::platform::MachineId(session)
            );
            add_finding(report, Severity::Error, "seat.session", (Region::Seat, seat as u64), meaning, FOREIGN_WRITER);
        }
    }
}

pub(super) fn splitter(view: &View<'_>, index: u64) -> LossVerdict {
    if index.is_multiple_of(2) {
        let meaning = "the name of the last machine that tried to take this place: a machine that is at it now takes the next one";
        return (Severity::Warning, meaning, safe(view, index, "empties it", Splitter::default()));
    }
    let meaning = "whether this place is taken: it counts as taken";
    (Severity::Warning, meaning, safe(view, index, "marks the place as taken", Splitter { closed: 1, ..Splitter::default() }))
}

pub(super) fn claimant(view: &View<'_>, index: u64) -> LossVerdict {
    let meaning = "the newest ballot may have stood there: no machine can claim a manager seat";
    let door = view.splitters.get(2 * index + 1);
    let mut copies = (0..u64::from(view.geometry.seats)).map(|seat| view.seat_claims.get(index * u64::from(view.geometry.seats) + seat));
    if door.is_some_and(|door| door.closed == 0) && copies.all(|copy| copy.is_some_and(|copy| copy.tag == 0)) {
        return (Severity::Error, meaning, empty::<Claimant>(view, index));
    }
    let ballots = view.claimants.iter().map(|(_, line)| line.ballot).chain(view.seat_claims.iter().map(|(_, line)| line.tag));
    let ballot = next_epoch(index, view.geometry.places(), ballots.max().unwrap_or(0).saturating_add(EPOCH_MARGIN));
    if ballot >= MAX_NUMBER.into() {
        return (Severity::Error, meaning, Remedy::None("the ballots are used up: format the pool again"));
    }
    let what = "writes a ballot far above every one that left a trace; its machine takes another place. A machine that is only paused in \
                a claim could act on the lost one";
    (Severity::Error, meaning, loss(view, index, what, Claimant { ballot: ballot as u32, ..Claimant::default() }))
}

pub(super) fn seat_claim(view: &View<'_>, index: u64) -> LossVerdict {
    let seats = u64::from(view.geometry.seats);
    let (place, seat) = (index / seats, index % seats);
    let best = view.decided_seats[seat as usize].best;
    let meaning = "the newest owner of this seat may have stood there: no machine can claim the seat";
    let Some(ballot) = view.claimants.get(place).map(|line| line.ballot) else {
        return (Severity::Error, meaning, Remedy::None("the place's own line has to be repaired first"));
    };
    if ballot == 0 || ballot < best.tag {
        let value = if ballot == 0 { SeatClaim::default() } else { SeatClaim { tag: ballot, ended: [0; 16], ..best } };
        let what = "copies the owner that counts, under this place's older ballot: it outvotes what stood there";
        return (Severity::Error, "one of the copies of this seat's owner is lost; a newer copy counts", safe(view, index, what, value));
    }
    // The seat's own line is a witness of an owner that was accepted.
    let witness = view.seats.get(seat).filter(|line| line.generation > best.generation);
    let value = match witness {
        Some(line) => SeatClaim { generation: line.generation, machine: line.machine, session: line.session, ..SeatClaim::default() },
        None => SeatClaim { ended: [0; 16], ..best },
    };
    let value = if value.generation == 0 { SeatClaim::default() } else { SeatClaim { tag: ballot, ..value } };
    let what = "writes the newest owner that left a trace; a machine that claimed since then, and is only paused, would share its seat";
    (Severity::Error, meaning, loss(view, index, what, value))
}
