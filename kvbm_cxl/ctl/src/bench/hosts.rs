// SPDX-License-Identifier: Apache-2.0
//! A pool in a scratch file, with hosts of this process on it.
//!
//! Hosts either run in real time, as a program's would, or are *driven*: one thread runs their service rounds in turn whenever the working
//! host waits, on a clock of its own. Driven hosts do the same accesses in every run, so these can be counted.

use super::counting::{Counting, Counts};
use cxl_pool::device::PoolSpec;
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::line::Lines;
use cxl_pool::machine::{Machine, State};
use cxl_pool::platform::{LocalMemory, MachineId, MachineLock, MachineLockGuard, Platform, ProcessId};
use cxl_pool::pool::{CellArea, FormatOptions, OpenOptions, Pool};
use cxl_pool::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Time that passes on the driven clock with every poll, in nanoseconds.
const POLL_NS: u64 = 1_000;

/// The machine that hosts of the bench run on: number `number`.
pub fn machine(number: u8) -> MachineId {
    MachineId([number + 1; 16])
}

/// A pool that lasts as long as this value.
pub struct Lab {
    pool: Pool,
    spec: PoolSpec,
    directory: tempfile::TempDir,
}

impl Lab {
    /// Formats a pool of `len_bytes`; machine 0 has its first seat.
    pub fn new(len_bytes: u64) -> Result<Lab> {
        Lab::with_cells(len_bytes, Vec::new())
    }

    /// The same with cells for a prefix cache.
    pub fn with_cells(len_bytes: u64, cells: Vec<CellArea>) -> Result<Lab> {
        let failed = |source| Error::Os { what: "making a directory in /dev/shm".into(), source };
        let directory = tempfile::Builder::new().prefix(".cxlctl-bench-").tempdir_in("/dev/shm").map_err(failed)?;
        let spec = PoolSpec::new(vec![directory.path().join("pool")], Some(len_bytes))?;
        let options = FormatOptions { machine: Some(machine(0)), cells, ..FormatOptions::default() };
        Ok(Lab { pool: Pool::format(&spec, &options)?, spec, directory })
    }

    /// The pool that another process has made, for a host of this one.
    pub fn open(path: &Path) -> Result<Pool> {
        Pool::open(&PoolSpec::new(vec![path.to_path_buf()], None)?, &OpenOptions::default())
    }

    /// The pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Its file.
    pub fn path(&self) -> PathBuf {
        self.spec.devices().next().unwrap_or(Path::new("/")).to_path_buf()
    }

    /// Where the machines keep their state.
    pub fn state(&self) -> PathBuf {
        self.directory.path().join("state")
    }

    /// A host on machine `number`, and its own count of accesses.
    pub fn join(&self, number: u8, driver: Option<&Arc<Driver>>) -> Result<Member> {
        let counting = Counting::over(self.pool.lines().memory().clone());
        let lines =
            Lines::new(counting.clone(), self.pool.layout().clone(), self.pool.superblock().uuid(), self.pool.superblock().incarnation());
        let machine = real_machine(&self.pool, &self.state(), number)?;
        let platform: Arc<dyn Platform> = match driver {
            None => Arc::new(machine),
            Some(driver) => Arc::new(Driven { machine, driver: driver.clone() }),
        };
        let host = cxl_pool::pool::join(lines, platform, config(&self.pool))?;
        let member = Member { host, counting };
        if let Some(driver) = driver {
            driver.members().push((member.clone(), Counts::default()));
        }
        Ok(member)
    }
}

/// The configuration of every host of the bench.
pub fn config(pool: &Pool) -> HostConfig {
    HostConfig { seats: pool.superblock().seats(), ..HostConfig::default() }
}

/// Machine `number` of a pool, with its state below `base`.
pub fn real_machine(pool: &Pool, base: &Path, number: u8) -> Result<Machine> {
    Machine::new(machine(number), State::open(base, pool.superblock().uuid(), machine(number))?)
}

/// A host and its count.
#[derive(Clone)]
pub struct Member {
    /// The host.
    pub host: Host,
    /// Its accesses.
    pub counting: Arc<Counting>,
}

/// Runs the service rounds of driven hosts.
#[derive(Default)]
pub struct Driver {
    members: Mutex<Vec<(Member, Counts)>>,
    is_driving: AtomicBool,
    now_ns: AtomicU64,
    rounds: AtomicU64,
}

impl Driver {
    /// Without hosts yet.
    pub fn new() -> Arc<Driver> {
        Arc::new(Driver { now_ns: AtomicU64::new(1_000_000_000), ..Driver::default() })
    }

    fn members(&self) -> std::sync::MutexGuard<'_, Vec<(Member, Counts)>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One service round of every host, in turn; what each of them accesses is added to its account. Nothing when one is under way.
    pub fn drive(&self) {
        self.now_ns.fetch_add(POLL_NS, Ordering::Relaxed);
        if self.is_driving.swap(true, Ordering::Relaxed) {
            return;
        }
        let hosts: Vec<Member> = self.members().iter().map(|(member, _)| member.clone()).collect();
        for (index, member) in hosts.iter().enumerate() {
            let before = member.counting.counts();
            // A host that cannot serve shows as a lock that does not come.
            let _ = member.host.service_round();
            let did = member.counting.counts() - before;
            self.members()[index].1 += did;
        }
        self.rounds.fetch_add(1, Ordering::Relaxed);
        self.is_driving.store(false, Ordering::Relaxed);
    }

    /// What the service rounds of each host accessed so far, and how many there were of each.
    pub fn accounts(&self) -> (Vec<Counts>, u64) {
        (self.members().iter().map(|(_, counts)| *counts).collect(), self.rounds.load(Ordering::Relaxed))
    }

    /// Lets the hosts go; they and the driver keep each other alive otherwise.
    pub fn release(&self) {
        let members = std::mem::take(&mut *self.members());
        drop(members);
    }
}

/// A machine whose waiting drives all hosts.
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
        self.driver.now_ns.fetch_add(ns, Ordering::Relaxed);
        self.driver.drive();
    }

    fn relax(&self, _round: u32) {
        self.driver.drive();
    }

    fn park(&self, _word: &AtomicU32, _expected: u32, _timeout_ns: u64) {
        self.driver.drive();
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
