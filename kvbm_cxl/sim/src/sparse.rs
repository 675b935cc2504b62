// SPDX-License-Identifier: Apache-2.0
//! An array with one cell per line of the pool, of which only the pages that are touched exist: a world is made in microseconds.

/// Cells in a page.
const PAGE: usize = 32;

/// The array.
pub(crate) struct Sparse<T> {
    pages: Vec<Option<Box<[T; PAGE]>>>,
    empty: T,
}

impl<T: Copy> Sparse<T> {
    /// `len` cells that hold `empty`.
    pub(crate) fn new(len: usize, empty: T) -> Self {
        Sparse { pages: std::iter::repeat_with(|| None).take(len.div_ceil(PAGE)).collect(), empty }
    }

    pub(crate) fn get(&self, index: u32) -> &T {
        let index = index as usize;
        self.pages[index / PAGE].as_ref().map_or(&self.empty, |page| &page[index % PAGE])
    }

    pub(crate) fn get_mut(&mut self, index: u32) -> &mut T {
        let index = index as usize;
        let empty = self.empty;
        &mut self.pages[index / PAGE].get_or_insert_with(|| Box::new([empty; PAGE]))[index % PAGE]
    }

    /// Every cell of the pages that exist.
    pub(crate) fn touched(&mut self) -> impl Iterator<Item = &mut T> {
        self.pages.iter_mut().flatten().flat_map(|page| page.iter_mut())
    }
}
