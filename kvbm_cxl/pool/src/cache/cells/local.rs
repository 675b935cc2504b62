// SPDX-License-Identifier: Apache-2.0
//! What the processes of one host share about the cache, in ordinary coherent memory of that machine.
//!
//! Pins are the host's: a cell is pinned while any of its processes uses it. Each process writes down what it has pinned, so that the pins
//! of one that died can be taken back; the counts next to the composed pin line are only sums of these notes, and are recomputed from them
//! when a process died in the middle of a change. Only atomics live here; all zero is the empty state.

use crate::cache::policy::CYCLE_TICKS;
use crate::error::{Error, Result};
use crate::host::local_mutex::LocalMutex;
use crate::limits::{MAX_PINS, MAX_PROCESSES};
use crate::media::{CELLS_PER_PIN, Geometry, Layout};
use crate::platform::LocalMemory;
use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

/// Version of the structure: processes of different builds must not share an area that they lay out differently.
const VERSION: u32 = 3;

#[repr(C, align(64))]
pub(in crate::cache) struct CellsHeader {
    version: AtomicU32,
    /// Ticks of the pool that this host has followed; 0 = none yet.
    pub ticks: AtomicU64,
    /// The [`attachment`] under which this host's claims on cell chunks were last published; 0 = never.
    pub attached: AtomicU64,
    /// Sequence number last used in a stamp. It never goes back: stamps of one incarnation are unique (CACHE.md D4).
    pub sequence: AtomicU64,
    /// Number of the last request in this host's `Ask` line, and the mutex of its writer.
    pub asked: AtomicU64,
    /// When it was published, in nanoseconds; 0 = never.
    pub asked_at_ns: AtomicU64,
    pub ask: LocalMutex,
}

/// One pin line of this host: the composed nibbles and what they are composed of.
#[repr(C, align(64))]
pub(in crate::cache) struct PinRow {
    pub mutex: LocalMutex,
    /// The [`attachment`] under which the line was last published as it is; 0 = none.
    pub published: AtomicU64,
    pub nibbles: [AtomicU64; 7],
    pub counts: [AtomicU16; CELLS_PER_PIN],
}

impl PinRow {
    pub fn nibble(&self, place: usize) -> u8 {
        (self.nibbles[place / 16].load(Ordering::Relaxed) >> (place % 16 * 4)) as u8 & 15
    }

    /// Sets the nibble of the cell at a place. The caller holds the row's mutex.
    pub fn set_nibble(&self, place: usize, nibble: u8) {
        let (word, shift) = (&self.nibbles[place / 16], place % 16 * 4);
        // No other thread changes the word meanwhile.
        let value = word.load(Ordering::Relaxed) & !(15 << shift) | u64::from(nibble) << shift;
        word.store(value, Ordering::Relaxed);
    }
}

/// The number that stands for a count of ticks in a pin line, 1 to 7.
pub(in crate::cache) fn number(ticks: u64) -> u8 {
    (ticks % u64::from(CYCLE_TICKS)) as u8 + 1
}

/// Slot and incarnation in one word. The slot counts as well: a machine may come back in another one, under an incarnation number that it
/// had before.
pub(in crate::cache) fn attachment(slot: u16, incarnation: u32) -> u64 {
    (u64::from(slot) + 1) << 32 | u64::from(incarnation)
}

#[repr(C, align(64))]
struct Notes {
    /// Tag of the process; 0 = none.
    tag: AtomicU32,
    used: AtomicU32,
}

/// One note: (cell + 1) << 16 | how often it is pinned; 0 = free.
pub(in crate::cache) fn note(cell: u64, count: u16) -> u64 {
    if count == 0 { 0 } else { (cell + 1) << 16 | u64::from(count) }
}

pub(in crate::cache) fn pin_of_note(note: u64) -> Option<(u64, u16)> {
    (note != 0).then(|| ((note >> 16).wrapping_sub(1), note as u16))
}

