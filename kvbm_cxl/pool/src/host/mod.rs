// SPDX-License-Identifier: Apache-2.0
//! Hosts: slots, joining, heartbeats, fences. Follows protocols/LOCKS.md sections 4 to 6.
//!
//! A *host* is a machine with a slot; its processes share that slot through the local segment (`segment`). Everything a host publishes is
//! composed from that segment and never read back from the pool.

mod config;
mod damage;
pub(crate) mod fence;
mod hooks;
mod join;
pub(crate) mod local_mutex;
mod names;
pub(crate) mod segment;
mod service;
pub(crate) mod witness;

pub use config::{ENV_POLL_US, ENV_SUSPECT_MS, HostConfig};
pub use damage::DamageCounts;
pub use fence::FenceStatus;
pub use hooks::{Hooks, Residue, Work};
#[cfg(test)]
pub(crate) use names::publish_name;
pub use names::{MAX_NAME_BYTES, NameLine, machine_name, name_lines};
pub(crate) use names::{is_name_damaged, machine_text, name_and_id, name_lines_end};
pub use service::Service;

use crate::background::FailedRounds;
use crate::cpus::ThreadKind;
use crate::error::{Error, Result};
use crate::fault::mutant;
use crate::limits::{LINE_BYTES, MAX_NUMBER, MAX_SLOTS};
use crate::line::{Line, Lines, if_whole};
use crate::lock::manager::Manager;
use crate::lock::{LockGuard, LockId, OnFence};
use crate::media::{Geometry, Superblock};
use crate::platform::{LocalMemory, MachineLockGuard, Platform};
use local_mutex::{Acquired, Asker, LocalMutex};
use segment::{Segment, state};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::Thread;

/// One process's membership in the pool as part of its host. Cheap to clone; every clone is the same membership.
///
/// The program has to call [`Host::service_round`] regularly, or [`Host::serve`] once: otherwise the host is soon taken for dead.
#[derive(Clone)]
pub struct Host {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub lines: Lines,
    pub platform: Arc<dyn Platform>,
    pub config: HostConfig,
    /// What the layers above let this host call.
    pub hooks: &'static [Hooks],
    pub segment: Segment,
    /// Index of this process in the segment's table, and the tag under which it owns local mutexes.
    pub index: usize,
    pub tag: u32,
    /// The shared hold on [`crate::platform::MachineLock::Members`]; `None` once closed.
    pub members: Mutex<Option<MachineLockGuard>>,
    /// This process's mark with the kernel; `None` once closed.
    pub mark: Mutex<Option<MachineLockGuard>>,
    pub manager: Mutex<Manager>,
    /// This process has detached.
    pub closed: AtomicBool,
    /// A thread has this membership's door line (`crate::ring`), which has one writer.
    pub has_door: AtomicBool,
    /// Files of the pool that are no longer where they were opened, and when this process last looked.
    pub moved_files: AtomicU64,
    pub looked_at_files_ns: AtomicU64,
    /// The thread of this process's service while it rests for long.
    pub resting: Mutex<Option<Thread>>,
    /// Lines that did not verify.
    pub damage: damage::Damage,
    /// Rounds of background threads that failed.
    pub failed_rounds: Arc<FailedRounds>,
    /// The first line of every device's superblock as it was at the join: another one means another pool.
    pub superblocks: Vec<Line>,
}

/// A stretch of work that may publish shared lines. While one is alive the host does not acknowledge a fence.
pub struct Op<'h> {
    host: &'h Host,
    incarnation: u32,
}

impl<'h> Op<'h> {
    /// The incarnation this work belongs to.
    pub fn incarnation(&self) -> u32 {
        self.incarnation
    }

    /// The host.
    pub fn host(&self) -> &'h Host {
        self.host
    }
}

impl Drop for Op<'_> {
    fn drop(&mut self) {
        self.host.inner.end_operation();
    }
}

