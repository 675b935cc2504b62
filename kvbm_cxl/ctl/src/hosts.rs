// SPDX-License-Identifier: Apache-2.0
//! `cxlctl hosts`.

use crate::cli::{DeclareDeadArgs, HostsArgs, HostsCommand};
use crate::output::{Exit, Failure, Out};
use crate::text::{list, table};
use crate::wait;
use cxl_pool::fsck::{Activity, SeatInfo, SlotInfo, SlotState, Survey, survey, watch};
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::media::{DeathLine, SLOTS_PER_FENCE};
use cxl_pool::pool::Pool;
use serde_json::{Value, json};
use std::time::Duration;

/// How long a heartbeat is watched before its host may be declared dead, in milliseconds: many periods of the slowest usual one.
const STILL_MS: u64 = 1_000;

/// `cxlctl hosts`.
pub fn run(pool: Option<&str>, args: &HostsArgs, out: &mut Out) -> Result<Exit, Failure> {
    if let Some(HostsCommand::DeclareDead(args)) = &args.command {
        return declare_dead(pool, args, out);
    }
    let pool = crate::pool::open(pool, true)?;
    let activity = watch(pool.lines(), Duration::from_millis(args.watch_ms), true)?;
    let survey = survey(pool.lines(), &pool.superblock().seats())?;
    out.answer(|| json_of(&survey, &activity), || text_of(&survey, &activity))?;
    Ok(Exit::Done)
}

/// Where the bound incarnation of a slot stands with the others; "unknown" where the pool does not tell which incarnation that is.
pub fn standing(slot: &SlotInfo) -> &'static str {
    match (slot.state, is_fenced(slot)) {
        (SlotState::Free, _) => "-",
        (_, None) => "unknown",
        _ if slot.dead >= slot.incarnation => "declared dead",
        (SlotState::Left, _) => "left",
        (_, Some(true)) => "fenced",
        (_, Some(false)) => "not fenced",
    }
}

/// Whether the bound incarnation of a slot is fenced. `None` where its lines do not tell which that is: one that lived earlier may be
/// fenced, or declared dead, and says nothing of a host that lives.
pub fn is_fenced(slot: &SlotInfo) -> Option<bool> {
    (!slot.is_binding_hidden && slot.incarnation > 0).then_some(slot.fenced >= slot.incarnation)
}

/// What a seat does.
pub fn role(seat: &SeatInfo, activity: &Activity) -> &'static str {
    match seat {
        SeatInfo { epoch: None, .. } => "its line does not verify",
        SeatInfo { epoch: Some(0), .. } => "never served",
        SeatInfo { is_newest: true, beat: None, .. } => "resigned",
        SeatInfo { is_newest: true, .. } if activity.seats.contains(&seat.seat) => "manager",
        SeatInfo { is_newest: true, .. } => "manager, standing still",
        _ => "served before",
    }
}

/// A machine's name in a table.
pub fn name_text(name: Option<&str>) -> String {
    name.unwrap_or("-").to_owned()
}

fn json_of(survey: &Survey, activity: &Activity) -> Value {
    let slots = survey.slots.iter().map(|slot| {
        json!({"slot": slot.slot, "state": slot.state.name(), "standing": standing(slot), "machine": crate::info::machine(slot.machine),
            "name": slot.name, "incarnation": slot.incarnation, "heartbeat": slot.heartbeat, "moving": activity.slots.contains(&slot.slot),
            "fenced": slot.fenced, "dead": slot.dead, "acknowledged": slot.acknowledged, "drained": slot.drained,
            "held_locks": slot.held, "wanted_locks": slot.wanted})
    });
    let seats = survey.seats.iter().map(|seat| {
        json!({"seat": seat.seat, "machine": seat.machine.map(|id| id.to_string()),
            "name": seat.machine.and_then(|id| survey.name_of(id)), "fixed": seat.is_fixed, "epoch": seat.epoch,
            "beat": seat.beat, "moving": activity.seats.contains(&seat.seat), "newest": seat.is_newest, "role": role(seat, activity)})
    });
    json!({"slots": slots.collect::<Vec<_>>(), "seats": seats.collect::<Vec<_>>()})
}

