// SPDX-License-Identifier: Apache-2.0
//! The two-tier lock. Follows protocols/LOCKS.md sections 2, 3 and 6.

use crate::host::Op;

/// Number of a lock, from 0.
pub type LockId = u32;

/// Lock of the lock table itself.
pub const LOCK_TABLE: LockId = 0;
/// Lock of the object table.
pub const LOCK_OBJECTS: LockId = 1;
/// Lock of the chunk claims.
pub const LOCK_CHUNKS: LockId = 2;
/// First lock that can be allocated.
pub const FIRST_USER_LOCK: LockId = 8;

/// A held lock; dropping it gives the local tier back and keeps the global grant (sticky) until it is recalled.
pub struct LockGuard<'h> {
    op: Op<'h>,
    grant: u32,
    repair: bool,
}

impl<'h> LockGuard<'h> {
    /// The work this guard is part of.
    pub fn op(&self) -> &Op<'h> {
        &self.op
    }

    /// Grant number (gno) under which the lock is held.
    pub fn grant(&self) -> u32 {
        self.grant
    }

    /// True when a holder before did not end cleanly and nobody has repaired since (H4).
    pub fn needs_repair(&self) -> bool {
        self.repair
    }

    /// States that the structure is repaired and sealed. Until then a release is not clean and the next holder repairs.
    pub fn repaired(&mut self) {
        self.repair = false;
    }
}