/// What the processes of a host know of a cell chunk, as one word: the tag of the one that has it, 0 = none, and above it how many of its
/// cells are being filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cache) struct ChunkUse(u64);

impl ChunkUse {
    /// One cell that is being filled.
    const CELL: u64 = 1 << 32;

    pub fn owner(self) -> u32 {
        self.0 as u32
    }

    /// Whether stores to its cells may lie in this machine's caches.
    pub fn is_filled(self) -> bool {
        self.0 >= Self::CELL
    }

    fn without_fills(self) -> Self {
        ChunkUse(self.owner().into())
    }
}

fn notes_per_process(geometry: &Geometry) -> usize {
    geometry.cell_count().min(MAX_PINS) as usize
}

/// Bytes of a host's local memory that the cache takes; a multiple of 64.
pub(in crate::cache) fn local_bytes(layout: &Layout) -> usize {
    if layout.geometry().cell_chunks() == 0 { 0 } else { Offsets::new(layout.geometry()).end }
}

#[derive(Clone)]
struct Offsets {
    rows: usize,
    notes: usize,
    entries: usize,
    owners: usize,
    end: usize,
}

impl Offsets {
    fn new(geometry: &Geometry) -> Self {
        let rows = size_of::<CellsHeader>();
        let notes = rows + geometry.pin_lines() as usize * size_of::<PinRow>();
        let entries = notes + MAX_PROCESSES * size_of::<Notes>();
        let owners = entries + MAX_PROCESSES * notes_per_process(geometry) * size_of::<AtomicU64>();
        let end = (owners + geometry.cell_chunks() as usize * size_of::<AtomicU64>()).next_multiple_of(64);
        Offsets { rows, notes, entries, owners, end }
    }
}

#[derive(Clone)]
pub(in crate::cache) struct LocalCells {
    start: NonNull<u8>,
    geometry: Geometry,
    /// Of that geometry: every pin asks for them.
    offsets: Offsets,
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the area is only used through atomics, and `_owner` keeps it mapped.
unsafe impl Send for LocalCells {}
// SAFETY: as above.
unsafe impl Sync for LocalCells {}

impl LocalCells {
    /// The area in `local`, the cache's part of a host's local memory.
    pub fn over(layout: &Layout, local: LocalMemory) -> Result<Self> {
        let LocalMemory { start, len_bytes, owner } = local;
        if len_bytes < local_bytes(layout) {
            return Err(Error::Invalid("the local memory has no room for the cache: stop the older processes of this machine".into()));
        }
        let (geometry, offsets) = (*layout.geometry(), Offsets::new(layout.geometry()));
        let area = LocalCells { start, geometry, offsets, _owner: owner };
        match area.header().version.compare_exchange(0, VERSION, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) | Err(VERSION) => Ok(area),
            Err(found) => Err(Error::Invalid(format!(
                "the cache's local area has version {found}, this build {VERSION}: stop the older processes of this machine first"
            ))),
        }
    }

    /// `count` structures of atomics, `at` bytes after the start.
    fn slice<T>(&self, at: usize, count: usize) -> &[T] {
        // SAFETY: `of` checked that the area with all its parts lies inside the mapping, whose start and parts are aligned to 64 (entries
        // and owners to their size); T is one of the structures of atomics above, which are valid for any bytes.
        unsafe { std::slice::from_raw_parts(self.start.byte_add(at).cast::<T>().as_ptr(), count) }
    }

    /// The number that stands for now in a pin line, 1 to 7.
    pub fn tick(&self) -> u8 {
        number(self.header().ticks.load(Ordering::Relaxed))
    }

    pub fn header(&self) -> &CellsHeader {
        &self.slice::<CellsHeader>(0, 1)[0]
    }

    pub fn rows(&self) -> &[PinRow] {
        self.slice(self.offsets.rows, self.geometry.pin_lines() as usize)
    }

    fn all_notes(&self) -> &[Notes] {
        self.slice(self.offsets.notes, MAX_PROCESSES)
    }

