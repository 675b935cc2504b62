// SPDX-License-Identifier: Apache-2.0
//! The instructions alone, as the base line of measurements: no look for faults, no checksum, no dispatch.
//!
//! Nothing that keeps data may use this: a device that goes away is not noticed here, it ends the process.

use super::{Coherence, Instructions, Line, arch};
use crate::error::{Error, Result};
use crate::limits::LINE_BYTES;
use std::ptr::NonNull;
use std::sync::Arc;

/// A power of two of lines, touched by bare instructions. Numbers beyond the last line wrap around, which costs less than a check.
pub struct Bare {
    start: NonNull<u8>,
    mask: u64,
    instructions: Instructions,
    _memory: Arc<dyn Coherence>,
}

impl Bare {
    /// The `lines` lines from pool offset `offset` of a mapping. Under the emulator they are those of the private view.
    ///
    /// # Errors
    /// [`Error::Invalid`] when `lines` is no power of two, the offset does not begin a line, this CPU lacks an instruction, or there is
    /// no mapping of that range.
    pub fn over(memory: Arc<dyn Coherence>, offset: u64, lines: u64, instructions: Instructions) -> Result<Bare> {
        instructions.check(&super::CpuFeatures::detect())?;
        if !lines.is_power_of_two() || !offset.is_multiple_of(LINE_BYTES as u64) {
            return Err(Error::Invalid(format!("{lines} lines at {offset:#x} are not a power of two of whole lines")));
        }
        let start = lines.checked_mul(LINE_BYTES as u64).and_then(|len_bytes| memory.address(offset, len_bytes));
        let start = start.ok_or_else(|| Error::Invalid(format!("{lines} lines at {offset:#x} are not mapped")))?;
        Ok(Bare { start, mask: lines - 1, instructions, _memory: memory })
    }

    #[inline]
    fn at(&self, index: u64) -> *mut u8 {
        // SAFETY: the masked number is below the number of lines, all of which `over` found mapped.
        unsafe { self.start.as_ptr().add((index & self.mask) as usize * LINE_BYTES) }
    }

    /// Writes a line, without a fence.
    #[inline]
    pub fn write(&self, index: u64, line: &Line) {
        // SAFETY: a mapped line, kept mapped by `_memory`, and instructions that `over` has checked.
        unsafe { arch::write_line(self.instructions.write, Some(self.instructions.flush), self.at(index), line) }
    }

    /// Flushes a line, without a fence.
    #[inline]
    pub fn flush(&self, index: u64) {
        // SAFETY: as in `write`.
        unsafe { arch::flush_line(self.instructions.flush, self.at(index)) }
    }

    /// Loads a line, cached or not.
    #[inline]
    pub fn load(&self, index: u64) -> Line {
        // SAFETY: as in `write`.
        unsafe { arch::load_line(self.instructions.load, self.at(index)) }
    }

    /// Orders stores (SFENCE).
    #[inline]
    pub fn fence_stores(&self) {
        arch::fence_stores();
    }

    /// Completes everything before (MFENCE).
    #[inline]
    pub fn fence_all(&self) {
        arch::fence_all();
    }

    /// What a publish is made of: the line, then the store fence.
    #[inline]
    pub fn publish(&self, index: u64, line: &Line) {
        self.write(index, line);
        self.fence_stores();
    }

    /// What a fetch is made of: the flush, the full fence, then the load.
    #[inline]
    pub fn fetch(&self, index: u64) -> Line {
        self.flush(index);
        self.fence_all();
        self.load(index)
    }

    /// The lines from `first` on that `len_bytes` reach, as far as there are any: where, and how many bytes.
    #[inline]
    fn range(&self, first: u64, len_bytes: usize) -> (*mut u8, usize) {
        let room = (self.mask + 1 - (first & self.mask)) as usize * LINE_BYTES;
        (self.at(first), len_bytes.min(room))
    }

    /// Copies the whole lines of `source` in from line `first` on with non-temporal stores, without a fence.
    #[inline]
    pub fn copy_in(&self, first: u64, source: &[u8]) {
        let (to, len) = self.range(first, source.len());
        // SAFETY: mapped lines as in `write`, as many as there are of both; the source is the caller's memory.
        unsafe { arch::copy_lines(self.instructions.copy, to, source.as_ptr(), len / LINE_BYTES) }
    }

    /// Copies `source` in from line `first` on with ordinary stores, which no other host needs to see.
    #[inline]
    pub fn store(&self, first: u64, source: &[u8]) {
        let (to, len) = self.range(first, source.len());
        // SAFETY: as in `copy_in`.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), to, len) }
    }

    /// Flushes the lines that `len_bytes` from line `first` on reach, without a fence.
    #[inline]
    pub fn flush_range(&self, first: u64, len_bytes: usize) {
        let (at, len) = self.range(first, len_bytes);
        for offset in (0..len).step_by(LINE_BYTES) {
            // SAFETY: as in `write`.
            unsafe { arch::flush_line(self.instructions.range, at.add(offset)) }
        }
    }

    /// Copies out from `skip_bytes` after the start of line `first` with ordinary loads and stores, cached or not.
    #[inline]
    pub fn copy_out(&self, first: u64, skip_bytes: usize, destination: &mut [u8]) {
        let (from, len) = self.range(first, destination.len().saturating_add(skip_bytes));
        // SAFETY: as in `copy_in`; the skipped bytes are not copied.
        unsafe {
            let (from, len) = (from.add(skip_bytes.min(len)), len.saturating_sub(skip_bytes));
            arch::copy_cached(destination.as_mut_ptr(), from, len);
        }
    }

    /// Copies out the whole lines from line `first` on to a destination that starts a line, with non-temporal stores to it. False, and
    /// nothing is copied, where it does not.
    #[inline]
    pub fn stream_out(&self, first: u64, destination: &mut [u8]) -> bool {
        let (from, len) = self.range(first, destination.len());
        let starts_line = (destination.as_ptr() as usize).is_multiple_of(LINE_BYTES);
        if starts_line {
            // SAFETY: as in `copy_in`, and the destination is aligned.
            unsafe { arch::stream_lines(self.instructions.copy, destination.as_mut_ptr(), from, len / LINE_BYTES) }
        }
        starts_line
    }

    /// Completes loads (LFENCE).
    #[inline]
    pub fn fence_loads(&self) {
        arch::fence_loads();
    }
}
