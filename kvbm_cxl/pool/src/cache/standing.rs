// SPDX-License-Identifier: Apache-2.0
//! Which incarnations are fenced, read once for a batch: the void rule (CACHE.md D2) costs a few lines per batch, not per block.

use super::Inner;
use crate::error::{Error, Result};
use crate::limits::MAX_SLOTS;
use crate::media::{FenceLine, SLOTS_PER_FENCE};

/// Fence words as fetched together.
#[derive(Clone, Copy)]
pub(super) struct Fences {
    up_to: [u32; MAX_SLOTS],
    /// One bit for each slot whose words all verified.
    known: u64,
}

impl Fences {
    /// Whether an incarnation is fenced; `None` where that cannot be told.
    pub fn of(&self, slot: u16, incarnation: u32) -> Option<bool> {
        let slot = usize::from(slot);
        let known = slot < MAX_SLOTS && self.known >> slot & 1 == 1;
        known.then(|| self.up_to[slot] >= incarnation)
    }
}

impl Inner {
    /// Fetches the fence words of `slots` from all seats; misses overlap.
    pub(super) fn fences(&self, slots: impl Iterator<Item = u16>) -> Result<Fences> {
        let geometry = self.geometry();
        let mut groups = 0u64;
        for slot in slots.filter(|&slot| u32::from(slot) < geometry.slots) {
            groups |= 1 << (usize::from(slot) / SLOTS_PER_FENCE);
        }
        let mut indexes = Vec::with_capacity(8);
        for group in (0..geometry.fence_lines()).filter(|group| groups >> group & 1 == 1) {
            indexes.extend((0..u64::from(geometry.seats)).map(|seat| seat * geometry.fence_lines() + group));
        }
        let mut fetched: Vec<Result<FenceLine>> = Vec::with_capacity(indexes.len());
        self.lines().fetch_many(&indexes, &mut fetched)?;
        let mut fences = Fences { up_to: [0; MAX_SLOTS], known: u64::MAX };
        for (index, line) in indexes.iter().zip(fetched) {
            let first = (index % geometry.fence_lines()) as usize * SLOTS_PER_FENCE;
            for place in 0..SLOTS_PER_FENCE.min(MAX_SLOTS - first) {
                match &line {
                    Ok(line) => fences.up_to[first + place] = fences.up_to[first + place].max(line.fenced[place]),
                    Err(Error::BadLine { .. }) => fences.known &= !(1 << (first + place)),
                    Err(_) => return Err(line.err().unwrap_or(Error::Closed)),
                }
            }
        }
        // What was not asked for is not known either.
        for slot in 0..MAX_SLOTS {
            if groups >> (slot / SLOTS_PER_FENCE) & 1 == 0 {
                fences.known &= !(1 << slot);
            }
        }
        Ok(fences)
    }
}
