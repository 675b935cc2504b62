// SPDX-License-Identifier: Apache-2.0
//! Superblocks of pools that this program cannot open, read as far as their hosts can be watched.
//!
//! Every version so far has its geometry, seats, devices and region table at the same place, and the regions `Identity` and `Summary` with
//! the words that tell whether a host lives. So the region table says where the heartbeats are, however the other regions lie. What
//! differs is the seed of the checksums of lines.

use super::{MAGIC, Raw, SUPERBLOCK_BYTES, Superblock, VERSION, check_numbers, check_tables, crc};
use crate::media::{Layout, Region, RegionSpan, Stripes};
use bytemuck::Zeroable;

/// The first version whose lines are seeded with the incarnation of the format as well as with the UUID.
const SEEDED_BY_INCARNATION: u16 = 3;

impl Superblock {
    /// Reads the superblock of an earlier version, or of another layout of this one, for [`crate::pool::FormerHosts`] alone: of its
    /// regions, [`Superblock::layout`] knows `Identity` and `Summary`.
    pub fn decode_earlier(bytes: &[u8]) -> Option<Superblock> {
        let raw = raw_of(bytes)?;
        if !(1..=VERSION.0).contains(&raw.major) {
            return None;
        }
        let (geometry, coherence) = check_numbers(&raw).ok()?;
        check_tables(&raw, &Stripes::of(&geometry).ok()?).ok()?;
        let span = |region: Region| {
            let entry = raw.region_table.iter().take(raw.regions as usize).find(|entry| entry.region == region as u32)?;
            Some(RegionSpan { region, offset: entry.offset, lines: entry.lines })
        };
        let layout = Layout::of_hosts(geometry, [span(Region::Identity)?, span(Region::Summary)?])?;
        Some(Superblock { raw, layout, coherence })
    }

    /// Whether these are a whole superblock that this program does not know, and not a damaged one: its checksum is right, or it may lie
    /// elsewhere.
    pub fn is_sound(bytes: &[u8]) -> bool {
        raw_of(bytes).is_some_and(|raw| raw.major > VERSION.0 || raw.crc == crc(&raw))
    }

    /// Whether the checksums of the lines begin with the incarnation of the format, as those of this version do.
    pub fn is_seeded_by_incarnation(&self) -> bool {
        self.raw.major >= SEEDED_BY_INCARNATION
    }
}

fn raw_of(bytes: &[u8]) -> Option<Box<Raw>> {
    let bytes = bytes.get(..SUPERBLOCK_BYTES).filter(|bytes| bytes.starts_with(&MAGIC))?;
    let mut raw: Box<Raw> = Box::new(Raw::zeroed());
    bytemuck::bytes_of_mut(&mut *raw).copy_from_slice(bytes);
    Some(raw)
}
