// SPDX-License-Identifier: Apache-2.0
//! Verified pull: pin, fetch, copy, fetch again (CACHE.md section 5). Whatever is in doubt is a miss.

use super::standing::Fences;
use super::{BlockKey, Few, Inner, Namespace};
use crate::background::held;
use crate::copy::{Checksum, LocalPlace, LocalRange, Outcome, ReadList};
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::media::Descriptor;
use crate::metrics::MissReason;
use std::ptr::NonNull;
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

/// A block that stays: its cell is neither freed nor written until this is dropped, as long as this host is not fenced.
///
/// Bytes are right only after [`Pinned::is_unchanged`] said so behind their use; the methods that copy do that themselves.
pub struct Pinned {
    inner: Arc<Inner>,
    cell: u64,
    offset: u64,
    descriptor: Descriptor,
    /// Incarnation of this host under which the pin was published.
    incarnation: u32,
    /// Whether dropping it gives the pin back.
    held: bool,
}

impl Inner {
    /// Pins the block of a key; an error of the caller's or the host's is an error, everything else a miss.
    pub(super) fn pin_block(self: &Arc<Self>, namespace: Namespace, key: BlockKey) -> Result<std::result::Result<Pinned, MissReason>> {
        // Where this process met it last it mostly still is: the look behind the pin tells, and saves the one before it.
        if let Some(cell) = self.guesses.get(&self.home(namespace, key))
            && let Some(Ok(pinned)) = self.confirm(namespace, &[key], &[cell], std::iter::once(self.host.slot()))?.pop()
        {
            return Ok(Ok(pinned));
        }
        let mut miss = MissReason::Absent;
        for _ in 0..TRIES {
            let Some(found) = self.look_up(namespace, key)? else { return Ok(Err(miss)) };
            let mut pinned = self.confirm(namespace, &[key], &[found.cell], std::iter::once(found.owner))?;
            match pinned.pop() {
                Some(Ok(pinned)) => return Ok(Ok(pinned)),
                Some(Err(found)) => miss = found,
                None => {}
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
            if mutant!("cache.fetched_before_pin") { Some(self.descriptors_and_fences(cells, std::iter::empty())?.0) } else { None };
        point!("cache.pin");
        self.pin(cells)?;
        let guard = Unpin { inner: self, cells };
        let (late, mut fences) = self.descriptors_and_fences(cells, owners)?;
        let found = early.unwrap_or(late);
        let blocks = |index: usize| found[index].filter(|found| Self::is_block(found, namespace, keys[index]));
        let owners = || (0..cells.len()).filter_map(blocks).map(|found| found.owner);
        if !fences.know(owners()) {
            // Somebody else's by now, or a line of a seat that was just being written.
            fences = self.fences(owners())?;
        }
        point!("cache.pin_confirmed");
        std::mem::forget(guard);
        let mut answers = Few::with_capacity(cells.len());
        for (index, &cell) in cells.iter().enumerate() {
            let answer = match blocks(index) {
                None => Err(MissReason::Changed),
                Some(found) if is_void(&fences, &found) && !mutant!("cache.no_void_check_before_copy") => Err(MissReason::FencedOwner),
                Some(found) => self.lines().layout().cell(cell).map(|place| (found, place)).map_err(|_| MissReason::Changed),
            };
            answers.push(match answer {
                Ok((descriptor, (offset, cell_bytes))) if descriptor.stored_bytes() <= cell_bytes => {
                    Ok(Pinned { inner: self.clone(), cell, offset, descriptor, incarnation: op.incarnation(), held: true })
                }
                Ok(_) => Err(MissReason::Changed),
                Err(miss) => Err(miss),
            });
        }
        let lost: Vec<u64> = answers.iter().zip(cells).filter(|(answer, _)| answer.is_err()).map(|(_, &cell)| cell).collect();
        if !lost.is_empty() {
            self.unpin(&lost);
        }
        self.metrics.pins_total.add((cells.len() - lost.len()) as u64);
        let tick = self.clock_now();
        let mut own = held(&self.cells);
        // From the end of a chain to its start, so that the start is the younger: without it the rest is of no use.
        cells.iter().rev().for_each(|&cell| own.touched(cell, tick));
        drop(own);
        Ok(answers)
    }

    fn descriptors_and_fences(&self, cells: &[u64], slots: impl Iterator<Item = u16>) -> Result<(Few<Option<Descriptor>>, Fences)> {
        let mut found = Few::with_capacity(cells.len());
        let fences = self.fetch_with_fences(cells, slots, |line| found.push(line.copied()))?;
        Ok((found, fences))
    }

    /// Steps 4 and 5 for several blocks: each descriptor as it was, each owner not fenced.
    pub(super) fn unchanged(&self, blocks: &[&Pinned]) -> Result<Few<Option<MissReason>>> {
        let cells: Few<u64> = blocks.iter().map(|block| block.cell).collect();
        point!("cache.copied");
        let (found, fences) = self.descriptors_and_fences(&cells, blocks.iter().map(|block| block.descriptor.owner))?;
        point!("cache.fetched_again");
        let verdict = |(block, found): (&&Pinned, &Option<Descriptor>)| {
            if found.is_none_or(|found| !is_same(&found, &block.descriptor)) && !mutant!("cache.no_refetch") {
                Some(MissReason::Changed)
            } else if is_void(&fences, &block.descriptor) && !mutant!("cache.no_void_check_after_copy") {
                Some(MissReason::FencedDuring)
            } else {
                None
            }
        };
        Ok(blocks.iter().zip(&found).map(verdict).collect())
    }

    /// Steps 3 to 6 for several blocks: copies each as its list says, and looks whether it was itself all the while; `None`, or why it is a
    /// miss. A checksum is looked at where the list takes the whole block.
    pub(super) fn copy_each(&self, blocks: &[&Pinned], lists: &mut [ReadList<'_>]) -> Result<Few<Option<MissReason>>> {
        for (block, list) in blocks.iter().zip(lists.iter()) {
            if let Some((offset, len_bytes)) = list.outside(block.offset, block.len_bytes()) {
                return Err(Error::OutOfRange { what: "part of a pinned block", offset, len_bytes, limit_bytes: block.len_bytes() });
            }
        }
        let lent = blocks.iter().filter(|block| block.is_lent()).count();
        if lent == 0 {
            return self.copy_own(blocks, lists);
        }
        if lent == blocks.len() {
            return self.copy_lent(blocks, lists);
        }
        let mut answers = Few::from_elem(None, blocks.len());
        for lent in [true, false] {
            let places: Vec<usize> = (0..blocks.len()).filter(|&place| blocks[place].is_lent() == lent).collect();
            let some: Vec<&Pinned> = places.iter().map(|&place| blocks[place]).collect();
            let mut taken: Vec<ReadList<'_>> = places.iter().map(|&place| std::mem::take(&mut lists[place])).collect();
            let found = if lent { self.copy_lent(&some, &mut taken) } else { self.copy_own(&some, &mut taken) }?;
            places.into_iter().zip(found).for_each(|(place, answer)| answers[place] = answer);
        }
        Ok(answers)
    }

    /// Of blocks that lie in their cells.
    fn copy_own(&self, blocks: &[&Pinned], lists: &mut [ReadList<'_>]) -> Result<Few<Option<MissReason>>> {
        let is_checked = |(block, list): (&&Pinned, &ReadList<'_>)| {
            let whole = list.len_bytes() == block.len_bytes() && list.is_one_stretch();
            whole && block.descriptor.kind == Descriptor::XXH3 && self.config.checksums
        };
        let checked: Few<bool> = blocks.iter().zip(lists.iter()).map(is_checked).collect();
        point!("cache.copying");
        let outcomes = self.pull_lists(lists, &checked);
        let verdicts = self.unchanged(blocks)?;
        let answers = blocks.iter().zip(checked).zip(outcomes).zip(verdicts);
        let answer = |(((block, checked), outcome), verdict): (((&&Pinned, bool), Outcome), Option<MissReason>)| match outcome {
            Err(Error::Poisoned { .. }) => Ok(Some(MissReason::Device)),
            Err(error) => Err(error),
            Ok(found) => Ok(verdict.or((checked && found != Some(block.descriptor.checksum)).then_some(MissReason::Checksum))),
        };
        answers.map(answer).collect()
    }

    /// Copies lists, those with a checksum apart from those without: a call of the engine is of one kind.
    pub(super) fn pull_lists(&self, lists: &mut [ReadList<'_>], checked: &[bool]) -> Few<Outcome> {
        let memory = &**self.lines().memory();
        let kind_of = |checked: bool| if checked { Checksum::Xxh3 } else { Checksum::Off };
        if let ([list], [checked]) = (&mut *lists, checked) {
            return Few::from([self.engine.pull(memory, list, kind_of(*checked))]);
        }
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
                Some(MissReason::TakenBack) => {
                    let cell = block.cell();
                    drop(block);
                    self.forget(cell, namespace, key)?;
                    return Ok(Pulled::Miss(MissReason::TakenBack));
                }
                Some(other) => return Ok(Pulled::Miss(other)),
            }
        }
        Ok(Pulled::Miss(miss))
    }
}

/// The void rule (CACHE.md D2); what cannot be told is void.
fn is_void(fences: &Fences, found: &Descriptor) -> bool {
    fences.of(found.owner, found.incarnation) != Some(false) && !mutant!("cache.no_void_rule")
}

/// Every byte alike: key, length and the stamp. An owner that looks whether somebody has the block pinned says EVICTING meanwhile, and
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

impl Pinned {
    /// Gives several pins back, as dropping them one by one does, but publishes each line of pins once.
    pub fn release_all(blocks: impl IntoIterator<Item = Pinned>) {
        let mut blocks: Vec<Pinned> = blocks.into_iter().collect();
        for of_one in blocks.chunk_by_mut(|one, other| Arc::ptr_eq(&one.inner, &other.inner)) {
            let cells: Vec<u64> = of_one.iter_mut().map(Pinned::let_go).collect();
            of_one[0].inner.unpin(&cells);
        }
    }

    /// Leaves it to the caller to give the pin of the cell back.
    fn let_go(&mut self) -> u64 {
        self.held = false;
        self.cell
    }

    pub(super) fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    /// Length of the block in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.descriptor.len_bytes.into()
    }

    /// Its key.
    pub fn key(&self) -> BlockKey {
        BlockKey(self.descriptor.key)
    }

    /// Its namespace.
    pub fn namespace(&self) -> Namespace {
        Namespace(self.descriptor.namespace)
    }

    /// The cell.
    pub fn cell(&self) -> u64 {
        self.cell
    }

    /// Whether the block lies where an engine lent it ([`super::lent`]). It can be copied and not be used in place: its lender may take it
    /// back at any time, and then a copy is a miss. The pin keeps only the reference.
    pub fn is_lent(&self) -> bool {
        self.descriptor.kind == Descriptor::REFERENCE
    }

    /// Pool offset of the first byte; of a lent block an offset for lists that [`Pinned::copy`] gets, and for nothing else.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Incarnation of this host that the pin is of: once it is fenced the block may go.
    pub fn incarnation(&self) -> u32 {
        self.incarnation
    }

    /// Slot of the host that owns the cell.
    pub fn owner(&self) -> u16 {
        self.descriptor.owner
    }

    /// Where this process maps the block, for use in place; `None` where there is no mapping, and of a lent block. Drop what this host's
    /// caches may hold of it first ([`Pinned::invalidate`]), and believe the result only if [`Pinned::is_unchanged`] afterwards.
    pub fn address(&self) -> Option<NonNull<u8>> {
        if self.is_lent() {
            return None;
        }
        self.inner.lines().memory().address(self.offset, self.len_bytes())
    }

    /// Drops what this host's caches hold of the block, so that what is read next comes from the memory.
    pub fn invalidate(&self) -> Result<()> {
        let memory = self.inner.lines().memory();
        memory.flush_range(self.offset, self.descriptor.stored_bytes())?;
        memory.fence_all();
        Ok(())
    }

    /// Whether the block is what it was when it was pinned. To be asked after every use in place: only a yes makes what was read right. A
    /// lent block cannot be used in place, so that the answer is no.
    pub fn is_unchanged(&self) -> Result<bool> {
        if self.is_lent() {
            return Ok(false);
        }
        self.inner.lines().memory().fence_loads();
        Ok(self.inner.unchanged(&[self])?[0].is_none())
    }

    /// Copies the block into `destination`, which may be longer than the block; `None`, or why it is a miss.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the destination is too short; the errors of the host and of the memory, except damage of the block itself.
    pub fn copy_to(&self, destination: &mut [u8]) -> Result<Option<MissReason>> {
        let len_bytes = destination.len();
        match destination.get_mut(..self.len_bytes() as usize) {
            Some(destination) => self.copy(&mut ReadList::scatter(self.offset, [destination])),
            None => Err(self.too_short(len_bytes)),
        }
    }

    /// A list that scatters the block over pieces by address, in order; to be given to [`Pinned::copy`].
    ///
    /// # Safety
    /// Until the last use of the list each range may be written, nobody else uses it, and it is not memory of the pool, but for a
    /// [region](super::lent) of this process.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the pieces are not as long as the block.
    pub unsafe fn scatter_raw(&self, pieces: impl IntoIterator<Item = LocalRange>) -> Result<ReadList<'static>> {
        // SAFETY: as this function demands.
        unsafe { self.scatter_in(LocalPlace::Host, pieces) }
    }

    /// As [`Pinned::scatter_raw`], over pieces that lie in `local`.
    ///
    /// # Safety
    /// As there, and a stream or event that `local` names is there.
    ///
    /// # Errors
    /// As there.
    pub unsafe fn scatter_in(&self, local: LocalPlace, pieces: impl IntoIterator<Item = LocalRange>) -> Result<ReadList<'static>> {
        // SAFETY: as this function demands.
        let (mut list, mut at) = (unsafe { ReadList::lying_on(local) }, self.offset);
        for piece in pieces {
            // SAFETY: as this function demands.
            unsafe { list.push_raw(at, piece) };
            at = at.saturating_add(piece.len_bytes as u64);
        }
        if list.len_bytes() != self.len_bytes() { Err(self.too_short(list.len_bytes() as usize)) } else { Ok(list) }
    }

