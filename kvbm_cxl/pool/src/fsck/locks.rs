// SPDX-License-Identifier: Apache-2.0
//! Grants: one holder per (lock, number), none above the decided number.

use super::damage::record_lock;
use super::report::{Remedy, Report, Severity};
use super::view::{View, add_finding};
use crate::limits::{INTENTS, MAX_NUMBER};
use crate::media::*;
use std::collections::HashMap;

const NONE: Remedy = Remedy::None("none: find out who wrote it (a cloned machine id? a program of another origin?), then format again");

/// A holder: slot and incarnation.
type Holder = (u64, u32);

pub(super) fn check(view: &View<'_>, report: &mut Report) {
    // What a host published under a grant proves that it held the lock under that number.
    let mut holders: HashMap<(u32, u32), Holder> = HashMap::new();
    grants(view, report, &mut holders);
    for (index, intent) in view.intents.iter() {
        if intent.grant != 0 && intent.lock < view.geometry.locks {
            witness(
                view,
                report,
                &mut holders,
                (Region::Intent, index),
                (intent.lock, intent.grant),
                (index / INTENTS as u64, intent.incarnation),
            );
        }
    }
    let per_slot = view.geometry.records();
    for (index, record) in view.records.iter() {
        if record.grant != 0 {
            let lock = record_lock(view, index % per_slot);
            witness(view, report, &mut holders, (Region::Record, index), (lock, record.grant), (index / per_slot, record.incarnation));
        }
    }
}

fn grants(view: &View<'_>, report: &mut Report, holders: &mut HashMap<(u32, u32), Holder>) {
    for (line, register) in view.decided_grants.iter().enumerate() {
        let at = (Region::Grant, register.seat * view.geometry.grant_lines() + line as u64);
        for (place, grant) in register.best.grants.iter().enumerate() {
            let lock = (line * LOCKS_PER_GRANT + place) as u32;
            let mut wrong = |rule, meaning: String| add_finding(report, Severity::Error, rule, at, meaning, NONE);
            if grant.number == 0 || lock >= view.geometry.locks {
                if *grant != Grant::default() {
                    wrong("grant.empty", format!("lock {lock} was never granted or does not exist, yet its grant is not empty"));
                }
                continue;
            }
            if grant.number >= MAX_NUMBER || grant.flags & !(Grant::REPAIR | Grant::RECALL) != 0 {
                wrong("grant.form", format!("grant {} of lock {lock} (flags {:#x}) is none", grant.number, grant.flags));
            }
            let slot = u64::from(grant.slot);
            if slot >= view.geometry.slots.into() {
                wrong("grant.slot", format!("lock {lock} is granted to slot {slot}, which does not exist"));
            } else if grant.incarnation > view.bound(slot) && !view.decided_bindings[slot as usize].hidden {
                let (incarnation, bound) = (grant.incarnation, view.bound(slot));
                wrong(
                    "grant.unbound",
                    format!("lock {lock} is granted to incarnation {incarnation} of slot {slot}, only {bound} is bound"),
                );
            } else if grant.incarnation != 0 {
                holders.insert((lock, grant.number), (slot, grant.incarnation));
                note_dead_holder(view, report, at, lock, grant);
            }
        }
    }
}

/// A grant of a fenced or dead holder that is not over yet.
fn note_dead_holder(view: &View<'_>, report: &mut Report, at: (Region, u64), lock: u32, grant: &Grant) {
    let slot = u64::from(grant.slot);
    if view.is_held(slot, lock) && view.is_fenced(slot, grant.incarnation) {
        let meaning = format!("lock {lock} was held by incarnation {} of slot {slot}, which is fenced", grant.incarnation);
        let remedy = Remedy::None("none needed: the manager passes it on, and the next holder repairs what it protects");
        add_finding(report, Severity::Note, "grant.fenced_holder", at, meaning, remedy);
    }
}

fn witness(
    view: &View<'_>,
    report: &mut Report,
    holders: &mut HashMap<(u32, u32), Holder>,
    at: (Region, u64),
    (lock, number): (u32, u32),
    (slot, incarnation): Holder,
) {
    let register = &view.decided_grants[lock as usize / LOCKS_PER_GRANT];
    let decided = view.grant(lock).number;
    if number > decided && !register.hidden {
        let meaning = format!("written under grant {number} of lock {lock}, of which only {decided} was ever decided");
        add_finding(report, Severity::Error, "grant.undecided", at, meaning, NONE);
        return;
    }
    let &mut (other, other_incarnation) = holders.entry((lock, number)).or_insert((slot, incarnation));
    if (other, other_incarnation) != (slot, incarnation) {
        let meaning = format!(
            "written under grant {number} of lock {lock} by incarnation {incarnation} of slot {slot}, but incarnation \
             {other_incarnation} of slot {other} held it under that number: two holders"
        );
        add_finding(report, Severity::Error, "grant.two_holders", at, meaning, NONE);
    }
}