impl Host {
    /// Joins the pool, or attaches to the incarnation that another process of this machine runs. `hooks` are those of the layers above,
    /// in the order in which their shares of the local memory lie: [`crate::pool::join`] has them.
    ///
    /// # Errors
    /// [`Error::Invalid`] for periods that cannot work ([`HostConfig::check`]), [`Error::Timeout`] when no manager answers,
    /// [`Error::SlotInUse`] when the wanted slot belongs to another live machine.
    pub fn join(lines: Lines, platform: Arc<dyn Platform>, config: HostConfig, hooks: &'static [Hooks]) -> Result<Host> {
        join::join(lines, platform, config, hooks)
    }

    /// The pool's metadata lines.
    pub fn lines(&self) -> &Lines {
        &self.inner.lines
    }

    pub(crate) fn geometry(&self) -> &Geometry {
        self.inner.lines.layout().geometry()
    }

    /// The machine below.
    pub fn platform(&self) -> &Arc<dyn Platform> {
        &self.inner.platform
    }

    /// This host's slot.
    pub fn slot(&self) -> u16 {
        self.inner.slot() as u16
    }

    /// This host's incarnation now; work that has to belong to one incarnation takes it from [`Host::enter`].
    pub fn incarnation(&self) -> u32 {
        self.inner.incarnation()
    }

    /// The nonce of the join attempt that this incarnation was bound for.
    pub fn nonce(&self) -> [u8; 16] {
        self.inner.nonce()
    }

    /// Index of this process among the processes of its host, below [`crate::limits::MAX_PROCESSES`].
    pub fn process_index(&self) -> usize {
        self.inner.index
    }

    /// The part of a layer above of the memory that this host's processes share. Zero until one of them writes to it.
    pub(crate) fn local_part(&self, layer: &Hooks) -> Result<LocalMemory> {
        hooks::part_of(self.inner.hooks, layer.name, self.lines().layout(), &self.inner.segment.behind())
    }

    /// How this host behaves.
    pub fn config(&self) -> &HostConfig {
        &self.inner.config
    }

    /// The manager seat that this host last knew to be in charge.
    pub fn manager_seat(&self) -> u32 {
        self.inner.segment.header().manager_seat.load(Ordering::Relaxed)
    }

    /// Files of the pool that were removed or replaced since they were opened, as the service saw at its last heartbeat. This host works on
    /// with what it has mapped; hosts that come later do not find it.
    pub fn moved_files(&self) -> u64 {
        self.inner.moved_files.load(Ordering::Relaxed)
    }

