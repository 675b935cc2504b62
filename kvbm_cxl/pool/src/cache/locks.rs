// SPDX-License-Identifier: Apache-2.0
//! The locks of the cache, with the time that calls wait for them.

use crate::error::{Error, Result};
use crate::host::Host;
use crate::lock::{LockGuard, LockId};
use crate::metrics::Metrics;
use std::sync::Arc;

#[derive(Clone)]
pub(super) struct CacheLocks {
    pub host: Host,
    /// Longest wait for one lock.
    pub timeout_ms: u64,
    pub metrics: Arc<Metrics>,
}

impl CacheLocks {
    /// Takes a lock of the cache and counts the wait. Much of the cache does so inside an operation, so no call waits for a re-join here.
    pub fn acquire(&self, lock: LockId) -> Result<LockGuard<'_>> {
        let start_ns = self.host.platform().now_ns();
        let guard = self.host.acquire_inside(lock, self.timeout_ms);
        self.count_wait(start_ns, guard.as_ref().err());
        guard
    }

    /// As [`CacheLocks::acquire`], of several locks, each as soon as it comes.
    pub fn acquire_each<'a>(&'a self, locks: &[LockId], mut work: impl FnMut(LockGuard<'a>) -> Result<()>) -> Result<()> {
        let start_ns = self.host.platform().now_ns();
        let done = self.host.acquire_each(locks, self.timeout_ms, |guard| {
            self.count_wait(start_ns, None);
            work(guard)
        });
        if let Err(error) = &done {
            self.count_wait(start_ns, Some(error));
        }
        done
    }

    fn count_wait(&self, start_ns: u64, failed: Option<&Error>) {
        match failed {
            None => self.metrics.lock_wait_seconds.observe(self.host.platform().now_ns().saturating_sub(start_ns)),
            Some(Error::Timeout { .. }) => self.metrics.lock_timeouts_total.inc(),
            Some(_) => {}
        }
    }

    /// As [`CacheLocks::acquire`] where that needs no other host; `None` where it would have to wait.
    pub fn acquire_if_here(&self, lock: LockId) -> Result<Option<LockGuard<'_>>> {
        let guard = self.host.acquire_if_here(lock)?;
        if guard.is_some() {
            self.metrics.lock_wait_seconds.observe(0);
        }
        Ok(guard)
    }
}
