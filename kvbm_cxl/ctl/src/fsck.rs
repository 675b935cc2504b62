// SPDX-License-Identifier: Apache-2.0
//! `cxlctl fsck`.

use crate::cli::FsckArgs;
use crate::output::{Exit, Failure, Out};
use crate::text::{list, safe};
use cxl_pool::fsck::{
    Activity, DamagedLine, Finding, FindingPlace, Healing, Remedy, Report, Severity, check, check_superblocks, check_twice, damaged_online,
    line_name, line_owner, repair, watch,
};
use cxl_pool::machine::Machine;
use cxl_pool::platform::{MachineId, MachineLock, MachineLockGuard, Platform};
use cxl_pool::pool::Pool;
use serde_json::{Value, json};
use std::time::Duration;

/// How long a check looks for heartbeats before it takes the pool for idle, in milliseconds.
const LOOK_MS: u64 = 200;

pub fn run(pool: Option<&str>, args: &FsckArgs, out: &mut Out) -> Result<Exit, Failure> {
    let pool = crate::pool::open(pool, !args.repair)?;
    let seats = pool.superblock().seats();
    if args.online {
        return online(&pool, &seats, args.watch_ms, out);
    }
    if args.repair {
        let _alone = if args.force {
            Vec::new()
        } else {
            take_alone(&pool, args.watch_ms, "before a repair (or --force, and their data may be lost)")?
        };
        let repaired = repair(pool.lines(), &seats, args.accept_loss)?;
        let mut after = repaired.after;
        check_superblocks(pool.lines(), pool.superblock(), &mut after)?;
        let json = || {
            json!({"lines_checked": after.lines_checked, "lines_written": repaired.lines_written,
                "before": counts(&repaired.before), "after": counts(&after), "found": findings(&pool, &repaired.before, args.notes),
                "left": findings(&pool, &after, args.notes)})
        };
        let text = || {
            let mut text = listing(&pool, &repaired.before, args.notes);
            text.push_str(&format!("repaired: {} lines written; left: {}\n", repaired.lines_written, summary(&after)));
            if !after.is_clean() {
                text.push_str(&listing(&pool, &after, false));
            }
            text
        };
        out.answer(json, text)?;
        return Ok(verdict(&after));
    }
    let activity = watch(pool.lines(), Duration::from_millis(LOOK_MS), false)?;
    let mut report = if activity.is_quiet() { check(pool.lines(), &seats)? } else { check_twice(pool.lines(), &seats)? };
    check_superblocks(pool.lines(), pool.superblock(), &mut report)?;
    let json = || {
        json!({"lines_checked": report.lines_checked, "in_use": !activity.is_quiet(), "counts": counts(&report),
            "findings": findings(&pool, &report, args.notes)})
    };
    let text = || {
        let mut text = listing(&pool, &report, args.notes);
        text.push_str(&format!("{} lines checked: {}\n", report.lines_checked, summary(&report)));
        if !activity.is_quiet() {
            text.push_str("hosts are using the pool: only what two passes found was reported\n");
        }
        if report.findings.iter().any(|found| matches!(found.remedy, Remedy::Safe { .. })) {
            text.push_str("stop every host and run fsck --repair\n");
        }
        text
    };
    out.answer(json, text)?;
    Ok(verdict(&report))
}

fn online(pool: &Pool, seats: &[MachineId], watch_ms: u64, out: &mut Out) -> Result<Exit, Failure> {
    let (activity, damaged) = damaged_online(pool.lines(), seats, Duration::from_millis(watch_ms))?;
    let name = |line: &DamagedLine| line_name(pool.layout(), line.region, line.index);
    let owner = |line: &DamagedLine| line_owner(pool.layout(), line.region, line.index);
    let json = || {
        let line = |line: &DamagedLine| {
            json!({"region": format!("{:?}", line.region), "line": line.index, "name": name(line), "owner": owner(line),
                "machine": line.machine.map(|machine| machine.to_string()), "owner_runs": line.is_owner_alive,
                "healing": line.healing.name(), "costs": line.cost, "action": line.action})
        };
        json!({"slots_beating": activity.slots, "seats_beating": activity.seats, "damaged": damaged.iter().map(line).collect::<Vec<_>>()})
    };
    let text = || {
        let mut text = String::new();
        for line in &damaged {
            let runs = if line.is_owner_alive { "which runs" } else { "which does not run" };
            let machine = line.machine.map(|machine| format!(" ({machine})")).unwrap_or_default();
            text.push_str(&format!("{:?} {} ({}) of {}{machine}, {runs}\n", line.region, line.index, name(line), owner(line)));
            text.push_str(&format!("    costs: {}\n    heals: {}\n    to do: {}\n", safe(&line.cost), line.healing.name(), line.action));
        }
        let left = damaged.iter().filter(|line| line.healing != Healing::Healed).count();
        text.push_str(&format!("{} damaged, {} of them healed while this looked\n", damaged.len(), damaged.len() - left));
        text
    };
    out.answer(json, text)?;
    let is_well = damaged.iter().all(|line| matches!(line.healing, Healing::Healed | Healing::NotNeeded));
    Ok(if is_well { Exit::Done } else { Exit::Failed })
}