    /// Begins work that may publish shared lines.
    ///
    /// # Errors
    /// [`Error::Fenced`] while this host is fenced and has not joined again; [`Error::Closed`] after it left.
    pub fn enter(&self) -> Result<Op<'_>> {
        let incarnation = self.inner.begin_operation()?;
        Ok(Op { host: self, incarnation })
    }

    /// A3 and B2: fetches every seat's fence row of this host's slot, after everything published so far.
    ///
    /// # Errors
    /// [`Error::Fenced`] when any row names the incarnation of `op` or a later one: the outcome is unknown.
    pub fn check_fences(&self, op: &Op<'_>) -> Result<()> {
        self.inner.check_fences(op.incarnation)
    }

    /// Whether any seat's row fences incarnation `incarnation` of `slot`.
    pub fn is_fenced(&self, slot: u16, incarnation: u32) -> Result<bool> {
        Ok(self.inner.patiently(|| self.inner.fenced_up_to(slot.into()))? >= incarnation)
    }

    /// Whether it is proven that incarnation `incarnation` of `slot` writes neither metadata nor payload any more (LOCKS.md section 6).
    pub fn is_proven_dead(&self, slot: u16, incarnation: u32) -> Result<bool> {
        self.inner.patiently(|| self.inner.is_proven_dead(slot.into(), incarnation))
    }

    /// [`Host::is_fenced`] for those who look again by themselves: `None` where a line cannot be read now, be it for a moment or for good.
    pub(crate) fn seems_fenced(&self, slot: u16, incarnation: u32) -> Result<Option<bool>> {
        Ok(if_whole(self.inner.fenced_up_to(slot.into()))?.map(|fenced| fenced >= incarnation))
    }

    /// [`Host::is_proven_dead`] in the same way.
    pub(crate) fn seems_dead(&self, slot: u16, incarnation: u32) -> Result<Option<bool>> {
        if_whole(self.inner.is_proven_dead(slot.into(), incarnation))
    }

    /// Whether every operation of incarnation `incarnation` of `slot` has ended: it makes no more of the writes that need one
    /// (CACHE.md section 7). Proof of death is more: it is about everything that the host's processes may still write.
    pub(crate) fn has_ended(&self, slot: u16, incarnation: u32) -> Result<bool> {
        if mutant!("cache.timeout_is_proof") && self.is_fenced(slot, incarnation)? {
            return Ok(true);
        }
        self.inner.patiently(|| self.inner.has_ended(slot.into(), incarnation))
    }

    /// States, as an operator of this machine, that incarnation `incarnation` of `slot` is powered off or cut off from the memory for good.
    ///
    /// A wrong statement gives a line two writers. The next service round publishes it if this machine has a manager seat.
    pub fn declare_dead(&self, slot: u16, incarnation: u32) -> Result<()> {
        self.inner.state_of(&self.inner.segment.header().declared_dead, slot, incarnation)
    }

    /// Asks that incarnation `incarnation` of `slot` be fenced now instead of when its heartbeat has been missed for long enough: a lease
    /// of it ran out, say, or its machine reported that it goes down.
    ///
    /// Wrong suspicion costs that host a new incarnation and harms no data. It takes effect where this machine has the manager's role, at
    /// the next service round or whenever the role comes here; the caller therefore says so on every machine that may have it.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a slot or an incarnation that cannot be.
    pub fn suspect(&self, slot: u16, incarnation: u32) -> Result<()> {
        self.inner.state_of(&self.inner.segment.header().suspected, slot, incarnation)
    }

    /// Acquires a lock, through a fence and re-join of this host if need be.
    ///
    /// # Errors
    /// [`Error::Timeout`] at the deadline; [`Error::BadLine`] when the lock is blocked by a damaged line.
    pub fn acquire(&self, lock: LockId, timeout_ms: u64) -> Result<LockGuard<'_>> {
        crate::lock::acquire(self, lock, timeout_ms, OnFence::Rejoin)
    }

    /// As [`Host::acquire`] for work inside an [`Op`], which keeps this host from joining again: a fence is an error at once.
    pub(crate) fn acquire_inside(&self, lock: LockId, timeout_ms: u64) -> Result<LockGuard<'_>> {
        crate::lock::acquire(self, lock, timeout_ms, OnFence::Fail)
    }

    /// As [`Host::acquire_inside`], without waiting: `None` unless the lock is this host's and no thread here holds it.
    pub(crate) fn acquire_if_here(&self, lock: LockId) -> Result<Option<LockGuard<'_>>> {
        crate::lock::acquire_if_here(self, lock)
    }

    /// Acquires each of several locks, in whatever order they come, and calls `work` with it: all are asked for at once, and none is kept
    /// while another is waited for. Inside an [`Op`], as [`Host::acquire_inside`].
    pub(crate) fn acquire_each<'h>(
        &'h self,
        locks: &[LockId],
        timeout_ms: u64,
        work: impl FnMut(LockGuard<'h>) -> Result<()>,
    ) -> Result<()> {
        crate::lock::acquire_each(self, locks, timeout_ms, work)
    }

    /// What this process met of damaged lines of locks, fences and memberships, and how many of its own it wrote again.
    pub fn damage_counts(&self) -> DamageCounts {
        self.inner.damage.counts()
    }

    /// One round of the host's service: heartbeat, recalls, fences, and the manager's work if this machine has the role.
    ///
    /// Returns after how many nanoseconds the next round is wanted.
    pub fn service_round(&self) -> Result<u64> {
        self.inner.service_round()
    }

    /// Runs the service on threads of its own until the result is dropped. A round that fails is recorded in [`Host::failed_rounds`], and
    /// the threads keep running.
    pub fn serve(&self) -> Result<Service> {
        Service::start(self)
    }

    /// Failed rounds of this process's background threads on this host: of the service, the cache's upkeep, and what callers record.
    pub fn failed_rounds(&self) -> &Arc<FailedRounds> {
        &self.inner.failed_rounds
    }

    /// Has the calling thread run where [`HostConfig::cpus`] wants upkeep. It stays where it was if it cannot, which is recorded in
    /// [`Host::failed_rounds`] as `what`.
    pub fn bind_upkeep(&self, what: &'static str) {
        if let Err(error) = self.config().cpus.bind_current_thread(ThreadKind::Upkeep) {
            self.failed_rounds().record(what, &error);
        }
    }

    /// What this host notices that ends it: another holder of its identity, another pool in its place.
    ///
    /// # Errors
    /// [`Error::Twin`], [`Error::Replaced`], [`Error::Closed`]; none while it is a member, or joins again after a fence.
    pub fn check_membership(&self) -> Result<()> {
        match self.inner.state() {
            segment::state::LIVE | segment::state::FENCED => Ok(()),
            found => Err(self.inner.not_live(found)),
        }
    }

    /// Incarnations whose end was stated on this machine, by slot: by its kernel or by an operator.
    pub fn stated_ends(&self) -> Vec<(u16, u32)> {
        let stated = self.inner.segment.header().declared_dead.iter().take(self.inner.geometry().slots as usize);
        let stated = stated.enumerate().map(|(slot, incarnation)| (slot as u16, incarnation.load(Ordering::Acquire)));
        stated.filter(|(_, incarnation)| *incarnation != 0).collect()
    }

    /// Leaves the pool. The last process of a host gives every lock back and marks the slot LEFT; an earlier one only detaches.
    ///
    /// # Errors
    /// [`Error::Timeout`] when work of this host does not end in time; then the slot stays as it is.
    pub fn leave(&self) -> Result<()> {
        join::leave(&self.inner)
    }
}

