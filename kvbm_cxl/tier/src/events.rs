// SPDX-License-Identifier: Apache-2.0
//! Which blocks came to the pool and went, in the format in which KVBM's block managers tell it of G1 and G2 (kvbm-logical, `events`).
//!
//! KVBM tells nothing of its object tier. The pool has no stream of what all hosts do either; a look compares the blocks that are there
//! with those of the look before, whichever host stored them, and whether they were evicted or went with their host. So it loses nothing
//! when it is late: it tells less.

use crate::blocks::CxlBlocks;
use crate::error::Result;
use crate::keys::hash_of;
use cxl_pool::cache::{BlockKey, Watch};
use kvbm_engine::SequenceHash;
use kvbm_logical::events::KvCacheEvent;
use std::cmp::Reverse;

/// The events that one listener got of the blocks of a model.
///
/// The stream that a `KvbmCacheEventsPublisher` takes can be made of it: one look, its events, a wait.
pub struct PoolEvents {
    blocks: CxlBlocks,
    watch: Watch,
}

impl PoolEvents {
    /// A listener that knows of nothing yet. A block counts while every rank's part of it is there.
    ///
    /// # Errors
    /// [`crate::Error::Pool`].
    pub fn new(blocks: &CxlBlocks) -> Result<PoolEvents> {
        Ok(PoolEvents { watch: blocks.watch()?, blocks: blocks.clone() })
    }

    /// The changes since the last look, in the order of KVBM's batches: removed blocks, children first, then new ones, parents first. It
    /// reads the descriptors of all cells that can hold such blocks, and blocks the thread meanwhile.
    ///
    /// # Errors
    /// [`crate::Error::Pool`]; then the next look tells what this one would have.
    pub fn look(&mut self) -> Result<Vec<KvCacheEvent>> {
        let changes = self.blocks.look(&mut self.watch)?;
        // A key of another encoding is in no namespace of these blocks.
        let hashes = |keys: Vec<BlockKey>| keys.into_iter().filter_map(hash_of).collect::<Vec<SequenceHash>>();
        let (mut gone, mut come) = (hashes(changes.removed), hashes(changes.added));
        gone.sort_by_key(|hash| Reverse(hash.position()));
        come.sort_by_key(SequenceHash::position);
        Ok(gone.into_iter().map(KvCacheEvent::Remove).chain(come.into_iter().map(KvCacheEvent::Create)).collect())
    }
}
