// SPDX-License-Identifier: Apache-2.0
//! What a checker of the simulator sees of a cache between two steps. Looking changes nothing and takes no step.

use super::cells::OwnedCellState;
use super::{BlockKey, Cache, Inner, Namespace};
use crate::error::Result;
use crate::limits::HINT_WINDOW;
use crate::line::Lines;
use crate::media::{Descriptor, HintLine};
use std::sync::Weak;

/// What a process takes one of its cells for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// In the free list.
    Free,
    /// In the hands of one operation.
    Busy,
    /// Holds the block of this descriptor.
    Ready(Descriptor),
    /// Held back.
    Quarantined,
}

/// The cells of one process.
#[derive(Clone, Debug)]
pub struct Owned {
    /// Slot of its host.
    pub slot: u16,
    /// Incarnation that its knowledge of the cells is of.
    pub incarnation: u32,
    /// Every cell and what it is.
    pub cells: Vec<(u64, Content)>,
    /// Blocks that the process has pinned.
    pub pinned: usize,
}

/// A view of a [`Cache`] that does not keep it open.
pub struct Look(Weak<Inner>);

impl Cache {
    /// A view of this cache for a checker.
    pub fn look(&self) -> Look {
        Look(std::sync::Arc::downgrade(&self.inner))
    }
}

impl Look {
    /// The cells as the process knows them now; `None` once the cache is closed.
    pub fn owned(&self) -> Option<Owned> {
        let inner = self.0.upgrade()?;
        let own = inner.store.cells();
        let content = |cell| match own.state(cell) {
            Some(OwnedCellState::Free) => Content::Free,
            Some(OwnedCellState::Ready) => Content::Ready(own.ready(cell).unwrap_or_default()),
            Some(OwnedCellState::Quarantined) => Content::Quarantined,
            _ => Content::Busy,
        };
        let cells = own.chunks().flat_map(|chunk| inner.store.cells_of(chunk)).map(|cell| (cell, content(cell))).collect();
        let (slot, incarnation) = (inner.host.slot(), inner.store.incarnation());
        Some(Owned { slot, incarnation, cells, pinned: inner.pins.cells() })
    }

    /// The cells that a probe for the key comes by, by the hints in `lines`.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn hinted(&self, lines: &Lines, namespace: Namespace, key: BlockKey) -> Result<Vec<u64>> {
        self.probe(|index| lines.fetch(index), namespace, key)
    }

    /// The first hint line that a probe for the key comes by; `None` once the cache is closed.
    pub fn window(&self, namespace: Namespace, key: BlockKey) -> Option<u64> {
        self.0.upgrade().map(|inner| inner.index.home(namespace, key).first_line)
    }

    /// As [`Look::hinted`], by whatever `fetch` says is in a hint line.
    ///
    /// # Errors
    /// What `fetch` returns.
    pub fn probe(&self, fetch: impl Fn(u64) -> Result<HintLine>, namespace: Namespace, key: BlockKey) -> Result<Vec<u64>> {
        let mut cells = Vec::new();
        let Some(inner) = self.0.upgrade() else { return Ok(cells) };
        let home = inner.index.home(namespace, key);
        for step in 0..HINT_WINDOW {
            if inner.index.matches(&home, &fetch(inner.index.hint_line(&home, step))?, &mut cells) {
                break;
            }
        }
        Ok(cells)
    }
}
