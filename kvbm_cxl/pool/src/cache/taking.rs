// SPDX-License-Identifier: Apache-2.0
//! Cells for blocks that are to be published: free ones, else a chunk more, else by eviction.
//!
//! Whoever publishes a block has mostly just found out that it is not there, and the insert of its hint looks anyway. Only where something
//! would be evicted for it is it looked up first: nothing goes for a block that is there.

use super::publish::{Form, Reserved, Wish};
use super::{BlockKey, Few, Inner, Namespace};
use crate::background::held;
use crate::error::{Error, Result};
use crate::host::Op;
use std::sync::Arc;

/// A wish that is to have a cell: the class of the cell, and its place in the batch.
type Wanted = (usize, usize);

impl Inner {
    /// Takes a cell for each wish whose answer is [`Reserved::NoCell`]; that stays the answer where there is none.
    pub(super) fn take_cells(self: &Arc<Self>, wishes: &[Wish], form: Form, answers: &mut [Reserved], op: &Op<'_>) -> Result<()> {
        let wanted = self.wanted(wishes, form, answers)?;
        let since_ns = self.host.platform().now_ns();
        let mut taken = Few::with_capacity(wanted.len());
        for of_class in wanted.chunk_by(|one, other| one.0 == other.0) {
            self.take_of_class(wishes, of_class, answers, &mut taken)
                .map_err(|error| self.given_back(taken.iter().map(|&(cell, _)| cell), error))?;
        }
        for (cell, index) in taken {
            answers[index] = Reserved::Cell(self.begin(&wishes[index], form, cell, op, since_ns)?);
        }
        Ok(())
    }

    /// Adds cells of one class to `taken`, each with the place of its wish.
    fn take_of_class(&self, wishes: &[Wish], wanted: &[Wanted], answers: &mut [Reserved], taken: &mut Few<(u64, usize)>) -> Result<()> {
        let Some(&(class, _)) = wanted.first() else { return Ok(()) };
        let unused = self.take_unused(class, wanted.len())?;
        let (given, others) = wanted.split_at(unused.len().min(wanted.len()));
        taken.extend(unused.into_iter().zip(given.iter().map(|&(_, index)| index)));
        if !others.is_empty() {
            let absent = self.absent(wishes, others, answers)?;
            taken.extend(self.make_room(class, absent.len())?.into_iter().zip(absent.iter().map(|&(_, index)| index)));
        }
        Ok(())
    }

    /// As [`Inner::take_cells`] for one block: the cell, or the answer if there is none.
    pub(super) fn take_cell(&self, wish: &Wish, class: usize) -> Result<std::result::Result<u64, Reserved>> {
        if let Some(refusal) = self.over_quota(wish, self.geometry().cells[class].cell_bytes)? {
            return Ok(Err(refusal));
        }
        if let Some(cell) = self.take_unused(class, 1)?.pop() {
            return Ok(Ok(cell));
        }
        if self.look_up(wish.namespace, wish.key)?.is_some() {
            return Ok(Err(Reserved::Exists));
        }
        Ok(self.make_room(class, 1)?.pop().ok_or(Reserved::NoCell))
    }

    /// The wishes without an answer that may have cells, those of one class together.
    fn wanted(&self, wishes: &[Wish], form: Form, answers: &mut [Reserved]) -> Result<Few<Wanted>> {
        let mut wanted = Few::with_capacity(wishes.len());
        // What this batch is going to take of namespaces with a quota, which no share tells yet.
        let mut taking: Vec<(Namespace, u64)> = Vec::new();
        for (index, (wish, answer)) in wishes.iter().zip(answers).enumerate() {
            let (Reserved::NoCell, Some(class)) = (&*answer, self.class_of(wish, form)) else { continue };
            if self.config.quotas.contains_key(&wish.namespace) {
                let place = taking.iter().position(|(namespace, _)| *namespace == wish.namespace).unwrap_or_else(|| {
                    taking.push((wish.namespace, 0));
                    taking.len() - 1
                });
                let wanted_bytes = taking[place].1 + self.geometry().cells[class].cell_bytes;
                if let Some(refusal) = self.over_quota(wish, wanted_bytes)? {
                    *answer = refusal;
                    continue;
                }
                taking[place].1 = wanted_bytes;
            }
            wanted.push((class, index));
        }
        wanted.sort_by_key(|(class, _)| *class);
        Ok(wanted)
    }

