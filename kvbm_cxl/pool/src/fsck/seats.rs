// SPDX-License-Identifier: Apache-2.0
//! Manager seats: epochs, the tags of their copies, fence and death rows.

use super::report::{Remedy, Report, Severity};
use super::view::{View, add_finding};
use crate::limits::MAX_NUMBER;
use crate::media::*;
use crate::platform::MachineId;
use bytemuck::Zeroable;

/// What every rule here ends with: two writers, or a build that does not follow the protocol.
pub(super) const FOREIGN_WRITER: Remedy =
    Remedy::None("none: find out who wrote it (a cloned machine id? a program of another origin?), then format again");

/// Numbers of the format only ever rise.
pub(super) const USED_UP: Remedy = Remedy::None("none: the numbers are used up, format the pool again");

pub(super) fn check(view: &View<'_>, report: &mut Report) {
    epochs(view, report);
    tags(view, report, &view.grants.cells, view.geometry.grant_lines(), |line| line.tag);
    tags(view, report, &view.bindings.cells, view.geometry.bindings(), |line| line.tag);
    rows(view, report);
}

fn epochs(view: &View<'_>, report: &mut Report) {
    let seats = view.geometry.all_seats() as u32;
    if let Some((index, line)) = view.seats.iter().max_by_key(|(_, line)| line.epoch)
        && line.epoch.saturating_add(seats) >= MAX_NUMBER
    {
        let meaning = format!("epoch {} is among the last: no manager can take over any more", line.epoch);
        add_finding(report, Severity::Error, "seat.used_up", (Region::Seat, index), meaning, USED_UP);
    }
    for (index, line) in view.seats.iter() {
        let at = (Region::Seat, index);
        let mut wrong = |rule, meaning: String| add_finding(report, Severity::Error, rule, at, meaning, FOREIGN_WRITER);
        if line.epoch == 0 {
            // One that was claimed and never served has an owner and no epoch.
            let owner =
                Seat { machine: line.machine, session: line.session, generation: line.generation, state: line.state, ..Seat::default() };
            let untouched = if line.generation == 0 { Seat::default() } else { owner };
            if *line != (Seat { crc: line.crc, ..untouched }) {
                wrong("seat.unclaimed", "the seat never claimed an epoch, yet its line is not empty".into());
            }
            continue;
        }
        if (line.epoch - 1) % seats != index as u32 {
            wrong("seat.epoch", format!("epoch {} belongs to seat {}, not to this one", line.epoch, (line.epoch - 1) % seats));
        }
        if line.epoch >= MAX_NUMBER {
            wrong("seat.limit", format!("epoch {} is beyond the limit of {MAX_NUMBER}", line.epoch));
        }
        if line.machine == [0; 16] && line.beat == u64::MAX {
            // A repair wrote it when nothing told any more whose the seat is.
            continue;
        }
        // Of a seat that was voted on, the session tells (`places`): the vote may be ahead of the seat's line.
        match view.seat_machine(index) {
            Some(machine) if machine.0 != line.machine && line.generation == 0 => {
                wrong("seat.machine", format!("written by machine {}, but the seat belongs to {machine}", MachineId(line.machine)));
            }
            None if !view.decided_seats[index as usize].hidden => {
                wrong("seat.machine", format!("written by machine {}, but the seat was given to no machine", MachineId(line.machine)));
            }
            _ => {}
        }
    }
}

/// A seat writes its copies under epochs of its own, the one it claimed last at most.
fn tags<T: MediaLine + PartialEq>(view: &View<'_>, report: &mut Report, cells: &[Option<T>], per_seat: u64, tag: impl Fn(&T) -> u32) {
    let empty: T = T::zeroed();
    for (index, line) in cells.iter().enumerate() {
        let Some(line) = line else { continue };
        let (seat, at) = (index as u64 / per_seat, (T::REGION, index as u64));
        let mut wrong = |rule, meaning: String| add_finding(report, Severity::Error, rule, at, meaning, FOREIGN_WRITER);
        let tag = tag(line);
        if tag == 0 {
            if bytemuck::bytes_of(line)[4..] != bytemuck::bytes_of(&empty)[4..] {
                wrong("copy.unadopted", "the copy was never adopted by its seat, yet it is not empty".into());
            }
        } else if u64::from(tag - 1) % view.geometry.all_seats() != seat {
            wrong("copy.tag", format!("tag {tag} belongs to seat {}, not to this one", u64::from(tag - 1) % view.geometry.all_seats()));
        } else if let Some(claimed) = view.seats.get(seat)
            && tag > claimed.epoch
        {
            wrong("copy.tag", format!("tag {tag} is above epoch {}, the highest that its seat claimed", claimed.epoch));
        }
    }
}

fn rows(view: &View<'_>, report: &mut Report) {
    let slots = u64::from(view.geometry.slots);
    for (index, row) in view.fences.iter() {
        let first = index % view.geometry.fence_lines() * SLOTS_PER_FENCE as u64;
        let at = (Region::Fence, index);
        for (place, &fenced) in row.fenced.iter().enumerate() {
            let slot = first + place as u64;
            if slot >= slots {
                if fenced != 0 {
                    add_finding(
                        report,
                        Severity::Error,
                        "fence.slot",
                        at,
                        format!("fences slot {slot}, which does not exist"),
                        FOREIGN_WRITER,
                    );
                }
            } else if fenced > view.highest_bound[slot as usize] && fenced > view.dead[slot as usize] && !is_binding_hidden(view, slot) {
                let meaning = format!("slot {slot} is fenced up to incarnation {fenced}, which was never bound: it joins above it");
                add_finding(report, Severity::Error, "fence.ahead", at, meaning, FOREIGN_WRITER);
            }
        }
    }
    for (index, row) in view.deaths.iter() {
        let first = index % view.geometry.fence_lines() * SLOTS_PER_FENCE as u64;
        let at = (Region::Death, index);
        for (place, &dead) in row.dead.iter().enumerate() {
            let slot = first + place as u64;
            let fenced = view.fences.get(index).map(|row| row.fenced[place]);
            if slot >= slots {
                if dead != 0 {
                    add_finding(
                        report,
                        Severity::Error,
                        "death.slot",
                        at,
                        format!("tells of slot {slot}, which does not exist"),
                        FOREIGN_WRITER,
                    );
                }
            } else if let Some(fenced) = fenced
                && dead > fenced
            {
                let meaning = format!("slot {slot} is declared dead up to incarnation {dead}, but this seat fenced it up to {fenced} only");
                let mut fence = view.fences.get(index).copied().unwrap_or_else(FenceLine::zeroed);
                fence.fenced[place] = dead;
                let writes = vec![view.write(index, fence)];
                add_finding(
                    report,
                    Severity::Error,
                    "death.unfenced",
                    at,
                    meaning,
                    Remedy::Safe { what: "fences the incarnations that are declared dead", writes },
                );
            } else if dead > view.highest_bound[slot as usize] && !is_binding_hidden(view, slot) {
                let meaning = format!("slot {slot} was declared dead up to incarnation {dead}, which was never bound: it joins above it");
                let remedy = Remedy::None("none needed: an operator declared more than there was");
                add_finding(report, Severity::Warning, "death.ahead", at, meaning, remedy);
            }
        }
    }
}

fn is_binding_hidden(view: &View<'_>, slot: u64) -> bool {
    let seats = 0..view.geometry.all_seats();
    seats.into_iter().any(|seat| view.bindings.get(seat * view.geometry.bindings() + slot).is_none())
}
