// SPDX-License-Identifier: Apache-2.0
//! Scenarios: the work of the simulated hosts, the faults, and the properties that must hold.
//!
//! A scenario is a function of its seed. Each begins with faults by chance and ends with a quiet time in which every live host has to get
//! through (V9), because a run whose threads do not end in time fails.

pub mod alloc;
pub mod alloc_cases;
pub mod cache;
pub mod cache_cases;
pub mod cache_ledger;
pub mod cache_ops;
pub mod cache_stage;
pub mod copy;
pub mod damage;
pub mod directed;
pub mod duel;
pub mod failover;
pub mod history;
pub mod join;
pub mod ledger;
pub mod linear;
pub mod lock;
pub mod names;
pub mod objects;
pub mod order;
pub mod patience;
pub mod rebind;
pub mod records;
pub mod reformat;
pub mod replaced;
pub mod ring;
pub mod ring_ends;
pub mod seal;
pub mod seat_cases;
pub mod seats;
pub mod setup;
pub mod stall;
pub mod stats;
pub mod sticky;
pub mod tier;
pub mod tier_cases;
pub mod tier_memory;
pub mod witness_cases;
pub mod zombie;

use crate::{Failure, Stats};

/// A scenario.
pub type Scenario = fn(u64) -> Result<Stats, Failure>;

/// Every scenario with the name under which its seeds are replayed.
pub const ALL: &[(&str, Scenario)] = &[
    ("order", order::run),
    ("copy", copy::run),
    ("lock", lock::run),
    ("join", join::run),
    ("duel", duel::run),
    ("damage", damage::run),
    ("damage_of_claimed_seats", damage::run_with_claimed_seats),
    ("zombie", zombie::run),
    ("rebind", rebind::run),
    ("lock_over_slot_seats", |seed| setup::over_slot_seats(lock::run, seed)),
    ("join_over_slot_seats", |seed| setup::over_slot_seats(join::run, seed)),
    ("duel_over_slot_seats", |seed| setup::over_slot_seats(duel::run, seed)),
    ("zombie_over_slot_seats", |seed| setup::over_slot_seats(zombie::run, seed)),
    ("rebind_over_slot_seats", |seed| setup::over_slot_seats(rebind::run, seed)),
    ("damage_of_slot_seats", |seed| setup::over_slot_seats(damage::run_with_claimed_seats, seed)),
    ("replaced", replaced::run),
    ("replaced_a_hundred_times", replaced::run_long),
    ("left_together", replaced::left_together),
    ("seats", seats::run),
    ("stall", stall::run),
    ("patience", patience::run),
    ("failover", failover::run),
    ("failover_storm", failover::storm),
    ("failover_rejoined", failover::rejoined),
    ("sticky", sticky::run),
    ("alloc", alloc::run),
    ("records", records::run),
    ("reformat", reformat::run),
    ("objects", objects::run),
    ("seal", seal::run),
    ("stats", stats::run),
    ("ring", ring::run),
    ("ring_ends", ring_ends::run),
    ("names", names::run),
    ("closes_late", names::closes_late),
    ("takes_over_late", names::takes_over_late),
    ("forgets_late", names::forgets_late),
    ("cache", cache::run),
    ("tier", tier::run),
];
