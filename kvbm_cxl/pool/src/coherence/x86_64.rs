// SPDX-License-Identifier: Apache-2.0
//! The steps on x86-64 (Intel SDM vol. 2: MOVDIR64B, VMOVNTDQ, CLFLUSH, CLFLUSHOPT, CLWB, SFENCE, MFENCE, LFENCE).
//!
//! Everything is assembly or an intrinsic of one instruction, and none of it claims to leave memory alone, so the compiler keeps the order.

use super::instructions::{CpuFeatures, LineCopy, LineFlush, LineLoad, LineWrite};
use super::line_sum::{LineSum, PRIME32_1};
use super::{Line, Submission};
use crate::limits::LINE_BYTES;
use std::arch::asm;
use std::arch::x86_64::*;

/// Asks CPUID, and XCR0 for the vector registers.
pub(super) fn features() -> CpuFeatures {
    let extended = if __cpuid(0).eax >= 7 { __cpuid_count(7, 0) } else { CpuidResult { eax: 0, ebx: 0, ecx: 0, edx: 0 } };
    CpuFeatures {
        movdir64b: extended.ecx & 1 << 28 != 0,
        enqcmd: extended.ecx & 1 << 29 != 0,
        avx512: is_x86_feature_detected!("avx512f"),
        avx2: is_x86_feature_detected!("avx2"),
        clflushopt: extended.ebx & 1 << 23 != 0,
        clwb: extended.ebx & 1 << 24 != 0,
        line_bytes: (__cpuid(1).ebx as usize >> 8 & 0xff) * 8,
    }
}

/// Writes one line. `flush` follows the stores where the choice is stores and a flush; `None` leaves it out.
///
/// # Safety
/// `to` is 64 mapped, writable bytes aligned to 64, and the CPU has the instructions.
#[inline]
pub(super) unsafe fn write_line(choice: LineWrite, flush: Option<LineFlush>, to: *mut u8, line: &Line) {
    // SAFETY: what the caller promises; `line` is 64 readable bytes aligned to 64.
    unsafe {
        match choice {
            LineWrite::Movdir64b => {
                asm!("movdir64b {to}, [{from}]", to = in(reg) to, from = in(reg) line, options(nostack, preserves_flags))
            }
            LineWrite::Avx512 => stream_avx512(to, line.0.as_ptr(), 1),
            LineWrite::StoresFlush | LineWrite::StoresDcCvac | LineWrite::StoresClwb => {
                store_words(to, line);
                match flush {
                    None => {}
                    Some(_) if choice == LineWrite::StoresClwb => asm!("clwb [{}]", in(reg) to, options(nostack, preserves_flags)),
                    Some(flush) => flush_line(flush, to),
                }
            }
        }
    }
}

/// Writes back and drops the line at `at`.
///
/// # Safety
/// `at` is mapped, and the CPU has the instruction.
#[inline]
pub(super) unsafe fn flush_line(choice: LineFlush, at: *mut u8) {
    // SAFETY: what the caller promises. A flush changes no byte that this host sees.
    unsafe {
        match choice {
            LineFlush::Clflushopt => asm!("clflushopt [{}]", in(reg) at, options(nostack, preserves_flags)),
            LineFlush::Clflush | LineFlush::DcCivac => asm!("clflush [{}]", in(reg) at, options(nostack, preserves_flags)),
        }
    }
}

/// Loads one line.
///
/// # Safety
/// `from` is 64 mapped, readable bytes aligned to 64, and the CPU has the instruction.
#[inline]
pub(super) unsafe fn load_line(choice: LineLoad, from: *const u8) -> Line {
    // SAFETY: what the caller promises.
    unsafe {
        match choice {
            LineLoad::Avx512 => load_avx512(from),
            LineLoad::Words => load_words(from),
        }
    }
}

