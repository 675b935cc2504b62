// SPDX-License-Identifier: Apache-2.0
//! The blocks of one namespace, in cells of one size.

use super::{CacheView, CellState, Claimant, fetch_all};
use crate::cache::{BlockKey, Namespace};
use crate::error::Result;
use crate::media::{CHUNKS_PER_CELL_CLAIM, Descriptor};

/// Descriptors that are fetched together.
const AT_ONCE: usize = 1024;

/// A block that a pull may get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its key.
    pub key: BlockKey,
    /// Its cell.
    pub cell: u64,
    /// Its length in bytes.
    pub len_bytes: u64,
    /// Slot of the host that owns the cell.
    pub owner: u16,
}

impl CacheView {
    /// Blocks of a namespace that a pull may get, in cells of one class, in the order of their cells. Cells without a claim are not
    /// read: it costs a line for each cell in use, whatever the size of the pool.
    ///
    /// # Errors
    /// Those of the memory, except where only single lines fail.
    pub fn blocks(&self, namespace: Namespace, class: usize) -> Result<Vec<Listed>> {
        let (classes, per_chunk) = (&self.geometry().cells, u64::from(self.geometry().cells_per_chunk));
        let first: u64 = classes.iter().take(class).map(|class| class.chunks).sum();
        let chunks = classes.get(class).map_or(0, |class| class.chunks);
        let claimed = (first..first + chunks).filter(|&chunk| self.may_be_claimed(chunk));
        let mut cells = claimed.flat_map(|chunk| chunk * per_chunk..(chunk + 1) * per_chunk);
        let mut blocks = Vec::new();
        loop {
            let batch: Vec<u64> = cells.by_ref().take(AT_ONCE).collect();
            if batch.is_empty() {
                return Ok(blocks);
            }
            let descriptors: Vec<Option<Descriptor>> = fetch_all(&self.lines, &batch)?;
            let found = batch.iter().zip(&descriptors).filter_map(|(&cell, found)| Some((cell, found.as_ref()?)));
            blocks.extend(found.filter(|(_, found)| self.serves(namespace, found)).map(|(cell, found)| Listed {
                key: BlockKey(found.key),
                cell,
                len_bytes: found.len_bytes.into(),
                owner: found.owner,
            }));
        }
    }

    /// Whether a slot claims a chunk, or that this is unknown.
    fn may_be_claimed(&self, chunk: u64) -> bool {
        let lines = self.geometry().cell_claim_lines();
        let (line, bit) = (chunk / CHUNKS_PER_CELL_CLAIM as u64, (chunk % CHUNKS_PER_CELL_CLAIM as u64) as usize);
        let mut slots = self.claims.iter().skip(line as usize).step_by(lines.max(1) as usize);
        slots.any(|claim| claim.as_ref().is_none_or(|claim| claim.has(bit)))
    }

    fn serves(&self, namespace: Namespace, found: &Descriptor) -> bool {
        let stamp = Claimant { slot: found.owner, incarnation: found.incarnation };
        CellState::of(Some(found)) == CellState::Ready && found.namespace == namespace.0 && !self.hosts.is_void(stamp)
    }
}
