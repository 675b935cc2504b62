// SPDX-License-Identifier: Apache-2.0
//! Publishing and fetching 64-byte metadata lines: the two recipes that every protocol of the pool is made of.
//!
//! - **publish** (I2): compose the whole line off to the side, write it as one unit, fence the stores. Program order of publishes is
//!   the order other hosts may rely on.
//! - **fetch** (I3): flush the line, full fence, load all 64 bytes, load fence, verify. The load fence keeps a later flush from running
//!   ahead of this load, so that a second fetch is never older than the first.
//!
//! Every line carries a CRC32C seeded with the pool's UUID, the incarnation of its format, its region and its number: a line in the wrong
//! place does not verify, nor one that a host of an earlier format wrote late. Lines inside blocks, where memory is used again and again,
//! are seeded with the fresh numbers of its present user ([`Seal`]).

mod forms;

pub use crate::coherence::Line;
pub(crate) use forms::with_line_of;
pub use forms::{empty_line, verify_line};

use crate::coherence::Coherence;
use crate::crc::{line_crc, whole_lines};
use crate::error::{Error, Result};
use crate::fault::mutant;
use crate::limits::{LINE_BYTES, TORN_RETRIES};
use crate::media::{Layout, MediaLine, Superblock};
use arrayvec::ArrayVec;
use std::sync::Arc;

/// Lines that are fetched together, after one fence.
pub(crate) const FETCHED_TOGETHER: usize = 64;

/// A structure that fills exactly one line inside a block and starts with its CRC; the lines of the regions are [`MediaLine`]s.
pub trait BlockLine: bytemuck::Pod {
    /// Tells kinds of lines apart. Regions have the numbers below [`FIRST_BLOCK_KIND`].
    const KIND: u32;

    /// As [`MediaLine::check`].
    fn check(&self) -> std::result::Result<(), &'static str> {
        Ok(())
    }
}

/// Lowest [`BlockLine::KIND`].
pub const FIRST_BLOCK_KIND: u32 = 0x100;

/// Where the checksums of a family of lines inside blocks begin: lines of another family, which may have lain in the same memory before,
/// do not verify.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seal(u32);

/// The metadata lines of one pool, as one host sees them.
#[derive(Clone)]
pub struct Lines {
    memory: Arc<dyn Coherence>,
    layout: Arc<Layout>,
    crc_seed: u32,
}

impl Lines {
    /// Lines of format `incarnation` of the pool `uuid`, laid out as `layout` over `memory`.
    pub fn new(memory: Arc<dyn Coherence>, layout: Arc<Layout>, uuid: &[u8; 16], incarnation: u64) -> Self {
        Lines { memory, layout, crc_seed: crc_seed(uuid, incarnation) }
    }

    /// Lines of the pool of a superblock, whichever version made it.
    pub fn of(memory: Arc<dyn Coherence>, superblock: &Superblock) -> Self {
        let crc_seed = match superblock.is_seeded_by_incarnation() {
            true => crc_seed(superblock.uuid(), superblock.incarnation()),
            false => crc32c::crc32c(superblock.uuid()),
        };
        Lines { memory, layout: Arc::new(superblock.layout().clone()), crc_seed }
    }

    /// Where the checksums of every line begin.
    pub fn crc_seed(&self) -> u32 {
        self.crc_seed
    }

    /// The memory below.
    pub fn memory(&self) -> &Arc<dyn Coherence> {
        &self.memory
    }

    /// Where everything lies.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Publishes `value` as line `index` of its region and orders it before every later publish of this thread.
    ///
    /// The caller owns the line (I1).
    pub fn publish<T: MediaLine>(&self, index: u64, value: T) -> Result<()> {
        self.write(index, value)?;
        self.fence_published();
        Ok(())
    }

    /// Writes a line without ordering it; [`Lines::fence_published`] ends a group of such writes.
    pub fn write<T: MediaLine>(&self, index: u64, value: T) -> Result<()> {
        let offset = self.layout.line_offset(T::REGION, index)?;
        self.memory.write_line(offset, &self.seal(index, value))
    }

    /// Orders the lines written so far before everything written later.
    pub fn fence_published(&self) {
        if !mutant!("publish.no_store_fence") {
            self.memory.fence_stores();
        }
    }