/// Loads the lines at `offsets` from `base`, as far as both lists go, with nothing between the loads that would keep their misses
/// from overlapping.
///
/// # Safety
/// As for [`load_line`], of every line.
pub(super) unsafe fn load_lines(choice: LineLoad, base: *const u8, offsets: &[u64], out: &mut [Line]) {
    // SAFETY: what the caller promises.
    unsafe {
        // A prefetch leaves the pipeline at once, where the loads of a few lines fill it: so as many misses overlap as the caches can have.
        offsets.iter().for_each(|&offset| prefetch(base.add(offset as usize)));
        match choice {
            LineLoad::Avx512 => load_lines_avx512(base, offsets, out),
            LineLoad::Words => offsets.iter().zip(out).for_each(|(&offset, line)| *line = load_words(base.add(offset as usize))),
        }
    }
}

/// Stores one line through the cache, with one instruction where the CPU can.
///
/// # Safety
/// `to` is 64 mapped, writable bytes aligned to 64, and the CPU has the instruction.
#[inline]
pub(super) unsafe fn store_line(choice: LineLoad, to: *mut u8, line: &Line) {
    // SAFETY: what the caller promises.
    unsafe {
        match choice {
            LineLoad::Avx512 => store_avx512(to, line),
            LineLoad::Words => store_words(to, line),
        }
    }
}

/// Stretches of a long copy that are made side by side, and the lines that are copied of each in turn: lines that are in no cache come
/// faster from several pages at once, since prefetchers end at the end of a page (measured: 5 to 20 percent from 32 KiB on).
const STRETCHES: usize = 4;
const TURN_LINES: usize = 4;
/// Lines from which on a copy is long.
const LONG_LINES: usize = 512;

/// Lines of each stretch of a copy: an odd number of turns, so that stretches never lie whole pages apart. Stores past the caches to four
/// such places in turn fall into the same few buffers of some processors: measured on a Zen 3, the copy takes twice as long.
#[inline]
fn stretch_lines(lines: usize) -> usize {
    let turns = if lines >= LONG_LINES { (lines / STRETCHES / TURN_LINES - 1) | 1 } else { 0 };
    turns * TURN_LINES
}

/// Copies `lines` whole lines past the caches. `to` is aligned to 64, `from` need not be.
///
/// # Safety
/// Both ranges are mapped and do not overlap, `to` is aligned to 64, and the CPU has the instruction.
#[inline]
pub(super) unsafe fn copy_lines(choice: LineCopy, to: *mut u8, from: *const u8, lines: usize) {
    let stretch = stretch_lines(lines);
    // SAFETY: what the caller promises: the stretches and the rest after them are parts of the ranges. A prefetch is no access.
    unsafe {
        let copy = |first: usize, lines| copy_run(choice, to.add(first * LINE_BYTES), from.add(first * LINE_BYTES), lines);
        for done in (0..stretch).step_by(TURN_LINES) {
            for first in (0..STRETCHES).map(|number| number * stretch + done) {
                for next in (first + TURN_LINES..first + 2 * TURN_LINES).filter(|_| done + TURN_LINES < stretch) {
                    // Read once: not where it would evict data that is used again.
                    _mm_prefetch::<_MM_HINT_NTA>(from.add(next * LINE_BYTES).cast());
                }
                copy(first, TURN_LINES);
            }
        }
        copy(STRETCHES * stretch, lines - STRETCHES * stretch);
    }
}

/// As [`copy_lines`], one line after the other.
///
/// # Safety
/// As for [`copy_lines`].
#[inline]
unsafe fn copy_run(choice: LineCopy, to: *mut u8, from: *const u8, lines: usize) {
    // SAFETY: what the caller promises.
    unsafe {
        match choice {
            LineCopy::Avx512 => stream_avx512(to, from, lines),
            LineCopy::Avx2 => stream_avx2(to, from, lines),
            LineCopy::Sse2 | LineCopy::Stnp => stream_sse2(to, from, lines),
        }
    }
}

/// Bytes from which on [`copy_cached`] copies by itself: shorter ones are the C library's, which is faster there.
const OWN_COPY_BYTES: usize = 2048;

