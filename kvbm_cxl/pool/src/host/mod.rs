// SPDX-License-Identifier: Apache-2.0
//! Hosts: slots, joining, heartbeats, fences. Follows protocols/LOCKS.md sections 4 to 6.

use crate::error::Result;
use crate::line::Lines;
use crate::lock::{LockGuard, LockId};
use crate::platform::Platform;
use std::sync::Arc;

/// How a host behaves. The times are counted on this host's own clock.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Slot to ask for; a wish, the binding decides. `None` takes any free one.
    pub slot: Option<u16>,
    /// Deadline of a join, in milliseconds.
    pub join_timeout_ms: u64,
    /// Period of the heartbeat, in milliseconds.
    pub heartbeat_ms: u64,
    /// A host (or manager) whose heartbeat did not move for this long is suspected, in milliseconds.
    pub suspect_ms: u64,
    /// Period in which the service looks for recalls and fences, in microseconds.
    pub poll_us: u64,
    /// A sticky lock that nobody here used for this long is given back, in milliseconds.
    pub idle_release_ms: u64,
}

impl Default for HostConfig {
    fn default() -> Self {
        HostConfig { slot: None, join_timeout_ms: 10_000, heartbeat_ms: 50, suspect_ms: 1_000, poll_us: 1_000, idle_release_ms: 10_000 }
    }
}

/// One process's membership in the pool as part of its host. Cheap to clone; every clone is the same membership.
#[derive(Clone)]
pub struct Host {
    inner: Arc<Inner>,
}

struct Inner {
    lines: Lines,
    platform: Arc<dyn Platform>,
}

/// A stretch of work that may publish shared lines. While one is alive the host does not acknowledge a fence.
pub struct Op<'h> {
    host: &'h Host,
    incarnation: u32,
}

impl Op<'_> {
    /// The incarnation this work belongs to.
    pub fn incarnation(&self) -> u32 {
        self.incarnation
    }

    /// The host.
    pub fn host(&self) -> &Host {
        self.host
    }
}

impl Host {
    /// Joins the pool, or attaches to the incarnation that another process of this machine runs.
    pub fn join(_lines: Lines, _platform: Arc<dyn Platform>, _config: HostConfig) -> Result<Host> {
        todo!()
    }

    /// The pool's metadata lines.
    pub fn lines(&self) -> &Lines {
        &self.inner.lines
    }

    /// The machine below.
    pub fn platform(&self) -> &Arc<dyn Platform> {
        &self.inner.platform
    }

    /// This host's slot.
    pub fn slot(&self) -> u16 {
        todo!()
    }

    /// Begins work that may publish shared lines.
    ///
    /// # Errors
    /// [`crate::Error::Fenced`] while this host is fenced and has not joined again.
    pub fn enter(&self) -> Result<Op<'_>> {
        todo!()
    }

    /// A3 and B2: fetches every seat's fence row of this host's slot, after everything published so far.
    ///
    /// # Errors
    /// [`crate::Error::Fenced`] when any row names the incarnation of `op` or a later one: the outcome is unknown.
    pub fn check_fences(&self, _op: &Op<'_>) -> Result<()> {
        todo!()
    }

    /// Whether any seat's row fences incarnation `incarnation` of `slot`.
    pub fn is_fenced(&self, _slot: u16, _incarnation: u32) -> Result<bool> {
        todo!()
    }

    /// Whether it is proven that incarnation `incarnation` of `slot` writes neither metadata nor payload any more.
    pub fn is_proven_dead(&self, _slot: u16, _incarnation: u32) -> Result<bool> {
        todo!()
    }

    /// Acquires a lock.
    ///
    /// # Errors
    /// [`crate::Error::Timeout`] at the deadline, [`crate::Error::Fenced`].
    pub fn acquire(&self, _lock: LockId, _timeout_ms: u64) -> Result<LockGuard<'_>> {
        todo!()
    }

    /// One round of the host's service: heartbeat, recalls, fences, and the manager's work if this machine has the role.
    ///
    /// Returns after how many nanoseconds the next round is wanted.
    pub fn service_round(&self) -> Result<u64> {
        todo!()
    }

    /// Leaves the pool: releases every lock, marks the slot LEFT when this was the machine's last process.
    pub fn leave(&self) -> Result<()> {
        todo!()
    }
}
