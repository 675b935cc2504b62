// SPDX-License-Identifier: Apache-2.0
//! Where everything of a region lies: its lines at the start of its block, its memory behind them, and the parts of each block in it.

use super::lines::{Head, LentLine, PARTS_PER_LINE, PartLine, PartWords};
use crate::background::held;
use crate::error::{Error, Result};
use crate::limits::LINE_BYTES;
use crate::line::{Lines, Seal};
use crate::media::Layout;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// The memory of a region begins at a multiple of this, in the pool.
const MEMORY_ALIGN: u64 = 4096;
/// Most blocks of a region.
const MAX_BLOCKS: u32 = 1 << 26;
/// Most parts of a block.
pub(super) const MAX_PARTS: usize = u16::MAX as usize;
/// Regions whose shapes a process remembers.
const REMEMBERED: usize = 256;
/// "lent" in the seals of heads.
const HEADS: u64 = u64::from_le_bytes(*b"lenthead");

/// One part of every block, as an engine lays them out: that of block `b` begins `start_bytes + b * stride_bytes` into the region's memory
/// and is `len_bytes` long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Start of block 0's.
    pub start_bytes: u64,
    /// From one block's to the next one's.
    pub stride_bytes: u64,
    /// Length.
    pub len_bytes: u64,
}

/// Where a region lies, as its head says.
#[derive(Clone, Copy, Debug)]
pub(super) struct RegionPlace {
    pub region: u64,
    pub nonce: u64,
    pub blocks: u32,
    pub parts_most: u16,
    pub len_bytes: u64,
}

impl RegionPlace {
    fn part_lines(&self) -> u64 {
        u64::from(self.parts_most).div_ceil(PARTS_PER_LINE)
    }

    fn lines_end(&self) -> u64 {
        self.region + (1 + self.part_lines() + u64::from(self.blocks)) * LINE_BYTES as u64
    }

    /// Pool offset of the memory that blocks lie in.
    pub fn memory(&self) -> u64 {
        self.lines_end().next_multiple_of(MEMORY_ALIGN)
    }

    /// Pool offset behind the last byte.
    pub fn end(&self) -> u64 {
        self.memory() + self.len_bytes
    }

    pub fn part_line(&self, number: u64) -> u64 {
        self.region + (1 + number) * LINE_BYTES as u64
    }

    pub fn standing(&self, block: u32) -> u64 {
        self.part_line(self.part_lines() + u64::from(block))
    }

    /// Seal of all lines but the head.
    pub fn seal(&self, lines: &Lines) -> Seal {
        lines.seal_of(&[self.region, self.nonce])
    }

    /// Bytes that a block of the pool has to have for a region, wherever it begins.
    pub fn wanted_bytes(&self) -> u64 {
        self.lines_end() - self.region + MEMORY_ALIGN + self.len_bytes
    }

    /// Refuses numbers that cannot be meant, and those that do not fit the pool.
    pub fn check(&self, layout: &Layout) -> std::result::Result<(), &'static str> {
        let most = layout.chunks().saturating_mul(layout.geometry().chunk_bytes);
        if self.blocks == 0 || self.blocks > MAX_BLOCKS || self.len_bytes == 0 || self.len_bytes > most {
            return Err("a region of no blocks, of too many, or of a size that the pool does not have");
        }
        let inside = |offset| layout.chunk_of(offset).is_some();
        if !self.region.is_multiple_of(LINE_BYTES as u64) || !inside(self.region) || !inside(self.end() - 1) {
            return Err("a region outside the blocks of the pool");
        }
        Ok(())
    }
}

/// Seal of the head of a region that begins at a pool offset.
pub(super) fn head_seal(lines: &Lines, region: u64) -> Seal {
    lines.seal_of(&[HEADS, region])
}

/// A region whose parts are known.
#[derive(Debug)]
pub(super) struct Shape {
    pub place: RegionPlace,
    parts: Vec<Part>,
    /// Where each part begins in a block whose parts follow one another, and the length of the block.
    starts: Vec<u64>,
}

