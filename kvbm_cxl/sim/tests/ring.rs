// SPDX-License-Identifier: Apache-2.0
//! Rings and calls on simulated hosts.

use cxl_sim::scenarios::{names as listeners, ring};
use cxl_sim::{Fault, explore, mutation_table, names, strike_points};

/// Names of the rings.
fn of_rings(names: Vec<&'static str>) -> Vec<&'static str> {
    names.into_iter().filter(|name| name.starts_with("ring.")).collect()
}

#[test]
fn messages_arrive_in_order_once_unaltered_or_an_error_does() {
    explore("ring", 300, ring::run);
}

#[test]
fn a_crash_or_pause_at_any_point_of_a_connection_is_survived() {
    let points = of_rings(names::of_pool().expect("the pool's sources").points);
    // A table of names that is full is the other scenario's.
    let (of_names, points): (Vec<_>, Vec<_>) = points.into_iter().partition(|point| *point == "ring.forgetting");
    let restart_after_ns = Some(1_000_000);
    let faults = [
        Fault::CrashMachine { restart_after_ns },
        Fault::CrashProcess { restart_after_ns },
        Fault::PauseHost { for_ns: 60_000_000 },
        Fault::PauseThread { for_ns: 60_000_000 },
    ];
    let run = |seed, planned| ring::run_with(seed, Some(planned));
    // Some of them lie on paths that few seeds take.
    let rare = strike_points(&points, &faults, 8, run);
    let unvisited = strike_points(&rare, &faults, 200, run);
    assert_eq!(unvisited, [""; 0], "no run came by there");
    let unvisited = strike_points(&of_names, &faults, 40, |seed, planned| listeners::run_with(seed, Some(planned)));
    assert_eq!(unvisited, [""; 0], "no run came by there");
}

#[test]
fn every_rule_of_the_rings_is_needed() {
    let mutants = of_rings(names::of_pool().expect("the pool's sources").mutants);
    // Each scenario comes by at its own rules only: the other one would run all its seeds in vain.
    let (of_names, of_rings): (Vec<_>, Vec<_>) =
        mutants.into_iter().partition(|mutant| ["ring.close_any", "ring.forget_any", "ring.take_over_any"].contains(mutant));
    assert_eq!(of_names.len(), 3);
    assert_eq!(mutation_table(&of_names, &[("names", listeners::run)], 4096), [""; 0], "nothing noticed their loss");
    assert_eq!(mutation_table(&of_rings, &[("ring", ring::run)], 4096), [""; 0], "nothing noticed their loss");
}
