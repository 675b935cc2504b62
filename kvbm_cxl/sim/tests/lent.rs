// SPDX-License-Identifier: Apache-2.0
//! Lent blocks on simulated hosts: every rule of LENT.md is needed, and a fault at any point of the protocol is survived.

use cxl_sim::scenarios::lent;
use cxl_sim::{Fault, Stats, explore, names, run_mutant, strike_points};

/// Names of lent blocks.
fn of_lent(names: Vec<&'static str>) -> Vec<&'static str> {
    names.into_iter().filter(|name| name.starts_with("lent.")).collect()
}

/// A run that counts only if a checker failed it.
fn judged(seed: u64) -> Result<Stats, cxl_sim::Failure> {
    match lent::run(seed) {
        Err(failure) if !failure.reason.trim_start_matches("invariant violated: ").starts_with(['P']) => {
            Ok(Stats { seed, ..Stats::default() })
        }
        other => other,
    }
}

#[test]
fn lent_blocks_are_pulled() {
    let summary = explore("lent", 60, lent::run);
    let hits = summary.points.get(lent::HIT).copied().unwrap_or(0);
    println!("{hits} blocks were pulled from where they were lent");
    assert!(std::env::var_os("SEED").is_some() || hits > summary.runs, "{hits} lent blocks were pulled in {} runs", summary.runs);
}

#[test]
fn a_crash_or_pause_at_any_point_is_survived() {
    let points = of_lent(names::of_pool().expect("the pool's sources").points);
    let restart_after_ns = Some(1_000_000);
    let faults = [
        Fault::CrashMachine { restart_after_ns },
        Fault::CrashProcess { restart_after_ns },
        Fault::PauseHost { for_ns: 30_000_000 },
        Fault::PauseThread { for_ns: 30_000_000 },
    ];
    let run = |seed, planned| lent::run_with(seed, Some(planned));
    // Some of them lie on paths that few seeds take.
    let rare = strike_points(&points, &faults, 4, run);
    let unvisited = strike_points(&rare, &faults, 100, run);
    assert_eq!(unvisited, [""; 0], "no run came by there");
}

#[test]
fn every_rule_of_lent_blocks_is_needed() {
    let only = std::env::var("MUTANT").ok();
    let mut survivors = Vec::new();
    for mutant in of_lent(names::of_pool().expect("the pool's sources").mutants) {
        if only.as_ref().is_some_and(|only| only != mutant) {
            continue;
        }
        let begin = std::time::Instant::now();
        match run_mutant(mutant, &[("lent", judged)], 4096) {
            Some(kill) => {
                println!("{mutant:<32} -> {}, seed {} ({:.1} s): {}", kill.scenario, kill.seed, begin.elapsed().as_secs_f32(), kill.reason)
            }
            None => survivors.push(mutant),
        }
    }
    assert_eq!(survivors, [""; 0], "nothing noticed their loss");
}
