// SPDX-License-Identifier: Apache-2.0
//! What hosts count, on simulated hosts.

use cxl_sim::scenarios::stats;
use cxl_sim::{Fault, names, strike_points};

#[test]
fn a_crash_or_pause_at_any_point_of_the_board_loses_no_count() {
    let points = names::of_pool().expect("the pool's sources").points;
    let points: Vec<&str> = points.into_iter().filter(|point| point.starts_with("stats.")).collect();
    let faults = [
        Fault::CrashProcess { restart_after_ns: Some(1_000_000) },
        Fault::PauseHost { for_ns: 30_000_000 },
        Fault::PauseThread { for_ns: 30_000_000 },
    ];
    let run = |seed, planned| stats::run_with(seed, Some(planned));
    let rare = strike_points(&points, &faults, 24, run);
    let unvisited = strike_points(&rare, &faults, 200, run);
    assert_eq!(unvisited, [""; 0], "no run came by there");
}
