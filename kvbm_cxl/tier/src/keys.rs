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
mod tests;
