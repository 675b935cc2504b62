// SPDX-License-Identifier: Apache-2.0
//! When hosts last used a block, as the others see it: the pool's tick, and its numbers in the pin lines (CACHE.md section 2).
//!
//! A number comes round after seven ticks, and would then make an unused block look like one that was just used. So a host clears
//! a number in its lines, and publishes them, while it is the oldest of the cycle, and follows the pool to the next tick only once no line
//! has that tick's number any more: where much is to be cleared, or the service stood still for ticks, it pins with an older number
//! meanwhile. What hosts that are gone have left in their lines does not count.
//!
//! An owner learns of uses by others in two ways: of a block that it is about to evict, and, in turn, of all its blocks, some at each
//! round of the upkeep. Without the second a use would be forgotten with its number, after some 30 seconds, while a block may have to wait
//! for its next use much longer.

use crate::background::held;
use crate::cache::Inner;
use crate::cache::cells::local::{PinRow, number};
use crate::cache::cells::store::CellStore;
use crate::cache::policy::CYCLE_TICKS;
use crate::cache::pull::pins::{Clearing, Pins};
use crate::error::{Error, Result};
use crate::media::{CELLS_PER_PIN, Identity, PinLine, Seat};
use std::sync::atomic::Ordering;

/// Beats of the manager's seat in one tick of recency: about five seconds.
const BEATS_PER_TICK: u64 = 100;
/// Pin lines published in one round because of numbers that were cleared in them: a round takes some milliseconds more at most, and those
/// of a tick are enough for the lines of two TiB.
const CLEARED_PER_ROUND: usize = 1 << 14;
/// Own chunks whose uses by others are looked up in one round. A round of 112 cells a chunk is some thousand lines with eight hosts; at two
/// rounds a second a process comes by each of its chunks before a number is cleared, for up to 15 thousand chunks.
pub(in crate::cache) const CHUNKS_LEARNT_PER_ROUND: usize = 256;
/// One in each nibble.
const EACH_NIBBLE: u64 = 0x1111_1111_1111_1111;

/// The numbers, a bit for each, that may be in lines of a host that followed up to `known`, and are to be gone before it writes that of
/// `now`: those of the ticks between, which are a cycle old, and the next one, which is about to be. A new manager starts its own count:
/// then the numbers alone tell how far it is.
fn stale(known: u64, now: u64) -> u8 {
    let cycle = u64::from(CYCLE_TICKS);
    let passed = now.checked_sub(known).unwrap_or_else(|| (cycle + now % cycle - known % cycle) % cycle);
    (1..=(passed + 1).min(cycle)).fold(0, |numbers, step| numbers | 1 << number(known % cycle + step))
}

fn has_any(row: &PinRow, numbers: u8) -> bool {
    let ticks = EACH_NIBBLE * u64::from(PinLine::TICK);
    row.nibbles.iter().map(|word| word.load(Ordering::Relaxed) & ticks).filter(|&word| word != 0).any(|word| {
        // A nibble of the difference is at most 7: with 7 more it has its highest bit unless it is 0.
        let has = |number: u64| !((word ^ (EACH_NIBBLE * number)) + ticks) & EACH_NIBBLE << 3 != 0;
        (1..8).any(|number| numbers >> number & 1 == 1 && has(number))
    })
}

impl CellStore {
    /// Takes over the last uses by other hosts of the blocks in `limit` of this process's chunks; the next round continues after them.
    pub(in crate::cache) fn learn_uses(&self, limit: usize) -> Result<()> {
        let from = self.recency.learnt.load(Ordering::Relaxed);
        let chunks = self.cells().chunks_from(from, limit);
        let next = chunks.last().filter(|_| chunks.len() == limit).map_or(0, |last| last + 1);
        self.recency.learnt.store(next, Ordering::Relaxed);
        for chunk in chunks {
            // The cells of a chunk have one line of each host.
            let cells: Vec<u64> = self.cells_of(chunk).collect();
            let uses = self.uses(&cells)?;
            let mut own = self.cells();
            for (&cell, seen) in cells.iter().zip(&uses).filter(|(_, seen)| seen.ticks != 0) {
                if let Some(tick) = self.youngest(seen) {
                    own.used_elsewhere(cell, tick);
                }
            }
        }
        Ok(())
    }

