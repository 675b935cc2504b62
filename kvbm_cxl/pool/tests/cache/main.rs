// SPDX-License-Identifier: Apache-2.0
//! What every call of the prefix cache does at its limits: full pools, quotas, odd lists, processes and hosts that go, damaged memory. Each
//! answer is a defined one, and nothing hangs. The hosts are emulated by machine identities of their own within this process, except where
//! a process has to be killed.

mod apart;
mod batch;
mod bench;
mod damage;
mod events;
mod fences;
mod heal;
mod lists;
#[path = "../common/load.rs"]
mod load;
mod partitions;
mod processes;
mod publish;
mod quota;
mod room;
mod watch;

/// Not a test of its own: the program of processes that are killed.
#[test]
fn child() {
    processes::run_if_child();
}
