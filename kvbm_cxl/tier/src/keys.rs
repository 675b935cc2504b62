// SPDX-License-Identifier: Apache-2.0
//! Keys: KVBM's positional lineage hash, 128 bits, is the pool's key.
//!
//! The hash covers the tokens of the block and of all blocks before it, and the salt. It carries its position and a fragment of its
//! parent's hash, so that parents are found among known keys without pointers. The encoding has changed between releases of dynamo-tokens:
//! [`ENCODING`] is part of the namespace, and keys of two encodings never meet.

use cxl_pool::cache::BlockKey;
use kvbm_engine::SequenceHash;
use serde::Deserialize;
use serde::de::value::{BytesDeserializer, Error};
use std::collections::{HashMap, VecDeque};

/// Name of the encoding of keys, as the namespace has it: that of dynamo-tokens 1.6.
pub const ENCODING: &str = "positional lineage hash, 1.6";

/// Modes of the hash that [`ENCODING`] defines; its accessors panic at others.
const MODES: u8 = 3;
/// Blocks whose key is remembered as that of a parent, 48 bytes each.
const REMEMBERED: usize = 1 << 16;
/// Bits of a parent's hash that a child of any position carries.
const FRAGMENT_MASK: u64 = (1 << 38) - 1;

/// The key of a block, or `None` where the hash is none of this encoding.
pub fn key_of(hash: SequenceHash) -> Option<BlockKey> {
    is_known(&hash).then(|| BlockKey(hash.as_u128().to_be_bytes()))
}

/// The hash whose key this is, or `None` where there is none of this encoding.
pub fn hash_of(key: BlockKey) -> Option<SequenceHash> {
    let hash = SequenceHash::deserialize(BytesDeserializer::<Error>::new(&key.0)).ok()?;
    (key_of(hash) == Some(key)).then_some(hash)
}

fn is_known(hash: &SequenceHash) -> bool {
    hash.mode() < MODES
}

/// Whether `parent` is the block before `child`, as far as the fragment in `child` tells.
pub fn is_parent(parent: &SequenceHash, child: &SequenceHash) -> bool {
    is_known(parent)
        && is_known(child)
        && child.position() == parent.position() + 1
        && child.parent_hash_fragment() == parent.parent_fragment_for_child_position(child.position())
}

/// Keys that this process has met, by what their children know of them. An offload comes in batches, and the parent of a batch's first
/// block is in the batch before it.
#[derive(Default)]
pub struct Lineage {
    known: HashMap<(u64, u64), SequenceHash>,
    order: VecDeque<(u64, u64)>,
}

impl Lineage {
    /// Remembers keys, and forgets the oldest where there are too many.
    pub fn learn(&mut self, hashes: &[SequenceHash]) {
        for hash in hashes.iter().filter(|hash| is_known(hash)) {
            let place = (hash.position(), hash.current_sequence_hash() & FRAGMENT_MASK);
            if self.known.insert(place, *hash).is_none() {
                self.order.push_back(place);
            }
            if self.order.len() > REMEMBERED
                && let Some(oldest) = self.order.pop_front()
            {
                self.known.remove(&oldest);
            }
        }
    }

    /// The key of the block before `child`, if it is known.
    pub fn parent_of(&self, child: &SequenceHash) -> Option<BlockKey> {
        if !is_known(child) {
            return None;
        }
        let place = (child.position().checked_sub(1)?, child.parent_hash_fragment() & FRAGMENT_MASK);
        self.known.get(&place).filter(|parent| is_parent(parent, child)).copied().and_then(key_of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(len: u64, seed: u64) -> Vec<SequenceHash> {
        let mut hashes = vec![SequenceHash::root(seed)];
        for block in 1..len {
            let last = hashes[hashes.len() - 1];
            hashes.push(last.extend(seed.wrapping_mul(block + 1)));
        }
        hashes
    }

    #[test]
    fn parents_are_found_across_the_widths_of_the_position() {
        // Positions of 8 and of 16 bits: fragments of two widths.
        let hashes = chain(300, 0x1234_5678_9abc_def1);
        let mut lineage = Lineage::default();
        lineage.learn(&hashes);
        assert_eq!(lineage.parent_of(&hashes[0]), None);
        for pair in hashes.windows(2) {
            assert_eq!(lineage.parent_of(&pair[1]), key_of(pair[0]), "at {}", pair[1].position());
        }
        let other = chain(3, 77);
        assert_eq!(lineage.parent_of(&other[2]), None, "the parent was never met");
    }

    #[test]
    fn a_key_and_its_hash_are_the_same_at_every_width_of_the_position() {
        for hash in chain(300, 5).into_iter().chain([SequenceHash::new(17, Some(4), 70_000)]) {
            assert_eq!(key_of(hash).and_then(hash_of), Some(hash), "at {}", hash.position());
        }
    }

    #[test]
    fn memory_is_bounded_and_the_oldest_goes_first() {
        let mut lineage = Lineage::default();
        let hashes = chain(REMEMBERED as u64 + 10, 3);
        lineage.learn(&hashes);
        assert_eq!((lineage.known.len(), lineage.order.len()), (REMEMBERED, REMEMBERED));
        assert_eq!(lineage.parent_of(&hashes[1]), None);
        assert!(lineage.parent_of(&hashes[REMEMBERED]).is_some());
    }

    #[test]
    fn a_hash_of_another_encoding_has_no_key() {
        // Mode 3 is not of this encoding. A peer can send any 16 bytes.
        let wire = 3u128 << 126 | 5;
        let foreign: SequenceHash = kvbm_hash_of(wire);
        assert_eq!(foreign.mode(), 3);
        assert_eq!(key_of(foreign), None);
        assert_eq!(hash_of(BlockKey(wire.to_be_bytes())), None);
        assert!(!is_parent(&foreign, &chain(2, 9)[1]));
        let mut lineage = Lineage::default();
        lineage.learn(&[foreign]);
        assert_eq!((lineage.parent_of(&foreign), lineage.known.len()), (None, 0));
    }

    fn kvbm_hash_of(value: u128) -> SequenceHash {
        // SAFETY: the type is a u128 without invalid values, and of its size.
        unsafe { std::mem::transmute_copy(&value) }
    }
}
