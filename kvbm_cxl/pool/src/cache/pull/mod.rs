// SPDX-License-Identifier: Apache-2.0
//! Verified pull: pin, fetch, copy, fetch again (CACHE.md section 5). Whatever is in doubt is a miss.

pub(super) mod fences;
pub(super) mod pinned;
pub(super) mod pins;

use super::{BlockKey, Few, Inner, Namespace, Pinned};
use crate::copy::{Checksum, Outcome, ReadList};
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::media::Descriptor;
use crate::metrics::MissReason;
use fences::Fences;
use std::sync::Arc;

/// Tries of a pull whose block changed under it: it may have been stamped anew by its next owner, which is no reason for a miss.
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
        // Where this process met it last it mostly still is: the look behind the pin tells, and saves the one before it.
        if let Some(cell) = self.index.locations.get(&self.home(namespace, key))
            && let Ok(pinned) = self.confirm_one(namespace, key, cell, self.host.slot())?
        {
            return Ok(Ok(pinned));
        }
        let mut miss = MissReason::Absent;
        for _ in 0..TRIES {
            let Some(found) = self.look_up(namespace, key)? else { return Ok(Err(miss)) };
            match self.confirm_one(namespace, key, found.cell, found.owner)? {
                Ok(pinned) => return Ok(Ok(pinned)),
                Err(found) => miss = found,
            }
        }
        Ok(Err(miss))
    }

    /// Pins the leading blocks of a chain that are cached.
    pub(super) fn pin_chain(self: &Arc<Self>, namespace: Namespace, keys: &[BlockKey]) -> Result<Vec<Pinned>> {
        let found = self.look_up_chain(namespace, keys)?;
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
        let early =
            if mutant!("cache.fetched_before_pins") { Some(self.descriptors_and_fences(cells, std::iter::empty())?.0) } else { None };
        before_pin();
        self.pin(cells)?;
        let guard = Unpin { inner: self, cells };
        let (late, mut fences) = self.descriptors_and_fences(cells, owners)?;
        let found = early.unwrap_or(late);
        let blocks = |index: usize| found[index].filter(|found| Self::is_block(found, namespace, keys[index]));
        let owners = || (0..cells.len()).filter_map(blocks).map(|found| found.owner);
        if !fences.know(owners()) {
            // Another session's by now, or a line of a seat that was just being written.
            fences = self.fences(owners())?;
        }
        after_confirm();
        std::mem::forget(guard);
        let mut answers = Few::with_capacity(cells.len());
        for (index, &cell) in cells.iter().enumerate() {
            let found = blocks(index);
            let void = found.is_some_and(|found| is_void(fences.of(found.owner, found.incarnation)));
            answers.push(self.pinned(cell, found, void, op.incarnation()));
        }
        let lost: Vec<u64> = answers.iter().zip(cells).filter(|(answer, _)| answer.is_err()).map(|(_, &cell)| cell).collect();
        if !lost.is_empty() && !mutant!("pins.misses_stay") {
            self.unpin(&lost);
        }
        self.metrics.pins_total.add((cells.len() - lost.len()) as u64);
        let tick = self.store.clock_now();
        let mut own = self.store.cells();
        // From the end of a chain to its start, so that the start is the younger: without it the rest is of no use.
        cells.iter().rev().for_each(|&cell| own.touched(cell, tick));
        drop(own);
        Ok(answers)
    }

    /// As [`Inner::confirm`] for one cell: the same steps without lists. A pull of 64 KiB as a list of one takes 1.12 times as long, one of
    /// 4 KiB 1.22 times (`make perf-pool`: pull_64k_list_over_one). [`Inner::is_as_pinned`] and [`Inner::copy_one`] are there for the same.
    fn confirm_one(
        self: &Arc<Self>,
        namespace: Namespace,
        key: BlockKey,
        cell: u64,
        owner: u16,
    ) -> Result<std::result::Result<Pinned, MissReason>> {
        let op = self.host.enter()?;
        let early = if mutant!("cache.fetched_before_pin") { self.descriptor_and_fence(cell, owner)?.0 } else { None };
        before_pin();
        self.pin(&[cell])?;
        let guard = Unpin { inner: self, cells: &[cell] };
        let (late, up_to) = self.descriptor_and_fence(cell, owner)?;
        let found = early.or(late).filter(|found| Self::is_block(found, namespace, key));
        after_confirm();
        let void = found.is_some_and(|found| is_void(up_to.map(|up_to| up_to >= found.incarnation)));
        let answer = self.pinned(cell, found, void, op.incarnation());
        if answer.is_err() {
            return Ok(answer);
        }
        std::mem::forget(guard);
        self.metrics.pins_total.inc();
        self.store.cells().touched(cell, self.store.clock_now());
        Ok(answer)
    }

    /// The block in a cell that `incarnation` of this host has pinned, if it is `found` and not void.
    fn pinned(
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

    /// A descriptor and the incarnation up to which its owner, who is expected to be `owner`, is fenced; `None` for what cannot be told.
    fn descriptor_and_fence(&self, cell: u64, owner: u16) -> Result<(Option<Descriptor>, Option<u32>)> {
        let mut found: Option<Descriptor> = None;
        let up_to = self.fetch_with_fence(&[cell], owner, |line| {
            found = line.copied();
            found.map_or(owner, |found| found.owner)
        })?;
        Ok((found, up_to))
    }

    fn descriptors_and_fences(&self, cells: &[u64], slots: impl Iterator<Item = u16>) -> Result<(Few<Option<Descriptor>>, Fences)> {
        let mut found = Few::with_capacity(cells.len());
        let fences = self.fetch_with_fences(cells, slots, |line| found.push(line.copied()))?;
        Ok((found, fences))
    }

    /// Steps 4 and 5 for several blocks: each descriptor as it was, each owner not fenced.
    pub(super) fn unchanged(&self, blocks: &[&Pinned]) -> Result<Few<Option<MissReason>>> {
        let cells: Few<u64> = blocks.iter().map(|block| block.cell).collect();
        after_copy();
        let (found, fences) = self.descriptors_and_fences(&cells, blocks.iter().map(|block| block.descriptor.owner))?;
        after_second_look();
        let void = |block: &Pinned| is_void(fences.of(block.descriptor.owner, block.descriptor.incarnation));
        Ok(blocks.iter().zip(found).map(|(block, found)| verdict(block, found, void(block))).collect())
    }

    /// As [`Inner::unchanged`] for one block.
    pub(super) fn is_as_pinned(&self, block: &Pinned) -> Result<Option<MissReason>> {
        after_copy();
        let (found, up_to) = self.descriptor_and_fence(block.cell, block.descriptor.owner)?;
        after_second_look();
        Ok(verdict(block, found, is_void(up_to.map(|up_to| up_to >= block.descriptor.incarnation))))
    }

    /// Steps 3 to 6 for one block: copies it as its list says, and looks whether it was itself all the while; `None`, or why it is a miss.
    /// A checksum is looked at where the list takes the whole block.
    pub(super) fn copy_one(&self, block: &Pinned, list: &mut ReadList<'_>) -> Result<Option<MissReason>> {
        is_inside(block, list)?;
        let checked = self.is_checked(block, list);
        before_copy();
        let outcome = self.engine.pull(&**self.lines().memory(), list, kind_of(checked));
        let verdict = self.is_as_pinned(block)?;
        answer(block, checked, outcome, verdict)
    }

    /// As [`Inner::copy_one`], for several.
    pub(super) fn copy_each(&self, blocks: &[&Pinned], lists: &mut [ReadList<'_>]) -> Result<Few<Option<MissReason>>> {
        blocks.iter().zip(lists.iter()).try_for_each(|(block, list)| is_inside(block, list))?;
        let checked: Few<bool> = blocks.iter().zip(lists.iter()).map(|(block, list)| self.is_checked(block, list)).collect();
        before_copy();
        let outcomes = self.pull_lists(lists, &checked);
        let verdicts = self.unchanged(blocks)?;
        let answers = blocks.iter().zip(checked).zip(outcomes).zip(verdicts);
        answers.map(|(((block, checked), outcome), verdict)| answer(block, checked, outcome, verdict)).collect()
    }

    /// Whether the checksum of a block can be looked at while it is copied as `list` says.
    pub(super) fn is_checked(&self, block: &Pinned, list: &ReadList<'_>) -> bool {
        let whole = list.len_bytes() == block.len_bytes() && list.is_one_stretch();
        whole && block.descriptor.kind == Descriptor::XXH3 && self.config.checksums
    }

    /// Copies lists, those with a checksum apart from those without: a call of the engine is of one kind.
    pub(super) fn pull_lists(&self, lists: &mut [ReadList<'_>], checked: &[bool]) -> Few<Outcome> {
        let memory = &**self.lines().memory();
        let count = checked.iter().filter(|checked| **checked).count();
        if count == 0 || count == checked.len() {
            return self.engine.pull_each(memory, lists, kind_of(count > 0)).into();
        }
        let mut outcomes: Few<Outcome> = checked.iter().map(|_| Ok(None)).collect();
        for kind in [true, false] {
            let taken = lists.iter_mut().zip(checked).filter(|(_, checked)| **checked == kind).map(|(list, _)| std::mem::take(list));
            let mut taken: Vec<ReadList<'_>> = taken.collect();
            let places = checked.iter().enumerate().filter(|(_, checked)| **checked == kind).map(|(place, _)| place);
            let pulled = self.engine.pull_each(memory, &mut taken, kind_of(kind));
            places.zip(pulled).for_each(|(place, outcome)| outcomes[place] = outcome);
        }
        outcomes
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

/// Where the cell is known, and not pinned.
fn before_pin() {
    point!("cache.pin");
}

/// Where the descriptor is fetched behind the pin.
fn after_confirm() {
    point!("cache.pin_confirmed");
}

/// Where the block is confirmed, and none of it copied.
fn before_copy() {
    point!("cache.copying");
}

/// Where all of it is copied, and may be something else.
fn after_copy() {
    point!("cache.copied");
}

/// Where the descriptor is fetched behind the copy.
fn after_second_look() {
    point!("cache.fetched_again");
}

/// The void rule (CACHE.md D2), given whether the owner is fenced: what cannot be told is void.
fn is_void(fenced: Option<bool>) -> bool {
    fenced != Some(false) && !mutant!("cache.no_void_rule")
}

/// Refuses a list with parts outside of the block.
fn is_inside(block: &Pinned, list: &ReadList<'_>) -> Result<()> {
    match list.outside(block.offset, block.len_bytes()) {
        None => Ok(()),
        Some((offset, len_bytes)) => {
            Err(Error::OutOfRange { what: "part of a pinned block", offset, len_bytes, limit_bytes: block.len_bytes() })
        }
    }
}

fn kind_of(checked: bool) -> Checksum {
    if checked { Checksum::Xxh3 } else { Checksum::Off }
}

/// What the second look at a block says: its descriptor as it was, its owner not fenced.
fn verdict(block: &Pinned, found: Option<Descriptor>, void: bool) -> Option<MissReason> {
    if found.is_none_or(|found| !is_same(&found, &block.descriptor)) && !mutant!("cache.no_refetch") {
        Some(MissReason::Changed)
    } else if void && !mutant!("cache.no_void_check_after_copy") {
        Some(MissReason::FencedDuring)
    } else {
        None
    }
}

/// What becomes of a copy of which the second look says `verdict`.
pub(super) fn answer(block: &Pinned, checked: bool, outcome: Outcome, verdict: Option<MissReason>) -> Result<Option<MissReason>> {
    match outcome {
        Err(Error::Poisoned { .. }) => Ok(Some(MissReason::Device)),
        Err(error) => Err(error),
        Ok(found) => Ok(verdict.or((checked && found != Some(block.descriptor.checksum)).then_some(MissReason::Checksum))),
    }
}

/// Every byte alike: key, length and the stamp. An owner that looks for pins of the block says EVICTING meanwhile, and
/// touches the payload only under another stamp.
fn is_same(found: &Descriptor, before: &Descriptor) -> bool {
    let found = match found.state {
        Descriptor::EVICTING => Descriptor { state: before.state, crc: before.crc, ..*found },
        _ => *found,
    };
    if mutant!("cache.stamp_not_compared") {
        return (found.state, found.key, found.namespace) == (before.state, before.key, before.namespace);
    }
    found == *before
}

/// Takes pins back when the work behind them fails.
struct Unpin<'a> {
    inner: &'a Inner,
    cells: &'a [u64],
}

impl Drop for Unpin<'_> {
    fn drop(&mut self) {
        self.inner.unpin(self.cells);
    }
}
