// SPDX-License-Identifier: Apache-2.0
//! `cxlctl seats`.

use crate::cli::{ReleaseArgs, SeatsArgs, SeatsCommand};
use crate::hosts::role;
use crate::output::{Exit, Failure, Out};
use crate::text::table;
use cxl_pool::fsck::{Activity, SeatInfo, Survey, survey, watch};
use cxl_pool::lock::claim::Claimer;
use cxl_pool::machine::Machine;
use cxl_pool::platform::{MachineId, MachineLock, Platform};
use cxl_pool::pool::Pool;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

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
        SeatInfo { is_fixed: true, .. } => "reserved by the format",
        SeatInfo { session: None, .. } => "free",
        SeatInfo { is_over: true, .. } => "released",
        _ => "owned",
    }
}

fn is_claimable(seat: &SeatInfo) -> bool {
    !seat.is_fixed && (seat.session.is_none() || seat.is_over)
}

/// Whether a manager serves now.
fn is_managed(survey: &Survey, activity: &Activity) -> bool {
    survey.seats.iter().any(|seat| seat.is_newest && activity.seats.contains(&seat.seat))
}

fn json_of(survey: &Survey, activity: &Activity) -> Value {
    let seats = survey.seats.iter().map(|seat| {
        json!({"seat": seat.seat, "claim": claim(seat), "machine": seat.machine.map(|id| id.to_string()),
            "session": seat.session.map(|id| id.to_string()), "generation": seat.generation, "epoch": seat.epoch, "beat": seat.beat,
            "moving": activity.seats.contains(&seat.seat), "newest": seat.is_newest, "role": role(seat, activity)})
    });
    json!({"managed": is_managed(survey, activity), "claimable": survey.seats.iter().any(is_claimable), "seats": seats.collect::<Vec<_>>()})
}

fn text_of(survey: &Survey, activity: &Activity) -> String {
    let mut rows = vec![["seat", "claim", "generation", "epoch", "role", "machine"].map(String::from).to_vec()];
    for seat in &survey.seats {
        let epoch = seat.epoch.map_or("?".into(), |epoch| epoch.to_string());
        let machine = seat.machine.map_or("-".into(), |machine| machine.to_string());
        let generation = seat.generation.to_string();
        rows.push(vec![seat.seat.to_string(), claim(seat).into(), generation, epoch, role(seat, activity).into(), machine]);
    }
    let outlook = match (is_managed(survey, activity), survey.seats.iter().any(is_claimable)) {
        (true, _) => "a manager serves",
        (false, true) => "no manager serves: the next machine that joins claims a seat",
        (false, false) => {
            "no manager serves, and no seat can be claimed: start a machine that has one, or, if it is gone for good, run \
             `cxlctl seats release --seat N`"
        }
    };
    format!("{}{outlook}\n", table(&rows))
}

fn release(pool: Option<&str>, args: &ReleaseArgs, out: &mut Out) -> Result<Exit, Failure> {
    let pool = crate::pool::open(pool, false)?;
    let known = survey(pool.lines(), &pool.superblock().seats())?;
    let seats = chosen(&known, args)?;
    if !args.i_know_it_is_gone {
        let told: Vec<String> = seats.iter().map(|(seat, machine, _)| format!("seat {seat} of machine {machine}")).collect();
        let message = format!(
            "{}: if the machine is only paused and goes on, two machines write one line and locks fail. Make sure that it is powered off \
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
            let message = format!("machine {machine} is not gone: the heartbeat of its slot {} moves", host.slot);
            return Err(Failure::new(Exit::Refused, message));
        }
        if activity.seats.contains(seat) {
            return Err(Failure::new(Exit::Refused, format!("machine {machine} is not gone: the beat of its seat {seat} moves")));
        }
    }
    state_ended(&pool, &seats, args.timeout_ms)?;
    let released: Vec<u16> = seats.iter().map(|(seat, ..)| *seat).collect();
    out.answer(
        || json!({"released": released}),
        || {
            let told = seats.iter().map(|(seat, machine, _)| format!("seat {seat} of machine {machine} is released\n"));
            told.collect::<String>() + "the next machine that joins claims it\n"
        },
    )?;
    Ok(Exit::Done)
}

/// The seats that are meant: number, machine and session.
fn chosen(known: &Survey, args: &ReleaseArgs) -> Result<Vec<(u16, MachineId, MachineId)>, Failure> {
    let machine = args.machine.as_deref().map(crate::format::machine).transpose()?;
    let is_meant = |seat: &&SeatInfo| match (args.seat, machine) {
        (Some(number), _) => seat.seat == number,
        (None, machine) => machine.is_some() && seat.machine == machine && !seat.is_fixed && !seat.is_over,
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
        .map(|seat| match (seat.machine, seat.session) {
            _ if seat.is_fixed => Err(Failure::new(
                Exit::Refused,
                format!("seat {} is reserved by the format for its machine for ever: only a new format gives it away", seat.seat),
            )),
            _ if seat.is_over => Err(Failure::usage(format!("seat {} is released already", seat.seat))),
            (Some(machine), Some(session)) => Ok((seat.seat, machine, session)),
            _ => Err(Failure::usage(format!("seat {} is free: no machine has it", seat.seat))),
        })
        .collect()
}

fn state_ended(pool: &Pool, seats: &[(u16, MachineId, MachineId)], timeout_ms: u64) -> Result<(), Failure> {
    let machine = Machine::for_pool(pool.superblock().uuid(), pool.faults().clone())?;
    if let Some((seat, ..)) = seats.iter().find(|(_, owner, _)| *owner == machine.machine()) {
        let message = format!("seat {seat} is this very machine's: its next process takes it by itself");
        return Err(Failure::new(Exit::Refused, message));
    }
    let deadline = Instant::now() + Duration::from_millis(timeout_ms);
    let _claiming = loop {
        if let Some(guard) = machine.try_lock(MachineLock::Claim, true)? {
            break guard;
        }
        if Instant::now() >= deadline {
            let message = format!("another process of this machine has been claiming a seat for {timeout_ms} ms: is it stopped?");
            return Err(Failure::new(Exit::Failed, message));
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let claimer = Claimer { lines: pool.lines(), platform: &machine };
    for (seat, _, session) in seats {
        claimer.state_ended((*seat).into(), &session.0)?;
    }
    Ok(())
}
