// SPDX-License-Identifier: Apache-2.0
//! Rings and calls on simulated hosts.

use cxl_sim::scenarios::{names as listeners, ring, ring_ends};
use cxl_sim::{Fault, Scenario, explore, mutation_table, names, strike_points};

/// Every rule that can be dropped, and the scenario that notices it soonest. `MUTANT=name` runs one.
const RULES: &[(&str, &str, Scenario)] = &[
    ("ring.accept_again", "ring", ring::run),
    ("ring.any_answer", "ring", ring::run),
    ("ring.any_instance", "ring_ends", ring_ends::run),
    ("ring.close_any", "closes_late", listeners::closes_late),
    ("ring.closed_is_received", "ring_ends", ring_ends::run),
    ("ring.closed_means_empty", "ring_ends", ring_ends::run),
    ("ring.drop_unfenced", "ring", ring::run),
    ("ring.ended_is_received", "ring_ends", ring_ends::run),
    ("ring.forget_any", "forgets_late", listeners::forgets_late),
    ("ring.free_unfenced", "ring", ring::run),
    ("ring.lost_is_closed", "ring_ends", ring_ends::run),
    ("ring.no_full_check", "ring", ring::run),
    ("ring.no_nonce", "ring", ring::run),
    ("ring.no_peer_check", "ring", ring::run),
    ("ring.no_sequence", "ring", ring::run),
    ("ring.reused_half_waits", "ring_ends", ring_ends::run),
    ("ring.rpc_any_call", "ring", ring::run),
    ("ring.silent_for_ever", "ring_ends", ring_ends::run),
    ("ring.take_over_any", "takes_over_late", listeners::takes_over_late),
    ("ring.told_before_read", "ring", ring::run),
];

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
fn every_end_of_a_connection_is_told_as_it_is() {
    explore("ring_ends", 140, ring_ends::run);
    explore("closes_late", 40, listeners::closes_late);
    explore("takes_over_late", 40, listeners::takes_over_late);
    explore("forgets_late", 40, listeners::forgets_late);
}

#[test]
fn every_rule_of_the_rings_is_needed() {
    let only = std::env::var("MUTANT").ok();
    let found = of_rings(names::of_pool().expect("the pool's sources").mutants);
    assert_eq!(found, RULES.iter().map(|of| of.0).collect::<Vec<_>>());
    let mut survivors = Vec::new();
    for &(mutant, name, scenario) in RULES.iter().filter(|of| only.as_ref().is_none_or(|only| of.0 == only)) {
        survivors.extend(mutation_table(&[mutant], &[(name, scenario)], 4096));
    }
    assert_eq!(survivors, [""; 0], "nothing noticed their loss");
}
