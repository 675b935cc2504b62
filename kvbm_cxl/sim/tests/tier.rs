// SPDX-License-Identifier: Apache-2.0
//! Lists of blocks of a storage tier on simulated hosts: every rule of `cxl_pool::cache::tier` is needed, and a fault at any point that a
//! put or a get passes is survived.

use cxl_sim::scenarios::{cache_stage, tier, tier_cases};
use cxl_sim::{Failure, Scenario, Stats, explore, names, search, strike_all_points};

/// Seeds after which a mutant has survived.
const MAX_SEEDS: u64 = 256;
/// Seeds of each choreography.
const SEEDS: u64 = 40;
/// Points of a put and of a get, in their order.
const POINTS: &[&str] = &[
    "cache.reserve", "cache.may_write", "cache.filled", "cache.commit", "cache.ready", "cache.pin", "cache.pin_confirmed", "cache.copying",
    "cache.copied", "cache.fetched_again",
];
/// Every rule that can be dropped, and the choreographies that each notice it.
const RULES: &[(&str, &[&str])] = &[
    ("tier.any_length", &["t1_t2_another_length"]),
    ("tier.drop_does_not_wait", &["t3_get_dropped", "t3_put_dropped"]),
    ("tier.miss_is_got", &["get_of_what_was_evicted"]),
    ("tier.own_rank_is_all", &["t2_a_rank_lacks_it"]),
    ("tier.reserved_is_there", &["t1_key_is_only_reserved", "t1_put_while_evicted"]),
    ("tier.same_memory_twice", &["get_into_the_same_memory"]),
    ("tier.told_before_commit", &["t1_put_while_fenced"]),
    ("tier.turn_after_drop", &["t3_get_dropped_before_it_begins"]),
];

/// The choreography of this name.
fn case(name: &str) -> Scenario {
    tier_cases::ALL.iter().find(|of| of.0 == name).expect("it is listed").1
}

/// A run that counts only if a checker failed it.
fn judged(scenario: Scenario, seed: u64) -> Result<Stats, Failure> {
    match scenario(seed) {
        Err(failure) if !failure.reason.trim_start_matches("invariant violated: ").starts_with(['P', 'T']) => {
            Ok(Stats { seed, ..Stats::default() })
        }
        other => other,
    }
}

#[test]
fn every_choreography_holds_and_is_played_to_its_end() {
    let only = std::env::var("CASE").ok();
    for &(name, scenario) in tier_cases::ALL.iter().filter(|of| only.as_ref().is_none_or(|only| of.0.starts_with(only))) {
        let summary = explore(name, SEEDS, scenario);
        let visits = |point| summary.points.get(point).copied().unwrap_or(0);
        let (played, spoiled) = (visits(cache_stage::PLAYED), visits(cache_stage::SPOILED));
        assert!(played >= summary.runs && spoiled * 10 <= summary.runs, "{name}: {played} scripts of {} runs were played", summary.runs);
    }
}

#[test]
fn blocks_are_got_and_calls_are_dropped() {
    let summary = explore("tier", 60, tier::run);
    let visits = |point| summary.points.get(point).copied().unwrap_or(0);
    println!("{} blocks were got, {} calls were dropped", visits(tier::GOT), visits(tier::DROPPED));
    let few = visits(tier::GOT) < 2 * summary.runs || visits(tier::DROPPED) < summary.runs;
    assert!(std::env::var_os("SEED").is_some() || !few, "{:?} in {} runs", (visits(tier::GOT), visits(tier::DROPPED)), summary.runs);
}

#[test]
fn a_crash_or_pause_at_any_point_of_a_list_is_survived() {
    strike_all_points(POINTS, 4, 100, |seed, planned| tier::run_with(seed, Some(planned)));
}

#[test]
fn every_rule_of_a_tier_is_needed() {
    let only = std::env::var("MUTANT").ok();
    let found: Vec<_> = names::of_pool().expect("the pool's sources").mutants.into_iter().filter(|of| of.starts_with("tier.")).collect();
    assert_eq!(found, RULES.iter().map(|of| of.0).collect::<Vec<_>>());
    let mut survivors = Vec::new();
    for &(mutant, cases) in RULES.iter().filter(|of| only.as_ref().is_none_or(|only| of.0 == only)) {
        for &name in cases {
            match search(0..MAX_SEEDS, Some(mutant), &|seed| judged(case(name), seed)) {
                Err(Failure { seed, reason, .. }) => println!("{mutant:<26} -> {name}, seed {seed}: {reason}"),
                Ok(_) => survivors.push((mutant, name)),
            }
        }
    }
    assert_eq!(survivors, [("", ""); 0], "nothing noticed their loss");
}
