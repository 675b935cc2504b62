// SPDX-License-Identifier: Apache-2.0
//! A storm over real processes on a pool in /dev/shm: hosts are killed, stopped for longer than their lease and continued, restarted, all
//! the time, while they count under a lock, allocate and free, publish named objects and check each other's bytes.
//!
//! Nothing may hang, no byte may be wrong, no count may be lost or doubled, and the pool has to check clean afterwards. `STORM_SECONDS`
//! sets how long each storm rages, `STORM_SEED` which one.

#[path = "../common/leases.rs"]
mod leases;
mod log;
mod parent;
mod worker;

use parent::{Storm, rage};

/// Not a test of its own: the program of the child processes.
#[test]
fn child() {
    if let Some(code) = worker::run_if_child() {
        std::process::exit(code);
    }
}

#[test]
fn on_plain_shared_memory() {
    rage(&Storm { name: "native", coherence: None, machines: 3, processes_each: 2 });
}

#[test]
fn on_emulated_non_coherent_memory() {
    // One process is one host there: the processes of a real machine share its caches, those of an emulated one do not.
    rage(&Storm { name: "emulated", coherence: Some("emulated:seed=11,noise=64"), machines: 4, processes_each: 1 });
}
