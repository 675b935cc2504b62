// SPDX-License-Identifier: Apache-2.0
//! Pins and recency: one nibble per cell in lines that only this host writes (CACHE.md section 2).
//!
//! The published line is composed from what all processes of the host have noted ([`crate::cache::cells::local`]); only the first pin of
//! a cell and the last are published, always as the whole line. A line counts in its slot under the incarnation in it, so after a re-join
//! the next pin of a line publishes it again even where the nibble does not change.

use crate::background::held;
use crate::cache::Few;
use crate::cache::cells::local::{LocalCells, PinRow, attachment, note, pin_of_note};
use crate::cache::hashing::Spread;
use crate::error::{Error, Result};
use crate::fault::{mutant, point};
use crate::host::Host;
use crate::limits::MAX_PROCESSES;
use crate::media::{CELLS_PER_PIN, PinLine};
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard};

#[derive(Default)]
struct PinTable {
    entries: HashMap<u64, (usize, u16), Spread>,
    free: Vec<usize>,
    used: usize,
}

impl PinTable {
    fn cells(&self) -> usize {
        self.entries.len()
    }

    fn count(&self, cell: u64) -> u16 {
        self.entries.get(&cell).map_or(0, |entry| entry.1)
    }

    fn pinned_cells(&self) -> Vec<u64> {
        self.entries.keys().copied().collect()
    }

    /// Notes `change` pins more of a cell; returns the entry and the word to write there, or `None` when there is no room for another cell.
    fn add(&mut self, cell: u64, change: i32, limit: usize) -> Option<(usize, u64)> {
        let (entry, count) = match self.entries.get(&cell) {
            Some(&found) => found,
            None => (self.free.pop().or_else(|| (self.used < limit).then_some(self.used))?, 0),
        };
        self.used = self.used.max(entry + 1);
        let count = u16::try_from(i32::from(count) + change).ok()?;
        if count == 0 {
            self.entries.remove(&cell);
            self.free.push(entry);
        } else {
            self.entries.insert(cell, (entry, count));
        }
        Some((entry, note(cell, count)))
    }
}

/// How far this process has looked through the host's pin lines on the way from one tick to another.
#[derive(Clone, Copy, Default)]
pub(in crate::cache) struct Clearing {
    pub(in crate::cache) way: (u64, u64),
    pub(in crate::cache) row: usize,
}

pub(in crate::cache) struct Pins {
    pub(in crate::cache) host: Host,
    pub(in crate::cache) local: LocalCells,
    table: Mutex<PinTable>,
    pub(in crate::cache) clearing: Mutex<Clearing>,
}

impl Pins {
    /// None yet.
    pub fn new(host: &Host, local: &LocalCells) -> Self {
        Pins { host: host.clone(), local: local.clone(), table: Mutex::default(), clearing: Mutex::default() }
    }

    pub fn cells(&self) -> usize {
        self.table().cells()
    }

