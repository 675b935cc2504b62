// SPDX-License-Identifier: Apache-2.0
//! Slots: bindings, and the lines that a slot's owner wrote under them.

use super::report::{Finding, FindingPlace, Remedy, Report, Severity};
use super::seats::USED_UP;
use super::view::{View, add_finding};
use crate::error::Result;
use crate::host::is_name_damaged;
use crate::limits::{INTENTS, MAX_NUMBER};
use crate::lock::{LOCK_CHUNKS, LOCK_OBJECTS, LOCK_TABLE};
use crate::media::*;
use crate::platform::MachineId;

pub(super) const NOT_THE_OWNER: Remedy = Remedy::None("none: a machine that does not own the slot wrote it (a cloned machine id?)");
const NEXT_JOIN: Remedy = Remedy::None("the next join of its machine writes it again");

pub(super) fn check(view: &View<'_>, report: &mut Report) -> Result<()> {
    bindings(view, report);
    identities(view, report);
    check_owned(view, report, &view.summaries.cells, view.geometry.summary_lines(), |line| line.incarnation);
    check_owned(view, report, &view.requests.cells, view.geometry.request_lines(), |line| line.incarnation);
    check_owned(view, report, &view.intents.cells, INTENTS as u64, |line| line.incarnation);
    check_owned(view, report, &view.records.cells, view.geometry.records(), |line| line.incarnation);
    check_owned(view, report, &view.claims.cells, view.lines.layout().claim_lines(), |line| line.incarnation);
    check_owned(view, report, &view.free_boxes.cells, view.geometry.slots.into(), |line| line.incarnation);
    check_owned(view, report, &view.free_acks.cells, view.geometry.slots.into(), |line| line.incarnation);
    check_owned(view, report, &view.stats.cells, view.geometry.stats_lines.into(), |line| line.incarnation);
    check_owned(view, report, &view.cell_claims.cells, view.geometry.cell_claim_lines(), |line| line.incarnation);
    check_owned(view, report, &view.asks.cells, 1, |line| line.incarnation);
    requests(view, report);
    intents(view, report);
    names(view, report)
}

/// Names lie in no region: they are in the header of the first device.
fn names(view: &View<'_>, report: &mut Report) -> Result<()> {
    for slot in 0..view.geometry.slots {
        if is_name_damaged(view.lines, slot)? {
            let meaning = format!("the name of the machine of slot {slot} does not verify: commands show its id alone");
            let place = FindingPlace::Superblock(0);
            report.add(Finding { severity: Severity::Note, rule: "name.damaged", place, meaning, remedy: NEXT_JOIN });
        }
    }
    Ok(())
}

fn bindings(view: &View<'_>, report: &mut Report) {
    for (line, register) in view.decided_bindings.iter().enumerate() {
        let binding = register.best;
        let at = (Region::Binding, register.seat * view.geometry.bindings() + line as u64);
        let highest = view.highest_bound[line].max(view.fenced[line]).max(view.dead[line]);
        if highest.saturating_add(1) >= MAX_NUMBER {
            let meaning = format!("incarnation {highest} is the last: the slot takes no host any more");
            add_finding(report, Severity::Error, "binding.used_up", at, meaning, USED_UP);
        }
        let mut wrong = |rule, meaning: String| add_finding(report, Severity::Error, rule, at, meaning, NOT_THE_OWNER);
        if binding.incarnation == 0 {
            if binding.machine != [0; 16] || binding.nonce != [0; 16] {
                wrong("binding.empty", "names a machine but no incarnation".into());
            }
            continue;
        }
        if binding.incarnation >= MAX_NUMBER {
            wrong("binding.limit", format!("incarnation {} is beyond the limit of {MAX_NUMBER}", binding.incarnation));
        }
        if binding.machine == [0; 16] || binding.nonce == [0; 16] {
            wrong("binding.unnamed", "bound to no machine or without a nonce".into());
        }
    }
}