impl Shape {
    /// The shape of a region whose blocks have these parts.
    pub fn new(place: RegionPlace, parts: Vec<Part>) -> std::result::Result<Shape, &'static str> {
        if parts.is_empty() || parts.len() > usize::from(place.parts_most) {
            return Err("no parts, or more than there is room for");
        }
        let mut starts = Vec::with_capacity(parts.len() + 1);
        let mut len_bytes = 0u64;
        for part in &parts {
            let last = part.stride_bytes.checked_mul(u64::from(place.blocks) - 1).and_then(|last| last.checked_add(part.start_bytes));
            let end = last.and_then(|last| last.checked_add(part.len_bytes));
            if part.len_bytes == 0 || end.is_none_or(|end| end > place.len_bytes) {
                return Err("a part outside the region, or of no length");
            }
            if place.blocks > 1 && part.stride_bytes < part.len_bytes {
                return Err("parts of two blocks that overlap");
            }
            starts.push(len_bytes);
            len_bytes = len_bytes.saturating_add(part.len_bytes);
        }
        starts.push(len_bytes);
        if len_bytes > u64::from(u32::MAX) {
            return Err("a block longer than 4 GiB");
        }
        Ok(Shape { place, parts, starts })
    }

    /// Length of a block.
    pub fn block_bytes(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Pool offset and length of each part of a block.
    pub fn ranges(&self, block: u32) -> impl Iterator<Item = (u64, u64)> + '_ {
        let memory = self.place.memory();
        self.parts.iter().map(move |part| (memory + part.start_bytes + u64::from(block) * part.stride_bytes, part.len_bytes))
    }

    /// The stretches of the pool that `len_bytes` of a block lie in, from byte `at` of it on.
    pub fn stretches(&self, block: u32, at: u64, len_bytes: usize) -> impl Iterator<Item = (u64, usize)> + '_ {
        let end = at.saturating_add(len_bytes as u64);
        let first = self.starts.partition_point(|&start| start <= at).saturating_sub(1);
        self.ranges(block).zip(&self.starts).skip(first).map_while(move |((offset, part_bytes), &start)| {
            let (from, to) = (at.max(start), end.min(start + part_bytes));
            (from < to).then(|| (offset + (from - start), (to - from) as usize))
        })
    }

    /// Publishes the parts; the head that counts them comes after.
    pub fn publish(&self, lines: &Lines) -> Result<()> {
        let seal = self.place.seal(lines);
        for (number, parts) in self.parts.chunks(PARTS_PER_LINE as usize).enumerate() {
            let mut line = PartLine::default();
            for (words, part) in line.parts.iter_mut().zip(parts) {
                *words = PartWords { start: part.start_bytes, stride: part.stride_bytes, len_bytes: part.len_bytes };
            }
            lines.write_in(seal, number as u64, self.place.part_line(number as u64), line)?;
        }
        lines.fence_published();
        Ok(())
    }

    /// Fetches the shape of a region. The inner error says why there is none, or none of this nonce any more.
    pub fn fetch(lines: &Lines, region: u64, nonce: u64) -> Result<std::result::Result<Shape, &'static str>> {
        if !region.is_multiple_of(LINE_BYTES as u64) || lines.layout().chunk_of(region).is_none() {
            return Ok(Err("a region outside the blocks of the pool"));
        }
        let head: Head = match lines.fetch_in(head_seal(lines, region), 0, region)? {
            Ok(head) => head,
            Err(reason) => return Ok(Err(reason)),
        };
        let place = place_of(region, &head);
        if head.nonce != nonce {
            return Ok(Err("another region lies there by now"));
        }
        if let Err(reason) = place.check(lines.layout()) {
            return Ok(Err(reason));
        }
        let seal = place.seal(lines);
        let mut parts = Vec::with_capacity(head.parts.into());
        for number in 0..u64::from(head.parts).div_ceil(PARTS_PER_LINE) {
            let line: PartLine = match lines.fetch_in(seal, number, place.part_line(number))? {
                Ok(line) => line,
                Err(reason) => return Ok(Err(reason)),
            };
            parts.extend(line.parts.map(|of| Part { start_bytes: of.start, stride_bytes: of.stride, len_bytes: of.len_bytes }));
        }
        parts.truncate(head.parts.into());
        Ok(Shape::new(place, parts))
    }

    /// Fetches how a block stands now; `None` where the line is not one of this region.
    pub fn standing(&self, lines: &Lines, block: u32) -> Result<Option<LentLine>> {
        Ok(lines.fetch_in(self.place.seal(lines), block.into(), self.place.standing(block))?.ok())
    }
}

/// Where the region lies that a head speaks of.
pub(super) fn place_of(region: u64, head: &Head) -> RegionPlace {
    RegionPlace { region, nonce: head.nonce, blocks: head.blocks, parts_most: head.parts_most, len_bytes: head.len_bytes }
}

