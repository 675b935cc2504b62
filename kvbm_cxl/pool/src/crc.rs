// SPDX-License-Identifier: Apache-2.0
//! CRC32C of a metadata line together with its place, at the cost of nine instructions.
//!
//! The general routine of the `crc32c` crate is made for long buffers; on 72 bytes its set-up is a large part of the cost.

use crate::coherence::Line;

/// CRC32C, continued from `seed`, of the region number, the line number (both little-endian) and the line after its own CRC.
#[inline]
pub(crate) fn line_crc(seed: u32, region: u32, index: u64, line: &[u64; 8]) -> u32 {
    let place = place_of(region, index, line);
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("sse4.2") {
        // SAFETY: the CPU has SSE4.2.
        return unsafe { hardware(seed, place, line) };
    }
    #[cfg(target_arch = "aarch64")]
    if std::arch::is_aarch64_feature_detected!("crc") {
        // SAFETY: the CPU has the CRC32 extension.
        return unsafe { hardware(seed, place, line) };
    }
    crc32c::crc32c_append(crc32c::crc32c_append(seed, bytemuck::bytes_of(&place)), bytemuck::cast_slice(&line[1..]))
}

/// Which of up to 64 lines start with the CRC of their place: bit `i` is that of `lines[i]`, line `indexes[i]` of the region.
///
/// In one go, so that the sums of lines that follow one another overlap.
pub(crate) fn whole_lines(seed: u32, region: u32, indexes: &[u64], lines: &[Line]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("sse4.2") {
        // SAFETY: the CPU has SSE4.2.
        return unsafe { whole_in_hardware(seed, region, indexes, lines) };
    }
    mask_of(indexes, lines, |index, line| line_crc(seed, region, index, line))
}

#[inline(always)]
fn mask_of(indexes: &[u64], lines: &[Line], crc: impl Fn(u64, &[u64; 8]) -> u32) -> u64 {
    indexes.iter().zip(lines).take(64).enumerate().fold(0, |mask, (place, (&index, line))| {
        let words: &[u64; 8] = bytemuck::cast_ref(line);
        mask | u64::from(words[0] as u32 == crc(index, words)) << place
    })
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
fn whole_in_hardware(seed: u32, region: u32, indexes: &[u64], lines: &[Line]) -> u64 {
    mask_of(indexes, lines, |index, line| hardware(seed, place_of(region, index, line), line))
}

/// The sixteen bytes that the sum of a line begins with: its place, and the four bytes after its CRC in the same word.
#[inline(always)]
fn place_of(region: u32, index: u64, line: &[u64; 8]) -> [u64; 2] {
    [u64::from(region) | index << 32, index >> 32 | line[0] & !0xffff_ffff]
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
#[inline]
fn hardware(seed: u32, place: [u64; 2], line: &[u64; 8]) -> u32 {
    use std::arch::x86_64::_mm_crc32_u64;
    let start = _mm_crc32_u64(_mm_crc32_u64(u64::from(!seed), place[0]), place[1]);
    !(line[1..].iter().fold(start, |crc, &word| _mm_crc32_u64(crc, word)) as u32)
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "crc")]
fn hardware(seed: u32, place: [u64; 2], line: &[u64; 8]) -> u32 {
    use std::arch::aarch64::__crc32cd;
    let start = __crc32cd(__crc32cd(!seed, place[0]), place[1]);
    !line[1..].iter().fold(start, |crc, &word| __crc32cd(crc, word))
}

#[cfg(test)]
mod tests;
