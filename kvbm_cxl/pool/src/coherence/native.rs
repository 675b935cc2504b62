// SPDX-License-Identifier: Apache-2.0
//! The CPU's own instructions on a mapping.

use super::faultmap::FaultMap;
use super::instructions::{CpuFeatures, Instructions, LineFlush};
use super::{Coherence, Line, LineSum, arch, lines_of};
use crate::error::{Error, Result};
use crate::limits::LINE_BYTES;
use std::ptr::NonNull;
use std::sync::Arc;

/// Pool memory as this CPU reaches it.
///
/// On a pool in `hardware` mode the flushes are elided; writes, copies and fences stay as they are.
pub struct Native {
    faults: Arc<FaultMap>,
    instructions: Instructions,
    hardware: bool,
}

impl Native {
    /// Uses `instructions` on the mapping of `faults`; `hardware` elides the flushes.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] when this CPU lacks one of the instructions.
    pub fn new(faults: Arc<FaultMap>, instructions: Instructions, hardware: bool) -> Result<Self> {
        instructions.check(&CpuFeatures::detect())?;
        Ok(Native { faults, instructions, hardware })
    }

    /// What does each step.
    pub fn instructions(&self) -> Instructions {
        self.instructions
    }

    #[inline]
    fn line_flush(&self) -> Option<LineFlush> {
        (!self.hardware).then_some(self.instructions.flush)
    }

    /// Copies into a part of one line. `to` is where the part begins.
    ///
    /// The line is fetched first, because what the write-back carries along must be what the memory holds, not what this cache once held.
    ///
    /// # Safety
    /// The whole line is mapped, and the part lies inside it.
    unsafe fn copy_part(&self, to: *mut u8, part: &[u8]) {
        let flush = self.line_flush();
        // SAFETY: what the caller promises; `part` is no pool memory that is written here, so the two do not overlap.
        unsafe {
            if let Some(flush) = flush {
                arch::flush_line(flush, to);
                arch::fence_all();
            }
            std::ptr::copy_nonoverlapping(part.as_ptr(), to, part.len());
            if let Some(flush) = flush {
                arch::flush_line(flush, to);
            }
        }
    }

    /// Copies with stores past the caches, but for the parts of lines at either end.
    ///
    /// # Safety
    /// As many bytes as `destination` has may be read at `from`, and the two do not overlap.
    unsafe fn stream(&self, from: *const u8, destination: &mut [u8]) {
        let to = destination.as_mut_ptr();
        let head = ((to as usize).wrapping_neg() % LINE_BYTES).min(destination.len());
        let lines = (destination.len() - head) / LINE_BYTES;
        let tail = head + lines * LINE_BYTES;
        // SAFETY: what the caller promises; `to + head` starts a line, unless there is none, and head, lines and tail make up the whole.
        unsafe {
            std::ptr::copy_nonoverlapping(from, to, head);
            arch::stream_lines(self.instructions.copy, to.add(head), from.add(head), lines);
            std::ptr::copy_nonoverlapping(from.add(tail), to.add(tail), destination.len() - tail);
        }
    }
}

impl Coherence for Native {
    fn len_bytes(&self) -> u64 {
        self.faults.len_bytes()
    }

    #[inline]
    fn load_line(&self, offset: u64) -> Result<Line> {
        let from = self.faults.enter_line(offset)?;
        // SAFETY: a whole line of the mapping, aligned because the base is, and an instruction that `new` has checked.
        let line = unsafe { arch::load_line(self.instructions.load, from) };
        self.faults.leave(offset, LINE_BYTES as u64)?;
        Ok(line)
    }

    #[inline]
    fn write_line(&self, offset: u64, line: &Line) -> Result<()> {
        let to = self.faults.enter_line(offset)?;
        // SAFETY: as in `load_line`.
        unsafe { arch::write_line(self.instructions.write, self.line_flush(), to, line) };
        self.faults.leave(offset, LINE_BYTES as u64)
    }

    #[inline]
    fn flush_line(&self, offset: u64) -> Result<()> {
        let at = self.faults.enter_line(offset)?;
        if let Some(flush) = self.line_flush() {
            // SAFETY: as in `load_line`.
            unsafe { arch::flush_line(flush, at) };
        }
        self.faults.leave(offset, LINE_BYTES as u64)
    }

    #[inline]
    fn fence_stores(&self) {
        arch::fence_stores();
    }

    #[inline]
    fn fence_all(&self) {
        arch::fence_all();
    }

    #[inline]
    fn fence_loads(&self) {
        arch::fence_loads();
    }

    fn flush_range(&self, offset: u64, len_bytes: u64) -> Result<()> {
        let start = self.faults.enter(offset, len_bytes)?;
        if !self.hardware {
            let lines = lines_of(offset, len_bytes);
            // The first line may begin before the range, but not before the mapping, which is page-aligned.
            let first = start.wrapping_sub(offset as usize % LINE_BYTES);
            for line in 0..lines.end - lines.start {
                // SAFETY: every line of the range is mapped, because the mapping is made of whole pages.
                unsafe { arch::flush_line(self.instructions.range, first.add(line as usize * LINE_BYTES)) };
            }
        }
        self.faults.leave(offset, len_bytes)
    }

