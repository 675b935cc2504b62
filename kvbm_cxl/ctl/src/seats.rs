// SPDX-License-Identifier: Apache-2.0
//! `cxlctl seats`.

use crate::cli::{ReleaseArgs, SeatsArgs, SeatsCommand};
use crate::hosts::{name_text, role};
use crate::output::{Exit, Failure, Out};
use crate::text::table;
use crate::wait;
use cxl_pool::fsck::{Activity, SeatInfo, Survey, survey, watch};
use cxl_pool::lock::claim::Claimer;
use cxl_pool::machine::Machine;
use cxl_pool::platform::{MachineId, MachineLock, Platform};
use cxl_pool::pool::Pool;
use serde_json::{Value, json};
use std::time::Duration;

/// How long heartbeats are watched before a seat may be released, in milliseconds: many periods of the slowest usual one.
const STILL_MS: u64 = 1_000;

/// `cxlctl seats`.
pub fn run(pool: Option<&str>, args: &SeatsArgs, out: &mut Out) -> Result<Exit, Failure> {
    if let Some(SeatsCommand::Release(args)) = &args.command {
        return release(pool, args, out);
    }
    let pool = crate::pool::open(pool, true)?;
    let activity = watch(pool.lines(), Duration::from_millis(args.watch_ms), true)?;
    let survey = survey(pool.lines(), &pool.superblock().seats())?;
    out.answer(|| json_of(&survey, &activity), || text_of(&survey, &activity))?;
    Ok(Exit::Done)
}

/// Whose a seat is.
fn claim(seat: &SeatInfo) -> &'static str {
    match seat {
        SeatInfo { slot: Some(_), is_living: true, .. } => "of a host",
        SeatInfo { slot: Some(_), is_over: true, .. } => "free with its slot",
        SeatInfo { slot: Some(_), .. } => "of a host that is gone",
        SeatInfo { is_fixed: true, .. } => "reserved by the format",
        SeatInfo { session: None, .. } => "free",
        SeatInfo { is_over: true, .. } => "released",
        _ => "owned",
    }
}

fn is_claimable(seat: &SeatInfo) -> bool {
    seat.slot.is_none() && !seat.is_fixed && (seat.session.is_none() || seat.is_over)
}

/// Whether a manager serves now.
fn is_managed(survey: &Survey, activity: &Activity) -> bool {
    survey.seats.iter().any(|seat| seat.is_newest && activity.seats.contains(&seat.seat))
}

/// Machines that have a seat and live: those that can take the management over. By what the lines say, and by heartbeats that move.
fn living(survey: &Survey, activity: &Activity) -> Vec<MachineId> {
    let moves = |machine| survey.slots.iter().any(|slot| slot.machine == machine && activity.slots.contains(&slot.slot));
    let mut machines: Vec<MachineId> =
        survey.seats.iter().filter(|seat| seat.is_living).filter_map(|seat| seat.machine).filter(|machine| moves(*machine)).collect();
    machines.sort_unstable_by_key(|machine| machine.0);
    machines.dedup();
    machines
}

fn json_of(survey: &Survey, activity: &Activity) -> Value {
    let seats = survey.seats.iter().map(|seat| {
        json!({"seat": seat.seat, "slot": seat.slot, "claim": claim(seat), "machine": seat.machine.map(|id| id.to_string()),
            "name": seat.machine.and_then(|id| survey.name_of(id)), "session": seat.session.map(|id| id.to_string()),
            "generation": seat.generation, "epoch": seat.epoch, "beat": seat.beat,
            "living": seat.is_living, "moving": activity.seats.contains(&seat.seat), "newest": seat.is_newest,
            "role": role(seat, activity)})
    });
    json!({"managed": is_managed(survey, activity), "claimable": survey.seats.iter().any(is_claimable),
        "living": living(survey, activity).len(), "outlook": outlook(survey, activity), "seats": seats.collect::<Vec<_>>()})
}

fn text_of(survey: &Survey, activity: &Activity) -> String {
    let mut rows = vec![["seat", "slot", "claim", "generation", "epoch", "role", "name", "machine"].map(String::from).to_vec()];
    // Seats of slots that no machine ever had come with the slot.
    for seat in survey.seats.iter().filter(|seat| seat.slot.is_none() || seat.generation > 0) {
        let epoch = seat.epoch.map_or("?".into(), |epoch| epoch.to_string());
        let machine = seat.machine.map_or("-".into(), |machine| machine.to_string());
        let (slot, generation) = (seat.slot.map_or("-".into(), |slot| slot.to_string()), seat.generation.to_string());
        let name = name_text(seat.machine.and_then(|machine| survey.name_of(machine)));
        rows.push(vec![seat.seat.to_string(), slot, claim(seat).into(), generation, epoch, role(seat, activity).into(), name, machine]);
    }
    format!("{}{}\n", table(&rows), outlook(survey, activity))
}

