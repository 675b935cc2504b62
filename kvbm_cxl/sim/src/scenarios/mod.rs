// SPDX-License-Identifier: Apache-2.0
//! Scenarios: what the simulated hosts do, what goes wrong meanwhile, and what must hold.
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
pub mod directed;
pub mod duel;
pub mod history;
pub mod join;
pub mod ledger;
pub mod lent;
pub mod lent_cases;
pub mod linear;
pub mod lock;
pub mod names;
pub mod objects;
pub mod order;
pub mod patience;
pub mod rebind;
pub mod records;
pub mod ring;
pub mod seal;
pub mod setup;
pub mod stall;
pub mod stats;
pub mod sticky;
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
    ("zombie", zombie::run),
    ("rebind", rebind::run),
    ("stall", stall::run),
    ("patience", patience::run),
    ("sticky", sticky::run),
    ("alloc", alloc::run),
    ("records", records::run),
    ("objects", objects::run),
    ("seal", seal::run),
    ("stats", stats::run),
    ("ring", ring::run),
    ("names", names::run),
    ("cache", cache::run),
    ("lent", lent::run),
];
