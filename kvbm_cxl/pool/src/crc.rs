// SPDX-License-Identifier: Apache-2.0
//! CRC32C of a metadata line together with its place, at the cost of nine instructions.
//!
//! The general routine of the `crc32c` crate is made for long buffers; on 72 bytes its set-up shows beside a line's own cost.

/// CRC32C, continued from `seed`, of the region number, the line number (both little-endian) and the line behind its own CRC.
#[inline]
pub(crate) fn line_crc(seed: u32, region: u32, index: u64, line: &[u64; 8]) -> u32 {
    let place = [u64::from(region) | index << 32, index >> 32 | line[0] & !0xffff_ffff];
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

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
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
mod tests {
    use super::*;
    use crate::line::Line;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn is_the_crc32c_of_region_index_and_line(seed: u32, region: u32, index: u64, low: [u8; 32], high: [u8; 32]) {
            let mut line = Line::ZERO;
            line.0[..32].copy_from_slice(&low);
            line.0[32..].copy_from_slice(&high);
            let bytes = [&region.to_le_bytes()[..], &index.to_le_bytes(), &line.0[4..]].concat();
            prop_assert_eq!(line_crc(seed, region, index, &bytemuck::cast(line)), crc32c::crc32c_append(seed, &bytes));
        }
    }
}
