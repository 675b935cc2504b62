// SPDX-License-Identifier: Apache-2.0
//! Pools side by side on one device: which ones there are, and that a format overwrites none of them.
//!
//! A pool begins with a superblock at a multiple of the device's unit, and owns every byte within its length, whatever it looks like.
//! So the device is walked from its start: from one pool to its end, elsewhere from unit to unit.

use super::media::fetch_any_superblock;
use crate::coherence::{CoherenceOptions, over_mapping};
use crate::device::{Device, map_part};
use crate::error::{Error, PartitionProblem, Result};
use crate::media::{Stripes, Superblock, uuid_text};

/// Mapped at once of a device, in bytes: enough that the cost of a mapping is small against that of the reads.
const WINDOW_BYTES: u64 = 1 << 30;

/// A pool that was found on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolOnDevice {
    /// Where it begins, in bytes from the start of the device.
    pub offset_bytes: u64,
    /// How much of the device it has, in bytes; of one that cannot be read, one unit.
    pub len_bytes: u64,
    /// Its UUID.
    pub uuid: [u8; 16],
    /// Whether its superblock verifies, be it of an earlier version.
    pub is_readable: bool,
}

impl PoolOnDevice {
    /// Where it ends. A superblock says whatever its writer wrote.
    pub fn end(&self) -> u64 {
        self.offset_bytes.saturating_add(self.len_bytes)
    }
}

/// The pools that lie on a device, in the order of their offsets, whatever part of it `device` is. Nothing is written, and holes of a file
/// stay holes.
///
/// # Errors
/// Those of mapping the device, and of its memory.
pub fn pools_on(device: &Device) -> Result<Vec<PoolOnDevice>> {
    let whole = device.whole()?;
    let (unit, device_bytes) = (whole.info().unit_bytes(), whole.info().len_bytes);
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(start) = next_place(&whole, at, unit) {
        let left = (device_bytes - start) / unit * unit;
        let window = map_part(&whole, start, left.min(WINDOW_BYTES.max(unit)))?;
        let end = start + window.len_bytes;
        let window = over_mapping(window, &CoherenceOptions::default())?;
        at = start;
        while let Some(place) = next_place(&whole, at, unit).filter(|&place| place < end) {
            let memory = &*window.memory;
            memory.flush_line(place - start)?;
            memory.fence_all();
            let line = memory.load_line(place - start)?;
            memory.fence_loads();
            let Some((uuid, _)) = Superblock::identity_in(&line) else {
                at = place + unit;
                continue;
            };
            let (len_bytes, is_readable) = match fetch_any_superblock(memory, place - start, &whole.info().name) {
                Ok(superblock) => (Stripes::of(superblock.layout().geometry())?.device_len_bytes(superblock.device_index()), true),
                Err(Error::NotAPool { .. }) => (unit, false),
                Err(error) => return Err(error),
            };
            found.push(PoolOnDevice { offset_bytes: place, len_bytes, uuid, is_readable });
            at = place.saturating_add(len_bytes.max(unit)).checked_next_multiple_of(unit).unwrap_or(device_bytes);
        }
        at = at.max(end);
    }
    Ok(found)
}

/// The first place from `at` on, a multiple of `unit`, where a pool can begin on the device.
fn next_place(whole: &Device, at: u64, unit: u64) -> Option<u64> {
    let fits = |place: &u64| whole.info().len_bytes.checked_sub(*place).is_some_and(|left| left >= unit);
    let mut place = Some(at).filter(fits)?;
    loop {
        match whole.next_data(place)? {
            data if data == place => return Some(place),
            // A superblock's first byte is not zero, so none begins in a hole.
            data => place = data.checked_next_multiple_of(unit).filter(fits)?,
        }
    }
}

/// Refuses the `len_bytes` bytes at `offset` of a part of a device where they overlap a pool that does not begin where the part does.
///
/// # Errors
/// [`Error::Partition`] naming the other pool; those of [`pools_on`].
pub fn refuse_overlap(part: &Device, offset: u64, len_bytes: u64) -> Result<()> {
    let own = part.info().offset_bytes;
    let start = own.saturating_add(offset);
    let end = start.saturating_add(len_bytes);
    let overlaps = |pool: &PoolOnDevice| pool.offset_bytes != own && pool.offset_bytes < end && start < pool.end();
    match pools_on(part)?.into_iter().find(overlaps) {
        None => Ok(()),
        Some(pool) => Err(Error::Partition {
            device: part.info().name.clone(),
            problem: PartitionProblem::Overlaps {
                offset: start,
                len_bytes,
                pool_offset: pool.offset_bytes,
                pool_bytes: pool.len_bytes,
                uuid: uuid_text(&pool.uuid),
            },
        }),
    }
}

#[cfg(test)]
mod tests;
