// SPDX-License-Identifier: Apache-2.0
//! Choreographies of hosts: those whose end the kernel certifies, on simulated machines with containers; and those of bindings, seats and
//! fences, whose mutants are in mutants.rs.

use cxl_sim::scenarios::{seat_cases, witness_cases};
use cxl_sim::{explore, mutation_table, names};

#[test]
fn every_choreography_holds_and_is_played_to_its_end() {
    for (cases, end, seeds) in [(witness_cases::ALL, witness_cases::PLAYED, 60), (seat_cases::ALL, seat_cases::PLAYED, 8)] {
        for &(name, scenario) in cases {
            let summary = explore(name, seeds, scenario);
            let played = summary.points.get(end).copied().unwrap_or(0);
            assert_eq!(played, summary.runs, "{name}");
        }
    }
}

#[test]
fn every_rule_of_the_kernels_word_is_needed() {
    let mutants = names::of_pool().expect("the pool's sources").mutants;
    let mutants: Vec<&'static str> = mutants.into_iter().filter(|name| name.starts_with("witness.")).collect();
    assert!(mutants.len() >= 5, "{mutants:?}");
    assert_eq!(mutation_table(&mutants, witness_cases::ALL, 4096), [""; 0], "nothing noticed their loss");
}
