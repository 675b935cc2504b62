// SPDX-License-Identifier: Apache-2.0
//! The real machine under a host: clock, processes, futexes, and the state directory that its processes share.
//!
//! All processes of one machine that use one pool must find each other, because the locks in the state directory are the proof that
//! only one incarnation of this machine runs and only one process writes its seat lines. A machine's identity therefore includes the path
//! of its state directory: processes that do not share one are different hosts to the pool. Containers of one machine either share the
//! directory **and** the PID namespace, or each gets its own `CXL_MACHINE_ID`.

mod identity;
mod presence;
mod state;

pub use identity::{ENV_MACHINE_ID, machine_id};
pub use state::{ENV_STATE_DIR, State};

use crate::coherence::FaultMap;
use crate::device::{DeviceInfo, DeviceKind};
use crate::error::{Error, Result};
use crate::platform::{LocalMemory, MachineId, MachineLock, MachineLockGuard, Platform, ProcessId};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Rounds of a polling loop that only spin.
const SPIN_ROUNDS: u32 = 64;
/// Rounds of a polling loop after which it no longer yields but sleeps.
const YIELD_ROUNDS: u32 = 256;
/// First and longest sleep of a polling loop, in nanoseconds.
const SLEEP_NS: (u64, u64) = (5_000, 50_000);

/// This machine, as one process sees it, for one pool.
pub struct Machine {
    id: MachineId,
    name: String,
    process: ProcessId,
    state: State,
    /// The pool's files: where each was opened, its device and its number.
    files: Vec<(String, (u64, u64))>,
    presence: Option<presence::KernelMarks>,
}

impl Machine {
    /// This machine for the pool `uuid`: identity and state directory from the environment. `faults` is closed when the memory that this
    /// machine's processes share is lost.
    pub fn for_pool(uuid: &[u8; 16], faults: Arc<FaultMap>) -> Result<Machine> {
        let base = state::base_from_env()?;
        let id = identity::machine_id_in(&base)?;
        let machine = Machine::new(id, State::open(&base, uuid, id)?.guarding(faults))?;
        Ok(Machine { name: identity::name(), ..machine })
    }

    /// A machine of a given identity and state directory.
    pub fn new(id: MachineId, state: State) -> Result<Machine> {
        if id.is_none() {
            return Err(Error::Invalid("a machine id cannot be all zero".into()));
        }
        let pid = std::process::id();
        let start = start_of(pid).ok_or_else(|| {
            Error::Invalid("/proc/self/stat cannot be read: /proc must be mounted, to tell running processes from dead ones".into())
        })?;
        Ok(Machine { id, name: String::new(), process: ProcessId { pid, start }, state, files: Vec::new(), presence: None })
    }

    /// Watches the files among these devices: a file that is removed or replaced is no longer the pool that others open by its name.
    pub fn watching(mut self, devices: &[DeviceInfo]) -> Machine {
        let files = devices.iter().filter(|device| device.kind != DeviceKind::Devdax);
        self.files = files.map(|device| (device.name.clone(), device.identity)).collect();
        self
    }

    /// The same, for a process that reaches the pool through `file`, on which it begins at `offset_bytes`: with it, the processes of one
    /// kernel can ask that kernel whether a host has ended, whatever containers they run in.
    ///
    /// # Errors
    /// [`Error::Os`] when the system does not tell what it is asked.
    pub fn with_file(self, file: File, offset_bytes: u64) -> Result<Machine> {
        Ok(Machine { presence: Some(presence::KernelMarks::over(file, offset_bytes)?), ..self })
    }

    /// The directory that this machine's processes share for this pool.
    pub fn state(&self) -> &State {
        &self.state
    }
}

/// Time of one of the clocks that every Linux has.
fn read_clock(clock: libc::clockid_t) -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is writable and of the type the kernel fills in, and the clock exists, so the call does not fail.
    unsafe { libc::clock_gettime(clock, &mut now) };
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}

