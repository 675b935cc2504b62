// SPDX-License-Identifier: Apache-2.0
//! A machine whose clock can be put forward, so that the pool's ticks go by as in the recorded time while the requests of an hour are
//! replayed in seconds.

use cxl_pool::Result;
use cxl_pool::machine::Machine;
use cxl_pool::platform::{LocalMemory, MachineId, MachineLock, MachineLockGuard, Platform, ProcessId};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The machine, ahead of its own time.
pub struct Ahead {
    machine: Machine,
    ahead_ns: AtomicU64,
}

impl Ahead {
    /// At the machine's own time.
    pub fn new(machine: Machine) -> Self {
        Ahead { machine, ahead_ns: AtomicU64::new(0) }
    }

    /// Puts the clock forward. Waits take as long as before.
    pub fn put_forward(&self, ns: u64) {
        self.ahead_ns.fetch_add(ns, Ordering::Relaxed);
    }

    fn ahead(&self, now_ns: u64) -> u64 {
        now_ns.saturating_add(self.ahead_ns.load(Ordering::Relaxed))
    }
}

impl Platform for Ahead {
    fn machine(&self) -> MachineId {
        self.machine.machine()
    }

    fn process(&self) -> ProcessId {
        self.machine.process()
    }

    fn is_alive(&self, process: ProcessId) -> bool {
        self.machine.is_alive(process)
    }

    fn now_ns(&self) -> u64 {
        self.ahead(self.machine.now_ns())
    }

    fn now_coarse_ns(&self) -> u64 {
        self.ahead(self.machine.now_coarse_ns())
    }

    fn sleep_ns(&self, ns: u64) {
        self.machine.sleep_ns(ns);
    }

    fn relax(&self, round: u32) {
        self.machine.relax(round);
    }

    fn park(&self, word: &AtomicU32, expected: u32, timeout_ns: u64) {
        self.machine.park(word, expected, timeout_ns);
    }

    fn wake(&self, word: &AtomicU32) {
        self.machine.wake(word);
    }

    fn random(&self) -> u64 {
        self.machine.random()
    }

    fn try_lock(&self, lock: MachineLock, exclusive: bool) -> Result<Option<MachineLockGuard>> {
        self.machine.try_lock(lock, exclusive)
    }

    fn local_memory(&self, len_bytes: usize) -> Result<LocalMemory> {
        self.machine.local_memory(len_bytes)
    }
}