    /// Fetches line `index` of `T`'s region: the bytes that are in the memory now, verified.
    ///
    /// # Errors
    /// [`Error::BadLine`] when it does not verify after [`TORN_RETRIES`] more looks; the errors of the memory.
    pub fn fetch<T: MediaLine>(&self, index: u64) -> Result<T> {
        let offset = self.layout.line_offset(T::REGION, index)?;
        let mut tries = 0;
        loop {
            let line = self.fetch_raw(offset)?;
            match self.open(index, &line) {
                Err(Error::BadLine { .. }) if tries < TORN_RETRIES => tries += 1,
                other => return other,
            }
        }
    }

    /// Fetches several lines of one region; the flushes overlap and share fences, so the misses do as well.
    ///
    /// `out` receives one result for each index, in order. No order holds among the lines of one call.
    pub fn fetch_many<T: MediaLine>(&self, indexes: &[u64], out: &mut Vec<Result<T>>) -> Result<()> {
        out.clear();
        let mut lines = ArrayVec::<Line, FETCHED_TOGETHER>::new();
        lines.extend(std::iter::repeat_n(Line::ZERO, indexes.len().min(FETCHED_TOGETHER)));
        for indexes in indexes.chunks(FETCHED_TOGETHER) {
            let found = self.fetch_some::<T>(indexes, &mut lines)?;
            out.extend(found.zip(indexes).map(|(found, &index)| found.map_or_else(|| self.fetch(index), |found| Ok(*found))));
        }
        Ok(())
    }