    fn table(&self) -> MutexGuard<'_, PinTable> {
        held(&self.table)
    }

    /// Cells sorted by pin line: each line is locked and published once.
    fn by_row(cells: &[u64]) -> Few<u64> {
        let mut sorted = Few::from_slice(cells);
        sorted.sort_unstable();
        sorted
    }

    /// Pins `cells` (a cell may be named more than once). When it returns, every pin is in the memory, before anything fetched later.
    ///
    /// # Errors
    /// [`Error::Full`] when this process has too many pins, [`Error::Fenced`]; then none of the cells has got a pin.
    pub(in crate::cache) fn pin(&self, cells: &[u64]) -> Result<()> {
        let sorted = Self::by_row(cells);
        let mut done = 0;
        let rows = sorted.chunk_by(|a, b| a / CELLS_PER_PIN as u64 == b / CELLS_PER_PIN as u64);
        for group in rows {
            if let Err(error) = self.pin_row(group) {
                if !mutant!("pins.earlier_rows_stay") {
                    self.unpin(&sorted[..done]);
                }
                return Err(error);
            }
            done += group.len();
        }
        Ok(())
    }

    fn row(&self, cell: u64) -> Result<(&PinRow, u64)> {
        let number = cell / CELLS_PER_PIN as u64;
        let limit_bytes = self.host.geometry().cell_count();
        let beyond = || Error::OutOfRange { what: "cell", offset: cell, len_bytes: 1, limit_bytes };
        if cell >= limit_bytes { Err(beyond()) } else { Ok((self.local.rows().get(number as usize).ok_or_else(beyond)?, number)) }
    }

    /// Runs `work` with the row's mutex; counts that a dead process left half changed are recomputed before.
    pub(in crate::cache) fn with_row<T>(&self, cell: u64, work: impl FnOnce(&PinRow, u64) -> Result<T>) -> Result<T> {
        let (row, number) = self.row(cell)?;
        let repair = || {
            if !mutant!("cache.row_of_the_dead_is_kept") {
                self.recount(row, number)
            }
        };
        self.host.inner.with_mutex_or_repair(&row.mutex, repair, || work(row, number))
    }

    fn recount(&self, row: &PinRow, number: u64) {
        let first = number * CELLS_PER_PIN as u64;
        row.counts.iter().for_each(|count| count.store(0, Ordering::Relaxed));
        for index in 0..MAX_PROCESSES {
            for entry in self.local.used_entries(index) {
                if let Some((cell, count)) = pin_of_note(entry.load(Ordering::Acquire))
                    && (first..first + CELLS_PER_PIN as u64).contains(&cell)
                {
                    let slot = &row.counts[(cell - first) as usize];
                    let count = if mutant!("cache.recount_one_a_process") { 1 } else { count };
                    slot.store(slot.load(Ordering::Relaxed).saturating_add(count), Ordering::Relaxed);
                }
            }
        }
        for place in 0..CELLS_PER_PIN {
            let is_pinned = row.counts[place].load(Ordering::Relaxed) > 0 && !mutant!("cache.recount_unpins");
            let pinned = if is_pinned { PinLine::PINNED } else { 0 };
            row.set_nibble(place, row.nibble(place) & PinLine::TICK | pinned);
        }
        // Whatever was published may be something else: the next change publishes the line.
        if !mutant!("cache.recount_is_published") {
            row.published.store(0, Ordering::Relaxed);
        }
    }

    /// Publishes a row under `incarnation`. The caller holds the row's mutex and an operation of that incarnation.
    pub(in crate::cache) fn publish_row(&self, row: &PinRow, number: u64, incarnation: u32) -> Result<()> {
        let mut line = PinLine { incarnation, ..PinLine::default() };
        for (word, nibbles) in line.nibbles.iter_mut().zip(&row.nibbles) {
            *word = nibbles.load(Ordering::Relaxed);
        }
        self.host.lines().publish(u64::from(self.host.slot()) * self.host.geometry().pin_lines() + number, line)?;
        row.published.store(attachment(self.host.slot(), incarnation), Ordering::Relaxed);
        Ok(())
    }

    /// Writes `change` pins of a cell into this process's notes; false when there is no room.
    fn write_note(&self, cell: u64, change: i32) -> bool {
        let index = self.host.process_index();
        let entries = self.local.entries(index);
        let mut table = self.table();
        let Some((entry, word)) = table.add(cell, change, entries.len()) else { return false };
        self.local.raise_used(index, table.used);
        entries[entry].store(word, Ordering::Release);
        true
    }

    fn pin_row(&self, cells: &[u64]) -> Result<()> {
        let Some(&first) = cells.first() else { return Ok(()) };
        let op = self.host.enter()?;
        let tick = self.local.tick();
        self.with_row(first, |row, number| {
            let published = row.published.load(Ordering::Relaxed);
            let mut changed = published != attachment(self.host.slot(), op.incarnation()) && !mutant!("cache.pins_stay_published");
            for (done, &cell) in cells.iter().enumerate() {
                let place = (cell % CELLS_PER_PIN as u64) as usize;
                let count = row.counts[place].load(Ordering::Relaxed);
                let next = count.checked_add(1).filter(|_| self.write_note(cell, 1));
                let Some(next) = next else {
                    self.drop_counts(row, &cells[..done]);
                    let advice = "unpin blocks, or pull with more processes";
                    return Err(Error::Full { what: "the pins of this process", limit: self.local.entries(0).len() as u64, advice });
                };
                let next = if mutant!("cache.pin_count_saturates") { next.min(15) } else { next };
                row.counts[place].store(next, Ordering::Relaxed);
                changed |= count == 0 && !mutant!("cache.first_pin_unpublished");
                row.set_nibble(place, PinLine::PINNED | tick);
            }
            point!("cache.pin_counted");
            if changed && let Err(error) = self.publish_row(row, number, op.incarnation()) {
                if !mutant!("pins.unpublished_row_stays") {
                    self.drop_counts(row, cells);
                }
                return Err(error);
            }
            Ok(())
        })?;
        point!("cache.pinned");
        Ok(())
    }

    /// Takes one pin of each cell out of the counts; true when the line changed.
    fn drop_counts(&self, row: &PinRow, cells: &[u64]) -> bool {
        cells.iter().filter(|&&cell| self.drop_count(row, cell)).count() > 0
    }

    /// Takes one pin of a cell out of the counts; true when it was the last one of this host.
    fn drop_count(&self, row: &PinRow, cell: u64) -> bool {
        if !self.write_note(cell, -1) {
            return false;
        }
        let place = (cell % CELLS_PER_PIN as u64) as usize;
        let count = row.counts[place].load(Ordering::Relaxed).saturating_sub(1);
        row.counts[place].store(count, Ordering::Relaxed);
        let last = count == 0 || mutant!("cache.pin_not_counted");
        if last {
            row.set_nibble(place, row.nibble(place) & PinLine::TICK);
        }
        last
    }

    /// Gives pins of this process back. What cannot be published now is published with the next change of its line.
    pub(in crate::cache) fn unpin(&self, cells: &[u64]) {
        let sorted = Self::by_row(cells);
        for group in sorted.chunk_by(|a, b| a / CELLS_PER_PIN as u64 == b / CELLS_PER_PIN as u64) {
            let op = self.host.enter();
            let result = self.with_row(group[0], |row, number| {
                let changed = self.drop_counts(row, group);
                point!("cache.unpin_counted");
                match &op {
                    Ok(op) if changed => self.publish_row(row, number, op.incarnation()),
                    // Fenced: the line is void, and the first pin under the next incarnation publishes it again.
                    _ => Ok(()),
                }
            });
            // A pin too many only keeps a block in place, and the notes of this process go when it does.
            drop(result);
        }
    }

    /// Takes the pins of processes of this host that are gone out of the counts; returns how many cells those had.
    pub(in crate::cache) fn reap_pins(&self) -> Result<u64> {
        let mut reaped = 0;
        for index in (0..MAX_PROCESSES).filter(|&index| index != self.host.process_index()) {
            let tag = self.local.notes_tag(index);
            if tag == 0 || (self.host.inner.is_tag_alive(tag) && !mutant!("cache.reaps_pins_of_the_living")) {
                continue;
            }
            reaped += self.clear_notes(index, tag)?;
            self.publish_rows_of_the_dead()?;
            self.local.drop_notes_tag(index, tag);
        }
        Ok(reaped)
    }

    /// Processes of this host that have the cache open.
    pub(in crate::cache) fn live_processes(&self) -> u64 {
        let tags = (0..MAX_PROCESSES).map(|index| self.local.notes_tag(index));
        tags.filter(|&tag| tag != 0 && self.host.inner.is_tag_alive(tag)).count() as u64
    }

    fn publish_rows_of_the_dead(&self) -> Result<()> {
        for (number, row) in self.local.rows().iter().enumerate().filter(|(_, row)| row.mutex.is_locked()) {
            let op = self.host.enter()?;
            let number = number as u64;
            self.with_row(number * CELLS_PER_PIN as u64, |_, _| self.publish_row(row, number, op.incarnation()))?;
        }
        Ok(())
    }

    /// Clears the notes of the process `tag` that had notes `index` and is gone, line by line, until another process has them.
    fn clear_notes(&self, index: usize, tag: u32) -> Result<u64> {
        let mut cleared = 0;
        for entry in self.local.used_entries(index) {
            let word = entry.load(Ordering::Acquire);
            let Some((cell, _)) = pin_of_note(word) else { continue };
            let op = self.host.enter()?;
            if cell >= self.host.geometry().cell_count() {
                entry.store(0, Ordering::Release);
                continue;
            }
            self.with_row(cell, |row, number| {
                // The writer of this very note has the row's mutex as well, and has put its tag there before.
                if self.local.notes_tag(index) == tag {
                    let _ = entry.compare_exchange(word, 0, Ordering::AcqRel, Ordering::Relaxed);
                }
                // The counts are recomputed: it does not matter who else does the same.
                self.recount(row, number);
                self.publish_row(row, number, op.incarnation())
            })?;
            point!("cache.pins_reaped");
            cleared += 1;
        }
        Ok(cleared)
    }

    /// Makes notes `index`, this process's, its own and empty: a process before may have died with the same index.
    ///
    /// # Errors
    /// [`Error::Exists`] when this process has the cache open already.
    pub(in crate::cache) fn open_notes(&self) -> Result<()> {
        let index = self.host.process_index();
        let tag = self.local.notes_tag(index);
        if tag == self.host.inner.tag {
            return Err(Error::Exists("the cache of this process, which clones of one `Cache` share,".into()));
        }
        self.clear_notes(index, tag)?;
        self.local.set_notes_tag(index, self.host.inner.tag);
        Ok(())
    }

    pub(in crate::cache) fn close_notes(&self) {
        let cells: Vec<u64> = {
            let table = self.table();
            table.pinned_cells().into_iter().flat_map(|cell| std::iter::repeat_n(cell, table.count(cell).into())).collect()
        };
        self.unpin(&cells);
        self.local.set_notes_tag(self.host.process_index(), 0);
    }
}
