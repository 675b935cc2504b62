// SPDX-License-Identifier: Apache-2.0
//! Every scenario on many seeds: nothing fails while no rule is dropped.
//!
//! `SEEDS=10000` for a long night, `SEED=n` to replay one seed of one test with its whole trace.

use cxl_sim::{explore, scenarios};

/// Runs the scenario of this name on so many seeds, unless the environment says otherwise.
fn holds(name: &str, seeds: u64) {
    let (name, scenario) = scenarios::ALL.iter().find(|of| of.0 == name).expect("the scenario is listed");
    explore(name, seeds, scenario);
}

macro_rules! scenarios {
    ($($(#[$mark:meta])* $name:ident: $seeds:literal),* $(,)?) => {
        $(
            #[test]
            $(#[$mark])*
            fn $name() {
                holds(stringify!($name), $seeds);
            }
        )*

        #[test]
        fn every_scenario_is_run() {
            let run = [$(stringify!($name)),*];
            let missing: Vec<&str> = scenarios::ALL.iter().map(|of| of.0).filter(|name| !run.contains(name)).collect();
            assert_eq!(missing, [""; 0], "scenarios without a test");
        }
    };
}

scenarios! {
    order: 2000,
    copy: 1000,
    lock: 200,
    join: 200,
    duel: 1000,
    damage: 1000,
    damage_of_claimed_seats: 500,
    zombie: 1000,
    rebind: 1000,
    seats: 1000,
    lock_over_slot_seats: 100,
    join_over_slot_seats: 100,
    duel_over_slot_seats: 500,
    zombie_over_slot_seats: 300,
    rebind_over_slot_seats: 500,
    damage_of_slot_seats: 300,
    replaced: 60,
    replaced_a_hundred_times: 2,
    left_together: 60,
    stall: 1000,
    patience: 300,
    failover: 200,
    failover_storm: 20,
    failover_rejoined: 100,
    sticky: 200,
    alloc: 200,
    records: 100,
    reformat: 100,
    names: 100,
    closes_late: 100,
    takes_over_late: 100,
    forgets_late: 100,
    ring_ends: 210,
    objects: 100,
    seal: 100,
    stats: 300,
    ring: 100,
    cache: 200,
    tier: 200,
}
