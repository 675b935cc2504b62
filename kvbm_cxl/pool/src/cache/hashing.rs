// SPDX-License-Identifier: Apache-2.0
//! A hash for maps whose keys are cell numbers or digests: they need to be spread over a table, not to be protected from each other.

use std::hash::{BuildHasherDefault, Hasher};

pub(super) type Spread = BuildHasherDefault<LastWord>;

/// Keeps the last eight bytes of a key.
#[derive(Default)]
pub(super) struct LastWord(u64);

impl Hasher for LastWord {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = bytes.last_chunk().map_or(self.0, |word| u64::from_ne_bytes(*word));
    }

    fn write_usize(&mut self, _: usize) {}

    fn finish(&self) -> u64 {
        // By the golden ratio (Knuth, The Art of Computer Programming, vol. 3, 6.4): its high bits depend on all of the word.
        self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32)
    }
}

#[cfg(test)]
mod tests;
