// SPDX-License-Identifier: Apache-2.0
//! Named objects and the lock table on simulated hosts.

use cxl_sim::scenarios::{objects, seal};
use cxl_sim::{explore, mutation_table, names, strike_all_points};

/// Names of the object table and of the lock table.
fn of_tables(names: Vec<&'static str>) -> Vec<&'static str> {
    names.into_iter().filter(|name| name.starts_with("objects.") || name.starts_with("locks.")).collect()
}

#[test]
fn every_answer_about_names_and_locks_fits_one_order() {
    explore("objects", 300, objects::run);
}

#[test]
fn a_crash_or_pause_at_any_point_of_the_tables_is_survived() {
    let points = of_tables(names::of_pool().expect("the pool's sources").points);
    strike_all_points(&points, 12, 200, |seed, planned| objects::run_with(seed, Some(planned)));
}

#[test]
fn every_rule_of_the_tables_and_of_a_commit_is_needed() {
    let of_commits = ["check_then_write", "no_fence_check", "no_seal", "reader_no_fence_check"];
    let found = names::of_pool().expect("the pool's sources").mutants;
    let mut mutants = of_tables(found.clone());
    mutants.extend(found.into_iter().filter(|name| name.starts_with("record.") || of_commits.contains(name)));
    assert_eq!(mutation_table(&mutants, &[("objects", objects::run), ("seal", seal::run)], 1024), [""; 0], "nothing noticed their loss");
}

#[test]
fn an_unbinding_cut_short_leaves_no_name_unreachable() {
    explore("seal", 100, seal::run);
}