fn verdict(report: &Report) -> Exit {
    if report.is_clean() { Exit::Done } else { Exit::Failed }
}

/// Makes sure, as far as that can be seen, that no host uses the pool: no process of this machine, and no heartbeat of another.
pub(crate) fn take_alone(pool: &Pool, watch_ms: u64, first: &str) -> Result<Vec<MachineLockGuard>, Failure> {
    let machine = Machine::for_pool(pool.superblock().uuid(), pool.faults().clone())?;
    let mut held = Vec::new();
    for lock in [MachineLock::Join, MachineLock::Members] {
        let Some(guard) = machine.try_lock(lock, true)? else {
            let message = format!("processes of this machine use the pool: stop them {first}");
            return Err(Failure::new(Exit::Refused, message));
        };
        held.push(guard);
    }
    if watch(pool.lines(), Duration::from_millis(watch_ms), false)?.is_quiet() {
        return Ok(held);
    }
    // A host is there; a second look tells which others.
    let Activity { slots, seats } = watch(pool.lines(), Duration::from_millis(LOOK_MS), true)?;
    let message = format!("hosts use the pool (heartbeats of slots {} and seats {} move): stop them {first}", list(&slots), list(&seats));
    Err(Failure::new(Exit::Refused, message))
}

fn counts(report: &Report) -> Value {
    json!({"errors": report.count(Severity::Error), "warnings": report.count(Severity::Warning), "notes": report.count(Severity::Note)})
}

fn summary(report: &Report) -> String {
    let plural = |count: u64, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    let [errors, warnings, notes] = [Severity::Error, Severity::Warning, Severity::Note].map(|severity| report.count(severity));
    format!("{}, {}, {}", plural(errors, "error"), plural(warnings, "warning"), plural(notes, "note"))
}

fn visible(report: &Report, notes: bool) -> impl Iterator<Item = &Finding> {
    report.findings.iter().filter(move |found| notes || found.severity > Severity::Note)
}

/// Whether a repair does something about it, and what it takes.
fn remedy_kind(remedy: &Remedy) -> &'static str {
    match remedy {
        Remedy::None(_) => "none",
        Remedy::Safe { .. } => "safe",
        Remedy::Loss { .. } => "loss",
    }
}

fn findings(pool: &Pool, report: &Report, notes: bool) -> Vec<Value> {
    let tell = |found: &Finding| {
        let mut value = json!({"severity": found.severity.name(), "rule": found.rule, "meaning": found.meaning,
            "remedy": remedy_kind(&found.remedy), "repair": found.remedy.what()});
        match found.place {
            FindingPlace::Superblock(device) => {
                value["region"] = "Superblock".into();
                value["line"] = device.into();
                value["lines"] = 1.into();
            }
            FindingPlace::Lines { region, first, count } => {
                value["region"] = format!("{region:?}").into();
                value["line"] = first.into();
                value["lines"] = count.into();
                value["name"] = line_name(pool.layout(), region, first).into();
                value["owner"] = line_owner(pool.layout(), region, first).into();
            }
        }
        value
    };
    visible(report, notes).map(tell).collect()
}

fn listing(pool: &Pool, report: &Report, notes: bool) -> String {
    let mut text = String::new();
    for found in visible(report, notes) {
        let place = match found.place {
            FindingPlace::Superblock(device) => format!("superblock of device {device}"),
            FindingPlace::Lines { region, first, count: 1 } => format!("{region:?} {first} ({})", line_name(pool.layout(), region, first)),
            FindingPlace::Lines { region, first, count } => {
                let name = line_name(pool.layout(), region, first);
                format!("{region:?} {first} to {} ({name} and on)", first + count - 1)
            }
        };
        let needs = if matches!(found.remedy, Remedy::Loss { .. }) { " (needs --accept-loss)" } else { "" };
        let (severity, rule, meaning) = (found.severity.name(), found.rule, safe(&found.meaning));
        text.push_str(&format!("{severity}: {place}: {meaning} [{rule}]\n    repair{needs}: {}\n", found.remedy.what()));
    }
    let omitted: u64 = report.omitted.iter().sum();
    if omitted > 0 {
        text.push_str(&format!("{omitted} more findings are not listed\n"));
    }
    text
}