/// Copies to memory of this host alone by way of the caches.
///
/// The C library's copy, and `rep movsb`, take more than twice as long where the destination lies less than 32 bytes after the source as
/// far as the offset in a page goes: each store then looks as if the next load needed it (measured on a Zen 3, from 4 KiB on, of lines that
/// are in no cache; wider registers than these gain nothing there). Blocks of the pool begin with a page, and large arrays that malloc()
/// makes 16 bytes after one.
///
/// Never inlined: where the compiler knows that the ranges do not overlap, it makes a call of the C library's copy of the loop.
///
/// # Safety
/// Both ranges are mapped and do not overlap.
#[inline(never)]
pub(super) unsafe fn copy_cached(to: *mut u8, from: *const u8, len: usize) {
    let whole = if len < OWN_COPY_BYTES { 0 } else { len - len % 16 };
    // SAFETY: what the caller promises: `len` bytes at both ends. SSE2 is part of x86-64.
    unsafe {
        for offset in (0..whole).step_by(16) {
            _mm_storeu_si128(to.add(offset).cast(), _mm_loadu_si128(from.add(offset).cast()));
        }
        std::ptr::copy_nonoverlapping(from.add(whole), to.add(whole), len - whole);
    }
}

/// Copies `lines` whole lines to memory of this host alone, past the caches.
///
/// # Safety
/// As for [`copy_lines`].
#[inline]
pub(super) unsafe fn stream_lines(choice: LineCopy, to: *mut u8, from: *const u8, lines: usize) {
    // SAFETY: what the caller promises.
    unsafe { copy_lines(choice, to, from, lines) }
}

/// Whether [`stream_lines_summed`] is made with the instructions of this choice.
pub(super) fn sums_copies(choice: LineCopy) -> bool {
    choice == LineCopy::Avx512
}

/// As [`stream_lines`], and adds every line to `sum`: each is loaded once, so that the sum covers the delivered bytes.
///
/// # Safety
/// As for [`copy_lines`] where [`sums_copies`].
pub(super) unsafe fn stream_lines_summed(to: *mut u8, from: *const u8, lines: usize, sum: &mut LineSum) {
    // SAFETY: what the caller promises.
    unsafe { stream_summed_avx512(to, from, lines, sum) }
}

/// Submits a descriptor (Intel SDM vol. 2: ENQCMD sets ZF when the device had no room).
///
/// # Safety
/// As for [`Submission::submit`].
pub(super) unsafe fn submit(how: Submission, portal: *mut u8, descriptor: &Line) -> bool {
    let refused: u8;
    // SAFETY: what the caller promises; `descriptor` is 64 readable bytes.
    unsafe {
        match how {
            Submission::Enqueue => asm!(
                "enqcmd {to}, [{from}]", "setz {refused}",
                to = in(reg) portal, from = in(reg) descriptor, refused = out(reg_byte) refused, options(nostack)
            ),
            Submission::DirectStore => {
                asm!("movdir64b {to}, [{from}]", to = in(reg) portal, from = in(reg) descriptor, options(nostack, preserves_flags));
                refused = 0;
            }
        }
    }
    refused == 0
}

/// SFENCE.
#[inline]
pub(super) fn fence_stores() {
    // SAFETY: a fence touches nothing.
    unsafe { asm!("sfence", options(nostack, preserves_flags)) }
}

/// MFENCE.
#[inline]
pub(super) fn fence_all() {
    // SAFETY: as above.
    unsafe { asm!("mfence", options(nostack, preserves_flags)) }
}

/// LFENCE.
#[inline]
pub(super) fn fence_loads() {
    // SAFETY: as above.
    unsafe { asm!("lfence", options(nostack, preserves_flags)) }
}

/// PREFETCHT0: begins to bring a line of ordinary memory into the caches.
#[inline]
pub(super) fn prefetch(at: *const u8) {
    // SAFETY: a prefetch is no access, and does nothing where nothing is mapped.
    unsafe { asm!("prefetcht0 [{}]", in(reg) at, options(nostack, preserves_flags, readonly)) }
}

#[inline]
unsafe fn store_words(to: *mut u8, line: &Line) {
    let words: [u64; 8] = bytemuck::cast(*line);
    // A wrong CRC first: what this cache held of the line may be old, and written back between two stores it must not verify. The word with
    // the right CRC last: a line that is whole for others has no store left to come, which could bring it back after its next owner has
    // written it.
    // SAFETY: the caller promises 64 writable bytes, aligned.
    unsafe { to.cast::<u64>().write_volatile(words[0] ^ super::CRC_BITS) };
    for (index, word) in words.into_iter().enumerate().rev() {
        // SAFETY: as above.
        unsafe { to.cast::<u64>().add(index).write_volatile(word) };
    }
}

