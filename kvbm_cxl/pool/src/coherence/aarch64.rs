// SPDX-License-Identifier: Apache-2.0
//! The steps on aarch64 (Arm ARM: DC CIVAC and DC CVAC at EL0, DSB, STNP).
//!
//! There is no 64-byte store to rely on, so a line is written as stores and a clean, and a reader may see it torn: its CRC tells. Cache
//! maintenance is complete only after a DSB, so both write fences are one.

use super::instructions::{CpuFeatures, LineCopy, LineFlush, LineLoad, LineWrite, arm_line_bytes};
use super::line_sum::LineSum;
use super::{Line, Submission};
use crate::limits::LINE_BYTES;
use std::arch::asm;

/// Reads the size of a data cache line from CTR_EL0, which Linux lets every process read.
pub(super) fn features() -> CpuFeatures {
    let ctr: u64;
    // SAFETY: reading this register has no effect.
    unsafe { asm!("mrs {}, ctr_el0", out(reg) ctr, options(nomem, nostack, preserves_flags)) };
    CpuFeatures {
        movdir64b: false,
        enqcmd: false,
        avx512: false,
        avx2: false,
        clflushopt: false,
        clwb: false,
        line_bytes: arm_line_bytes(ctr),
    }
}

/// Writes one line. `flush` says whether the stores are followed by the choice's cache maintenance.
///
/// # Safety
/// `to` is 64 mapped, writable bytes aligned to 64.
#[inline]
pub(super) unsafe fn write_line(choice: LineWrite, flush: Option<LineFlush>, to: *mut u8, line: &Line) {
    // SAFETY: what the caller promises.
    unsafe {
        store_line(LineLoad::Words, to, line);
        match (flush, choice) {
            (None, _) => {}
            (Some(flush), LineWrite::StoresFlush) => flush_line(flush, to),
            (Some(_), _) => clean_line(to),
        }
    }
}

/// Writes back and drops the line at `at` (DC CIVAC), the only flush there is.
///
/// # Safety
/// `at` is mapped and readable.
#[inline]
pub(super) unsafe fn flush_line(_choice: LineFlush, at: *mut u8) {
    // SAFETY: what the caller promises.
    unsafe { asm!("dc civac, {}", in(reg) at, options(nostack, preserves_flags)) }
}

/// Loads one line as eight words.
///
/// # Safety
/// `from` is 64 mapped, readable bytes aligned to 64.
#[inline]
pub(super) unsafe fn load_line(_choice: LineLoad, from: *const u8) -> Line {
    // SAFETY: what the caller promises.
    bytemuck::cast(std::array::from_fn::<u64, 8, _>(|index| unsafe { from.cast::<u64>().add(index).read_volatile() }))
}

/// Loads the lines at `offsets` from `base`, as far as both lists go.
///
/// # Safety
/// As for [`load_line`], of every line.
pub(super) unsafe fn load_lines(choice: LineLoad, base: *const u8, offsets: &[u64], out: &mut [Line]) {
    for (&offset, line) in offsets.iter().zip(out) {
        // SAFETY: what the caller promises.
        *line = unsafe { load_line(choice, base.add(offset as usize)) };
    }
}

/// Stores one line through the cache as eight words.
///
/// # Safety
/// `to` is 64 mapped, writable bytes aligned to 64.
#[inline]
pub(super) unsafe fn store_line(_choice: LineLoad, to: *mut u8, line: &Line) {
    let words: [u64; 8] = bytemuck::cast(*line);
    // A wrong CRC first, in front of a barrier because stores are not ordered here: this cache's copy of the line may be old, and
    // written back between two stores it must not verify. The word with the right CRC last, after a barrier: a line that is whole for
    // others has no store left to come, which could bring it back after its next owner has written it.
    // SAFETY: what the caller promises.
    unsafe { to.cast::<u64>().write_volatile(words[0] ^ super::CRC_BITS) };
    fence_stores();
    for (index, word) in words.into_iter().enumerate().rev() {
        if index == 0 {
            fence_stores();
        }
        // SAFETY: what the caller promises.
        unsafe { to.cast::<u64>().add(index).write_volatile(word) };
    }
}

/// Copies `lines` whole lines with STNP and cleans each, because the non-temporal hint alone does not leave the cache.
///
/// # Safety
/// Both ranges are mapped and do not overlap; `to` is aligned to 64.
#[inline]
pub(super) unsafe fn copy_lines(_choice: LineCopy, to: *mut u8, from: *const u8, lines: usize) {
    for offset in (0..lines * LINE_BYTES).step_by(LINE_BYTES) {
        // SAFETY: the caller promises `lines` lines at both ends.
        unsafe {
            asm!(
                "ldp q0, q1, [{from}]",
                "ldp q2, q3, [{from}, #32]",
                "stnp q0, q1, [{to}]",
                "stnp q2, q3, [{to}, #32]",
                from = in(reg) from.add(offset), to = in(reg) to.add(offset),
                out("v0") _, out("v1") _, out("v2") _, out("v3") _,
                options(nostack, preserves_flags)
            );
            clean_line(to.add(offset));
        }
    }
}

/// Copies to memory of this host alone by way of the caches.
///
/// # Safety
/// Both ranges are mapped and do not overlap.
#[inline]
pub(super) unsafe fn copy_cached(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: what the caller promises.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
}

/// Copies `lines` whole lines to memory of this host alone: through the caches, which the non-temporal hint does not leave anyway.
///
/// # Safety
/// As for [`copy_lines`].
#[inline]
pub(super) unsafe fn stream_lines(_choice: LineCopy, to: *mut u8, from: *const u8, lines: usize) {
    // SAFETY: what the caller promises.
    unsafe { copy_cached(to, from, lines * LINE_BYTES) }
}

/// Whether [`stream_lines_summed`] copies: not here, where copies and sums are made in turn.
pub(super) fn sums_copies(_choice: LineCopy) -> bool {
    false
}

/// Never called, because [`sums_copies`] says no.
///
/// # Safety
/// Nothing is touched.
pub(super) unsafe fn stream_lines_summed(_to: *mut u8, _from: *const u8, _lines: usize, _sum: &mut LineSum) {}

/// There is no such device here, so that nothing is ever taken.
///
/// # Safety
/// Nothing is touched.
pub(super) unsafe fn submit(_how: Submission, _portal: *mut u8, _descriptor: &Line) -> bool {
    false
}

/// DSB SY: also completes the cleans before it.
#[inline]
pub(super) fn fence_stores() {
    fence_all();
}

/// DSB SY.
#[inline]
pub(super) fn fence_all() {
    // SAFETY: a barrier touches nothing.
    unsafe { asm!("dsb sy", options(nostack, preserves_flags)) }
}

/// DSB LD: every earlier load has its value before anything later starts, cache maintenance included.
#[inline]
pub(super) fn fence_loads() {
    // SAFETY: as above.
    unsafe { asm!("dsb ld", options(nostack, preserves_flags)) }
}

/// PRFM PLDL1KEEP: begins to bring a line of ordinary memory into the caches.
#[inline]
pub(super) fn prefetch(at: *const u8) {
    // SAFETY: a prefetch is no access, and does nothing where nothing is mapped.
    unsafe { asm!("prfm pldl1keep, [{}]", in(reg) at, options(nostack, preserves_flags, readonly)) }
}

#[inline]
unsafe fn clean_line(at: *mut u8) {
    // SAFETY: the caller promises that `at` is mapped and readable.
    unsafe { asm!("dc cvac, {}", in(reg) at, options(nostack, preserves_flags)) }
}