    /// Those whose blocks are not there; the others are answered.
    fn absent(&self, wishes: &[Wish], wanted: &[Wanted], answers: &mut [Reserved]) -> Result<Few<Wanted>> {
        let mut absent = Few::new();
        for group in wanted.chunk_by(|one, other| wishes[one.1].namespace == wishes[other.1].namespace) {
            let keys: Vec<BlockKey> = group.iter().map(|&(_, index)| wishes[index].key).collect();
            let mut asked = group.iter();
            self.look_up_all(wishes[group[0].1].namespace, &keys, |found| {
                match (asked.next(), found) {
                    (Some(&(_, index)), Some(_)) => answers[index] = Reserved::Exists,
                    (asked, _) => absent.extend(asked.copied()),
                }
                true
            })?;
        }
        Ok(absent)
    }

    /// Why a block gets no cell if its namespace may have only so much, and this one makes it `wanted_bytes` of cells more. Blocks of the
    /// namespace are evicted for it if need be.
    fn over_quota(&self, wish: &Wish, wanted_bytes: u64) -> Result<Option<Reserved>> {
        let Some(&quota) = self.config.quotas.get(&wish.namespace) else { return Ok(None) };
        let excess = || (held(&self.cells).share(&wish.namespace.0).cell_bytes + wanted_bytes).saturating_sub(quota);
        let over = excess();
        if over == 0 {
            return Ok(None);
        }
        if self.look_up(wish.namespace, wish.key)?.is_some() {
            return Ok(Some(Reserved::Exists));
        }
        if wanted_bytes <= quota {
            self.evict_of(wish.namespace, over)?;
        }
        Ok((excess() > 0).then_some(Reserved::OverQuota))
    }

    /// Up to `count` cells of a class for which nothing has to go: free ones, else those of a chunk more.
    fn take_unused(&self, class: usize, count: usize) -> Result<Few<u64>> {
        let mut cells = Few::with_capacity(count);
        self.take_free(class, count, &mut cells)?;
        while cells.len() < count && self.may_claim(class) {
            match self.claim_chunk(class) {
                Ok(true) => {
                    self.take_free(class, count, &mut cells)?;
                }
                Ok(false) => {
                    self.has_exhausted(class, true);
                    break;
                }
                Err(error) => return Err(self.given_back(cells.iter().copied(), error)),
            }
        }
        Ok(cells)
    }

    /// Up to `count` cells of a class, by evicting blocks. Where that does not do, other hosts are asked for room.
    fn make_room(&self, class: usize, count: usize) -> Result<Few<u64>> {
        let mut cells = Few::with_capacity(count);
        while cells.len() < count {
            self.evict(class, count - cells.len()).map_err(|error| self.given_back(cells.iter().copied(), error))?;
            // Once more only where what was evicted cannot be used, which is so once for each cell.
            if !self.take_free(class, count, &mut cells)? {
                break;
            }
        }
        if cells.len() < count {
            self.ask_for_room(class).map_err(|error| self.given_back(cells.iter().copied(), error))?;
        }
        Ok(cells)
    }

    /// The error because of which cells that were taken are free again.
    fn given_back(&self, cells: impl IntoIterator<Item = u64>, error: Error) -> Error {
        let mut own = held(&self.cells);
        cells.into_iter().for_each(|cell| own.set_free(cell));
        error
    }

    /// Takes free cells until there are `count`. Those in memory that was marked bad are set aside: a block would be lost there, and each
    /// of its publishes fail. True when there were any. If it fails all are free again.
    fn take_free(&self, class: usize, count: usize, cells: &mut Few<u64>) -> Result<bool> {
        let mut were_bad = false;
        loop {
            let had = cells.len();
            held(&self.cells).take_free(class, count.saturating_sub(had), cells);
            let (mut at, mut any_bad) = (had, false);
            while let Some(&cell) = cells.get(at) {
                let is_bad = self.is_bad(cell).map_err(|error| self.given_back(cells.iter().copied(), error))?;
                if is_bad {
                    held(&self.cells).set_bad(cells.swap_remove(at));
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

    /// Whether a cell lies in memory that was marked bad.
    fn is_bad(&self, cell: u64) -> Result<bool> {
        let (offset, len_bytes) = self.lines().layout().cell(cell)?;
        Ok(matches!(self.lines().memory().check(offset, len_bytes), Err(Error::Poisoned { .. })))
    }
}