#[inline]
unsafe fn load_words(from: *const u8) -> Line {
    // SAFETY: the caller promises 64 readable bytes, aligned; volatile, so that each load is made exactly once and exactly here.
    let parts: [__m128i; 4] = std::array::from_fn(|index| unsafe { from.cast::<__m128i>().add(index).read_volatile() });
    // SAFETY: 64 bytes either way, all of them set.
    unsafe { std::mem::transmute::<[__m128i; 4], Line>(parts) }
}

#[target_feature(enable = "avx512f")]
unsafe fn load_avx512(from: *const u8) -> Line {
    let mut line = std::mem::MaybeUninit::<Line>::uninit();
    // Not one of the lower sixteen registers: code compiled for SSE would be slow until their upper halves are cleared again.
    // SAFETY: the caller promises 64 readable bytes. Assembly, so that the load is made exactly once and exactly here.
    unsafe {
        asm!(
            "vmovdqa64 zmm16, [{from}]", "vmovdqa64 [{to}], zmm16",
            from = in(reg) from, to = in(reg) line.as_mut_ptr(), out("zmm16") _, options(nostack, preserves_flags)
        );
    }
    // SAFETY: all 64 bytes were stored.
    unsafe { line.assume_init() }
}

#[target_feature(enable = "avx512f")]
unsafe fn load_lines_avx512(base: *const u8, offsets: &[u64], out: &mut [Line]) {
    for (&offset, line) in offsets.iter().zip(out) {
        // SAFETY: the caller promises 64 readable bytes at each offset; `line` has as many, aligned. Assembly as in `load_avx512`.
        unsafe {
            asm!(
                "vmovdqa64 zmm16, [{from}]", "vmovdqa64 [{to}], zmm16",
                from = in(reg) base.add(offset as usize), to = in(reg) line, out("zmm16") _, options(nostack, preserves_flags)
            );
        }
    }
}

#[target_feature(enable = "avx512f")]
unsafe fn store_avx512(to: *mut u8, line: &Line) {
    // Word by word into the register: one wide load of a line that was just put together from narrower stores waits for all of them.
    // SAFETY: 64 readable bytes, aligned; volatile, so that the loads are not merged into one.
    let [a, b, c, d, e, f, g, h] = std::array::from_fn(|index| unsafe { line.0.as_ptr().cast::<i64>().add(index).read_volatile() });
    let wide = _mm512_set_epi64(h, g, f, e, d, c, b, a);
    // SAFETY: the caller promises 64 writable bytes, aligned.
    unsafe { asm!("vmovdqa64 [{to}], {wide}", to = in(reg) to, wide = in(zmm_reg) wide, options(nostack, preserves_flags)) };
}

#[target_feature(enable = "avx512f")]
unsafe fn stream_avx512(to: *mut u8, from: *const u8, lines: usize) {
    for offset in (0..lines * LINE_BYTES).step_by(64) {
        // SAFETY: the caller promises `lines` lines at both ends, `to` aligned.
        unsafe { _mm512_stream_si512(to.add(offset).cast(), _mm512_loadu_si512(from.add(offset).cast())) };
    }
}

#[target_feature(enable = "avx2")]
unsafe fn stream_avx2(to: *mut u8, from: *const u8, lines: usize) {
    for offset in (0..lines * LINE_BYTES).step_by(32) {
        // SAFETY: as in `stream_avx512`.
        unsafe { _mm256_stream_si256(to.add(offset).cast(), _mm256_loadu_si256(from.add(offset).cast())) };
    }
}

unsafe fn stream_sse2(to: *mut u8, from: *const u8, lines: usize) {
    for offset in (0..lines * LINE_BYTES).step_by(16) {
        // SAFETY: as in `stream_avx512`; SSE2 is part of x86-64.
        unsafe { _mm_stream_si128(to.add(offset).cast(), _mm_loadu_si128(from.add(offset).cast())) };
    }
}

