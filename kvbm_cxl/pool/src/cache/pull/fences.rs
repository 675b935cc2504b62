// SPDX-License-Identifier: Apache-2.0
//! Which incarnations are fenced, read once for a batch: the void rule (CACHE.md D2) costs a few lines per batch, not per block.

use crate::cache::Inner;
use crate::error::Result;
use crate::host::Op;
use crate::limits::{MAX_SEATS, MAX_SLOTS};
use crate::line::{FETCHED_TOGETHER, if_whole};
use crate::media::{FenceLine, MediaLine, SLOTS_PER_FENCE};
use arrayvec::ArrayVec;

/// Fence lines that a seat can have, each with the words of as many neighbouring slots.
const GROUPS: usize = MAX_SLOTS.div_ceil(SLOTS_PER_FENCE);

/// Fence words as fetched together.
#[derive(Clone, Copy)]
pub(in crate::cache) struct Fences {
    up_to: [[u32; SLOTS_PER_FENCE]; GROUPS],
    /// One bit for each group of slots whose lines were fetched, and verified.
    known: u64,
}

impl Fences {
    /// Whether an incarnation is fenced; `None` where that cannot be told.
    pub fn of(&self, slot: u16, incarnation: u32) -> Option<bool> {
        let slot = usize::from(slot);
        let (group, place) = (slot / SLOTS_PER_FENCE, slot % SLOTS_PER_FENCE);
        (slot < MAX_SLOTS && self.known >> group & 1 == 1).then(|| self.up_to[group][place] >= incarnation)
    }

    /// Whether the words of all these slots verified.
    pub fn know(&self, mut slots: impl Iterator<Item = u16>) -> bool {
        slots.all(|slot| self.of(slot, 0).is_some())
    }
}

/// Fence lines that hold some slots, of all seats.
struct Rows {
    /// One bit for each group of slots.
    groups: u64,
    /// Group by group, its line of each seat.
    indexes: ArrayVec<u64, MAX_ROWS>,
}

/// Fence lines that there can be.
const MAX_ROWS: usize = MAX_SEATS * GROUPS;

impl Inner {
    fn rows_of(&self, slots: impl Iterator<Item = u16>) -> Rows {
        let geometry = self.geometry();
        let mut groups = 0u64;
        for slot in slots.filter(|&slot| u32::from(slot) < geometry.slots) {
            groups |= 1 << (usize::from(slot) / SLOTS_PER_FENCE);
        }
        let mut indexes = ArrayVec::new();
        for group in (0..geometry.fence_lines()).filter(|group| groups >> group & 1 == 1) {
            indexes.extend((0..geometry.all_seats()).map(|seat| seat * geometry.fence_lines() + group));
        }
        Rows { groups, indexes }
    }

    /// Adds what a fence line tells. Where one cannot be read, its slots are not known.
    fn add_row(&self, fences: &mut Fences, index: u64, line: Option<&FenceLine>) -> Result<()> {
        let group = (index % self.geometry().fence_lines()) as usize;
        match line.copied().map_or_else(|| self.look_again_at_row(index), |line| Ok(Some(line)))? {
            Some(FenceLine { fenced, .. }) => {
                fences.up_to[group].iter_mut().zip(fenced).for_each(|(most, fenced)| *most = fenced.max(*most));
            }
            None => fences.known &= !(1 << group),
        }
        Ok(())
    }

    /// Fetches the fence words of `slots` from all seats; misses overlap.
    pub(in crate::cache) fn fences(&self, slots: impl Iterator<Item = u16>) -> Result<Fences> {
        self.fetch_with_fences::<FenceLine>(&[], slots, |_| ())
    }

    /// Fetches lines of one kind, and the fence words of `slots`; `each` gets the lines in order, `None` for one that does not verify.
    /// Neither needs the other to be older (CACHE.md 12.5), so that they are fetched together.
    pub(in crate::cache) fn fetch_with_fences<T: MediaLine>(
        &self,
        indexes: &[u64],
        slots: impl Iterator<Item = u16>,
        mut each: impl FnMut(Option<&T>),
    ) -> Result<Fences> {
        let rows = self.rows_of(slots);
        let mut fences = Fences { up_to: [[0; SLOTS_PER_FENCE]; GROUPS], known: rows.groups };
        let mut lines = ArrayVec::new();
        let (mut lines_left, mut rows_left) = (indexes, &rows.indexes[..]);
        while !lines_left.is_empty() || !rows_left.is_empty() {
            let (row_part, rows_after) = rows_left.split_at(rows_left.len().min(FETCHED_TOGETHER));
            let (line_part, lines_after) = lines_left.split_at(lines_left.len().min(FETCHED_TOGETHER - row_part.len()));
            let (found, fenced) = self.lines().fetch_both::<T, FenceLine>(line_part, row_part, &mut lines)?;
            for (&index, line) in line_part.iter().zip(found) {
                match line {
                    Some(line) => each(Some(line)),
                    None => each(self.look_again(index)?.as_ref()),
                }
            }
            row_part.iter().zip(fenced).try_for_each(|(&index, line)| self.add_row(&mut fences, index, line))?;
            (lines_left, rows_left) = (lines_after, rows_after);
        }
        Ok(fences)
    }