fn text_of(survey: &Survey, activity: &Activity) -> String {
    let mut rows = vec![
        ["slot", "state", "standing", "incarnation", "heartbeat", "fenced", "dead", "holds", "wants", "name", "machine"]
            .map(String::from)
            .to_vec(),
    ];
    for slot in survey.slots.iter().filter(|slot| slot.state != SlotState::Free) {
        let beat = if activity.slots.contains(&slot.slot) { "moving" } else { "still" };
        rows.push(vec![
            slot.slot.to_string(),
            slot.state.name().into(),
            standing(slot).into(),
            slot.incarnation.to_string(),
            format!("{} {beat}", slot.heartbeat),
            slot.fenced.to_string(),
            slot.dead.to_string(),
            list(&slot.held),
            list(&slot.wanted),
            name_text(slot.name.as_deref()),
            slot.machine.to_string(),
        ]);
    }
    let free = survey.slots.iter().filter(|slot| slot.state == SlotState::Free).count();
    let mut text = if rows.len() == 1 { String::new() } else { table(&rows) };
    text.push_str(&format!("{free} of {} slots were never used\n", survey.slots.len()));
    let mut rows = vec![["seat", "epoch", "role", "name", "machine"].map(String::from).to_vec()];
    for seat in &survey.seats {
        let machine = match seat.machine {
            Some(machine) if seat.is_fixed => format!("{machine} (by the superblock)"),
            Some(machine) => machine.to_string(),
            None => "none yet".into(),
        };
        let epoch = seat.epoch.map_or("?".into(), |epoch| epoch.to_string());
        let name = name_text(seat.machine.and_then(|machine| survey.name_of(machine)));
        rows.push(vec![seat.seat.to_string(), epoch, role(seat, activity).into(), name, machine]);
    }
    text + &table(&rows)
}

/// An incarnation of a slot.
type Incarnation = (u16, u32);

fn declare_dead(pool: Option<&str>, args: &DeclareDeadArgs, out: &mut Out) -> Result<Exit, Failure> {
    let pool = crate::pool::open(pool, !args.i_know_it_is_gone)?;
    let known = survey(pool.lines(), &pool.superblock().seats())?;
    // All of the time, whatever else moves: it is these slots that must stand still.
    let named = match (args.slot, args.incarnation) {
        (Some(slot), Some(incarnation)) => vec![known_incarnation(&known, slot, incarnation)?],
        _ => fenced(&known),
    };
    let text = |(slot, _): &Incarnation| slot_text(&known, *slot);
    if !args.i_know_it_is_gone && !args.all_fenced {
        let machines: Vec<String> = named.iter().map(text).collect();
        return Err(need_confirmation(&format!(
            "make sure that {} is powered off or cut off from the memory, then repeat this with --i-know-it-is-gone",
            machines.join(", ")
        )));
    }
    let activity = watch(pool.lines(), Duration::from_millis(STILL_MS), true)?;
    let moves = |(slot, incarnation): &Incarnation| {
        activity.slots.contains(slot) && known.slots.iter().any(|found| (found.slot, found.incarnation) == (*slot, *incarnation))
    };
    if let Some(one) = named.iter().find(|one| !args.all_fenced && moves(one)) {
        return Err(Failure::new(Exit::Refused, format!("{} is not dead: its heartbeat moves", text(one))));
    }
    let meant: Vec<Incarnation> = named.into_iter().filter(|one| !moves(one)).collect();
    if args.all_fenced && !args.i_know_it_is_gone {
        return list_fenced(&known, &meant, out);
    }
    if !meant.is_empty() {
        let config = HostConfig { join_timeout_ms: args.timeout_ms, ..HostConfig::from_env()? };
        wait::as_host(pool.join(config)?, |host| state_deaths(&pool, host, &meant))?;
    }
    let each = |one: &Incarnation| format!("{} is declared dead up to incarnation {}\n", text(one), one.1);
    out.answer(
        || match args.all_fenced {
            true => {
                json!({"declared_dead": meant.iter().map(|(slot, up_to)| json!({"slot": slot, "incarnation": up_to})).collect::<Vec<_>>()})
            }
            false => json!({"slot": args.slot, "incarnation": args.incarnation, "declared_dead": true}),
        },
        || if meant.is_empty() { "no host is fenced and stands still\n".into() } else { meant.iter().map(each).collect() },
    )?;
    Ok(Exit::Done)
}

fn need_confirmation(advice: &str) -> Failure {
    Failure::new(Exit::Refused, format!("a machine that is declared dead but still runs corrupts data: {advice}"))
}

/// A slot and its machine, as a sentence names them.
fn slot_text(known: &Survey, slot: u16) -> String {
    let machine = known.slots.get(usize::from(slot)).map(|found| known.machine_text(found.machine));
    format!("slot {slot} of machine {}", machine.unwrap_or_default())
}

