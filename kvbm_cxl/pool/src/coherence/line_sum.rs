// SPDX-License-Identifier: Apache-2.0
//! XXH3-64 with seed 0 over whole lines, for a copy that takes the checksum of the bytes while it has them in registers.
//!
//! A line is what XXH3 calls a stripe: eight words that go into eight sums under a key which moves by a word from line to line. After
//! [`BLOCK_LINES`] lines the sums are scrambled. The last line has a key of its own and is not followed by a scramble.

use crate::limits::LINE_BYTES;

pub(super) const BLOCK_LINES: u64 = 16;
/// Where in the secret the keys of a scramble, of the last line and of the end begin, in bytes.
const SCRAMBLE_KEY: usize = 128;
const LAST_KEY: usize = 121;
const END_KEY: usize = 11;
/// Shorter inputs have sums of another form.
const MIN_BYTES: u64 = 256;

pub(super) const PRIME32_1: u64 = 0x9e37_79b1;
const PRIME32_2: u64 = 0x85eb_ca77;
const PRIME32_3: u64 = 0xc2b2_ae3d;
const PRIME64_1: u64 = 0x9e37_79b1_85eb_ca87;
const PRIME64_2: u64 = 0xc2b2_ae3d_27d4_eb4f;
const PRIME64_3: u64 = 0x1656_67b1_9e37_79f9;
const PRIME64_4: u64 = 0x85eb_ca77_c2b2_ae63;
const PRIME64_5: u64 = 0x27d4_eb2f_1656_67c5;
const END_PRIME: u64 = 0x1656_6791_9e37_79f9;

/// The secret of XXH3, a constant of the format, as words of a little-endian machine.
static SECRET: [u64; 24] = [
    0xbe4b_a423_396c_feb8, 0x1cad_21f7_2c81_017c, 0xdb97_9083_e96d_d4de, 0x1f67_b3b7_a4a4_4072, 0x78e5_c0cc_4ee6_79cb,
    0x2172_ffcc_7dd0_5a82, 0x8e24_43f7_7446_08b8, 0x4c26_3a81_e690_35e0, 0xcb00_c391_bb52_283c, 0xa32e_531b_8b65_d088,
    0x4ef9_0da2_9748_6471, 0xd8ac_dea9_46ef_1938, 0x3f34_9ce3_3f76_faa8, 0x1d4f_0bc7_c7bb_dcf9, 0x3159_b4cd_4be0_518a,
    0x6473_78d9_c97e_9fc8, 0xc3eb_d334_83ac_c5ea, 0xeb63_13fa_ffa0_81c5, 0x49da_f0b7_51dd_0d17, 0x9e68_d429_2655_16d3,
    0xfca1_477d_58be_162b, 0xce31_d07a_d1b8_f88f, 0x2804_1695_8f3a_cb45, 0x7e40_4bbb_cafb_d7af,
];

/// A checksum under way over a number of lines that is known beforehand.
#[derive(Clone, Debug)]
pub struct LineSum {
    pub(super) sums: [u64; 8],
    lines: u64,
    done: u64,
}

/// What the next lines are summed with: as many lines as lie before a change, the keys from
/// that of the first on, and the key of a scramble that follows.
pub(super) struct Run {
    pub(super) lines: usize,
    pub(super) keys: &'static [u8],
    pub(super) scramble: Option<&'static [u8]>,
}

impl LineSum {
    /// The sum of `len_bytes` bytes; `None` where that is no whole number of lines, or so few that XXH3 is another sum.
    pub fn of(len_bytes: u64) -> Option<Self> {
        let is_whole = len_bytes.is_multiple_of(LINE_BYTES as u64) && len_bytes >= MIN_BYTES;
        let sums = [PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1];
        is_whole.then_some(LineSum { sums, lines: len_bytes / LINE_BYTES as u64, done: 0 })
    }

    /// Advances by at most `most` lines, which the caller adds to the sums.
    pub(super) fn next_run(&mut self, most: usize) -> Run {
        let in_block = self.done % BLOCK_LINES;
        let before_last = self.lines.saturating_sub(1).saturating_sub(self.done);
        if before_last == 0 {
            self.done += 1;
            return Run { lines: most.min(1), keys: secret_from(LAST_KEY), scramble: None };
        }
        let lines = before_last.min(BLOCK_LINES - in_block).min(most as u64);
        self.done += lines;
        let ends = (in_block + lines == BLOCK_LINES).then(|| secret_from(SCRAMBLE_KEY));
        Run { lines: lines as usize, keys: secret_from(in_block as usize * size_of::<u64>()), scramble: ends }
    }

    /// The checksum, once every line was added; `None` before.
    pub fn finish(&self) -> Option<u64> {
        (self.done == self.lines).then(|| {
            let folded = |pair: usize| {
                let word = |index: usize| self.sums.get(index).copied().unwrap_or(0) ^ key_word(END_KEY + index * size_of::<u64>());
                let product = u128::from(word(2 * pair)) * u128::from(word(2 * pair + 1));
                product as u64 ^ (product >> 64) as u64
            };
            let len_bytes = self.lines.wrapping_mul(LINE_BYTES as u64);
            let sum = (0..4).fold(len_bytes.wrapping_mul(PRIME64_1), |sum, pair| sum.wrapping_add(folded(pair)));
            let mixed = (sum ^ sum >> 37).wrapping_mul(END_PRIME);
            mixed ^ mixed >> 32
        })
    }
}

/// The secret from a byte on.
fn secret_from(start: usize) -> &'static [u8] {
    bytemuck::bytes_of(&SECRET).get(start..).unwrap_or_default()
}

/// The word of the secret that begins at a byte.
fn key_word(start: usize) -> u64 {
    secret_from(start).first_chunk().copied().map_or(0, u64::from_le_bytes)
}

#[cfg(test)]
mod tests;
