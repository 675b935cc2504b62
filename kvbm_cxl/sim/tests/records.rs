// SPDX-License-Identifier: Apache-2.0
//! Host-owned records on simulated hosts.

use cxl_sim::scenarios::records;
use cxl_sim::{Fault, explore, mutation_table, names, strike_points};

#[test]
fn confirmed_commits_and_accepted_reads_last() {
    explore("records", 200, records::run);
}

#[test]
fn a_crash_or_pause_at_any_point_of_a_commit_is_survived() {
    let points = names::of_pool().expect("the pool's sources").points;
    let points: Vec<_> = points.into_iter().filter(|name| name.starts_with("record.")).collect();
    let restart_after_ns = Some(1_000_000);
    let faults = [
        Fault::CrashMachine { restart_after_ns },
        Fault::CrashProcess { restart_after_ns },
        Fault::PauseHost { for_ns: 30_000_000 },
        Fault::PauseThread { for_ns: 30_000_000 },
    ];
    let unvisited = strike_points(&points, &faults, 12, |seed, planned| records::run_with(seed, Some(planned)));
    assert_eq!(unvisited, [""; 0], "no run came by there");
}

#[test]
fn every_rule_of_a_commit_is_needed() {
    let rules = ["check_then_write", "no_fence_check", "no_seal", "reader_no_fence_check"];
    let mutants = names::of_pool().expect("the pool's sources").mutants;
    let mutants: Vec<_> = mutants.into_iter().filter(|name| name.starts_with("record.") || rules.contains(name)).collect();
    assert_eq!(mutation_table(&mutants, &[("records", records::run)], 1024), [""; 0], "nothing noticed their loss");
}
