// SPDX-License-Identifier: Apache-2.0
//! Several locks at once: to take one only if it is here, and to ask for many together, so that their ways to the manager and back overlap.
//!
//! To the manager the requests are those of as many threads of one host. No lock is kept while another is waited for, and no local
//! mutex of one is waited for with another held, so that no order among them has to be kept.

use super::global::Wait;
use super::mutex::Mutex;
use super::{LockGuard, LockId, OnFence, acquire, check};
use crate::error::Result;
use crate::host::{Host, Inner};

/// [`Host::acquire_if_here`].
pub(crate) fn acquire_if_here(host: &Host, lock: LockId) -> Result<Option<LockGuard<'_>>> {
    check(host, lock)?;
    let Some(mutex) = Mutex::try_lock(&host.inner, lock) else { return Ok(None) };
    // The operation first: without one a fenced host would count a use of a lock that it has lost.
    let op = host.enter()?;
    Ok(host.inner.granted(lock).map(|grant| LockGuard { op, lock: mutex.keep(), grant }))
}

/// [`Host::acquire_each`].
pub(crate) fn acquire_each<'h>(
    host: &'h Host,
    locks: &[LockId],
    timeout_ms: u64,
    mut work: impl FnMut(LockGuard<'h>) -> Result<()>,
) -> Result<()> {
    let inner = &*host.inner;
    locks.iter().try_for_each(|&lock| check(host, lock))?;
    let op = host.enter()?;
    let mut asked = Asked { inner, locks: Vec::with_capacity(locks.len()) };
    let (mut here, mut busy) = (Vec::new(), Vec::new());
    for &lock in locks {
        let Some(mutex) = Mutex::try_lock(inner, lock) else {
            busy.push(lock);
            continue;
        };
        match inner.ask(lock)? {
            Some(grant) => here.push(mutex.guard(host, grant)?),
            None => asked.locks.push(mutex.keep()),
        }
    }
    here.into_iter().try_for_each(&mut work)?;
    let mut wait = Wait::new(inner.platform.now_ns() + timeout_ms * 1_000_000, timeout_ms);
    while !asked.locks.is_empty() {
        let (place, grant) = inner.await_any(&asked.locks, op.incarnation(), &mut wait).inspect_err(|_| asked.unlock())?;
        let mutex = Mutex::kept(inner, asked.locks.swap_remove(place));
        work(mutex.guard(host, grant)?)?;
    }
    drop(op);
    // Other threads of this host are at these: their turn comes first.
    busy.into_iter().try_for_each(|lock| work(acquire(host, lock, timeout_ms, OnFence::Fail)?))
}

/// Locks that were asked for and are not here yet, with their local mutexes held: a grant without a waiter is one that
/// is never given back.
struct Asked<'h> {
    inner: &'h Inner,
    locks: Vec<LockId>,
}

impl Asked<'_> {
    fn unlock(&mut self) {
        self.locks.drain(..).for_each(|lock| drop(Mutex::kept(self.inner, lock)));
    }
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        // Should the memory fail here, the host's own failure ends the requests.
        let _ = self.inner.cancel_all(&self.locks);
        self.unlock();
    }
}

#[cfg(test)]
mod tests;