impl Inner {
    pub fn geometry(&self) -> &Geometry {
        self.lines.layout().geometry()
    }

    /// Notes for the manager's work of this machine the statements about an incarnation.
    fn state_of(&self, statements: &[AtomicU32; MAX_SLOTS], slot: u16, incarnation: u32) -> Result<()> {
        let Some(statement) = statements.get(usize::from(slot)).filter(|_| u32::from(slot) < self.geometry().slots) else {
            return Err(Error::Invalid(format!("slot {slot} does not exist")));
        };
        if incarnation >= MAX_NUMBER {
            return Err(Error::Invalid(format!("incarnation {incarnation} of slot {slot} cannot be: all are below {MAX_NUMBER}")));
        }
        statement.fetch_max(incarnation, Ordering::AcqRel);
        Ok(())
    }

    pub fn slot(&self) -> u32 {
        self.segment.header().slot.load(Ordering::Acquire)
    }

    pub fn incarnation(&self) -> u32 {
        self.segment.header().incarnation.load(Ordering::Acquire)
    }

    pub fn state(&self) -> u32 {
        self.segment.header().state.load(Ordering::SeqCst)
    }

    /// Counts an operation in and returns its incarnation.
    pub fn begin_operation(&self) -> Result<u32> {
        // Dekker with the service, which sets FENCED and then reads the counts: one of the two sees the other.
        self.count_operation();
        match self.state() {
            state::LIVE if !self.closed.load(Ordering::SeqCst) => Ok(self.incarnation()),
            found => {
                self.end_operation();
                Err(self.not_live(found))
            }
        }
    }

    /// Counts work that outlives the [`Op`] it began in, which is still alive. [`Inner::end_operation`] is its end.
    pub fn count_operation(&self) {
        self.segment.header().processes[self.index].operations.fetch_add(1, Ordering::SeqCst);
    }

