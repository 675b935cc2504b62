// SPDX-License-Identifier: Apache-2.0
//! Random numbers that are the same for a seed on every machine.

/// Splitmix64.
pub struct Random(u64);

/// Spreads a word over all its bits.
pub fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(mix(seed ^ 0x6a09_e667_f3bc_c908))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// From 0 to 1, 0 and 1 excluded.
    pub fn unit(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// A whole number below `limit`; 0 where that is 0.
    pub fn below(&mut self, limit: usize) -> usize {
        ((self.unit() * limit as f64) as usize).min(limit.saturating_sub(1))
    }

    /// Time to the next event, where events come at random, one in `mean` on average.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * self.unit().ln()
    }
}

#[cfg(test)]
mod tests;
