// SPDX-License-Identifier: Apache-2.0
//! Machines with a clock of their own making: waiting costs no time, and a machine that waits lets the other hosts run.

use super::choices::mix;
use cxl_pool::Result;
use cxl_pool::host::Host;
use cxl_pool::platform::{LocalMemory, MachineId, MachineLock, MachineLockGuard, Platform, ProcessId};
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Time that a look at the clock takes, in nanoseconds.
const LOOK_NS: u64 = 100;
/// Time that one round of polling takes, in nanoseconds.
const RELAX_NS: u64 = 200_000;

/// The time of all machines, and who runs while one of them waits.
#[derive(Default)]
pub struct Clock {
    now_ns: AtomicU64,
    hosts: Mutex<Vec<Host>>,
    turn: AtomicU64,
    is_nested: AtomicBool,
}

impl Clock {
    /// Virtual nanoseconds since the start.
    pub fn now_ns(&self) -> u64 {
        self.now_ns.load(Ordering::Relaxed)
    }

    /// Adds a host to those that serve while others wait.
    pub fn add(&self, host: &Host) {
        self.hosts.lock().unwrap().push(host.clone());
    }

    /// The host serves no more.
    pub fn forget(&self, machine: MachineId) {
        self.hosts.lock().unwrap().retain(|host| host.platform().machine() != machine);
    }

    /// No host serves any more.
    pub fn forget_all(&self) {
        let hosts = std::mem::take(&mut *self.hosts.lock().unwrap_or_else(PoisonError::into_inner));
        drop(hosts);
    }

    /// Time passes, and the next host has a round.
    pub fn pass(&self, ns: u64) {
        self.now_ns.fetch_add(ns, Ordering::Relaxed);
        if self.is_nested.swap(true, Ordering::Relaxed) {
            return;
        }
        let next = {
            let hosts = self.hosts.lock().unwrap();
            let turn = self.turn.fetch_add(1, Ordering::Relaxed);
            (turn as usize).checked_rem(hosts.len()).map(|place| hosts[place].clone())
        };
        if let Some(host) = next {
            // Damage is what it has to cope with; the operation that waits reports its own.
            let _ = host.service_round();
        }
        self.is_nested.store(false, Ordering::Relaxed);
    }
}

/// One machine: what outlives its processes.
pub struct Machine {
    id: MachineId,
    local: Mutex<Option<Arc<[Unit]>>>,
    locks: Mutex<HashMap<MachineLock, Holds>>,
    /// Pid of the running process; 0 = none.
    alive: AtomicU32,
    pids: AtomicU32,
}

/// 64 bytes of local memory.
#[repr(align(64))]
#[derive(Default)]
pub struct Unit([AtomicU64; 8]);

#[derive(Default)]
struct Holds {
    shared: u32,
    is_exclusive: bool,
}

impl Machine {
    /// Machine number `number`.
    pub fn new(number: u8) -> Arc<Self> {
        Arc::new(Machine {
            id: MachineId([number + 1; 16]),
            local: Mutex::default(),
            locks: Mutex::default(),
            alive: AtomicU32::new(0),
            pids: AtomicU32::new(u32::from(number) * 100),
        })
    }

    /// Its identity.
    pub fn id(&self) -> MachineId {
        self.id
    }

    /// Its memory's 64-bit words, if a process ever used it.
    pub fn with_local(&self, work: impl FnOnce(&[Unit])) {
        if let Some(units) = &*self.local.lock().unwrap() {
            work(units);
        }
    }
}

impl Unit {
    /// Its words.
    pub fn words(&self) -> &[AtomicU64; 8] {
        &self.0
    }
}

/// A process of a machine.
pub struct Process {
    machine: Arc<Machine>,
    clock: Arc<Clock>,
    id: ProcessId,
    random: AtomicU64,
}

impl Process {
    /// Starts a process; the one before has ended.
    pub fn start(machine: &Arc<Machine>, clock: &Arc<Clock>) -> Arc<Self> {
        let pid = machine.pids.fetch_add(1, Ordering::Relaxed) + 1;
        machine.alive.store(pid, Ordering::Relaxed);
        let random = AtomicU64::new(mix(u64::from(pid)));
        Arc::new(Process { machine: machine.clone(), clock: clock.clone(), id: ProcessId { pid, start: 7 }, random })
    }
}

struct Guard {
    machine: Arc<Machine>,
    lock: MachineLock,
    is_exclusive: bool,
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut locks = self.machine.locks.lock().unwrap();
        let holds = locks.entry(self.lock).or_default();
        if self.is_exclusive { holds.is_exclusive = false } else { holds.shared -= 1 }
    }
}

impl Platform for Process {
    fn name(&self) -> &str {
        "rack/machine"
    }

    fn machine(&self) -> MachineId {
        self.machine.id
    }

    fn process(&self) -> ProcessId {
        self.id
    }

    fn is_alive(&self, process: ProcessId) -> bool {
        process == ProcessId { pid: self.machine.alive.load(Ordering::Relaxed), start: 7 }
    }

    fn now_ns(&self) -> u64 {
        self.clock.now_ns.fetch_add(LOOK_NS, Ordering::Relaxed)
    }

    fn sleep_ns(&self, ns: u64) {
        self.clock.pass(ns);
    }

    fn relax(&self, _round: u32) {
        self.clock.pass(RELAX_NS);
    }

    fn park(&self, _word: &AtomicU32, _expected: u32, timeout_ns: u64) {
        self.clock.pass(timeout_ns);
    }

    fn wake(&self, _word: &AtomicU32) {}

    fn random(&self) -> u64 {
        mix(self.random.fetch_add(1, Ordering::Relaxed))
    }

    fn try_lock(&self, lock: MachineLock, exclusive: bool) -> Result<Option<MachineLockGuard>> {
        let mut locks = self.machine.locks.lock().unwrap();
        let holds = locks.entry(lock).or_default();
        if holds.is_exclusive || (exclusive && holds.shared > 0) {
            return Ok(None);
        }
        if exclusive {
            holds.is_exclusive = true
        } else {
            holds.shared += 1
        }
        Ok(Some(Box::new(Guard { machine: self.machine.clone(), lock, is_exclusive: exclusive })))
    }

    fn local_memory(&self, len_bytes: usize) -> Result<LocalMemory> {
        let mut local = self.machine.local.lock().unwrap();
        let units = local.get_or_insert_with(|| (0..len_bytes.div_ceil(64)).map(|_| Unit::default()).collect());
        Ok(LocalMemory { start: NonNull::from(&**units).cast(), len_bytes: units.len() * 64, owner: Arc::new(units.clone()) })
    }
}