fn identities(view: &View<'_>, report: &mut Report) {
    for (slot, identity) in view.identities.iter() {
        let at = (Region::Identity, slot);
        let register = &view.decided_bindings[slot as usize];
        let mut wrong = |rule, meaning: String| add_finding(report, Severity::Error, rule, at, meaning, NOT_THE_OWNER);
        if identity.incarnation == 0 {
            if *identity != (Identity { crc: identity.crc, ..Identity::default() }) {
                wrong("identity.empty", "the slot was never joined, yet its line is not empty".into());
            }
            continue;
        }
        if identity.state == 0 {
            wrong("identity.state", "an incarnation without a state".into());
        }
        if identity.acknowledged > identity.incarnation || identity.drained > identity.incarnation {
            wrong("identity.ahead", "acknowledges an incarnation after its own".into());
        }
        if register.hidden {
            continue;
        }
        if identity.incarnation > register.best.incarnation {
            let bound = register.best.incarnation;
            wrong("identity.unbound", format!("incarnation {} of the slot joined, but only {bound} is bound", identity.incarnation));
        } else if identity.incarnation == register.best.incarnation
            && (identity.machine, identity.nonce) != (register.best.machine, register.best.nonce)
        {
            let bound = MachineId(register.best.machine);
            wrong("identity.foreign", format!("written by machine {}, bound to {bound}", MachineId(identity.machine)));
        } else if identity.incarnation < register.best.incarnation {
            let meaning = format!("incarnation {} is bound but did not finish joining", register.best.incarnation);
            add_finding(report, Severity::Note, "identity.joining", at, meaning, NEXT_JOIN);
        }
    }
}

fn check_owned<T: MediaLine>(view: &View<'_>, report: &mut Report, cells: &[Option<T>], per_slot: u64, incarnation: impl Fn(&T) -> u32) {
    for (index, line) in cells.iter().enumerate() {
        let Some(incarnation) = line.as_ref().map(&incarnation) else { continue };
        let slot = index as u64 / per_slot;
        if incarnation > view.bound(slot) && !view.decided_bindings[slot as usize].hidden {
            let meaning = format!("written by incarnation {incarnation} of slot {slot}, of which only {} is bound", view.bound(slot));
            add_finding(report, Severity::Error, "line.unbound", (T::REGION, index as u64), meaning, NOT_THE_OWNER);
        }
    }
}

fn requests(view: &View<'_>, report: &mut Report) {
    for (index, line) in view.requests.iter() {
        let first = index % view.geometry.request_lines() * LOCKS_PER_REQUEST as u64;
        for (place, request) in line.requests.iter().enumerate() {
            let lock = first + place as u64;
            let at = (Region::Request, index);
            if lock >= view.geometry.locks.into() {
                if *request != Request::default() {
                    add_finding(
                        report,
                        Severity::Error,
                        "request.lock",
                        at,
                        format!("asks for lock {lock}, which does not exist"),
                        NEXT_JOIN,
                    );
                }
            } else if request.flags & !(Request::WANT | Request::CLEAN | Request::DIRTY) != 0 || request.number >= MAX_NUMBER {
                let meaning = format!("the request for lock {lock} (number {}, flags {:#x}) is none", request.number, request.flags);
                add_finding(report, Severity::Error, "request.form", at, meaning, NEXT_JOIN);
            }
        }
    }
}

fn intents(view: &View<'_>, report: &mut Report) {
    let table = view.geometry.lock_table_records();
    for (index, intent) in view.intents.iter() {
        if intent.count == 0 {
            continue;
        }
        let (slot, at) = (index / INTENTS as u64, (Region::Intent, index));
        let allowed = match intent.lock {
            LOCK_TABLE => 0..table,
            LOCK_OBJECTS => table..view.geometry.records(),
            LOCK_CHUNKS => 0..view.lines.layout().chunks(),
            lock if lock < view.geometry.locks => 0..u64::from(u32::MAX),
            lock => {
                add_finding(report, Severity::Error, "intent.lock", at, format!("names lock {lock}, which does not exist"), NEXT_JOIN);
                continue;
            }
        };
        // `check` of the line has bounded the count.
        if let Some(line) = intent.lines.iter().take(intent.count as usize).find(|line| !allowed.contains(&u64::from(**line))) {
            let meaning = format!("names line {line}, outside what lock {} protects: the next holder repairs everything", intent.lock);
            add_finding(report, Severity::Error, "intent.range", at, meaning, NEXT_JOIN);
        } else {
            let meaning = format!(
                "incarnation {} of slot {slot} stopped, or is, in the middle of a commit of {} lines under lock {}",
                intent.incarnation, intent.count, intent.lock
            );
            let remedy = Remedy::None("none needed: the next holder of the lock repairs it");
            add_finding(report, Severity::Note, "intent.open", at, meaning, remedy);
        }
    }
}