    fn too_short(&self, len_bytes: usize) -> Error {
        Error::Invalid(format!("the destination has {len_bytes} bytes, the block {}: give room for all of it", self.len_bytes()))
    }

    /// Copies parts of the block as `list` says, whose offsets lie inside it; `None`, or why it is a miss. The checksum is looked at when
    /// the list takes the whole block.
    ///
    /// # Errors
    /// As [`Pinned::copy_to`], and [`Error::OutOfRange`] for parts outside of the block.
    pub fn copy(&self, list: &mut ReadList<'_>) -> Result<Option<MissReason>> {
        let verdicts = self.inner.copy_each(&[self], std::slice::from_mut(list))?;
        Ok(verdicts.into_iter().next().flatten())
    }

    /// Lets `use_bytes` read the block where it lies, and gives its result if the block did not change meanwhile. Without a mapping it
    /// reads a copy.
    ///
    /// Until the check the bytes may be anything, if this host is fenced meanwhile: `use_bytes` must survive any bytes, and nothing of
    /// what it does besides its result may count.
    pub fn read<T>(&self, use_bytes: impl FnOnce(&[u8]) -> T) -> Result<std::result::Result<T, MissReason>> {
        let Some(address) = self.address() else {
            let mut copy = vec![0; self.len_bytes() as usize];
            return Ok(match self.copy_to(&mut copy)? {
                None => Ok(use_bytes(&copy)),
                Some(miss) => Err(miss),
            });
        };
        self.invalidate()?;
        // SAFETY: the range lies inside the mapping, which lives as long as `self.inner`; the pin keeps every owner from writing to it, and
        // a write by a host that disregards this is what the documentation warns of.
        let bytes = unsafe { std::slice::from_raw_parts(address.as_ptr(), self.len_bytes() as usize) };
        let result = use_bytes(bytes);
        Ok(if self.is_unchanged()? { Ok(result) } else { Err(MissReason::Changed) })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.held {
            self.inner.unpin(&[self.cell]);
        }
    }
}
