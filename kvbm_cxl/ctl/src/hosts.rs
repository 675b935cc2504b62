// SPDX-License-Identifier: Apache-2.0
//! `cxlctl hosts`.

use crate::cli::{DeclareDeadArgs, HostsArgs, HostsCommand};
use crate::output::{Exit, Failure, Out};
use crate::text::{list, table};
use cxl_pool::fsck::{Activity, SeatInfo, SlotInfo, SlotState, Survey, survey, watch};
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::media::{DeathLine, SLOTS_PER_FENCE};
use cxl_pool::pool::Pool;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

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
fn role(seat: &SeatInfo, activity: &Activity) -> &'static str {
    match seat {
        SeatInfo { epoch: None, .. } => "its line does not verify",
        SeatInfo { epoch: Some(0), .. } => "never served",
        SeatInfo { is_newest: true, beat: None, .. } => "resigned",
        SeatInfo { is_newest: true, .. } if activity.seats.contains(&seat.seat) => "manager",
        SeatInfo { is_newest: true, .. } => "manager, standing still",
        _ => "served before",
    }
}

fn json_of(survey: &Survey, activity: &Activity) -> Value {
    let slots = survey.slots.iter().map(|slot| {
        json!({"slot": slot.slot, "state": slot.state.name(), "standing": standing(slot), "machine": crate::info::machine(slot.machine),
            "incarnation": slot.incarnation, "heartbeat": slot.heartbeat, "moving": activity.slots.contains(&slot.slot),
            "fenced": slot.fenced, "dead": slot.dead, "acknowledged": slot.acknowledged, "drained": slot.drained,
            "held_locks": slot.held, "wanted_locks": slot.wanted})
    });
    let seats = survey.seats.iter().map(|seat| {
        json!({"seat": seat.seat, "machine": seat.machine.map(|id| id.to_string()), "fixed": seat.is_fixed, "epoch": seat.epoch,
            "beat": seat.beat, "moving": activity.seats.contains(&seat.seat), "newest": seat.is_newest, "role": role(seat, activity)})
    });
    json!({"slots": slots.collect::<Vec<_>>(), "seats": seats.collect::<Vec<_>>()})
}

fn text_of(survey: &Survey, activity: &Activity) -> String {
    let mut rows = vec![
        ["slot", "state", "standing", "incarnation", "heartbeat", "fenced", "dead", "holds", "wants", "machine"].map(String::from).to_vec(),
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
            slot.machine.to_string(),
        ]);
    }
    let free = survey.slots.iter().filter(|slot| slot.state == SlotState::Free).count();
    let mut text = if rows.len() == 1 { String::new() } else { table(&rows) };
    text.push_str(&format!("{free} of {} slots were never used\n", survey.slots.len()));
    let mut rows = vec![["seat", "epoch", "role", "machine"].map(String::from).to_vec()];
    for seat in &survey.seats {
        let machine = match seat.machine {
            Some(machine) if seat.is_fixed => format!("{machine} (by the superblock)"),
            Some(machine) => machine.to_string(),
            None => "none yet".into(),
        };
        let epoch = seat.epoch.map_or("?".into(), |epoch| epoch.to_string());
        rows.push(vec![seat.seat.to_string(), epoch, role(seat, activity).into(), machine]);
    }
    text + &table(&rows)
}

fn declare_dead(pool: Option<&str>, args: &DeclareDeadArgs, out: &mut Out) -> Result<Exit, Failure> {
    if !args.i_know_it_is_powered_off {
        return Err(Failure::new(
            Exit::Refused,
            "a machine that is declared dead and goes on corrupts data: make sure that it is powered off or cut off from the memory, \
             then repeat this with --i-know-it-is-powered-off",
        ));
    }
    let pool = crate::pool::open(pool, false)?;
    let known = survey(pool.lines(), &pool.superblock().seats())?;
    let Some(slot) = known.slots.get(usize::from(args.slot)) else {
        return Err(Failure::usage(format!("slot {} does not exist: the pool has {} slots", args.slot, known.slots.len())));
    };
    // One that is not known to have been cannot be stated dead: the statement would also hold for a host that joins later.
    if args.incarnation > slot.incarnation && slot.is_binding_hidden {
        let message = format!(
            "whether slot {} ever had incarnation {} cannot be read: a line that binds the slot to a machine does not verify. `cxlctl \
             fsck` tells which; repeat this once the machine of that line's seat, or `cxlctl fsck --repair`, has written it anew",
            args.slot, args.incarnation
        );
        return Err(Failure::new(Exit::Failed, message));
    }
    if args.incarnation == 0 || args.incarnation > slot.incarnation {
        let message = format!("slot {} never had incarnation {}: its newest is {}", args.slot, args.incarnation, slot.incarnation);
        return Err(Failure::usage(message));
    }
    // All of the time, whatever else moves: it is this slot that must stand still.
    let activity = watch(pool.lines(), Duration::from_millis(STILL_MS), true)?;
    if args.incarnation == slot.incarnation && activity.slots.contains(&args.slot) {
        let message = format!("slot {} is not dead: its heartbeat moves", args.slot);
        return Err(Failure::new(Exit::Refused, message));
    }
    let config = HostConfig { join_timeout_ms: args.timeout_ms, ..HostConfig::from_env()? };
    let host = pool.join(config)?;
    let stated = state_death(&pool, &host, args);
    // Leaving is tidy, not needed: the statement is published, or its failure is what counts.
    let left = host.leave();
    stated?;
    left?;
    out.answer(
        || json!({"slot": args.slot, "incarnation": args.incarnation, "declared_dead": true}),
        || format!("slot {} is declared dead up to incarnation {}\n", args.slot, args.incarnation),
    )?;
    Ok(Exit::Done)
}

/// Has this machine's manager publish it.
fn state_death(pool: &Pool, host: &Host, args: &DeclareDeadArgs) -> Result<(), Failure> {
    if host.slot() == args.slot && host.incarnation() <= args.incarnation {
        return Err(Failure::new(Exit::Refused, format!("slot {} is this very machine", args.slot)));
    }
    host.declare_dead(args.slot, args.incarnation)?;
    let _service = host.serve()?;
    let deadline = Instant::now() + Duration::from_millis(args.timeout_ms);
    while !is_declared(pool, args)? {
        if Instant::now() >= deadline {
            let message = format!(
                "not published within {} ms: this machine has no manager seat; run this on a machine that has one \
                 (cxlctl hosts)",
                args.timeout_ms
            );
            return Err(Failure::new(Exit::Failed, message));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn is_declared(pool: &Pool, args: &DeclareDeadArgs) -> Result<bool, Failure> {
    let geometry = pool.layout().geometry();
    let (line, place) = (u64::from(args.slot) / SLOTS_PER_FENCE as u64, usize::from(args.slot) % SLOTS_PER_FENCE);
    for seat in 0..u64::from(geometry.seats) {
        let row: DeathLine = pool.lines().fetch(seat * geometry.fence_lines() + line)?;
        if row.dead[place] >= args.incarnation {
            return Ok(true);
        }
    }
    Ok(false)
}
