// SPDX-License-Identifier: Apache-2.0
//! Manager seats: who claimed last (LOCKS.md section 2).

use crate::error::Result;
use crate::fault::mutant;
use crate::line::Lines;
use crate::media::Seat;

/// The seat with the highest epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Newest {
    pub seat: u64,
    pub epoch: u32,
    pub beat: u64,
}

/// Every seat's line, all of them fetched now. A damaged one may hide the highest epoch, so it is an error.
pub(crate) fn all(lines: &Lines) -> Result<Vec<Seat>> {
    let indexes: Vec<u64> = (0..u64::from(lines.layout().geometry().seats)).collect();
    let mut fetched: Vec<Result<Seat>> = Vec::with_capacity(indexes.len());
    lines.fetch_many(&indexes, &mut fetched)?;
    fetched.into_iter().collect()
}

/// The seat that claimed last; `None` when none ever did.
pub(crate) fn newest(lines: &Lines) -> Result<Option<Newest>> {
    let seats = all(lines)?;
    let newest = seats.iter().enumerate().max_by_key(|(_, seat)| seat.epoch);
    Ok(newest.filter(|(_, seat)| seat.epoch > 0).map(|(index, seat)| Newest { seat: index as u64, epoch: seat.epoch, beat: seat.beat }))
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
mod tests {
    use super::next_epoch;

    #[test]
    fn epochs_rise_and_belong_to_one_seat() {
        for seats in 1..=8 {
            for seat in 0..seats {
                for seen in 0..40 {
                    let epoch = next_epoch(seat, seats, seen);
                    assert!(epoch > u64::from(seen) && epoch <= u64::from(seen) + seats);
                    assert_eq!((epoch - 1) % seats, seat);
                }
            }
        }
    }
}