    pub fn entries(&self, index: usize) -> &[AtomicU64] {
        let per_process = notes_per_process(&self.geometry);
        let at = self.offsets.entries + index * per_process * size_of::<AtomicU64>();
        self.slice(at, per_process)
    }

    pub fn used_entries(&self, index: usize) -> &[AtomicU64] {
        let used = self.all_notes()[index].used.load(Ordering::Acquire) as usize;
        let entries = self.entries(index);
        &entries[..used.min(entries.len())]
    }

    /// States that entries below `used` of process `index` may be in use.
    pub fn raise_used(&self, index: usize, used: usize) {
        self.all_notes()[index].used.fetch_max(used as u32, Ordering::AcqRel);
    }

    /// Tag of the process that has notes `index`; 0 = none.
    pub fn notes_tag(&self, index: usize) -> u32 {
        self.all_notes()[index].tag.load(Ordering::Acquire)
    }

    pub fn set_notes_tag(&self, index: usize, tag: u32) {
        self.all_notes()[index].tag.store(tag, Ordering::Release);
    }

    /// Takes notes `index` from the process `tag`, if it is still the one that has them.
    pub fn drop_notes_tag(&self, index: usize, tag: u32) {
        let _ = self.all_notes()[index].tag.compare_exchange(tag, 0, Ordering::AcqRel, Ordering::Relaxed);
    }

    fn uses(&self) -> &[AtomicU64] {
        self.slice(self.offsets.owners, self.geometry.cell_chunks() as usize)
    }

    pub fn chunk(&self, chunk: u64) -> ChunkUse {
        ChunkUse(self.uses().get(chunk as usize).map_or(0, |of| of.load(Ordering::Acquire)))
    }

    /// Tag of the process that has a cell chunk; 0 = none. Meaningless unless the host claims the chunk.
    pub fn owner(&self, chunk: u64) -> u32 {
        self.chunk(chunk).owner()
    }

    /// Gives a cell chunk to the process `tag`, none of whose cells is being filled unless it is that process's already. The caller holds
    /// the lock of the claims, and has brought out what another process left of it ([`crate::cache::cells::residue`]).
    pub fn set_owner(&self, chunk: u64, tag: u32) {
        if let Some(of) = self.uses().get(chunk as usize)
            && self.owner(chunk) != tag
        {
            of.store(tag.into(), Ordering::Release);
        }
    }

    /// Takes a cell chunk from the process `tag`, if it is still that one's.
    pub fn disown(&self, chunk: u64, tag: u32) {
        if let Some(of) = self.uses().get(chunk as usize) {
            let without = |word: u64| (ChunkUse(word).owner() == tag).then_some(word & !u64::from(u32::MAX));
            // Another owner serves as well.
            let _ = of.fetch_update(Ordering::AcqRel, Ordering::Acquire, without);
        }
    }

    pub fn begin_filling(&self, chunk: u64) {
        if let Some(of) = self.uses().get(chunk as usize) {
            of.fetch_add(ChunkUse::CELL, Ordering::AcqRel);
        }
    }

    /// Notes that a cell which the process `tag` was filling is past this machine's caches.
    pub fn end_filling(&self, chunk: u64, tag: u32) {
        if let Some(of) = self.uses().get(chunk as usize) {
            let less = |word: u64| (ChunkUse(word).owner() == tag).then(|| word.checked_sub(ChunkUse::CELL)).flatten();
            // Another process's by now: nothing of it was noted any more.
            let _ = of.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
        }
    }

    /// Notes that all cells of a chunk are past this machine's caches, if nothing has changed since it was `found`.
    pub fn note_flushed(&self, chunk: u64, found: ChunkUse) {
        if let Some(of) = self.uses().get(chunk as usize) {
            let _ = of.compare_exchange(found.0, found.without_fills().0, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    pub fn next_sequence(&self) -> u64 {
        self.header().sequence.fetch_add(1, Ordering::Relaxed) + 1
    }
}

#[cfg(test)]
mod tests;
