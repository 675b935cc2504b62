// SPDX-License-Identifier: Apache-2.0
//! Cells for blocks that are to be published: free ones, else a chunk more, else by eviction.
//!
//! A publisher of a block has mostly just found out that it is not there, and the insert of its hint looks anyway. Only where something
//! would be evicted for it is it looked up first: nothing goes for a block that is there.

use crate::cache::cells::quota::Promised;
use crate::cache::cells::store::CellStore;
use crate::cache::publish::{PublishRequest, Reserved};
use crate::cache::{BlockKey, Few, Inner};
use crate::error::{Error, Result};
use crate::host::Op;
use std::sync::Arc;

/// Times that room is made for a request, at most, of which other threads take some.
const LOST: usize = 64;

/// A request that is to have a cell: the class of the cell, and its place in the batch.
type Wanted = (usize, usize);

/// Cells in the hands of this operation. Those that nothing was made of when it ends are free again.
struct TakenCells<'a> {
    inner: &'a Inner,
    cells: Few<u64>,
}

impl<'a> TakenCells<'a> {
    fn none(inner: &'a Inner, capacity: usize) -> Self {
        TakenCells { inner, cells: Few::with_capacity(capacity) }
    }
}

impl Drop for TakenCells<'_> {
    fn drop(&mut self) {
        if !self.cells.is_empty() {
            let mut own = self.inner.store.cells();
            self.cells.iter().for_each(|&cell| own.set_free(cell));
        }
    }
}

impl CellStore {
    /// Adds cells of a class for which nothing has to go until there are `count`: free ones, else those of a chunk more.
    fn take_unused(&self, class: usize, count: usize, cells: &mut Few<u64>) -> Result<()> {
        self.take_free(class, count, cells)?;
        while cells.len() < count && self.may_claim(class) {
            if !self.claim_chunk(class)? {
                self.has_exhausted(class, true);
                break;
            }
            self.take_free(class, count, cells)?;
        }
        Ok(())
    }

    /// Adds free cells until there are `count`. Those in memory that was marked bad are set aside: a block would be lost there, and each of
    /// its publishes fail. True when there were any.
    fn take_free(&self, class: usize, count: usize, cells: &mut Few<u64>) -> Result<bool> {
        let mut were_bad = false;
        loop {
            let had = cells.len();
            self.cells().take_free(class, count.saturating_sub(had), cells);
            let (mut at, mut any_bad) = (had, false);
            while let Some(&cell) = cells.get(at) {
                if self.is_bad(cell)? {
                    self.cells().set_bad(cells.swap_remove(at));
                    any_bad = true;
                } else {
                    at += 1;
                }
            }
            were_bad |= any_bad;
            if !any_bad {
                return Ok(were_bad);
            }
        }
    }

    fn is_bad(&self, cell: u64) -> Result<bool> {
        let (offset, len_bytes) = self.host.lines().layout().cell(cell)?;
        Ok(matches!(self.host.lines().memory().check(offset, len_bytes), Err(Error::Poisoned { .. })))
    }
}

impl Inner {
    /// Takes a cell for each request whose answer is [`Reserved::NoCell`]; that stays the answer where there is none.
    pub(in crate::cache) fn take_cells(self: &Arc<Self>, requests: &[PublishRequest], answers: &mut [Reserved], op: &Op<'_>) -> Result<()> {
        let mut promised = Promised::none(self, requests);
        let wanted = self.wanted_cells(requests, answers, &mut promised)?;
        let since_ns = self.host.platform().now_ns();
        let mut taken = TakenCells::none(self, wanted.len());
        // For each cell the place of its request.
        let mut places = Few::with_capacity(wanted.len());
        for of_class in wanted.chunk_by(|one, other| one.0 == other.0) {
            self.take_of_class(requests, of_class, answers, &mut taken.cells, &mut places)?;
        }
        for (cell, index) in std::mem::take(&mut taken.cells).into_iter().zip(places) {
            answers[index] = Reserved::Cell(self.begin(&requests[index], (cell, promised.hand_over(index)), op, since_ns)?);
        }
        Ok(())
    }

    /// Adds cells of one class to `cells`, and the places of their requests to `places`.
    fn take_of_class(
        &self,
        requests: &[PublishRequest],
        wanted: &[Wanted],
        answers: &mut [Reserved],
        cells: &mut Few<u64>,
        places: &mut Few<usize>,
    ) -> Result<()> {
        let Some(&(class, _)) = wanted.first() else { return Ok(()) };
        let had = cells.len();
        self.store.take_unused(class, had + wanted.len(), cells)?;
        let (given, others) = wanted.split_at((cells.len() - had).min(wanted.len()));
        places.extend(given.iter().map(|&(_, index)| index));
        if !others.is_empty() {
            let (absent, had) = (self.find_absent(requests, others, answers)?, cells.len());
            self.make_room(class, had + absent.len(), cells)?;
            places.extend(absent.iter().take(cells.len() - had).map(|&(_, index)| index));
        }
        Ok(())
    }

    fn wanted_cells(&self, requests: &[PublishRequest], answers: &mut [Reserved], promised: &mut Promised<'_>) -> Result<Few<Wanted>> {
        let mut wanted = Few::with_capacity(requests.len());
        for (index, (request, answer)) in requests.iter().zip(answers).enumerate() {
            let (Reserved::NoCell, Some(class)) = (&*answer, self.class_holding(request.len_bytes)) else { continue };
            if let Some(refusal) = self.promise(promised, index, self.geometry().cells[class].cell_bytes)? {
                *answer = refusal;
                continue;
            }
            wanted.push((class, index));
        }
        wanted.sort_by_key(|(class, _)| *class);
        Ok(wanted)
    }

    fn find_absent(&self, requests: &[PublishRequest], wanted: &[Wanted], answers: &mut [Reserved]) -> Result<Few<Wanted>> {
        let mut absent = Few::new();
        for group in wanted.chunk_by(|one, other| requests[one.1].namespace == requests[other.1].namespace) {
            let keys: Vec<BlockKey> = group.iter().map(|&(_, index)| requests[index].key).collect();
            let mut asked = group.iter();
            self.index.look_up_all(requests[group[0].1].namespace, &keys, |found| {
                match (asked.next(), found) {
                    (Some(&(_, index)), Some(_)) => answers[index] = Reserved::Exists,
                    (asked, _) => absent.extend(asked.copied()),
                }
                true
            })?;
        }
        Ok(absent)
    }

    /// Adds cells of a class until there are `count`, by evicting blocks. Where there are none that could go, other hosts are asked for
    /// room.
    fn make_room(&self, class: usize, count: usize, cells: &mut Few<u64>) -> Result<()> {
        let mut lost = 0;
        while cells.len() < count && lost < LOST {
            let freed = self.evict(class, count - cells.len())?;
            let had = cells.len();
            let were_bad = self.store.take_free(class, count, cells)?;
            if freed == 0 && !were_bad && cells.len() == had {
                return self.ask_for_room(class);
            }
            // The evicted cell cannot be used, which happens once for each cell; or another thread was faster.
            lost += usize::from(!were_bad);
        }
        Ok(())
    }
}
