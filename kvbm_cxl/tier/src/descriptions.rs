// SPDX-License-Identifier: Apache-2.0
//! What a router needs of a block and the block's key does not hold: the hash of its own tokens, and its parent's hash.
//!
//! A description is a small block next to the block that it describes, under the same key, in a namespace of its own. So every host can
//! tell routers of every block, whichever host stored it. The pool needs cells for it that are smaller than those of blocks.

use crate::blocks::CxlBlocks;
use crate::error::{Error, Result};
use crate::keys::key_of;
use cxl_pool::cache::{BlockKey, Cache, Namespace, NamespaceFields, Published, Pulled};
use kvbm_engine::SequenceHash;

/// "KVT" and the version, whether there is a parent, the hash of the block's own tokens, its parent's hash; numbers are little-endian.
const LEN_BYTES: usize = 24;
const MAGIC: [u8; 4] = *b"KVT\x01";

/// What a description says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tokens {
    /// Hash of the block's own tokens.
    pub(crate) own: u64,
    /// Hash of all tokens before it.
    pub(crate) parent: Option<u64>,
}

impl Tokens {
    fn encode(self) -> [u8; LEN_BYTES] {
        let mut bytes = [0; LEN_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = self.parent.is_some().into();
        bytes[8..16].copy_from_slice(&self.own.to_le_bytes());
        bytes[16..].copy_from_slice(&self.parent.unwrap_or(0).to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; LEN_BYTES]) -> Option<Tokens> {
        let (head, numbers) = bytes.split_at(8);
        let has_parent = match head {
            [b'K', b'V', b'T', 1, has_parent @ 0..=1, 0, 0, 0] => *has_parent == 1,
            _ => return None,
        };
        let (own, parent) = numbers.split_at(8);
        let number = |bytes: &[u8]| bytes.try_into().map(u64::from_le_bytes).ok();
        Some(Tokens { own: number(own)?, parent: if has_parent { Some(number(parent)?) } else { None } })
    }
}

/// The descriptions of a model's blocks.
pub(crate) struct Descriptions {
    cache: Cache,
    namespace: Namespace,
    /// Sizes of the cells that a description and a block take; the first is less where the pool was formatted for descriptions.
    cells_bytes: (u64, u64),
}

impl Descriptions {
    pub(crate) fn of(blocks: &CxlBlocks) -> Descriptions {
        let cache = blocks.cache().clone();
        let geometry = *cache.host().lines().layout().geometry();
        let holding = |len_bytes: u64| {
            let cells = geometry.cells.iter().filter(|class| class.chunks > 0 && class.cell_bytes >= len_bytes);
            cells.map(|class| class.cell_bytes).min().unwrap_or(0)
        };
        let cells_bytes = (holding(LEN_BYTES as u64), holding(blocks.block_bytes() as u64));
        // Every rank's blocks have one description.
        let model = blocks.first_namespace().to_string();
        let of = NamespaceFields { model, dtype: "description".into(), layout: "kvbm description 1".into(), ..NamespaceFields::default() };
        Descriptions { cache, namespace: of.namespace(), cells_bytes }
    }

    /// Whether the pool has cells for them.
    pub(crate) fn is_possible(&self) -> bool {
        self.cells_bytes.0 < self.cells_bytes.1
    }

    /// Stores the description of a block; false when the pool has no room for it.
    pub(crate) fn store(&self, hash: SequenceHash, parent: Option<SequenceHash>, tokens: Tokens) -> Result<bool> {
        if !self.is_possible() {
            return Err(Error::NoSmallCells { block_bytes: self.cells_bytes.1 });
        }
        let Some(key) = key_of(hash) else { return Ok(false) };
        match self.cache.publish(self.namespace, key, parent.and_then(key_of), &tokens.encode()) {
            Ok(Published::Stored | Published::Exists) => Ok(true),
            Ok(Published::Busy) | Err(cxl_pool::Error::Full { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// The descriptions of blocks, as far as they are in the pool.
    pub(crate) fn load(&self, hashes: &[SequenceHash]) -> Result<Vec<(SequenceHash, Tokens)>> {
        let (known, keys): (Vec<SequenceHash>, Vec<BlockKey>) = hashes.iter().filter_map(|&hash| Some((hash, key_of(hash)?))).unzip();
        let mut found = Vec::new();
        for ((hash, key), info) in known.into_iter().zip(&keys).zip(self.cache.lookup_all(self.namespace, &keys)?) {
            let mut bytes = [0; LEN_BYTES];
            if info.is_some_and(|info| info.len_bytes == LEN_BYTES as u64)
                && let Pulled::Hit { .. } = self.cache.pull(self.namespace, *key, &mut bytes)?
                && let Some(tokens) = Tokens::decode(&bytes)
            {
                found.push((hash, tokens));
            }
        }
        Ok(found)
    }

    /// Takes the description of a block that is gone out of the pool, if it is this host's.
    pub(crate) fn forget(&self, hash: SequenceHash) -> Result<()> {
        let Some(key) = key_of(hash) else { return Ok(()) };
        let found = self.cache.lookup(self.namespace, key)?;
        if found.is_some_and(|found| found.owner == self.cache.host().slot()) {
            self.cache.evict(self.namespace, key)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