    fn look_who_is_over(&self) -> Result<()> {
        // What cannot be read makes recency older, not wrong.
        let standings = self.host.inner.standings()?.into_iter().map(|(standing, _)| standing);
        let slots: Vec<u64> = (0..u64::from(self.host.geometry().slots)).collect();
        let mut fetched: Vec<Result<Identity>> = Vec::with_capacity(slots.len());
        self.host.lines().fetch_many(&slots, &mut fetched)?;
        for ((over, standing), identity) in self.recency.over.iter().zip(standings).zip(fetched) {
            // An older incarnation of the slot is over as well, and all are where the last one has left.
            let before = |identity: Identity| match identity.state {
                Identity::LIVE => identity.incarnation.saturating_sub(1),
                _ => identity.incarnation,
            };
            over.fetch_max(standing.fenced.max(standing.dead).max(identity.map_or(0, before)), Ordering::Relaxed);
        }
        Ok(())
    }
}

impl Pins {
    /// Clears, in this host's lines, the numbers that must not be there when it goes from tick `known` to `now`; true when that is done,
    /// else, with `limit` lines published, the next round continues.
    fn clear_numbers(&self, known: u64, now: u64, limit: usize) -> Result<bool> {
        let numbers = stale(known, now);
        let mut clearing = *held(&self.clearing);
        if clearing.way != (known, now) {
            clearing = Clearing { way: (known, now), row: 0 };
        }
        let mut published = 0;
        let mut is_done = true;
        for (index, row) in self.local.rows().iter().enumerate().skip(clearing.row) {
            if has_any(row, numbers) {
                if published == limit {
                    is_done = false;
                    break;
                }
                published += usize::from(self.clear_row(index as u64, known, now, numbers)?);
            }
            clearing.row = index + 1;
        }
        *held(&self.clearing) = clearing;
        Ok(is_done)
    }

    /// Clears numbers in one line; true when it had to be published.
    fn clear_row(&self, index: u64, known: u64, now: u64, numbers: u8) -> Result<bool> {
        let op = self.host.enter()?;
        self.with_row(index * CELLS_PER_PIN as u64, |row, index| {
            // Where another process has gone on meanwhile, these numbers may be those of uses since.
            if self.local.header().ticks.load(Ordering::Acquire) != known {
                return Ok(false);
            }
            let mut changed = false;
            for place in 0..CELLS_PER_PIN {
                let nibble = row.nibble(place);
                if numbers >> (nibble & PinLine::TICK) & 1 == 0 {
                    continue;
                }
                if nibble & PinLine::PINNED == 0 {
                    row.set_nibble(place, 0);
                    changed = true;
                } else {
                    // It is being used. The tick counts once it is not, and is published with that.
                    row.set_nibble(place, PinLine::PINNED | number(now));
                }
            }
            if changed {
                self.publish_row(row, index, op.incarnation())?;
            }
            Ok(changed)
        })
    }
}

impl Inner {
    /// Takes over the tick that the manager's beat stands for, and with each the state of the hosts.
    pub(in crate::cache) fn follow_ticks(&self) -> Result<()> {
        let beat = match self.lines().fetch::<Seat>(self.host.manager_seat().into()) {
            Ok(seat) => seat.beat,
            // Recency stands still: that costs hits only.
            Err(Error::BadLine { .. }) => return Ok(()),
            Err(error) => return Err(error),
        };
        // Never 0, which stands for a host that has followed none yet.
        let now = beat / BEATS_PER_TICK + u64::from(CYCLE_TICKS);
        if self.store.observe_tick(number(now)) {
            self.store.look_who_is_over()?;
        }
        let ticks = &self.store.local.header().ticks;
        let known = ticks.load(Ordering::Acquire);
        if known != now && (known == 0 || self.pins.clear_numbers(known, now, CLEARED_PER_ROUND)?) {
            // Another process of the host may have been faster.
            let _ = ticks.compare_exchange(known, now, Ordering::AcqRel, Ordering::Relaxed);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
