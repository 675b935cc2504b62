// SPDX-License-Identifier: Apache-2.0
//! Hosts that one thread drives on one clock: whenever a host waits, the service rounds of all of them run in turn. The clock can jump, so
//! that the ticks of an hour pass in seconds, and every run does the same.

use cxl_pool::Result;
use cxl_pool::host::Host;
use cxl_pool::machine::Machine;
use cxl_pool::platform::{LocalMemory, MachineId, MachineLock, MachineLockGuard, Platform, ProcessId};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Time that passes with every poll, in nanoseconds.
const POLL_NS: u64 = 1_000;

/// The hosts of one pool and their clock.
pub struct Driver {
    hosts: Mutex<Vec<Host>>,
    is_driving: AtomicBool,
    now_ns: AtomicU64,
}

impl Driver {
    pub fn new() -> Arc<Driver> {
        Arc::new(Driver { hosts: Mutex::default(), is_driving: AtomicBool::new(false), now_ns: AtomicU64::new(1_000_000_000) })
    }

    fn hosts(&self) -> std::sync::MutexGuard<'_, Vec<Host>> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a host that joined on [`Driver::platform`].
    pub fn add(&self, host: Host) {
        self.hosts().push(host);
    }

    /// Drops the hosts: they and this value keep each other alive.
    pub fn release(&self) {
        let hosts = std::mem::take(&mut *self.hosts());
        drop(hosts);
    }

    /// A machine whose waits drive all hosts.
    pub fn platform(self: &Arc<Driver>, machine: Machine) -> Arc<dyn Platform> {
        Arc::new(Driven { machine, driver: self.clone() })
    }

    /// Lets time pass, then runs a service round of every host.
    pub fn pass(&self, ns: u64) {
        self.now_ns.fetch_add(ns, Ordering::Relaxed);
        if self.is_driving.swap(true, Ordering::Relaxed) {
            return;
        }
        let hosts: Vec<Host> = self.hosts().clone();
        // A host that cannot serve shows as a lock that is not granted.
        hosts.iter().for_each(|host| _ = host.service_round());
        self.is_driving.store(false, Ordering::Relaxed);
    }
}

struct Driven {
    machine: Machine,
    driver: Arc<Driver>,
}

impl Platform for Driven {
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
        self.driver.now_ns.load(Ordering::Relaxed)
    }

    fn sleep_ns(&self, ns: u64) {
        self.driver.pass(ns);
    }

    fn relax(&self, _round: u32) {
        self.driver.pass(POLL_NS);
    }

    fn park(&self, _word: &AtomicU32, _expected: u32, _timeout_ns: u64) {
        self.driver.pass(POLL_NS);
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
