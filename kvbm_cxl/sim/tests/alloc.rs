// SPDX-License-Identifier: Apache-2.0
//! The allocator on simulated hosts.

use cxl_sim::scenarios::{alloc, alloc_cases};
use cxl_sim::{Scenario, explore, mutation_table, names, strike_all_points};

/// Names of the allocator.
fn of_alloc(names: Vec<&'static str>) -> Vec<&'static str> {
    names.into_iter().filter(|name| name.starts_with("alloc.")).collect()
}

#[test]
fn no_block_has_two_owners_and_none_is_lost() {
    explore("alloc", 400, alloc::run);
}

#[test]
fn a_crash_or_pause_at_any_point_of_the_allocator_is_survived() {
    let points = of_alloc(names::of_pool().expect("the pool's sources").points);
    strike_all_points(&points, 8, 300, |seed, planned| alloc::run_with(seed, Some(planned)));
}

#[test]
fn every_choreography_holds_and_is_played_to_its_end() {
    for &(name, scenario) in alloc_cases::ALL {
        let summary = explore(name, 60, scenario);
        let played = summary.points.get(alloc_cases::PLAYED).copied().unwrap_or(0);
        assert_eq!(played, summary.runs, "{name}");
    }
}

/// `MUTANT=name` runs one.
#[test]
fn every_rule_of_the_allocator_is_needed() {
    let only = std::env::var("MUTANT").ok();
    let mut mutants = of_alloc(names::of_pool().expect("the pool's sources").mutants);
    mutants.retain(|mutant| only.as_ref().is_none_or(|only| mutant == only));
    let scenarios = [&[("alloc", alloc::run as Scenario)], alloc_cases::ALL].concat();
    assert_eq!(mutation_table(&mutants, &scenarios, 4096), [""; 0], "nothing noticed their loss");
}
