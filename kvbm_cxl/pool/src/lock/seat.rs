// SPDX-License-Identifier: Apache-2.0
//! Manager seats: who claimed last (LOCKS.md section 2).

use crate::error::{Error, Result};
use crate::fault::mutant;
use crate::host::Inner;
use crate::line::{Lines, if_whole};
use crate::lock::claim;
use crate::media::{Identity, Seat};

/// The seat with the highest epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Newest {
    pub seat: u64,
    pub epoch: u32,
    pub beat: u64,
    pub machine: [u8; 16],
}

/// Every seat's line, all of them fetched now.
pub(crate) fn each(lines: &Lines) -> Result<Vec<Result<Seat>>> {
    let indexes: Vec<u64> = (0..lines.layout().geometry().all_seats()).collect();
    let mut fetched: Vec<Result<Seat>> = Vec::with_capacity(indexes.len());
    lines.fetch_many(&indexes, &mut fetched)?;
    Ok(fetched)
}

/// As [`each`], where a line that does not verify is an error: it may hide the highest epoch.
pub(crate) fn all(lines: &Lines) -> Result<Vec<Seat>> {
    each(lines)?.into_iter().collect()
}

/// The seat that claimed last; `None` when none ever did.
///
/// # Errors
/// [`crate::error::Error::BadLine`] of a seat whose line does not verify: it may hide the highest epoch. Not of one that was never given
/// to a machine.
pub(crate) fn newest(inner: &Inner) -> Result<Option<Newest>> {
    let mut newest: Option<Newest> = None;
    for (seat, line) in (0..).zip(each(&inner.lines)?) {
        let line = match line {
            Err(Error::BadLine { .. }) if inner.is_vacant(seat)? => continue,
            line => line?,
        };
        if line.epoch > newest.map_or(0, |newest| newest.epoch) {
            newest = Some(Newest { seat, epoch: line.epoch, beat: line.beat, machine: line.machine });
        }
    }
    Ok(newest)
}

impl Inner {
    /// Whether `seat` was given to no machine up to now: no line of it was ever written then, whatever it may hold.
    ///
    /// A claim that was accepted is in the copy of the place that made it, and in those of all that were accepted later: the copy with the
    /// highest tag tells of it. A claim that is there and was not accepted only makes the answer no. The owner of a slot publishes the
    /// slot's identity before a line of the slot's seat: if no incarnation wrote the identity, the seat's lines are the format's.
    pub(crate) fn is_vacant(&self, seat: u64) -> Result<bool> {
        if let Some(slot) = self.geometry().slot_of(seat) {
            let identity = if_whole(self.lines.fetch::<Identity>(slot.into()))?;
            return Ok(identity.is_some_and(|identity| identity.incarnation == 0));
        }
        if self.config.seats.get(seat as usize).is_some_and(|machine| !machine.is_none()) {
            return Ok(false);
        }
        Ok(if_whole(claim::decided(&self.lines, seat))?.is_some_and(|claim| claim.generation == 0))
    }
}

/// The seat whose copy of the grant and binding lines `seat` writes: its own, unless the rule "own copies per seat" is dropped.
pub(crate) fn copy_of(seat: u64) -> u64 {
    if mutant!("shared_grant_line") { 0 } else { seat }
}

/// The smallest epoch of `seat` above `seen`: no two seats share one.
pub(crate) fn next_epoch(seat: u64, seats: u64, seen: u32) -> u64 {
    let next = u64::from(seen) + 1;
    if mutant!("epochs_not_unique") {
        return next;
    }
    // Epoch e belongs to seat (e - 1) mod seats.
    next + (seat + seats - (next - 1) % seats) % seats
}

#[cfg(test)]
mod tests;
