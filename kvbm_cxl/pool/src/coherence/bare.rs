// SPDX-License-Identifier: Apache-2.0
//! The instructions alone, as the base line of measurements: no look for faults, no checksum, no dispatch.
//!
//! Nothing that keeps data may use this: a device that goes away is not noticed here, it ends the process.

use super::{Coherence, Instructions, arch};
use crate::error::{Error, Result};
use crate::limits::LINE_BYTES;
use crate::line::Line;
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
}
