// SPDX-License-Identifier: Apache-2.0
//! Where a case takes its decisions from: the bytes of a fuzzer, then pseudo-random ones, so that every input is a whole case.

/// A stream of decisions.
pub struct Choices {
    bytes: Vec<u8>,
    next: usize,
    state: u64,
}

impl Choices {
    /// The decisions of a seed.
    pub fn of_seed(seed: u64) -> Self {
        Choices { bytes: Vec::new(), next: 0, state: mix(seed) | 1 }
    }

    /// The decisions that `bytes` give, and others that depend on nothing else once those are used up.
    pub fn of_bytes(bytes: &[u8]) -> Self {
        Choices { bytes: bytes.to_vec(), next: 0, state: mix(bytes.len() as u64) | 1 }
    }

    fn byte(&mut self) -> u8 {
        if let Some(&byte) = self.bytes.get(self.next) {
            self.next += 1;
            return byte;
        }
        // xorshift64*
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        (self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 56) as u8
    }

    /// Any number.
    pub fn word(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// A number below `limit`, which is not zero. Takes as few bytes as that needs.
    pub fn below(&mut self, limit: u64) -> u64 {
        let bytes = (64 - limit.leading_zeros()).div_ceil(8);
        (0..bytes).fold(0, |word, _| word << 8 | u64::from(self.byte())) % limit
    }

    /// True once in `times`.
    pub fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// One of `items`, which are some.
    pub fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len() as u64) as usize]
    }
}

/// SplitMix64's last steps: neighbouring seeds give unrelated streams.
pub fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}
