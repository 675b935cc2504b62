// SPDX-License-Identifier: Apache-2.0
//! What the protocols need of the machine they run on, as a trait, so that simulated hosts run the same code.

pub use crate::machine_id::MachineId;

use crate::error::Result;
use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// A process of this machine. The start time tells a re-used pid from the process that had it before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ProcessId {
    /// Process id.
    pub pid: u32,
    /// Start time in clock ticks since boot (`/proc/PID/stat` field 22), truncated.
    pub start: u32,
}

/// Machine-wide locks, held by open file descriptions so that the kernel drops them with the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MachineLock {
    /// Held (exclusively) while a process joins or attaches.
    Join,
    /// Held (shared) by every process of the running incarnation; exclusive means that none is left.
    Members,
    /// Held (exclusively) by the process that may write this machine's seat lines.
    Manager,
    /// Held (exclusively) while a process writes the lines of this machine's place among those that claim a seat.
    Claim,
}

/// Memory shared by the processes of one machine for one pool. Zeroed when created.
#[derive(Clone)]
pub struct LocalMemory {
    /// First byte, aligned to 64.
    pub start: NonNull<u8>,
    /// Size in bytes.
    pub len_bytes: usize,
    /// Keeps the mapping alive.
    pub owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the memory is only used through atomics (`host::segment`), and `owner` keeps it mapped.
unsafe impl Send for LocalMemory {}
// SAFETY: as above.
unsafe impl Sync for LocalMemory {}

/// A held [`MachineLock`]; dropping it releases the lock.
pub type MachineLockGuard = Box<dyn Any + Send + Sync>;

/// The machine under one process of one host.
pub trait Platform: Send + Sync {
    /// This machine's identity.
    fn machine(&self) -> MachineId;
    /// What people call this machine; empty = nothing is known.
    fn name(&self) -> &str {
        ""
    }
    /// This process.
    fn process(&self) -> ProcessId;
    /// Whether a process of this machine still exists (a zombie that only waits to be reaped does not).
    fn is_alive(&self, process: ProcessId) -> bool;
    /// Monotonic time of this machine in nanoseconds. Never compared with another machine's.
    fn now_ns(&self) -> u64;
    /// As [`Platform::now_ns`], but up to 10 ms late where that is cheaper.
    fn now_coarse_ns(&self) -> u64 {
        self.now_ns()
    }
    /// Sleeps for about `ns`.
    fn sleep_ns(&self, ns: u64);
    /// One step of a polling loop: `round` counts from 0; first spins, then yields, then sleeps briefly.
    fn relax(&self, round: u32);
    /// Waits until `word` is no longer `expected`, a thread calls [`Platform::wake`] on it, or `timeout_ns` passed.
    fn park(&self, word: &AtomicU32, expected: u32, timeout_ns: u64);
    /// Wakes one waiter of `word`.
    fn wake(&self, word: &AtomicU32);
    /// Random bits, different in every process.
    fn random(&self) -> u64;
    /// Names the kernel that this process runs under together with the file through which it asks that kernel about others; 0 = it cannot
    /// ask. Processes with the same witness learn of each other's marks.
    fn witness(&self) -> u64 {
        0
    }
    /// Marks this process with the kernel as one of this machine's, until the guard is dropped or the process has ended. With it comes
    /// whether another process of the machine was marked once this one was: then the machine is marked without a gap. `None` where one is
    /// and this one wants to be `alone`.
    fn mark(&self, alone: bool) -> Result<Option<(MachineLockGuard, bool)>> {
        Ok(Some((Box::new(()), !alone)))
    }
    /// Whether any process is marked as one of `machine`'s. Only asked of machines with this process's own [`Platform::witness`].
    fn is_marked(&self, machine: MachineId) -> Result<bool> {
        let _ = machine;
        Ok(true)
    }
    /// Tries to take the lock of all processes with this one's witness: under it one at a time writes the lines of their place among
    /// those that claim a seat. `None` when it is held.
    fn lock_place(&self) -> Result<Option<MachineLockGuard>> {
        Ok(Some(Box::new(())))
    }
    /// Tries to take a machine-wide lock; `None` when it is held.
    fn try_lock(&self, lock: MachineLock, exclusive: bool) -> Result<Option<MachineLockGuard>>;
    /// The memory that the processes of this machine share for this pool, created zeroed when missing.
    fn local_memory(&self, len_bytes: usize) -> Result<LocalMemory>;
    /// Paths of the pool's files that lead to another file now, or to none.
    fn moved_files(&self) -> Vec<String> {
        Vec::new()
    }
    /// Looks whether that memory is still what the next process of this machine would get.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] when it was removed, replaced or truncated.
    fn check_local(&self) -> Result<()> {
        Ok(())
    }
}