/// Lines whose loads are under way ahead of the one that is summed.
const AHEAD_LINES: usize = 64;

#[target_feature(enable = "avx512f")]
unsafe fn stream_summed_avx512(to: *mut u8, from: *const u8, lines: usize, sum: &mut LineSum) {
    // SAFETY: 64 readable bytes.
    let mut sums = unsafe { _mm512_loadu_si512(sum.sums.as_ptr().cast()) };
    let mut line = 0;
    while line < lines {
        let run = sum.next_run(lines - line);
        for step in 0..run.lines {
            let at = (line + step) * LINE_BYTES;
            let data: __m512i;
            // SAFETY: the caller promises `lines` lines at both ends, `to` aligned; a key and the seven words after it lie in the secret
            // for every line of a run. A prefetch reads nothing, wherever it points. Assembly, so that the line is loaded exactly once.
            let key = unsafe {
                asm!(
                    "prefetcht0 [{from} + {ahead}]", "vmovdqu64 {data}, [{from}]",
                    from = in(reg) from.add(at), data = out(zmm_reg) data, ahead = const AHEAD_LINES * LINE_BYTES,
                    options(nostack, preserves_flags)
                );
                _mm512_stream_si512(to.add(at).cast(), data);
                _mm512_loadu_si512(run.keys.as_ptr().add(step * size_of::<u64>()).cast())
            };
            let keyed = _mm512_xor_si512(data, key);
            let product = _mm512_mul_epu32(keyed, _mm512_srli_epi64::<32>(keyed));
            // Each word goes into the sum of its neighbour as it is.
            sums = _mm512_add_epi64(sums, _mm512_add_epi64(product, _mm512_shuffle_epi32::<0b01_00_11_10>(data)));
        }
        if let Some(key) = run.scramble {
            // SAFETY: the last eight words of the secret.
            let key = unsafe { _mm512_loadu_si512(key.as_ptr().cast()) };
            let mixed = _mm512_xor_si512(_mm512_xor_si512(sums, _mm512_srli_epi64::<47>(sums)), key);
            let prime = _mm512_set1_epi64(PRIME32_1 as i64);
            let high = _mm512_mul_epu32(_mm512_srli_epi64::<32>(mixed), prime);
            sums = _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64::<32>(high));
        }
        line += run.lines;
    }
    // SAFETY: 64 writable bytes.
    unsafe { _mm512_storeu_si512(sum.sums.as_mut_ptr().cast(), sums) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_by_way_of_the_caches_have_every_byte_and_no_other() {
        let source: Vec<u8> = (0..3 * OWN_COPY_BYTES).map(|index| (index * 7 + index / 251) as u8 | 1).collect();
        for len in [0, 1, 31, OWN_COPY_BYTES - 1].into_iter().chain(OWN_COPY_BYTES..OWN_COPY_BYTES + 70) {
            for (from, to) in [(0, 0), (0, 16), (5, 0), (3, 64)] {
                let mut copied = vec![0; to + len + 64];
                // SAFETY: both ranges lie in their vectors, which are two.
                unsafe { copy_cached(copied.as_mut_ptr().add(to), source.as_ptr().add(from), len) };
                assert_eq!(copied[to..to + len], source[from..from + len], "{len} bytes from {from} to {to}");
                assert!(copied[..to].iter().chain(&copied[to + len..]).all(|&byte| byte == 0), "{len} bytes to {to}");
            }
        }
    }

    #[test]
    fn stretches_of_a_long_copy_lie_no_whole_pages_apart_and_within_it() {
        for lines in 0..20_000 {
            let stretch = stretch_lines(lines);
            assert!(STRETCHES * stretch <= lines && stretch.is_multiple_of(TURN_LINES), "{stretch} of {lines}");
            if lines < LONG_LINES {
                assert_eq!(stretch, 0, "{lines}");
            } else {
                let rest = lines - STRETCHES * stretch;
                assert!(!(stretch * LINE_BYTES).is_multiple_of(4096) && rest < 3 * STRETCHES * TURN_LINES, "{stretch} of {lines}");
            }
        }
    }
}
