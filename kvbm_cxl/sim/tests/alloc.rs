// SPDX-License-Identifier: Apache-2.0
//! The allocator on simulated hosts.

use cxl_sim::scenarios::alloc;
use cxl_sim::{explore, mutation_table, names};

/// Names of the allocator.
fn of_alloc(names: Vec<&'static str>) -> Vec<&'static str> {
    names.into_iter().filter(|name| name.starts_with("alloc.")).collect()
}

#[test]
fn no_block_has_two_owners_and_none_is_lost() {
    let summary = explore("alloc", 1000, alloc::run);
    if std::env::var("SEED").is_err() {
        let points = of_alloc(names::of_pool().expect("the pool's sources").points);
        for p in &points { println!("{p} {:?}", summary.points.get(p)); }
        assert_eq!(summary.unvisited(&points), [""; 0], "no run came by there");
    }
}

#[test]
fn every_rule_of_the_allocator_is_needed() {
    let mutants = of_alloc(names::of_pool().expect("the pool's sources").mutants);
    assert_eq!(mutation_table(&mutants, &[("alloc", alloc::run)], 4096), [""; 0], "nothing noticed their loss");
}
