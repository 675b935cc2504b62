// SPDX-License-Identifier: Apache-2.0
//! CRC32C of a metadata line together with its place, at the cost of nine instructions.
//!
//! The general routine of the `crc32c` crate is made for long buffers; on 72 bytes its set-up shows beside a line's own cost.

use crate::line::Line;

/// CRC32C, continued from `seed`, of the region number, the line number (both little-endian) and the line behind its own CRC.
#[inline]
pub(crate) fn line_crc(seed: u32, region: u32, index: u64, line: &Line) -> u32 {
    let words: [u64; 8] = bytemuck::cast(*line);
    let mut message = [0; 9];
    message[0] = u64::from(region) | index << 32;
    message[1] = index >> 32 | words[0] & !0xffff_ffff;
    message[2..].copy_from_slice(&words[1..]);
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("sse4.2") {
        // SAFETY: the CPU has SSE4.2.
        return unsafe { hardware(seed, &message) };
    }
    #[cfg(target_arch = "aarch64")]
    if std::arch::is_aarch64_feature_detected!("crc") {
        // SAFETY: the CPU has the CRC32 extension.
        return unsafe { hardware(seed, &message) };
    }
    crc32c::crc32c_append(seed, bytemuck::bytes_of(&message))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
fn hardware(seed: u32, message: &[u64; 9]) -> u32 {
    let crc = message.iter().fold(u64::from(!seed), |crc, &word| std::arch::x86_64::_mm_crc32_u64(crc, word));
    !(crc as u32)
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "crc")]
fn hardware(seed: u32, message: &[u64; 9]) -> u32 {
    !message.iter().fold(!seed, |crc, &word| std::arch::aarch64::__crc32cd(crc, word))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn is_the_crc32c_of_region_index_and_line(seed: u32, region: u32, index: u64, low: [u8; 32], high: [u8; 32]) {
            let mut line = Line::ZERO;
            line.0[..32].copy_from_slice(&low);
            line.0[32..].copy_from_slice(&high);
            let bytes = [&region.to_le_bytes()[..], &index.to_le_bytes(), &line.0[4..]].concat();
            prop_assert_eq!(line_crc(seed, region, index, &line), crc32c::crc32c_append(seed, &bytes));
        }
    }
}
