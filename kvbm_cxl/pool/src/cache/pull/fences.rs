// SPDX-License-Identifier: Apache-2.0
//! Which incarnations are fenced, read once for a batch: the void rule (CACHE.md D2) costs a few lines per batch, not per block.

use crate::cache::Few;
use crate::error::Result;
use crate::fault::mutant;
use crate::host::{Host, Op};
use crate::limits::{MAX_SEATS, MAX_SLOTS};
use crate::line::{FETCHED_TOGETHER, if_whole};
use crate::media::{Descriptor, FenceLine, MediaLine, SLOTS_PER_FENCE};
use arrayvec::ArrayVec;

/// Fence lines that a seat can have, each with the words of as many neighbouring slots.
const GROUPS: usize = MAX_SLOTS.div_ceil(SLOTS_PER_FENCE);

#[derive(Clone, Copy)]
pub(in crate::cache) struct Fences {
    up_to: [[u32; SLOTS_PER_FENCE]; GROUPS],
    known: u64,
}

impl Fences {
    /// Whether an incarnation is fenced; `None` where that is unknown.
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

struct Rows {
    groups: u64,
    indexes: ArrayVec<u64, MAX_ROWS>,
}

/// Fence lines that there can be.
const MAX_ROWS: usize = MAX_SEATS * GROUPS;

/// Reads the fences of the pool as `host` sees it, alone or together with other lines.
#[derive(Clone)]
pub(in crate::cache) struct FenceView {
    host: Host,
}

impl FenceView {
    pub fn of(host: &Host) -> Self {
        FenceView { host: host.clone() }
    }

    fn rows_of(&self, slots: impl Iterator<Item = u16>) -> Rows {
        let geometry = self.host.geometry();
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
        let group = (index % self.host.geometry().fence_lines()) as usize;
        match line.copied().map_or_else(|| self.look_again_at_row(index), |line| Ok(Some(line)))? {
            Some(FenceLine { fenced, .. }) => {
                fences.up_to[group].iter_mut().zip(fenced).for_each(|(most, fenced)| *most = fenced.max(*most));
            }
            None => fences.known &= !(1 << group),
        }
        Ok(())
    }

    pub(in crate::cache) fn fences(&self, slots: impl Iterator<Item = u16>) -> Result<Fences> {
        self.fetch_with_fences::<FenceLine>(&[], slots, |_| ())
    }

    /// Descriptors, `None` for one that does not verify, with the fence words of `slots`.
    pub fn descriptors_and_fences(&self, cells: &[u64], slots: impl Iterator<Item = u16>) -> Result<(Few<Option<Descriptor>>, Fences)> {
        let mut found = Few::with_capacity(cells.len());
        let fences = self.fetch_with_fences(cells, slots, |line| found.push(line.copied()))?;
        Ok((found, fences))
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
            let (found, fenced) = self.host.lines().fetch_both::<T, FenceLine>(line_part, row_part, &mut lines)?;
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

    /// Fetches lines of one kind together with this host's own fence words. Fails if the incarnation of `op` is fenced.
    pub(in crate::cache) fn fetch_unfenced<T: MediaLine>(&self, indexes: &[u64], op: &Op<'_>, each: impl FnMut(Option<&T>)) -> Result<()> {
        let own = self.host.slot();
        match self.fetch_with_fences(indexes, std::iter::once(own), each)?.of(own, op.incarnation()) {
            Some(false) => Ok(()),
            _ => self.host.check_fences(op),
        }
    }

    /// As [`FenceView::look_again`], at a fence line: that of a seat that no machine has is empty.
    fn look_again_at_row(&self, index: u64) -> Result<Option<FenceLine>> {
        if_whole(self.host.inner.row(index))
    }

    /// One more look at a line that did not verify: it may have been in the middle of being written.
    fn look_again<T: MediaLine>(&self, index: u64) -> Result<Option<T>> {
        if_whole(self.host.lines().fetch(index))
    }
}

/// The void rule (CACHE.md D2), given whether the owner is fenced: unknown is void.
pub fn is_void(fenced: Option<bool>) -> bool {
    fenced != Some(false) && !mutant!("cache.no_void_rule")
}