impl Platform for Machine {
    fn machine(&self) -> MachineId {
        self.id
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn process(&self) -> ProcessId {
        self.process
    }

    fn is_alive(&self, process: ProcessId) -> bool {
        process.pid != 0 && start_of(process.pid) == Some(process.start)
    }

    fn now_ns(&self) -> u64 {
        read_clock(libc::CLOCK_MONOTONIC)
    }

    fn now_coarse_ns(&self) -> u64 {
        read_clock(libc::CLOCK_MONOTONIC_COARSE)
    }

    fn sleep_ns(&self, ns: u64) {
        std::thread::sleep(Duration::from_nanos(ns));
    }

    fn relax(&self, round: u32) {
        if round < SPIN_ROUNDS {
            std::hint::spin_loop();
        } else if round < YIELD_ROUNDS {
            std::thread::yield_now();
        } else {
            let ns = SLEEP_NS.0.saturating_mul(u64::from(round - YIELD_ROUNDS) / 16 + 1);
            self.sleep_ns(ns.min(SLEEP_NS.1));
        }
    }

    fn park(&self, word: &AtomicU32, expected: u32, timeout_ns: u64) {
        let timeout = libc::timespec {
            tv_sec: libc::time_t::try_from(timeout_ns / 1_000_000_000).unwrap_or(libc::time_t::MAX),
            tv_nsec: (timeout_ns % 1_000_000_000) as libc::c_long,
        };
        // Not FUTEX_PRIVATE: the word may lie in memory shared with other processes. Whatever ends the wait (woken, changed, timed out,
        // interrupted), the caller looks at the word again, so the result says nothing more.
        // SAFETY: the word is valid for the call (it is borrowed), and so is the time-out; the kernel only reads both.
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, expected, &timeout, std::ptr::null::<u32>(), 0u32) };
    }

    fn wake(&self, word: &AtomicU32) {
        // SAFETY: the kernel uses the address of a borrowed word as a key and does not touch what it points to.
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, 1u32) };
    }

    fn random(&self) -> u64 {
        static CALLS: AtomicU64 = AtomicU64::new(0);
        random_bytes().map(u64::from_le_bytes).unwrap_or_else(|_| {
            // Only a sandbox without getrandom comes here: still different in every process, call and moment.
            let words = [u64::from(self.process.pid), u64::from(self.process.start), self.now_ns(), CALLS.fetch_add(1, Ordering::Relaxed)];
            let digest = identity::digest(&[bytemuck::bytes_of(&words)]).0;
            u64::from_le_bytes([digest[0], digest[1], digest[2], digest[3], digest[4], digest[5], digest[6], digest[7]])
        })
    }

    fn witness(&self) -> u64 {
        self.presence.as_ref().map_or(0, |presence| presence.witness())
    }

    fn mark(&self, alone: bool) -> Result<Option<(MachineLockGuard, bool)>> {
        match &self.presence {
            Some(presence) => presence.mark(self.id, alone),
            None => Ok(Some((Box::new(()), !alone))),
        }
    }

    fn lock_place(&self) -> Result<Option<MachineLockGuard>> {
        match &self.presence {
            Some(presence) => presence.lock_place(),
            None => Ok(Some(Box::new(()))),
        }
    }

    fn is_marked(&self, machine: MachineId) -> Result<bool> {
        self.presence.as_ref().map_or(Ok(true), |presence| presence.is_marked(machine))
    }

    fn try_lock(&self, lock: MachineLock, exclusive: bool) -> Result<Option<MachineLockGuard>> {
        self.state.try_lock(lock, exclusive)
    }

    fn local_memory(&self, len_bytes: usize) -> Result<LocalMemory> {
        self.state.local_memory(len_bytes)
    }

    fn moved_files(&self) -> Vec<String> {
        let is_there = |path: &str, identity| std::fs::metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == identity);
        let moved = self.files.iter().filter(|(path, identity)| !is_there(path, *identity));
        moved.map(|(path, _)| path.clone()).collect()
    }

    fn check_local(&self) -> Result<()> {
        self.state.check_kept()
    }
}

/// Start time of a process, truncated as in [`ProcessId`]; `None` when it is gone or only waits to be reaped.
fn start_of(pid: u32) -> Option<u32> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    start_in(&stat)
}

/// Field 22 of `/proc/PID/stat`. The name in field 2 may hold anything, closing parentheses included, so fields count from the last one.
fn start_in(stat: &[u8]) -> Option<u32> {
    let behind_name = stat.iter().rposition(|&byte| byte == b')')? + 1;
    let mut fields = std::str::from_utf8(&stat[behind_name..]).ok()?.split_ascii_whitespace();
    // Field 3: Z is a zombie, X and x are dead.
    if matches!(fields.next()?, "Z" | "X" | "x") {
        return None;
    }
    fields.nth(18)?.parse::<u64>().ok().map(|ticks| ticks as u32)
}

/// Random bytes of the kernel.
pub fn random_bytes<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        // SAFETY: the pointer and length describe the rest of `bytes`.
        let got = unsafe { libc::getrandom(bytes[filled..].as_mut_ptr().cast(), N - filled, 0) };
        match usize::try_from(got) {
            Ok(got) => filled += got,
            Err(_) if std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return Err(Error::last_os("getting random bytes")),
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
