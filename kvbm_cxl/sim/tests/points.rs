// SPDX-License-Identifier: Apache-2.0
//! Whatever strikes at whichever named point of the production code, the run stays correct: a crash of the machine, a crash of the process,
//! and a pause of the host for longer than its lease.

use cxl_sim::scenarios::{damage, duel, rebind, seats, setup, witness_cases, zombie};
use cxl_sim::{Failure, Fault, Planned, Stats, When, names, search};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

type Scenario = fn(u64, Option<Planned>) -> Result<Stats, Failure>;

/// Seeds for each fault at each point.
const SEEDS: u64 = 32;
/// Longer than the time-out of every scenario, with what a wrong suspicion adds to it.
const PAUSE_NS: u64 = 40_000_000;

const MACHINE: Fault = Fault::CrashMachine { restart_after_ns: Some(2_000_000) };
const PROCESS: Fault = Fault::CrashProcess { restart_after_ns: Some(2_000_000) };
const PAUSE: Fault = Fault::PauseHost { for_ns: PAUSE_NS };

/// Containers of one machine, one of which crashed.
fn released(seed: u64, planned: Option<Planned>) -> Result<Stats, Failure> {
    planned.map_or_else(|| Ok(Stats::default()), |planned| witness_cases::run_with(seed, planned))
}

/// Lines of seats that no member keeps are lost.
fn damage_of_slot_seats(seed: u64, planned: Option<Planned>) -> Result<Stats, Failure> {
    setup::over_slot_seats(|seed| damage::run_with(seed, planned), seed)
}

/// The scenarios that come by at a point.
fn scenarios_at(point: &str) -> Vec<Scenario> {
    match point.split('.').next().unwrap_or_default() {
        "witness" => vec![released],
        _ if matches!(point, "join.beside" | "manager.reported") => vec![released],
        _ if point == "manager.seat_mended" => vec![damage::run_with],
        _ if point == "manager.open_seat_mended" => vec![damage_of_slot_seats],
        _ if point == "claim.ended_here" => vec![witness_cases::run_among_joiners],
        "claim" => vec![seats::run_with],
        "record" => vec![zombie::run_with],
        "join" | "leave" => vec![rebind::run_with],
        _ => vec![duel::run_with, rebind::run_with],
    }
}

/// Inflicts `fault` at early visits of `point` and tells how often it struck.
fn strike(point: &'static str, fault: Fault) -> u64 {
    let seeds = std::env::var("SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(SEEDS);
    let struck = AtomicU64::new(0);
    for scenario in scenarios_at(point) {
        let run = |number: u64| {
            // Lines that a machine leaves half written when it loses power are not what this is about: even seeds write whole ones.
            let seed = if fault == MACHINE { 2 * number } else { number };
            let visit = 1 + number % 4;
            let stats = scenario(seed, Some(Planned { when: When::Point(point, visit), host: None, fault }))?;
            if stats.points.get(point).is_some_and(|visits| *visits >= visit) {
                struck.fetch_add(1, SeqCst);
            }
            Ok(stats)
        };
        if let Err(failure) = search(0..seeds, None, &run) {
            let trace = failure.trace[failure.trace.len().saturating_sub(40)..].join("\n");
            panic!("{fault:?} at {point}: {failure}\n{trace}");
        }
    }
    struck.into_inner()
}

/// Points with a test of their own: alloc.rs, objects.rs, stats.rs and ring.rs.
const ELSEWHERE: [&str; 6] = ["alloc.", "objects.", "locks.", "stats.", "ring.", "cache."];

/// Strikes at every point but those struck elsewhere.
fn strike_all(fault: Fault) {
    let mut unstruck = Vec::new();
    let mut total = 0;
    for point in names::of_pool().expect("the pool's sources").points {
        if !ELSEWHERE.iter().any(|of| point.starts_with(of)) {
            let struck = strike(point, fault);
            total += struck;
            if struck == 0 {
                unstruck.push(point);
            }
        }
    }
    println!("{fault:?}: struck {total} times");
    assert_eq!(unstruck, [""; 0], "{fault:?} never struck there");
}

#[test]
fn a_machine_crashes_at_every_point() {
    strike_all(MACHINE);
}

#[test]
fn a_process_is_killed_at_every_point() {
    strike_all(PROCESS);
}

#[test]
fn a_host_stands_still_at_every_point() {
    strike_all(PAUSE);
}
