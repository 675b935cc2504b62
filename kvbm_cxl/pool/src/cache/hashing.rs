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
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn neighbours_are_spread() {
        let hash_of = |key: u64| {
            let mut hasher = LastWord::default();
            std::hash::Hash::hash(&key, &mut hasher);
            hasher.finish()
        };
        let low: std::collections::HashSet<u64> = (0..1024).map(|key| hash_of(key) % 1024).collect();
        assert!(low.len() > 600, "{} of 1024 places", low.len());
        let mut map: HashMap<[u8; 16], u32, Spread> = HashMap::default();
        map.extend((0..100u8).map(|key| ([key; 16], key.into())));
        assert!((0..100u8).all(|key| map.get(&[key; 16]) == Some(&key.into())) && !map.contains_key(&[100; 16]));
    }
}
