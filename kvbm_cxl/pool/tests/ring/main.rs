// SPDX-License-Identifier: Apache-2.0
//! Rings and calls between real hosts: in one process, where every end can be looked at, and in processes of their own that are killed and
//! stopped, on plain memory and on emulated memory without coherence.

mod lab;
#[path = "../common/load.rs"]
mod load;
mod processes;
mod threads;
mod worker;

/// Not a test of its own: the program of the child processes.
#[test]
fn child() {
    if let Some(code) = worker::run_if_child() {
        std::process::exit(code);
    }
}