    /// Fetches lines of one kind, few enough for one fetch with the fence words, and the incarnation up to which one slot is fenced; `None`
    /// where that cannot be told. `each` gets the lines in order and says which slot is meant, the last answer counts; where that one does
    /// not share its fence lines with `expected` they are fetched behind.
    pub(in crate::cache) fn fetch_with_fence<T: MediaLine>(
        &self,
        indexes: &[u64],
        expected: u16,
        mut each: impl FnMut(Option<&T>) -> u16,
    ) -> Result<Option<u32>> {
        let mut lines = ArrayVec::new();
        let rows = self.fence_lines_of(expected);
        let (first_rows, more_rows) = rows.split_at(rows.len().min(FETCHED_TOGETHER - indexes.len()));
        let (found, fences) = self.lines().fetch_both::<T, FenceLine>(indexes, first_rows, &mut lines)?;
        let mut slot = expected;
        for (&index, line) in indexes.iter().zip(found) {
            slot = match line {
                Some(line) => each(Some(line)),
                None => each(self.look_again(index)?.as_ref()),
            };
        }
        if usize::from(slot) / SLOTS_PER_FENCE != usize::from(expected) / SLOTS_PER_FENCE {
            return self.most_fenced(slot, &self.fence_lines_of(slot));
        }
        match (self.most_in(slot, first_rows, fences)?, more_rows) {
            (most, []) | (most @ None, _) => Ok(most),
            (most, more_rows) => Ok(self.most_fenced(slot, more_rows)?.and_then(|more| most.max(Some(more)))),
        }
    }

    /// Fetches lines of one kind together with this host's own fence words. Fails if the incarnation of `op` is fenced.
    pub(in crate::cache) fn fetch_unfenced<T: MediaLine>(
        &self,
        indexes: &[u64],
        op: &Op<'_>,
        mut each: impl FnMut(Option<&T>),
    ) -> Result<()> {
        let own = self.host.slot();
        let up_to = self.fetch_with_fence(indexes, own, |line| {
            each(line);
            own
        });
        match up_to? {
            Some(up_to) if up_to < op.incarnation() => Ok(()),
            _ => self.host.check_fences(op),
        }
    }

    /// The fence lines with the word of a slot, one of each seat; none of a slot that cannot be.
    fn fence_lines_of(&self, slot: u16) -> ArrayVec<u64, MAX_SEATS> {
        let geometry = self.geometry();
        let seats = if u32::from(slot) < geometry.slots { geometry.all_seats() } else { 0 };
        (0..seats).map(|seat| seat * geometry.fence_lines() + u64::from(slot) / SLOTS_PER_FENCE as u64).collect()
    }

    /// The incarnation up to which a slot is fenced by its lines `rows`, fetched now; `None` where that cannot be told.
    fn most_fenced(&self, slot: u16, rows: &[u64]) -> Result<Option<u32>> {
        let mut most = None;
        for part in rows.chunks(FETCHED_TOGETHER) {
            let mut lines = ArrayVec::new();
            let (_, fences) = self.lines().fetch_both::<FenceLine, FenceLine>(&[], part, &mut lines)?;
            let Some(of_part) = self.most_in(slot, part, fences)? else { return Ok(None) };
            most = most.max(Some(of_part));
        }
        Ok(most)
    }

    /// The same of what was fetched of `rows`.
    fn most_in<'a>(&self, slot: u16, rows: &[u64], fetched: impl Iterator<Item = Option<&'a FenceLine>>) -> Result<Option<u32>> {
        let place = usize::from(slot) % SLOTS_PER_FENCE;
        let mut most = None;
        for (&index, line) in rows.iter().zip(fetched) {
            let word = match line {
                Some(line) => line.fenced[place],
                None => match self.look_again_at_row(index)? {
                    Some(line) => line.fenced[place],
                    None => return Ok(None),
                },
            };
            most = most.max(Some(word));
        }
        Ok(most)
    }

    /// As [`Inner::look_again`], at a fence line: that of a seat that no machine has is empty.
    fn look_again_at_row(&self, index: u64) -> Result<Option<FenceLine>> {
        if_whole(self.host.inner.row(index))
    }

    /// One more look at a line that did not verify: it may have been in the middle of being written.
    fn look_again<T: MediaLine>(&self, index: u64) -> Result<Option<T>> {
        if_whole(self.lines().fetch(index))
    }
}
