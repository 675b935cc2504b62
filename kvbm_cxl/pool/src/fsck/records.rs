// SPDX-License-Identifier: Apache-2.0
//! Records: one newest copy each; the lock table and the object table that they hold.

use super::report::{Remedy, Report, Severity};
use super::view::{View, add_finding};
use crate::limits::{MAX_NUMBER, MAX_OBJECT_NAME_BYTES, OBJECT_PROBES};
use crate::media::*;
use std::collections::HashMap;

const NONE: Remedy = Remedy::None("none: destroy or publish the object again");

pub(super) fn check(view: &View<'_>, report: &mut Report) {
    let best: Vec<Option<Best>> = (0..view.geometry.records()).map(|number| newest(view, report, number)).collect();
    let (locks, objects) = best.split_at(view.geometry.lock_table_records() as usize);
    lock_table(view, report, locks);
    object_table(view, report, objects);
}

struct Best {
    index: u64,
    data: [u8; RECORD_BYTES],
}

/// The newest copy; `None` when it is unknown.
fn newest(view: &View<'_>, report: &mut Report, number: u64) -> Option<Best> {
    let mut best: Option<(u32, u32, u64)> = None;
    let mut is_certain = true;
    for slot in 0..u64::from(view.geometry.slots) {
        let index = slot * view.geometry.records() + number;
        let at = (Region::Record, index);
        let Some(copy) = view.records.get(index) else {
            is_certain = false;
            continue;
        };
        if copy.grant == 0 {
            if bytemuck::bytes_of(copy)[4..].iter().any(|&byte| byte != 0) {
                let remedy = Remedy::None("none: the copy counts for nothing");
                add_finding(report, Severity::Error, "record.empty", at, "written under no grant, yet it is not empty", remedy);
            }
            continue;
        }
        if copy.grant >= MAX_NUMBER || copy.version > MAX_NUMBER {
            let meaning = format!("grant {} or version {} is beyond the limit of {MAX_NUMBER}", copy.grant, copy.version);
            add_finding(report, Severity::Error, "record.limit", at, meaning, Remedy::None("none: format the pool again"));
        }
        match best {
            Some((grant, version, other)) if (grant, version) == (copy.grant, copy.version) => {
                let other = other / view.geometry.records();
                let meaning = format!("slots {other} and {slot} wrote version {version} of record {number} under one grant, {grant}");
                let remedy = Remedy::None("none: its value is unknown; commit it again under its lock");
                add_finding(report, Severity::Error, "record.two_writers", at, meaning, remedy);
                is_certain = false;
            }
            Some((grant, version, _)) if (grant, version) > (copy.grant, copy.version) => {}
            _ => best = Some((copy.grant, copy.version, index)),
        }
    }
    let index = best.map_or(number, |(_, _, index)| index);
    let copy = view.records.get(index).copied()?;
    if copy.grant != 0 && view.is_fenced(index / view.geometry.records(), copy.incarnation) {
        let meaning = format!("record {number} was last written by a host that is fenced: readers without the lock take it for doubtful");
        let remedy = Remedy::None("none needed: the next holder of its lock settles it");
        add_finding(report, Severity::Note, "record.doubtful", (Region::Record, index), meaning, remedy);
    }
    is_certain.then_some(Best { index, data: copy.data })
}

fn lock_table(view: &View<'_>, report: &mut Report, records: &[Option<Best>]) {
    let allocated = |lock: u32| {
        let record = records.get(lock as usize / LOCKS_PER_RECORD)?.as_ref()?;
        let bit = lock as usize % LOCKS_PER_RECORD;
        Some(record.data[bit / 8] >> (bit % 8) & 1 == 1)
    };
    for (number, record) in records.iter().enumerate() {
        let Some(record) = record else { continue };
        for bit in 0..LOCKS_PER_RECORD {
            let lock = (number * LOCKS_PER_RECORD + bit) as u32;
            let is_set = record.data[bit / 8] >> (bit % 8) & 1 == 1;
            if is_set && !(view.geometry.first_user_lock()..view.geometry.locks).contains(&lock) {
                let meaning = format!("says that lock {lock} is allocated, which cannot be");
                let remedy = Remedy::None("none needed: the number is never given out");
                add_finding(report, Severity::Error, "lock_table.range", (Region::Record, record.index), meaning, remedy);
            }
        }
    }
    for lock in view.geometry.first_user_lock()..view.geometry.locks {
        if view.is_held(view.grant(lock).slot.into(), lock) && allocated(lock) == Some(false) {
            let line = u64::from(lock) / LOCKS_PER_GRANT as u64;
            let at = (Region::Grant, view.decided_grants[line as usize].seat * view.geometry.grant_lines() + line);
            let remedy = Remedy::None("none needed: it is used without having been allocated, or was freed while it was held");
            add_finding(report, Severity::Note, "lock_table.unallocated", at, format!("lock {lock} is held but not allocated"), remedy);
        }
    }
}

fn object_table(view: &View<'_>, report: &mut Report, cells: &[Option<Best>]) {
    let values: Vec<Option<ObjectValue>> = cells.iter().map(|cell| Some(bytemuck::cast(cell.as_ref()?.data))).collect();
    let mut names: HashMap<Vec<u8>, usize> = HashMap::new();
    for (cell, value) in values.iter().enumerate() {
        let (Some(value), Some(Some(best))) = (value, cells.get(cell)) else { continue };
        let mut wrong = |rule, meaning: String| add_finding(report, Severity::Error, rule, (Region::Record, best.index), meaning, NONE);
        if matches!(value.state, ObjectValue::EMPTY | ObjectValue::TOMB) {
            continue;
        }
        if value.state != ObjectValue::LIVE {
            wrong("object.state", format!("object cell {cell} has the unknown state {}", value.state));
            continue;
        }
        let len = usize::from(value.name_len);
        let Some(name) = value.name.get(..len).filter(|name| !name.is_empty()) else {
            wrong("object.name", format!("object cell {cell} has a name of {len} bytes, which must be 1 to {MAX_OBJECT_NAME_BYTES}"));
            continue;
        };
        let shown = String::from_utf8_lossy(name).into_owned();
        let last = value.offset.checked_add(u64::from(value.len_bytes).saturating_sub(1));
        let layout = view.lines.layout();
        if layout.chunk_of(value.offset).is_none() || last.is_none_or(|last| layout.chunk_of(last).is_none()) {
            let (offset, len_bytes) = (value.offset, value.len_bytes);
            wrong("object.offset", format!("object {shown:?} points to {offset:#x} (+{len_bytes} bytes), outside the chunks"));
        }
        if let Some(other) = names.insert(name.to_vec(), cell) {
            wrong("object.twice", format!("object {shown:?} is bound in cells {other} and {cell}: lookups find the first only"));
        }
        if !is_reachable(name, cell, &values) {
            wrong("object.unreachable", format!("object {shown:?} lies in cell {cell}, where no lookup of its name comes"));
        }
    }
}

/// Whether a lookup of `name` visits `cell` before it meets an empty one. A cell that cannot be read stops no lookup for good.
fn is_reachable(name: &[u8], cell: usize, values: &[Option<ObjectValue>]) -> bool {
    let home = crc32c::crc32c(name) as usize % values.len();
    for step in 0..values.len().min(OBJECT_PROBES) {
        let visited = (home + step) % values.len();
        if visited == cell {
            return true;
        }
        if values[visited].is_some_and(|value| value.state == ObjectValue::EMPTY) {
            return false;
        }
    }
    false
}
