// SPDX-License-Identifier: Apache-2.0
//! The local mutex of a lock, while an acquisition holds it: whatever goes wrong gives it back.

use super::{LockGuard, LockId};
use crate::error::Result;
use crate::host::local_mutex::Asker;
use crate::host::{Host, Inner};

/// The local mutex of a lock, held.
pub(super) struct Mutex<'h> {
    inner: &'h Inner,
    lock: LockId,
}

impl<'h> Mutex<'h> {
    /// Takes it if it is free.
    pub fn try_lock(inner: &'h Inner, lock: LockId) -> Option<Self> {
        // Made only once it is held: whatever is dropped unlocks.
        inner.segment.lock(lock).mutex.try_lock(inner.tag).then(|| Mutex { inner, lock })
    }

    /// Takes it, from a dead process if need be; `None` at the deadline (on the platform's clock).
    pub fn lock(inner: &'h Inner, lock: LockId, deadline_ns: u64) -> Option<Self> {
        let is_alive = |tag| inner.is_tag_alive(tag);
        let asker = Asker { tag: inner.tag, platform: &*inner.platform, is_alive: &is_alive };
        let taken = inner.segment.lock(lock).mutex.lock(&asker, deadline_ns)?;
        inner.note_inherited(lock, taken);
        Some(Mutex { inner, lock })
    }

    /// One that was left held by [`Mutex::keep`].
    pub fn kept(inner: &'h Inner, lock: LockId) -> Self {
        Mutex { inner, lock }
    }

    /// The lock, whose grant is accepted.
    pub fn guard(self, host: &'h Host, grant: u32) -> Result<LockGuard<'h>> {
        let op = host.enter()?;
        Ok(LockGuard { op, lock: self.keep(), grant })
    }

    /// Leaves it held.
    pub fn keep(self) -> LockId {
        std::mem::ManuallyDrop::new(self).lock
    }
}

impl Drop for Mutex<'_> {
    fn drop(&mut self) {
        self.inner.segment.lock(self.lock).mutex.unlock(&*self.inner.platform);
    }
}