    pub fn end_operation(&self) {
        self.segment.header().processes[self.index].operations.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether this host has noticed a fence so far; nothing is fetched.
    pub fn check_noticed(&self) -> Result<()> {
        match self.state() {
            state::LIVE => Ok(()),
            found => Err(self.not_live(found)),
        }
    }

    pub fn not_live(&self, found: u32) -> Error {
        match found {
            state::FENCED => Error::Fenced { slot: self.slot() as u16, incarnation: self.incarnation() },
            state::FOREIGN => Error::Twin { slot: Some(self.slot() as u16), machine: self.platform.machine() },
            state::REPLACED => {
                let incarnation_of = |line: Option<&Line>| line.and_then(Superblock::identity_in).map_or(0, |(_, incarnation)| incarnation);
                let now = self.lines.fetch_raw(0).ok();
                Error::Replaced { was: incarnation_of(self.superblocks.first()), now: incarnation_of(now.as_ref()) }
            }
            state::UNROOTED => match self.platform.check_local() {
                Err(error) => error,
                Ok(()) => Error::Closed,
            },
            // Zeros in place of the segment, or a handle that was closed.
            _ => match self.lines.memory().check(0, LINE_BYTES as u64) {
                Err(error) => error,
                Ok(()) => Error::Closed,
            },
        }
    }

    /// Runs `work` under a mutex of the local tier.
    pub fn with_mutex<T>(&self, mutex: &LocalMutex, work: impl FnOnce() -> Result<T>) -> Result<T> {
        self.with_mutex_or_repair(mutex, || (), work)
    }

    /// Runs `work` under a mutex of the local tier, and `repair` before it when the last owner died with the mutex.
    pub fn with_mutex_or_repair<T>(&self, mutex: &LocalMutex, repair: impl FnOnce(), work: impl FnOnce() -> Result<T>) -> Result<T> {
        // Held for one publish at a time; a thread that has it for longer is stopped, and the host resumes with it or is fenced.
        let timeout_ms = self.config.join_timeout_ms();
        let is_alive = |tag| self.is_tag_alive(tag);
        let asker = Asker { tag: self.tag, platform: &*self.platform, is_alive: &is_alive };
        let taken = match mutex.try_lock(self.tag) {
            true => Some(Acquired::Clean),
            false => mutex.lock(&asker, self.platform.now_ns() + timeout_ms * 1_000_000),
        };
        match taken {
            Some(Acquired::Clean) => {}
            Some(Acquired::FromDead) => repair(),
            None => {
                return Err(Error::Timeout {
                    what: "a mutex of the local segment (is a process of this host stopped?)".into(),
                    timeout_ms,
                });
            }
        }
        let result = work();
        mutex.unlock(&*self.platform);
        result
    }

    /// Repeats a read while it meets a damaged line that no call has waited for long enough: on hosts that write lines by stores and a
    /// flush, a line of a writer that is stopped in the middle looks damaged until it resumes.
    pub fn patiently<T>(&self, read: impl Fn() -> Result<T>) -> Result<T> {
        let mut round = 0;
        loop {
            match read() {
                Err(error) => drop(self.wait_for_whole(error, self.config.suspect_ms)?),
                read => return read,
            }
            self.platform.relax(round);
            round += 1;
        }
    }

    pub fn is_tag_alive(&self, tag: u32) -> bool {
        self.segment.process_of(tag).is_some_and(|process| self.platform.is_alive(process))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Detaching is all that a dropped handle does: the slot stays bound, so that the host's blocks and pins stay what they are.
        // The entry may be another handle's by now, if this machine started over since this one left.
        if self.segment.tag_of(self.index) == self.tag {
            let entry = &self.segment.header().processes[self.index];
            entry.start.store(0, Ordering::Release);
            entry.pid.store(0, Ordering::Release);
        }
    }
}
