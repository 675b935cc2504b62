// SPDX-License-Identifier: Apache-2.0
//! A node for each cell that is followed, found by the cell's number without hashing, and lists threaded through the nodes.
//!
//! A process owns chunks, that is runs of cells, so nodes stand in pages by cell number and neighbours link to each other by that number.

use crate::error::{Error, Result};

/// Cells of one page.
const PAGE_CELLS: usize = 256;
pub(super) const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum ListState {
    #[default]
    Absent,
    Listed,
    Offered,
    /// A candidate that was used since it was offered.
    Recalled,
}

/// The state of a cell. The order of the fields keeps it at 16 bytes plus `extra`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Node<X> {
    pub older: u32,
    pub younger: u32,
    /// Tick of the last known use, 0 for none.
    pub tick: u32,
    pub state: ListState,
    /// The policy's own flags.
    pub mark: u8,
    /// The policy's own: which of its lists.
    pub queue: u8,
    /// What one policy needs alone.
    pub extra: X,
}

impl<X: Default> Default for Node<X> {
    fn default() -> Self {
        Node { older: NONE, younger: NONE, tick: 0, state: ListState::Absent, mark: 0, queue: 0, extra: X::default() }
    }
}

const _: () = assert!(size_of::<Node<()>>() == 16);

#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    pub oldest: u32,
    pub youngest: u32,
    pub len: usize,
}

impl Default for List {
    fn default() -> Self {
        List { oldest: NONE, youngest: NONE, len: 0 }
    }
}

pub(super) struct Cells<X> {
    pages: Vec<Option<Box<[Node<X>; PAGE_CELLS]>>>,
    limit: u64,
    len: usize,
}

impl<X: Copy + Default> Cells<X> {
    pub fn new(limit: u64) -> Self {
        Cells { pages: Vec::new(), limit: limit.min(u64::from(NONE)), len: 0 }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// The number of a cell, where it is followed.
    pub fn find(&self, cell: u64) -> Option<u32> {
        u32::try_from(cell).ok().filter(|&cell| self.get(cell).is_some())
    }

    pub fn get(&self, cell: u32) -> Option<&Node<X>> {
        let page = self.pages.get(cell as usize / PAGE_CELLS)?.as_ref()?;
        page.get(cell as usize % PAGE_CELLS).filter(|node| node.state != ListState::Absent)
    }

    pub fn get_mut(&mut self, cell: u32) -> Option<&mut Node<X>> {
        let page = self.pages.get_mut(cell as usize / PAGE_CELLS)?.as_mut()?;
        page.get_mut(cell as usize % PAGE_CELLS).filter(|node| node.state != ListState::Absent)
    }

    /// Follows a cell, which is in no list yet.
    pub fn follow(&mut self, cell: u64, tick: u32, extra: X) -> Result<u32> {
        let (number, limit) = (cell as u32, self.limit);
        let outside = || Error::Invalid(format!("eviction policy: cell {cell} is not below the {limit} cells of the pool"));
        if cell >= limit {
            return Err(outside());
        }
        let index = number as usize / PAGE_CELLS;
        if self.pages.len() <= index {
            self.pages.resize_with(index + 1, || None);
        }
        let page = self.pages.get_mut(index).ok_or_else(outside)?;
        let page = page.get_or_insert_with(|| Box::new([Node::default(); PAGE_CELLS]));
        let node = page.get_mut(number as usize % PAGE_CELLS).ok_or_else(outside)?;
        self.len += usize::from(node.state == ListState::Absent);
        *node = Node { tick, extra, state: ListState::Listed, ..Node::default() };
        Ok(number)
    }

    /// Ends it. The cell must be in no list.
    pub fn forget(&mut self, cell: u32) {
        if let Some(node) = self.get_mut(cell) {
            *node = Node::default();
            self.len -= 1;
        }
    }

    fn set_younger(&mut self, list: &mut List, of: u32, to: u32) {
        match self.get_mut(of) {
            Some(node) => node.younger = to,
            None => list.oldest = to,
        }
    }

    fn set_older(&mut self, list: &mut List, of: u32, to: u32) {
        match self.get_mut(of) {
            Some(node) => node.older = to,
            None => list.youngest = to,
        }
    }

    /// Puts a cell between two neighbours of a list; [`NONE`] is the neighbour at either end.
    fn link(&mut self, list: &mut List, cell: u32, older: u32, younger: u32) {
        if let Some(node) = self.get_mut(cell) {
            (node.older, node.younger) = (older, younger);
            self.set_younger(list, older, cell);
            self.set_older(list, younger, cell);
            list.len += 1;
        }
    }

    pub fn push_young(&mut self, list: &mut List, cell: u32) {
        self.link(list, cell, list.youngest, NONE);
    }

    pub fn push_old(&mut self, list: &mut List, cell: u32) {
        self.link(list, cell, NONE, list.oldest);
    }

    pub fn unlink(&mut self, list: &mut List, cell: u32) {
        let Some(node) = self.get_mut(cell) else { return };
        let (older, younger) = (node.older, node.younger);
        (node.older, node.younger) = (NONE, NONE);
        self.set_younger(list, older, younger);
        self.set_older(list, younger, older);
        list.len -= 1;
    }

    pub fn pop_old(&mut self, list: &mut List) -> Option<u32> {
        let cell = list.oldest;
        self.get(cell)?;
        self.unlink(list, cell);
        Some(cell)
    }

    /// Appends all of `other` at the young end, in its order, and leaves it empty.
    pub fn append(&mut self, list: &mut List, other: &mut List) {
        if other.len == 0 {
            return;
        }
        let (last, first) = (list.youngest, other.oldest);
        self.set_younger(list, last, first);
        if let Some(node) = self.get_mut(first) {
            node.older = last;
        }
        list.youngest = other.youngest;
        list.len += other.len;
        *other = List::default();
    }
}