/// Shapes of regions that a process has pulled from, by pool offset and nonce: they never change.
#[derive(Default)]
pub(crate) struct Shapes {
    known: Mutex<HashMap<(u64, u64), Arc<Shape>>>,
}

impl Shapes {
    /// The shape of a region; the inner error as [`Shape::fetch`].
    pub(super) fn of(&self, lines: &Lines, region: u64, nonce: u64) -> Result<std::result::Result<Arc<Shape>, &'static str>> {
        if let Some(shape) = held(&self.known).get(&(region, nonce)) {
            return Ok(Ok(shape.clone()));
        }
        let shape = match Shape::fetch(lines, region, nonce)? {
            Ok(shape) => Arc::new(shape),
            Err(reason) => return Ok(Err(reason)),
        };
        let mut known = held(&self.known);
        if known.len() >= REMEMBERED {
            known.clear();
        }
        known.insert((region, nonce), shape.clone());
        Ok(Ok(shape))
    }
}

/// Turns a shape that an engine asked for into an error that says why it cannot be.
pub(super) fn refused(reason: &'static str) -> Error {
    Error::Invalid(format!("a region for lent blocks: {reason}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::media::Geometry;

    fn place(blocks: u32, parts_most: u16, len_bytes: u64) -> RegionPlace {
        RegionPlace { region: 64, nonce: 1, blocks, parts_most, len_bytes }
    }

    fn part(start_bytes: u64, stride_bytes: u64, len_bytes: u64) -> Part {
        Part { start_bytes, stride_bytes, len_bytes }
    }

    #[test]
    fn stretches_of_a_block_are_its_bytes_in_order() {
        let shape = Shape::new(place(3, 4, 1000), vec![part(0, 100, 60), part(400, 50, 50), part(60, 100, 7)]).unwrap();
        assert_eq!(shape.block_bytes(), 117);
        for block in 0..3 {
            let all: Vec<u64> = shape.ranges(block).flat_map(|(offset, len_bytes)| offset..offset + len_bytes).collect();
            for at in 0..117 {
                for len_bytes in 0..=117 - at {
                    let found: Vec<u64> = shape
                        .stretches(block, at, len_bytes as usize)
                        .flat_map(|(offset, len_bytes)| offset..offset + len_bytes as u64)
                        .collect();
                    assert_eq!(found, all[at as usize..(at + len_bytes) as usize], "{len_bytes} bytes from {at} of block {block}");
                }
            }
        }
    }

    #[test]
    fn everything_has_a_place_of_its_own() {
        let place = place(5, 3, 100);
        let of_parts = (0..2).map(|line| place.part_line(line));
        let lines: Vec<u64> = [place.region].into_iter().chain(of_parts).chain((0..5).map(|block| place.standing(block))).collect();
        assert_eq!(lines, (0..8).map(|line| place.region + line * 64).collect::<Vec<_>>());
        assert!(place.memory() >= place.region + 8 * 64 && place.memory().is_multiple_of(MEMORY_ALIGN));
        assert!(place.end() - place.region <= place.wanted_bytes());
    }

    #[test]
    fn shapes_that_cannot_be_are_refused() {
        let layout = Layout::new(Geometry::with_len(64 << 20)).unwrap();
        let region = layout.data_offset();
        let fits = RegionPlace { region, ..place(4, 2, 1000) };
        assert!(fits.check(&layout).is_ok());
        for bad in [
            RegionPlace { region: 64, ..fits },
            RegionPlace { region: region + 1, ..fits },
            RegionPlace { blocks: 0, ..fits },
            RegionPlace { blocks: u32::MAX, ..fits },
            RegionPlace { len_bytes: 0, ..fits },
            RegionPlace { len_bytes: u64::MAX, ..fits },
            RegionPlace { len_bytes: 64 << 20, ..fits },
        ] {
            assert!(bad.check(&layout).is_err(), "{bad:?}");
        }
        for parts in [
            vec![],
            vec![part(0, 10, 10); 3],
            vec![part(0, 10, 0)],
            vec![part(0, 10, 11)],
            vec![part(991, 3, 3)],
            vec![part(0, u64::MAX, 8)],
            vec![part(u64::MAX, 10, 10)],
            vec![part(0, 10, u64::MAX)],
        ] {
            assert!(Shape::new(fits, parts.clone()).is_err(), "{parts:?}");
        }
    }
}
