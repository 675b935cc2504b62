// SPDX-License-Identifier: Apache-2.0
//! Which locks are in use: one bit per lock in the first records, written under [`LOCK_TABLE`](crate::lock::LOCK_TABLE).
//!
//! The table only hands numbers out. A crash between the commit and the return of [`allocate_lock`] leaves a lock that no caller knows of;
//! it costs one number and looks like a used one, so callers store the number in a named object right away.

use crate::error::{Error, Result};
use crate::fault::point;
use crate::host::Host;
use crate::lock::LockId;
use crate::media::{Geometry, LOCKS_PER_RECORD, RECORD_BYTES};
use crate::record::{self, Best, Locked, Reading, Structure};

/// Record, byte and bit that tell about a lock.
fn place(lock: LockId) -> (u64, usize, u8) {
    let bit = lock as usize % LOCKS_PER_RECORD;
    (u64::from(lock) / LOCKS_PER_RECORD as u64, bit / 8, 1 << (bit % 8))
}

/// The lowest lock of record `number` that can be allocated and is not.
fn lowest_free(number: u64, data: &[u8; RECORD_BYTES], range: std::ops::Range<u32>) -> Option<LockId> {
    let first = number as u32 * LOCKS_PER_RECORD as u32;
    let end = range.end.min(first + LOCKS_PER_RECORD as u32);
    (first.max(range.start)..end).find(|&lock| {
        let (_, byte, mask) = place(lock);
        data[byte] & mask == 0
    })
}

fn check_number(lock: LockId, geometry: &Geometry) -> Result<()> {
    let first = geometry.first_user_lock();
    if (first..geometry.locks).contains(&lock) {
        return Ok(());
    }
    Err(Error::Invalid(format!("lock {lock} is not one of the locks {first} to {} that can be allocated", geometry.locks - 1)))
}

fn is_set(best: &Best, lock: LockId) -> bool {
    let (_, byte, mask) = place(lock);
    best.copy.data[byte] & mask != 0
}

/// Allocates a lock.
///
/// # Errors
/// [`Error::Full`]; [`Error::Fenced`] (a lock may then be left allocated), [`Error::Timeout`] after `timeout_ms`.
pub fn allocate_lock(host: &Host, timeout_ms: u64) -> Result<LockId> {
    let mut locked = Locked::acquire(host, Structure::LockTable, timeout_ms)?;
    let geometry = host.lines().layout().geometry();
    for number in Structure::LockTable.records(geometry) {
        let best = locked.read(number)?;
        if let Some(lock) = lowest_free(number, &best.copy.data, geometry.first_user_lock()..geometry.locks) {
            let mut data = best.copy.data;
            let (_, byte, mask) = place(lock);
            data[byte] |= mask;
            point!("locks.found");
            locked.commit(&[(best, data)])?;
            return Ok(lock);
        }
    }
    locked.confirm()?;
    let limit = u64::from(geometry.locks - geometry.first_user_lock());
    Err(Error::Full { what: "the lock table", limit, advice: "free locks, or format the pool with more" })
}

/// Gives a lock back. The caller knows that it is not used any more.
///
/// # Errors
/// [`Error::NotFound`] when it is not allocated; [`Error::Fenced`], [`Error::Timeout`].
pub fn free_lock(host: &Host, lock: LockId, timeout_ms: u64) -> Result<()> {
    check_number(lock, host.lines().layout().geometry())?;
    let mut locked = Locked::acquire(host, Structure::LockTable, timeout_ms)?;
    let (number, byte, mask) = place(lock);
    let best = locked.read(number)?;
    if !is_set(&best, lock) {
        locked.confirm()?;
        return Err(Error::NotFound(format!("lock {lock}")));
    }
    let mut data = best.copy.data;
    data[byte] &= !mask;
    point!("locks.freeing");
    locked.commit(&[(best, data)])
}

/// Whether a lock is allocated. Takes no lock unless the answer is in doubt, then for at most `timeout_ms`.
pub fn is_allocated(host: &Host, lock: LockId, timeout_ms: u64) -> Result<bool> {
    check_number(lock, host.lines().layout().geometry())?;
    let (number, ..) = place(lock);
    if let Reading::Final(best) = record::read(host, number)? {
        return Ok(is_set(&best, lock));
    }
    let mut locked = Locked::acquire(host, Structure::LockTable, timeout_ms)?;
    let best = locked.settle(number)?;
    point!("locks.settled");
    locked.confirm()?;
    Ok(is_set(&best, lock))
}

#[cfg(test)]
mod tests;
