// SPDX-License-Identifier: Apache-2.0
//! Lent blocks on simulated hosts: every rule of LENT.md is needed, and a fault at any point of the protocol is survived.

use cxl_sim::scenarios::{lent, lent_cases};
use cxl_sim::{Failure, Scenario, Stats, explore, names, search, strike_all_points};

/// Seeds after which a mutant has survived.
const MAX_SEEDS: u64 = 1024;
/// Seeds of each choreography.
const SEEDS: u64 = 40;
/// Every rule that can be dropped, and the scenario that notices it soonest.
const RULES: &[(&str, &str)] = &[
    ("lent.freed_while_lent", "z4_successor_in_the_same_memory"),
    ("lent.generation_not_compared", "z1_same_block_again_and_no_pin"),
    ("lent.key_not_compared", "lent"),
    ("lent.lent_unfenced", "z2_taken_back_while_being_lent"),
    ("lent.lent_unflushed", "lent"),
    ("lent.made_unflushed", "z3_bytes_never_written"),
    ("lent.not_looked_at_again", "z1_same_block_again"),
    ("lent.not_taken_back", "lent"),
    ("lent.offered_unfenced", "z2_taken_back_while_being_lent"),
    ("lent.reaps_from_afar", "z5_reaper_on_another_machine"),
    ("lent.reaps_the_living", "lent"),
    ("lent.taken_back_unfenced", "z1_same_block_again"),
];

/// Names of lent blocks.
fn of_lent(names: Vec<&'static str>) -> Vec<&'static str> {
    names.into_iter().filter(|name| name.starts_with("lent.")).collect()
}

/// The scenario of this name.
fn scenario(name: &str) -> Scenario {
    let mut all = lent_cases::ALL.iter().chain(&[("lent", lent::run as Scenario)]).filter(|of| of.0 == name);
    all.next().expect("it is listed").1
}

/// A run that counts only if a checker failed it.
fn judged(scenario: Scenario, seed: u64) -> Result<Stats, Failure> {
    match scenario(seed) {
        Err(failure) if !failure.reason.trim_start_matches("invariant violated: ").starts_with('P') => {
            Ok(Stats { seed, ..Stats::default() })
        }
        other => other,
    }
}

#[test]
fn every_choreography_holds_and_is_played_to_its_end() {
    let only = std::env::var("CASE").ok();
    for &(name, scenario) in lent_cases::ALL.iter().filter(|of| only.as_ref().is_none_or(|only| of.0.starts_with(only))) {
        let summary = explore(name, SEEDS, scenario);
        let played = summary.points.get(lent_cases::PLAYED).copied().unwrap_or(0);
        assert!(played >= summary.runs, "{name}: {played} scripts of {} runs were played", summary.runs);
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
    strike_all_points(&points, 4, 100, |seed, planned| lent::run_with(seed, Some(planned)));
}

#[test]
fn every_rule_of_lent_blocks_is_needed() {
    let only = std::env::var("MUTANT").ok();
    let found = of_lent(names::of_pool().expect("the pool's sources").mutants);
    assert_eq!(found, RULES.iter().map(|of| of.0).collect::<Vec<_>>());
    let mut survivors = Vec::new();
    for &(mutant, name) in RULES.iter().filter(|of| only.as_ref().is_none_or(|only| of.0 == only)) {
        let begin = std::time::Instant::now();
        match search(0..MAX_SEEDS, Some(mutant), &|seed| judged(scenario(name), seed)) {
            Err(Failure { seed, reason, .. }) => {
                println!("{mutant:<30} -> {name}, seed {seed} ({:.1} s): {reason}", begin.elapsed().as_secs_f32())
            }
            Ok(_) => survivors.push(mutant),
        }
    }
    assert_eq!(survivors, [""; 0], "nothing noticed their loss");
}