/// The incarnation that was named, if the slot ever had it.
fn known_incarnation(known: &Survey, number: u16, incarnation: u32) -> Result<Incarnation, Failure> {
    let Some(slot) = known.slots.get(usize::from(number)) else {
        return Err(Failure::usage(format!("slot {number} does not exist: the pool has {} slots", known.slots.len())));
    };
    // One that is not known to have been cannot be stated dead: the statement would also hold for a host that joins later.
    if incarnation > slot.incarnation && slot.is_binding_hidden {
        let message = format!(
            "whether slot {number} ever had incarnation {incarnation} cannot be read: a line that binds the slot to a machine does not \
             verify. `cxlctl fsck` tells which; repeat this once the machine of that line's seat, or `cxlctl fsck --repair`, has written \
             it again"
        );
        return Err(Failure::new(Exit::Failed, message));
    }
    if incarnation == 0 || incarnation > slot.incarnation {
        let message = format!("slot {number} never had incarnation {incarnation}: its newest is {}", slot.incarnation);
        return Err(Failure::usage(message));
    }
    Ok((number, incarnation))
}

/// Every incarnation that is fenced and of which nothing proves that it has ended.
fn fenced(known: &Survey) -> Vec<Incarnation> {
    known.slots.iter().filter(|slot| standing(slot) == "fenced").map(|slot| (slot.slot, slot.incarnation)).collect()
}

/// What `--all-fenced` means now.
fn list_fenced(known: &Survey, meant: &[Incarnation], out: &mut Out) -> Result<Exit, Failure> {
    let listed = || meant.iter().filter_map(|(slot, up_to)| Some((known.slots.get(usize::from(*slot))?, up_to)));
    let mut rows = vec![["slot", "incarnation", "name", "machine"].map(String::from).to_vec()];
    for (slot, up_to) in listed() {
        rows.push(vec![slot.slot.to_string(), up_to.to_string(), name_text(slot.name.as_deref()), slot.machine.to_string()]);
    }
    let json_of_slot = |(slot, up_to): (&SlotInfo, &u32)| {
        let machine = slot.machine.to_string();
        json!({"slot": slot.slot, "incarnation": up_to, "name": slot.name, "machine": machine})
    };
    out.answer(
        || json!({"fenced": listed().map(json_of_slot).collect::<Vec<_>>()}),
        || if meant.is_empty() { "no host is fenced and stands still\n".into() } else { table(&rows) },
    )?;
    match meant.is_empty() {
        true => Ok(Exit::Done),
        false => Err(need_confirmation(
            "make sure that every machine listed is powered off or cut off from the memory, then repeat this with \
             --i-know-it-is-gone; where one of them may be alive, name the others one by one",
        )),
    }
}

/// Has the statements published: in this machine's row where it has a seat, else by the manager, which this host reports them to.
fn state_deaths(pool: &Pool, host: &Host, meant: &[Incarnation]) -> Result<(), Failure> {
    if meant.iter().any(|(slot, incarnation)| host.slot() == *slot && host.incarnation() <= *incarnation) {
        return Err(Failure::new(Exit::Refused, format!("slot {} is this very machine", host.slot())));
    }
    for (slot, incarnation) in meant {
        host.declare_dead(*slot, *incarnation)?;
    }
    let timeout_ms = host.config().join_timeout_ms();
    let published = wait::until(timeout_ms, || Ok(are_declared(pool, meant)?.then_some(())))?;
    published.ok_or_else(|| {
        let message = format!(
            "not published within {timeout_ms} ms: this machine has no manager seat and no manager takes its report (cxlctl hosts shows \
             whether one serves); repeat this"
        );
        Failure::new(Exit::Failed, message)
    })
}

fn are_declared(pool: &Pool, meant: &[Incarnation]) -> Result<bool, Failure> {
    let geometry = pool.layout().geometry();
    for (slot, incarnation) in meant {
        let (line, place) = (u64::from(*slot) / SLOTS_PER_FENCE as u64, usize::from(*slot) % SLOTS_PER_FENCE);
        let mut declared = false;
        for seat in 0..geometry.all_seats() {
            let row: DeathLine = pool.lines().fetch(seat * geometry.fence_lines() + line)?;
            declared |= row.dead[place] >= *incarnation;
        }
        if !declared {
            return Ok(false);
        }
    }
    Ok(true)
}
