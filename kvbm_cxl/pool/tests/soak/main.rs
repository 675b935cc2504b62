// SPDX-License-Identifier: Apache-2.0
//! A soak of the prefix cache over real processes: they publish, pull, pin, read in place, evict and clear in a pool that is far too small
//! for all their keys, while they are killed, stopped for longer and shorter than a lease, restarted, and come and go as they please.
//!
//! Every byte that a pull calls a hit is compared with what its publication wrote: **not one may be wrong**. A pinned cell must keep its
//! bytes as long as the host that pinned it is not fenced. Afterwards every healthy host must get on, and one host that is left
//! alone must be able to own, fill and empty every cell. `SOAK_SECONDS` sets how long each soak lasts, `SOAK_SEED` which one.

mod judge;
#[path = "../common/leases.rs"]
mod leases;
mod log;
mod operate;
mod parent;
mod payload;
mod worker;

use parent::{Soak, run};

/// Not a test of its own: the program of the child processes.
#[test]
fn child() {
    if let Some(code) = worker::run_if_child() {
        std::process::exit(code);
    }
}

#[test]
fn on_plain_shared_memory() {
    run(&Soak { name: "native", number: 1, emulator_noise: None, machines: 3, processes_each: 3 });
}

#[test]
fn on_emulated_non_coherent_memory() {
    // One process is one host there: the processes of a real machine share its caches, those of an emulated one do not.
    run(&Soak { name: "emulated", number: 2, emulator_noise: Some(64), machines: 4, processes_each: 1 });
}