    fn flush_lines(&self, offsets: &[u64]) -> Result<()> {
        let base = self.faults.enter_lines(offsets)?;
        if !self.hardware {
            for &offset in offsets {
                // SAFETY: as in `load_lines`.
                unsafe { arch::flush_line(self.instructions.range, base.add(offset as usize)) };
            }
        }
        self.faults.leave_lines(offsets)
    }

    fn load_lines(&self, offsets: &[u64], out: &mut [Line]) -> Result<()> {
        let base = self.faults.enter_lines(offsets)?;
        // SAFETY: whole lines of the mapping, aligned because the base is, and an instruction that `new` has checked.
        unsafe { arch::load_lines(self.instructions.load, base, offsets, out) };
        self.faults.leave_lines(offsets)
    }

    fn prefetch_lines(&self, offsets: &[u64]) -> Result<()> {
        let base = self.faults.enter_lines(offsets)?;
        // A prefetch is no access: it never faults, and it skips pages that this process's page tables do not have.
        offsets.iter().for_each(|&offset| arch::prefetch(base.wrapping_add(offset as usize)));
        self.faults.leave_lines(offsets)
    }

    fn copy_in(&self, offset: u64, source: &[u8]) -> Result<()> {
        let to = self.faults.enter(offset, source.len() as u64)?;
        let head = (to as usize).wrapping_neg() % LINE_BYTES;
        let (head, rest) = source.split_at(head.min(source.len()));
        let (lines, tail) = rest.split_at(rest.len() - rest.len() % LINE_BYTES);
        // SAFETY: the range lies in the mapping. `to + head` starts a line, unless nothing is left; the part before it and the tail each
        // lie inside one line, which is mapped as a whole. The source is the caller's memory, or memory of the
        // pool that no thread writes meanwhile.
        unsafe {
            if !head.is_empty() {
                self.copy_part(to, head);
            }
            arch::copy_lines(self.instructions.copy, to.add(head.len()), lines.as_ptr(), lines.len() / LINE_BYTES);
            if !tail.is_empty() {
                self.copy_part(to.add(head.len() + lines.len()), tail);
            }
        }
        self.faults.leave(offset, source.len() as u64)
    }

    fn copy_out(&self, offset: u64, destination: &mut [u8]) -> Result<()> {
        let from = self.faults.enter(offset, destination.len() as u64)?;
        // SAFETY: the range lies in the mapping, and the destination is the caller's alone and does not overlap it. Bytes that another host
        // changes meanwhile may come out mixed; their reader verifies.
        unsafe { arch::copy_cached(destination.as_mut_ptr(), from, destination.len()) };
        self.faults.leave(offset, destination.len() as u64)
    }

    fn copy_out_streaming(&self, offset: u64, destination: &mut [u8]) -> Result<()> {
        let from = self.faults.enter(offset, destination.len() as u64)?;
        // SAFETY: the range lies in the mapping; for the rest as in `copy_out`.
        unsafe { self.stream(from, destination) };
        self.faults.leave(offset, destination.len() as u64)
    }

    fn store_streaming(&self, source: &[u8], destination: &mut [u8]) {
        let len = source.len().min(destination.len());
        // SAFETY: a shared and an exclusive slice do not overlap.
        unsafe { self.stream(source.as_ptr(), &mut destination[..len]) };
    }

    fn keeps_lines_whole(&self) -> bool {
        self.instructions.keep_lines_whole()
    }

    fn sums_copies(&self) -> bool {
        arch::sums_copies(self.instructions.copy)
    }

    fn copy_out_summed(&self, offset: u64, destination: &mut [u8], sum: &mut LineSum) -> Result<()> {
        let to = destination.as_mut_ptr();
        if !self.sums_copies() || !(to as usize).is_multiple_of(LINE_BYTES) || !destination.len().is_multiple_of(LINE_BYTES) {
            return Err(Error::Invalid(format!("a copy with a checksum of {} bytes to {to:?}: it takes whole lines", destination.len())));
        }
        let from = self.faults.enter(offset, destination.len() as u64)?;
        // SAFETY: the range lies in the mapping, the destination starts a line and does not overlap it, and the CPU has the instructions.
        unsafe { arch::stream_lines_summed(to, from, destination.len() / LINE_BYTES, sum) };
        self.faults.leave(offset, destination.len() as u64)
    }

    fn check(&self, offset: u64, len_bytes: u64) -> Result<()> {
        self.faults.enter(offset, len_bytes).map(drop)
    }

    fn address(&self, offset: u64, len_bytes: u64) -> Option<NonNull<u8>> {
        self.faults.enter(offset, len_bytes).ok().and_then(NonNull::new)
    }
}