    /// Fetches lines of two regions into `lines`, after one fence, so that all their misses overlap: at most [`FETCHED_TOGETHER`] of both.
    /// Gives those that verify, in order; `None` for the others, which may be in the middle of being written. No order holds among them.
    pub(crate) fn fetch_both<'a, A: MediaLine, B: MediaLine>(
        &self,
        first: &[u64],
        second: &[u64],
        lines: &'a mut ArrayVec<Line, FETCHED_TOGETHER>,
    ) -> Result<(impl Iterator<Item = Option<&'a A>> + use<'a, A, B>, impl Iterator<Item = Option<&'a B>> + use<'a, A, B>)> {
        // Mostly few, so that no array of all that there may be is made for each kind, as `offsets_of` does.
        let mut offsets = ArrayVec::<u64, FETCHED_TOGETHER>::new();
        lines.clear();
        for (region, indexes) in [(A::REGION, first), (B::REGION, second)] {
            let (start, count) = self.layout.lines_of(region);
            for &index in indexes {
                if index >= count {
                    self.layout.line_offset(region, index)?;
                }
                offsets.push(start + index * LINE_BYTES as u64);
                lines.push(Line::ZERO);
            }
        }
        self.fetch_raw_at(&offsets, lines)?;
        let (of_first, of_second) = lines.split_at(first.len().min(lines.len()));
        Ok((self.whole_of(first, of_first), self.whole_of(second, of_second)))
    }

    /// The values of fetched lines of one region.
    fn whole_of<'a, T: MediaLine>(&self, indexes: &[u64], lines: &'a [Line]) -> impl Iterator<Item = Option<&'a T>> + use<'a, T> {
        let whole = whole_lines(self.crc_seed, T::REGION as u32, indexes, lines);
        values_of(lines, whole)
    }

    /// Sees to it that what a fetch of line `index` returned is in the memory itself.
    ///
    /// On the path of stores and a flush a sibling on this host may so far have written it into this host's cache only. A caller that goes
    /// on to check that no host overlooks the line settles it first.
    pub fn settle<T: MediaLine>(&self, index: u64) -> Result<()> {
        let offset = self.layout.line_offset(T::REGION, index)?;
        if mutant!("settle.nothing") {
            return Ok(());
        }
        self.flush(offset)?;
        self.fence_flushed();
        Ok(())
    }

    /// Brings every line of every region out of this machine's caches, whichever host stored it.
    pub(crate) fn flush_regions(&self) -> Result<()> {
        for span in self.layout.spans().iter().filter(|span| span.lines > 0) {
            match self.memory.flush_range(span.offset, span.lines * LINE_BYTES as u64) {
                // Nothing is read from there any more.
                Err(Error::Poisoned { .. }) => {}
                other => other?,
            }
        }
        self.memory.fence_all();
        Ok(())
    }

    /// Fetches 64 bytes without looking at what they mean: for the superblock and for inspection.
    pub fn fetch_raw(&self, offset: u64) -> Result<Line> {
        self.flush(offset)?;
        self.fence_flushed();
        let line = self.memory.load_line(offset)?;
        self.fence_loaded();
        Ok(line)
    }

    /// Fetches the lines at `offsets`, one for each place in `out`; the flushes overlap and share fences. No order holds among them.
    pub fn fetch_raw_many(&self, mut offsets: impl Iterator<Item = u64>, out: &mut [Line]) -> Result<()> {
        for part in out.chunks_mut(FETCHED_TOGETHER) {
            let offsets: ArrayVec<u64, FETCHED_TOGETHER> = offsets.by_ref().take(part.len()).collect();
            self.fetch_raw_at(&offsets, part)?;
        }
        Ok(())
    }

    fn fetch_raw_at(&self, offsets: &[u64], out: &mut [Line]) -> Result<()> {
        self.flush_many(offsets)?;
        self.fence_flushed();
        self.memory.load_lines(offsets, out)?;
        self.fence_loaded();
        Ok(())
    }

    /// Fetches up to 64 lines of one region into `lines`, which has room for them, and gives those that verify, in order; `None` for the
    /// others, which may be in the middle of being written. No order holds among them.
    pub fn fetch_some<'a, T: MediaLine>(
        &self,
        indexes: &[u64],
        lines: &'a mut [Line],
    ) -> Result<impl Iterator<Item = Option<&'a T>> + use<'a, T>> {
        let mut offsets = [0; FETCHED_TOGETHER];
        let offsets = self.offsets_of::<T>(indexes, &mut offsets)?;
        let lines = &mut lines[..offsets.len()];
        self.flush_many(offsets)?;
        self.fence_flushed();
        self.memory.load_lines(offsets, lines)?;
        // In front of the load fence, so that the sums of the first lines overlap with the misses of the last.
        let whole = whole_lines(self.crc_seed, T::REGION as u32, indexes, lines);
        self.fence_loaded();
        Ok(values_of(lines, whole))
    }

    /// Looks at up to 64 lines of one region without flushing or verifying them: what this host's caches hold, perhaps since long ago, or
    /// else the memory. Only for advice that another host's line confirms. The load fence keeps the flush of a second look from
    /// running ahead of this one, which would leave the old line where it is.
    pub fn peek_some<'a, T: MediaLine>(&self, indexes: &[u64], lines: &'a mut [Line]) -> Result<impl Iterator<Item = &'a T> + use<'a, T>> {
        let mut offsets = [0; FETCHED_TOGETHER];
        let offsets = self.offsets_of::<T>(indexes, &mut offsets)?;
        let lines = &mut lines[..offsets.len()];
        self.memory.load_lines(offsets, lines)?;
        self.fence_loaded();
        Ok(lines.iter().map(|line| bytemuck::from_bytes(&line.0)))
    }

    /// As [`Lines::peek_some`], for one line.
    pub fn peek<T: MediaLine>(&self, index: u64) -> Result<T> {
        let line = self.memory.load_line(self.layout.line_offset(T::REGION, index)?)?;
        self.fence_loaded();
        Ok(bytemuck::cast(line))
    }

    /// Offsets of up to 64 lines, with one look at their bounds for all.
    #[inline]
    fn offsets_of<'o, T: MediaLine>(&self, indexes: &[u64], offsets: &'o mut [u64; FETCHED_TOGETHER]) -> Result<&'o [u64]> {
        let (first, lines) = self.layout.lines_of(T::REGION);
        let mut last = 0;
        for (offset, &index) in offsets.iter_mut().zip(indexes) {
            last = last.max(index);
            *offset = first.wrapping_add(index.wrapping_mul(LINE_BYTES as u64));
        }
        let offsets = &offsets[..indexes.len().min(FETCHED_TOGETHER)];
        if last >= lines && !offsets.is_empty() {
            self.layout.line_offset(T::REGION, last)?;
        }
        Ok(offsets)
    }

    fn does_flush(&self) -> bool {
        !mutant!("fetch.no_flush")
    }

    fn flush(&self, offset: u64) -> Result<()> {
        if self.does_flush() { self.memory.flush_line(offset) } else { Ok(()) }
    }

    /// Flushes lines with the instruction for ranges: CLFLUSH waits for the one before it, CLFLUSHOPT does not, and the full fence after
    /// the last one orders either.
    fn flush_many(&self, offsets: &[u64]) -> Result<()> {
        if self.does_flush() { self.memory.flush_lines(offsets) } else { Ok(()) }
    }

    fn fence_flushed(&self) {
        if !mutant!("fetch.no_full_fence") {
            self.memory.fence_all();
        }
    }

    fn fence_loaded(&self) {
        if !mutant!("fetch.no_load_fence") {
            self.memory.fence_loads();
        }
    }

    /// The 64 bytes of `value` with its CRC filled in.
    pub fn seal<T: MediaLine>(&self, index: u64, value: T) -> Line {
        seal_words(self.crc_seed, T::REGION as u32, index, bytemuck::cast(value))
    }

    /// The seal of the family that `names` name, fresh random numbers among them.
    pub fn seal_of(&self, names: &[u64]) -> Seal {
        Seal(crc32c::crc32c_append(self.crc_seed, bytemuck::cast_slice(names)))
    }

    /// The 64 bytes of a line inside a block, `index` being its place or number in its family.
    pub fn seal_in<T: BlockLine>(&self, seal: Seal, index: u64, value: T) -> Line {
        seal_words(seal.0, T::KIND, index, bytemuck::cast(value))
    }

    /// Reads a line inside a block, if it verifies as line `index` of its family.
    pub fn open_in<T: BlockLine>(&self, seal: Seal, index: u64, line: &Line) -> std::result::Result<T, &'static str> {
        let words: [u64; 8] = bytemuck::cast(*line);
        if words[0] as u32 != line_crc(seal.0, T::KIND, index, &words) {
            return Err("checksum differs");
        }
        let value: T = bytemuck::cast(*line);
        value.check().map(|()| value)
    }

    /// Writes a line inside a block without ordering it; [`Lines::fence_published`] ends a group of such writes.
    pub fn write_in<T: BlockLine>(&self, seal: Seal, index: u64, offset: u64, value: T) -> Result<()> {
        self.memory.write_line(offset, &self.seal_in(seal, index, value))
    }

    /// Publishes a line inside a block, as [`Lines::publish`] does one of a region.
    pub fn publish_in<T: BlockLine>(&self, seal: Seal, index: u64, offset: u64, value: T) -> Result<()> {
        self.write_in(seal, index, offset, value)?;
        self.fence_published();
        Ok(())
    }

    /// Fetches a line inside a block. The inner error says why it does not verify after [`TORN_RETRIES`] more looks.
    pub fn fetch_in<T: BlockLine>(&self, seal: Seal, index: u64, offset: u64) -> Result<std::result::Result<T, &'static str>> {
        let mut tries = 0;
        loop {
            let found = self.open_in(seal, index, &self.fetch_raw(offset)?);
            if found.is_ok() || tries == TORN_RETRIES {
                return Ok(found);
            }
            tries += 1;
        }
    }

    /// Reads `line` as line `index` of `T`'s region, if it verifies.
    pub fn open<T: MediaLine>(&self, index: u64, line: &Line) -> Result<T> {
        let bad = |reason| Error::BadLine { region: T::REGION.name(), index, reason };
        let words: [u64; 8] = bytemuck::cast(*line);
        if words[0] as u32 != line_crc(self.crc_seed, T::REGION as u32, index, &words) {
            return Err(bad("checksum differs"));
        }
        let value: T = bytemuck::cast(*line);
        value.check().map_err(bad)?;
        Ok(value)
    }
}

