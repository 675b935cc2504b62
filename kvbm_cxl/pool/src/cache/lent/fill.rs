// SPDX-License-Identifier: Apache-2.0
//! Pulls into blocks of a region. A block is either filled or promised to readers, never both: a pull into a lent block is
//! refused before a byte is written, and so is a lend of one that is being filled.

use super::super::{BlockKey, Namespace, Pulled};
use super::LentRegion;
use super::lend::LentBlockState;
use crate::copy::{LocalPlace, LocalRange};
use crate::error::{Error, Result};

/// Blocks that are being filled; they are the engine's again when this is dropped.
struct Filling<'a> {
    region: &'a LentRegion,
    blocks: &'a [u32],
}

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        let mut states = self.region.states();
        self.blocks.iter().for_each(|&block| states.set(block, LentBlockState::Held));
    }
}

impl LentRegion {
    /// Pulls blocks of the cache to where they belong: `keys[i]` to `blocks[i]` of this region, as [`super::super::Cache::pull_all_raw`]. A
    /// block of another length than the region's is a miss.
    ///
    /// # Safety
    /// Until this returns no other thread of this process uses these blocks.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is no such block, one is lent, offered or being filled already (take it back first), or the parts were
    /// not told; those of the pull.
    pub unsafe fn pull(&self, namespace: Namespace, keys: &[BlockKey], blocks: &[u32]) -> Result<Vec<Pulled>> {
        if keys.len() != blocks.len() {
            return Err(Error::Invalid(format!("{} keys for {} blocks: give one block for each key", keys.len(), blocks.len())));
        }
        let pieces: Vec<Vec<LocalRange>> = blocks.iter().map(|&block| self.pieces(block)).collect::<Result<_>>()?;
        let _filling = self.fill(blocks)?;
        // SAFETY: the pieces are mapped memory of this process's region. They are of blocks that are not lent, nor will be before
        // `_filling` is dropped, and that no other thread uses, as this function demands.
        unsafe { self.cache.pull_all_raw(namespace, keys, LocalPlace::Host, |place, _| pieces[place].iter().copied()) }
    }

    fn fill<'a>(&'a self, blocks: &'a [u32]) -> Result<Filling<'a>> {
        let mut states = self.states();
        for (place, &block) in blocks.iter().enumerate() {
            if states.get(block) != LentBlockState::Held {
                blocks[..place].iter().for_each(|&before| states.set(before, LentBlockState::Held));
                let advice = "take it back before something is pulled into it, and name it once";
                return Err(Error::Invalid(format!("block {block} is lent, about to be, or being filled: {advice}")));
            }
            states.set(block, LentBlockState::Filling);
        }
        Ok(Filling { region: self, blocks })
    }
}