/// Who serves, and what follows if that machine dies.
fn outlook(survey: &Survey, activity: &Activity) -> String {
    let can_join = survey.seats.iter().any(is_claimable);
    match (is_managed(survey, activity), living(survey, activity).len()) {
        (true, others @ 2..) => {
            format!("a manager serves; if its machine dies, one of {} other machines with a seat takes over", others - 1)
        }
        (true, _) if can_join => {
            "a manager serves, and no other machine has a seat; if it dies, the next machine that joins claims one".into()
        }
        (true, _) => "a manager serves, and no other machine has a seat; if it dies, nothing serves until that machine is back, or an \
                      operator runs `cxlctl seats release --seat N`"
            .into(),
        (false, others @ 1..) => format!("no manager serves now: one of {others} machines with a seat takes over within a few seconds"),
        (false, 0) if can_join => "no manager serves: the next machine that joins claims a seat".into(),
        (false, 0) => "no manager serves, and no seat can be claimed: start a machine that has one, or, if it is gone for good, run \
                       `cxlctl seats release --seat N`"
            .into(),
    }
}

fn release(pool: Option<&str>, args: &ReleaseArgs, out: &mut Out) -> Result<Exit, Failure> {
    let pool = crate::pool::open(pool, false)?;
    let known = survey(pool.lines(), &pool.superblock().seats())?;
    let seats = select_seats(&known, args)?;
    if !args.i_know_it_is_gone {
        let told: Vec<String> =
            seats.iter().map(|(seat, machine, _)| format!("seat {seat} of machine {}", known.machine_text(*machine))).collect();
        let message = format!(
            "{}: if the machine is only paused and resumes, two machines write one line and locks fail. Make sure that it is powered off \
             or cut off from the memory, or that its container and all of its processes are gone, then repeat this with \
             --i-know-it-is-gone",
            told.join(", ")
        );
        return Err(Failure::new(Exit::Refused, message));
    }
    let activity = watch(pool.lines(), Duration::from_millis(STILL_MS), true)?;
    for (seat, machine, _) in &seats {
        let host = known.slots.iter().find(|slot| slot.machine == *machine && activity.slots.contains(&slot.slot));
        if let Some(host) = host {
            let machine = known.machine_text(*machine);
            let message = format!("machine {machine} is not gone: the heartbeat of its slot {} moves", host.slot);
            return Err(Failure::new(Exit::Refused, message));
        }
        if activity.seats.contains(seat) {
            let message = format!("machine {} is not gone: the beat of its seat {seat} moves", known.machine_text(*machine));
            return Err(Failure::new(Exit::Refused, message));
        }
    }
    release_all(&pool, &seats, args.timeout_ms)?;
    let released: Vec<u16> = seats.iter().map(|(seat, ..)| *seat).collect();
    out.answer(
        || json!({"released": released}),
        || {
            let told =
                seats.iter().map(|(seat, machine, _)| format!("seat {seat} of machine {} is released\n", known.machine_text(*machine)));
            told.collect::<String>() + "the next machine that joins claims it\n"
        },
    )?;
    Ok(Exit::Done)
}

/// The seats that are meant: number, machine and session.
fn select_seats(known: &Survey, args: &ReleaseArgs) -> Result<Vec<(u16, MachineId, MachineId)>, Failure> {
    let machine = args.machine.as_deref().map(crate::format::machine).transpose()?;
    let is_meant = |seat: &&SeatInfo| match (args.seat, machine) {
        (Some(number), _) => seat.seat == number,
        (None, machine) => machine.is_some() && seat.machine == machine && !seat.is_fixed && !seat.is_over && seat.slot.is_none(),
    };
    let meant: Vec<&SeatInfo> = known.seats.iter().filter(is_meant).collect();
    if meant.is_empty() {
        let message = match args.seat {
            Some(seat) => format!("seat {seat} does not exist: the pool has {} seats", known.seats.len()),
            None => "this machine has no seat (`cxlctl seats` lists them)".into(),
        };
        return Err(Failure::usage(message));
    }
    meant
        .into_iter()
        .map(|seat| match (seat.slot, seat.machine, seat.session) {
            (Some(slot), ..) => Err(Failure::usage(format!(
                "seat {} belongs to slot {slot}: `cxlctl hosts declare-dead` gives both to another machine",
                seat.seat
            ))),
            _ if seat.is_fixed => Err(Failure::new(
                Exit::Refused,
                format!("seat {} is reserved by the format for its machine for ever: only a new format gives it away", seat.seat),
            )),
            _ if seat.is_over => Err(Failure::usage(format!("seat {} is released already", seat.seat))),
            (None, Some(machine), Some(session)) => Ok((seat.seat, machine, session)),
            _ => Err(Failure::usage(format!("seat {} is free: no machine has it", seat.seat))),
        })
        .collect()
}

fn release_all(pool: &Pool, seats: &[(u16, MachineId, MachineId)], timeout_ms: u64) -> Result<(), Failure> {
    let machine = Machine::for_pool(pool.superblock().uuid(), pool.faults().clone())?;
    if let Some((seat, ..)) = seats.iter().find(|(_, owner, _)| *owner == machine.machine()) {
        let message = format!("seat {seat} is this very machine's: its next process takes it by itself");
        return Err(Failure::new(Exit::Refused, message));
    }
    let guard = wait::until(timeout_ms, || Ok(machine.try_lock(MachineLock::Claim, true)?))?;
    let _claiming = guard.ok_or_else(|| {
        let message = format!("another process of this machine has been claiming a seat for {timeout_ms} ms: is it stopped?");
        Failure::new(Exit::Failed, message)
    })?;
    let claimer = Claimer { lines: pool.lines(), platform: &machine };
    for (seat, _, session) in seats {
        claimer.state_ended((*seat).into(), &session.0)?;
    }
    Ok(())
}