/// Where the checksums of every line of a format begin. Two formats whose seeds differ have no sealed line in common: the sum of the same
/// bytes differs with the seed.
pub fn crc_seed(uuid: &[u8; 16], incarnation: u64) -> u32 {
    let seed = crc32c::crc32c(uuid);
    if mutant!("lines.any_incarnation") { seed } else { crc32c::crc32c_append(seed, &incarnation.to_le_bytes()) }
}

/// The values of lines, those whose bit is set in `whole` and that are sound.
fn values_of<T: MediaLine>(lines: &[Line], whole: u64) -> impl Iterator<Item = Option<&T>> {
    lines.iter().enumerate().map(move |(place, line)| {
        let value: &T = bytemuck::from_bytes(&line.0);
        (whole >> place & 1 == 1 && value.check().is_ok()).then_some(value)
    })
}

/// The fetched line if it verified; any error but that one stays an error.
pub(crate) fn if_whole<T>(fetched: Result<T>) -> Result<Option<T>> {
    match fetched {
        Ok(found) => Ok(Some(found)),
        Err(Error::BadLine { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// `words` with the CRC of its family, kind and place filled in.
fn seal_words(seed: u32, kind: u32, index: u64, mut words: [u64; 8]) -> Line {
    let crc = line_crc(seed, kind, index, &words);
    // The word is composed in a register: a 4-byte store into it would hold up the wide load that writes the line.
    words[0] = words[0] & !0xffff_ffff | u64::from(crc);
    bytemuck::cast(words)
}
