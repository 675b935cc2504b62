// SPDX-License-Identifier: Apache-2.0
//! Verified pull: pin, fetch, copy, fetch again (CACHE.md section 5). Whatever is in doubt is a miss.

pub(super) mod copy;
pub(super) mod fences;
pub(super) mod pinned;
pub(super) mod pins;

use super::index::Index;
use super::{BlockKey, Few, Inner, Namespace, Pinned};
use crate::copy::ReadList;
use crate::error::Result;
use crate::fault::{mutant, point};
use crate::media::Descriptor;
use crate::metrics::MissReason;
use fences::is_void;
use std::sync::Arc;

/// Tries of a pull whose block changed under it: its next owner may have stamped it again, which is no reason for a miss.
const TRIES: usize = 3;

/// What became of a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pulled {
    /// The destination holds the block's bytes.
    Hit {
        /// Its length.
        len_bytes: u64,
    },
    /// The destination may hold anything.
    Miss(MissReason),
}

impl Inner {
    /// Pins the block of a key; an error of the caller's or the host's is an error, everything else a miss.
    pub(super) fn pin_block(self: &Arc<Self>, namespace: Namespace, key: BlockKey) -> Result<std::result::Result<Pinned, MissReason>> {
        // A block is mostly still where this process met it last: the look after the pin shows that, and saves the one before it.
        if let Some(cell) = self.index.locations.get(&self.index.home(namespace, key))
            && let Ok(pinned) = self.confirm_cell(namespace, key, cell, self.host.slot())?
        {
            return Ok(Ok(pinned));
        }
        let mut miss = MissReason::Absent;
        for _ in 0..TRIES {
            let Some(found) = self.index.look_up(namespace, key)? else { return Ok(Err(miss)) };
            match self.confirm_cell(namespace, key, found.cell, found.owner)? {
                Ok(pinned) => return Ok(Ok(pinned)),
                Err(found) => miss = found,
            }
        }
        Ok(Err(miss))
    }

    fn confirm_cell(
        self: &Arc<Self>,
        namespace: Namespace,
        key: BlockKey,
        cell: u64,
        owner: u16,
    ) -> Result<std::result::Result<Pinned, MissReason>> {
        Ok(self.confirm(namespace, &[key], &[cell], std::iter::once(owner))?.pop().unwrap_or(Err(MissReason::Changed)))
    }

    /// Pins the leading blocks of a chain that are cached.
    pub(super) fn pin_chain(self: &Arc<Self>, namespace: Namespace, keys: &[BlockKey]) -> Result<Vec<Pinned>> {
        let found = self.index.look_up_chain(namespace, keys)?;
        let cells: Vec<u64> = found.iter().map(|found| found.cell).collect();
        let mut pinned = Vec::with_capacity(cells.len());
        for block in self.confirm(namespace, &keys[..cells.len()], &cells, found.iter().map(|found| found.owner))? {
            match block {
                Ok(block) => pinned.push(block),
                Err(_) => match self.pin_block(namespace, keys[pinned.len()])? {
                    Ok(block) => pinned.push(block),
                    Err(_) => break,
                },
            }
        }
        Ok(pinned)
    }

    /// Steps 0 to 2: pins `cells`, then looks whether each still holds the block of its key, by an owner that is not fenced. `owners` are
    /// those that the lookup met.
    pub(super) fn confirm(
        self: &Arc<Self>,
        namespace: Namespace,
        keys: &[BlockKey],
        cells: &[u64],
        owners: impl Iterator<Item = u16>,
    ) -> Result<Few<std::result::Result<Pinned, MissReason>>> {
        if cells.is_empty() {
            return Ok(Few::new());
        }
        // The host cannot join again before the pins are confirmed, so that they are of the incarnation that runs when the caller gets
        // them.
        let op = self.host.enter()?;
        let early = if mutant!("cache.fetched_before_pins") {
            Some(self.copier.fences.descriptors_and_fences(cells, std::iter::empty())?.0)
        } else {
            None
        };
        point!("cache.pin");
        self.pins.pin(cells)?;
        let guard = Unpin { inner: self, cells };
        let (late, mut fences) = self.copier.fences.descriptors_and_fences(cells, owners)?;
        let found = early.unwrap_or(late);
        let blocks = |index: usize| found[index].filter(|found| Index::is_block(found, namespace, keys[index]));
        let owners = || (0..cells.len()).filter_map(blocks).map(|found| found.owner);
        if !fences.know(owners()) {
            // Another session's by now, or a line of a seat that was just being written.
            fences = self.copier.fences.fences(owners())?;
        }
        point!("cache.pin_confirmed");
        std::mem::forget(guard);
        let mut answers = Few::with_capacity(cells.len());
        for (index, &cell) in cells.iter().enumerate() {
            let found = blocks(index);
            let void = found.is_some_and(|found| is_void(fences.of(found.owner, found.incarnation)));
            answers.push(self.to_pinned(cell, found, void, op.incarnation()));
        }
        let lost: Vec<u64> = answers.iter().zip(cells).filter(|(answer, _)| answer.is_err()).map(|(_, &cell)| cell).collect();
        if !lost.is_empty() && !mutant!("pins.misses_stay") {
            self.pins.unpin(&lost);
        }
        self.metrics.pins_total.add((cells.len() - lost.len()) as u64);
        let tick = self.store.clock_now();
        let mut own = self.store.cells();
        // From the end of a chain to its start, so that the start is the younger: without it the rest is of no use.
        cells.iter().rev().for_each(|&cell| own.on_use(cell, tick));
        drop(own);
        Ok(answers)
    }

    /// The block in a cell that `incarnation` of this host has pinned, if it is `found` and not void.
    fn to_pinned(
        self: &Arc<Self>,
        cell: u64,
        found: Option<Descriptor>,
        void: bool,
        incarnation: u32,
    ) -> std::result::Result<Pinned, MissReason> {
        let Some(descriptor) = found else { return Err(MissReason::Changed) };
        if void && !mutant!("cache.no_void_check_before_copy") {
            return Err(MissReason::FencedOwner);
        }
        match self.lines().layout().cell(cell) {
            Ok((offset, cell_bytes)) if u64::from(descriptor.len_bytes) <= cell_bytes => {
                Ok(Pinned { inner: self.clone(), cell, offset, descriptor, incarnation, held: true })
            }
            _ => Err(MissReason::Changed),
        }
    }

    /// Pulls one block into `list`, which takes its bytes from `offset` on, as told by `fill`.
    pub(super) fn pull_block<'m>(
        self: &Arc<Self>,
        namespace: Namespace,
        key: BlockKey,
        mut destination: impl FnMut(&Pinned) -> Result<ReadList<'m>>,
    ) -> Result<Pulled> {
        let mut miss = MissReason::Absent;
        for _ in 0..TRIES {
            let block = match self.pin_block(namespace, key)? {
                Ok(block) => block,
                Err(MissReason::Absent) => return Ok(Pulled::Miss(miss)),
                Err(found) => return Ok(Pulled::Miss(found)),
            };
            let mut list = destination(&block)?;
            match block.copy(&mut list)? {
                None => return Ok(Pulled::Hit { len_bytes: block.len_bytes() }),
                Some(MissReason::Changed) => miss = MissReason::Changed,
                Some(other) => return Ok(Pulled::Miss(other)),
            }
        }
        Ok(Pulled::Miss(miss))
    }
}

struct Unpin<'a> {
    inner: &'a Inner,
    cells: &'a [u64],
}

impl Drop for Unpin<'_> {
    fn drop(&mut self) {
        self.inner.pins.unpin(self.cells);
    }
}
