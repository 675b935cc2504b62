// SPDX-License-Identifier: Apache-2.0
//! The two-tier lock (TraCT 3.3, made to survive failures). Follows protocols/LOCKS.md sections 3 and 6.
//!
//! Local tier: a mutex per lock in the host's segment, so that one thread of a host asks at a time. Global tier: the host's request line
//! and the managers' grant lines. A grant is *sticky*: the next acquisition on the same host touches no shared line, until the manager
//! recalls it.

pub mod claim;
mod global;
pub(crate) mod manager;
mod mutex;
pub(crate) mod seat;
mod several;

pub(crate) use several::{acquire_each, acquire_if_here};

use crate::error::{Error, Result};
use crate::host::segment::{flag, state};
use crate::host::{Host, Op};
use crate::media::Geometry;
use global::Wait;
use mutex::Mutex;
use std::sync::atomic::Ordering;

/// Number of a lock, from 0.
pub type LockId = u32;

/// Lock of the lock table itself.
pub const LOCK_TABLE: LockId = 0;
/// Lock of the object table.
pub const LOCK_OBJECTS: LockId = 1;
/// Lock of the chunk claims.
pub const LOCK_CHUNKS: LockId = 2;
/// Lock of the claims on cell chunks.
pub const LOCK_CELLS: LockId = 3;
pub use crate::media::FIRST_STRIPE_LOCK;
/// First lock that can be allocated in a pool without cells; with cells it is [`Geometry::first_user_lock`].
pub const FIRST_USER_LOCK: LockId = FIRST_STRIPE_LOCK;

/// What a lock does while its holder is suspected and perhaps only paused (LOCKS.md section 6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockMode {
    /// Safe-wait: waits for the proof that the holder has stopped.
    Safe,
    /// Time-out: passes on once the holder is fenced. Only for structures whose commits follow LOCKS.md section 5.
    Timed,
}

/// The mode of a lock: the pool's own structures follow section 5, what users protect need not.
pub fn mode_of(geometry: &Geometry, lock: LockId) -> LockMode {
    if lock < geometry.first_user_lock() { LockMode::Timed } else { LockMode::Safe }
}

/// A held lock; dropping it gives the local tier back and keeps the global grant (sticky) until it is recalled.
pub struct LockGuard<'h> {
    op: Op<'h>,
    lock: LockId,
    grant: u32,
}

/// What an acquisition does when this host is fenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnFence {
    /// Waits for the re-join, and acquires the lock under the new incarnation.
    Rejoin,
    /// Gives up: the caller is inside an operation, and while that lasts there is no re-join to wait for.
    Fail,
}

/// [`Host::acquire`], [`Host::acquire_inside`].
pub(crate) fn acquire<'h>(host: &'h Host, lock: LockId, timeout_ms: u64, on_fence: OnFence) -> Result<LockGuard<'h>> {
    let inner = &*host.inner;
    check(host, lock)?;
    let timeout = || Error::Timeout { what: format!("lock {lock}"), timeout_ms };
    // The clock is only read once there is something to wait for: the uncontended path must stay short.
    let mut deadline_ns = None;
    let mut round = 0;
    loop {
        let mutex = match Mutex::try_lock(inner, lock) {
            Some(mutex) => mutex,
            None => {
                let deadline_ns = *deadline_ns.get_or_insert_with(|| inner.platform.now_ns() + timeout_ms * 1_000_000);
                Mutex::lock(inner, lock, deadline_ns).ok_or_else(timeout)?
            }
        };
        let error = match host.enter() {
            Ok(op) => {
                let mut deadline_ns = || *deadline_ns.get_or_insert_with(|| inner.platform.now_ns() + timeout_ms * 1_000_000);
                match inner.obtain(lock, op.incarnation(), || Wait::new(deadline_ns(), timeout_ms)) {
                    Ok(grant) => return Ok(LockGuard { op, lock: mutex.keep(), grant }),
                    Err(error) => {
                        // Before the operation ends, as everywhere.
                        drop(mutex);
                        error
                    }
                }
            }
            Err(error) => {
                drop(mutex);
                error
            }
        };
        if !error.is_fenced() || on_fence == OnFence::Fail {
            return Err(error);
        }
        // Fenced: nothing was done under the old incarnation, so wait for the new one.
        let deadline_ns = *deadline_ns.get_or_insert_with(|| inner.platform.now_ns() + timeout_ms * 1_000_000);
        while inner.state() == state::FENCED {
            if inner.platform.now_ns() >= deadline_ns {
                return Err(inner.not_live(state::FENCED));
            }
            inner.platform.relax(round);
            round += 1;
        }
    }
}

fn check(host: &Host, lock: LockId) -> Result<()> {
    let locks = host.inner.geometry().locks;
    if lock >= locks {
        return Err(Error::Invalid(format!("lock {lock} does not exist: the pool has {locks} locks")));
    }
    Ok(())
}

impl<'h> LockGuard<'h> {
    /// The work this guard is part of.
    pub fn op(&self) -> &Op<'h> {
        &self.op
    }

    /// The lock.
    pub fn lock(&self) -> LockId {
        self.lock
    }

    /// Grant number (gno) under which the lock is held.
    pub fn grant(&self) -> u32 {
        self.grant
    }

    /// True when a holder before did not end cleanly and no holder has repaired since (H4).
    pub fn needs_repair(&self) -> bool {
        self.flags() & flag::REPAIR != 0
    }

    /// States that the structure is repaired and sealed. Until then a release is not clean and the next holder repairs.
    pub fn repaired(&mut self) {
        self.op.host().inner.segment.lock(self.lock).flags.fetch_and(!(flag::REPAIR | flag::DIRTY), Ordering::AcqRel);
    }

    /// States that the structure was left half done: the next holder repairs.
    pub fn damaged(&mut self) {
        self.op.host().inner.segment.lock(self.lock).flags.fetch_or(flag::REPAIR | flag::DIRTY, Ordering::AcqRel);
    }

    /// True while no fence was noticed on this host; says nothing about fences not noticed yet.
    pub fn is_live(&self) -> bool {
        self.op.host().inner.state() == state::LIVE
    }

    fn flags(&self) -> u32 {
        self.op.host().inner.segment.lock(self.lock).flags.load(Ordering::Acquire)
    }
}

impl Drop for LockGuard<'_> {
    fn drop(&mut self) {
        let inner = &*self.op.host().inner;
        let local = inner.segment.lock(self.lock);
        // A fenced host writes nothing: its grant ends with its incarnation.
        if local.flags.load(Ordering::Acquire) & flag::RECALL != 0 && inner.state() == state::LIVE {
            // The request stays published as it was if the memory fails here, and the host's own failure ends the grant.
            let _ = inner.give_back(self.lock);
        }
        local.mutex.unlock(&*inner.platform);
    }
}
