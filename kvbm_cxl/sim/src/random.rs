// SPDX-License-Identifier: Apache-2.0
//! The one source of chance in a simulated world: everything that happens follows from its seed.

/// SplitMix64: small, fast, and good from any seed, also from 0, 1, 2, ...
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Starts the sequence of `seed`.
    pub fn new(seed: u64) -> Self {
        // One mixing step in front, so that neighbouring seeds share nothing.
        Random(Random(seed ^ 0x6a09_e667_f3bc_c908).next())
    }

    /// The next 64 bits.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`, which must not be 0.
    pub fn below(&mut self, limit: usize) -> usize {
        ((u128::from(self.next()) * limit as u128) >> 64) as usize
    }

    /// A number from `least` to `most`, both included.
    pub fn between(&mut self, least: u64, most: u64) -> u64 {
        least + ((u128::from(self.next()) * (u128::from(most - least) + 1)) >> 64) as u64
    }

    /// True once in `n` times on average; never for 0.
    pub fn one_in(&mut self, n: u64) -> bool {
        n != 0 && self.next() <= u64::MAX / n
    }

    /// True `count` times in a million on average.
    pub fn per_million(&mut self, count: u64) -> bool {
        count != 0 && self.between(1, 1_000_000) <= count
    }

    /// One of `choices`.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// A duration whose order of magnitude is evenly spread between the two bounds.
    pub fn spread(&mut self, least: u64, most: u64) -> u64 {
        let low = least.max(1);
        let doublings = (most / low).max(1).ilog2();
        let scale = low << self.between(0, u64::from(doublings));
        self.between(scale, scale.saturating_mul(2).min(most.max(scale)))
    }
}
