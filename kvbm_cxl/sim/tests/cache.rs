// SPDX-License-Identifier: Apache-2.0
//! The prefix cache on simulated hosts.

use cxl_sim::scenarios::cache;
use cxl_sim::{Fault, names, strike_points};

/// Points of the cache.
fn points() -> Vec<&'static str> {
    let names = names::of_pool().expect("the pool's sources").points;
    names.into_iter().filter(|name| name.starts_with("cache.")).collect()
}

#[test]
fn a_crash_or_pause_at_any_point_of_the_cache_is_survived() {
    let restart_after_ns = Some(1_000_000);
    let faults = [
        Fault::CrashMachine { restart_after_ns },
        Fault::CrashProcess { restart_after_ns },
        Fault::PauseHost { for_ns: 30_000_000 },
        Fault::PauseThread { for_ns: 30_000_000 },
    ];
    let run = |seed, planned| cache::run_with(seed, Some(planned));
    // Some of them lie on paths that few seeds take.
    let rare = strike_points(&points(), &faults, 3, run);
    let unvisited = strike_points(&rare, &faults, 100, run);
    assert_eq!(unvisited, [""; 0], "no run came by there");
}
