// SPDX-License-Identifier: Apache-2.0
//! Lock-free lookups: one block, or the longest cached prefix of a chain, with the misses of a batch overlapped (TraCT section 4.2).
//!
//! A lookup looks at the descriptors, not only at hints, and at the fences as this process knew them a moment ago. It is still only advice:
//! between it and a pull the block may go. A caller that needs a hit to stay pins it ([`crate::cache::Cache::pin_chain`]).
//!
//! Hints are advice: they are first believed as this host's caches hold them, however old, because the descriptor that they lead to is
//! fetched and decides. Only a key that is not found that way has its hints fetched; a block that was published before a lookup began is
//! found by it.
//!
//! The location cache remembers the cell in which this process met a key before: a hit skips the probe of the index, a stale entry costs
//! one line fetched more.

use crate::cache::index::{Home, Homes, Index, tombs_if_bad};
use crate::cache::{BlockKey, Few, Namespace};
use crate::coherence;
use crate::error::Result;
use crate::fault::mutant;
use crate::limits::{HINT_WINDOW, MAX_SLOTS};
use crate::line::Line;
use crate::media::{Descriptor, HINTS_PER_LINE, Hint, HintLine};
use arrayvec::ArrayVec;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Keys that are looked up together; a chain that ends early costs no more than these beyond its end.
const GROUP: usize = 64;

/// What a lookup tells of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockInfo {
    /// The cell it lies in.
    pub cell: u64,
    /// Its length.
    pub len_bytes: u64,
    /// Slot of the host that owns the cell.
    pub owner: u16,
}

impl BlockInfo {
    fn of(cell: u64, found: &Descriptor) -> Self {
        BlockInfo { cell, len_bytes: found.len_bytes.into(), owner: found.owner }
    }
}

/// The cells in which keys were met last: direct-mapped, one word per entry, so that entries are never torn.
pub(in crate::cache) struct LocationCache {
    words: Box<[AtomicU64]>,
}

impl LocationCache {
    const CELL_BITS: u32 = 33;

    /// Room for about `entries` keys, 8 bytes each, of a pool with `cells` cells: more than a few times as many are of no use.
    pub fn new(entries: usize, cells: u64) -> Self {
        let useful = usize::try_from(cells).unwrap_or(usize::MAX).saturating_mul(8);
        LocationCache { words: (0..entries.min(useful).next_power_of_two().max(64)).map(|_| AtomicU64::new(0)).collect() }
    }

    fn word(&self, home: &Home) -> (&AtomicU64, u64) {
        let place = home.fingerprint as usize & (self.words.len() - 1);
        (&self.words[place], home.fingerprint >> Self::CELL_BITS << Self::CELL_BITS)
    }

    /// Brings the entry of a key into a cache, ahead of its use.
    pub fn prefetch(&self, home: &Home) {
        coherence::prefetch(std::ptr::from_ref(self.word(home).0).cast());
    }

    pub fn put(&self, home: &Home, cell: u64) {
        let (word, tag) = self.word(home);
        word.store(tag | (cell + 1), Ordering::Relaxed);
    }

    pub fn get(&self, home: &Home) -> Option<u64> {
        let (word, tag) = self.word(home);
        let found = word.load(Ordering::Relaxed);
        let cell = found & ((1 << Self::CELL_BITS) - 1);
        (found & !((1 << Self::CELL_BITS) - 1) == tag).then(|| cell.checked_sub(1)).flatten()
    }
}

/// The keys that are looked up together, and their results. Nothing of a lookup is on the heap: an allocation costs about as much as a
/// miss.
struct Group<'a> {
    namespace: Namespace,
    keys: &'a [BlockKey],
    homes: ArrayVec<Home, GROUP>,
    /// The cell of each block, or [`NOWHERE`]. Apart from the rest, so that each is loaded as it was stored: anything wider would wait.
    cells: [u64; GROUP],
    rest: [u64; GROUP],
    missing: usize,
}

impl<'a> Group<'a> {
    fn of(namespace: Namespace, keys: &'a [BlockKey]) -> Self {
        Group { namespace, keys, homes: ArrayVec::new(), cells: [NOWHERE; GROUP], rest: [0; GROUP], missing: keys.len() }
    }

    fn missing(&self) -> ArrayVec<u8, GROUP> {
        let mut places = ArrayVec::new();
        for (place, &cell) in self.cells[..self.homes.len()].iter().enumerate() {
            if cell == NOWHERE {
                places.push(place as u8);
            }
        }
        places
    }

    fn set(&mut self, place: usize, found: BlockInfo) {
        self.missing -= usize::from(self.cells[place] == NOWHERE);
        // A descriptor has 32 bits for the length.
        (self.cells[place], self.rest[place]) = (found.cell, found.len_bytes | u64::from(found.owner) << 32);
    }

    fn get(&self, place: usize) -> Option<BlockInfo> {
        let (cell, rest) = (self.cells[place], self.rest[place]);
        (cell != NOWHERE).then_some(BlockInfo { cell, len_bytes: rest & u64::from(u32::MAX), owner: (rest >> 32) as u16 })
    }

    fn home_lines(&self, places: &[u8]) -> ArrayVec<u64, GROUP> {
        places.iter().map(|&place| self.homes[usize::from(place)].first_line).collect()
    }
}

const NOWHERE: u64 = u64::MAX;

/// Whether where a block is found is news to this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum News {
    No,
    Yes,
}

/// Cells that may hold keys of a group: for each cell the place of its key.
#[derive(Default)]
struct Named {
    places: ArrayVec<u8, GROUP>,
    cells: ArrayVec<u64, GROUP>,
}

impl Named {
    /// At most one for each key.
    fn add(&mut self, place: u8, cell: u64) {
        self.places.push(place);
        self.cells.push(cell);
    }
}

impl Index {
    pub(in crate::cache) fn is_block(found: &Descriptor, namespace: Namespace, key: BlockKey) -> bool {
        found.state == Descriptor::READY && ((found.key == key.0 && found.namespace == namespace.0) || mutant!("cache.hint_is_trusted"))
    }

    /// Whether a block of the key is there, as far as a look without a pin shows.
    pub(in crate::cache) fn look_up(&self, namespace: Namespace, key: BlockKey) -> Result<Option<BlockInfo>> {
        self.renew_fences();
        let home = self.home(namespace, key);
        if let Some(cell) = self.locations.get(&home)
            && let Some(found) = self.block_in(cell, namespace, key)?
        {
            return Ok(Some(found));
        }
        let mut found = self.block_by_cached_hint(&home, namespace, key)?;
        if found.is_none() && looks_twice() {
            found = self.look_through_window(&home, namespace, key)?;
        }
        if let Some(found) = found {
            self.locations.put(&home, found.cell);
        }
        Ok(found)
    }

    /// Which of several blocks are in the cells where this process last met them; `each` gets their places. Misses overlap.
    pub(in crate::cache) fn look_where_they_were<'a>(
        &self,
        asked: impl Iterator<Item = (&'a Home, Namespace, BlockKey)>,
        mut each: impl FnMut(usize),
    ) -> Result<()> {
        let remembered_of = |(place, (home, namespace, key))| {
            let cell = self.locations.get(home).filter(|&cell| cell < self.cell_count)?;
            Some((place, namespace, key, cell))
        };
        let remembered: Few<(usize, Namespace, BlockKey, u64)> = asked.enumerate().filter_map(remembered_of).collect();
        if remembered.is_empty() {
            return Ok(());
        }
        self.renew_fences();
        let mut lines = [Line::ZERO; GROUP];
        for remembered in remembered.chunks(GROUP) {
            let cells: ArrayVec<u64, GROUP> = remembered.iter().map(|&(.., cell)| cell).collect();
            for (&(place, namespace, key, _), found) in
                remembered.iter().zip(self.host.lines().fetch_some::<Descriptor>(&cells, &mut lines)?)
            {
                if found.is_some_and(|found| self.is_served(found, namespace, key)) {
                    each(place);
                }
            }
        }
        Ok(())
    }

    /// The block of a key, if its hints lead to it as this host's caches hold them.
    fn block_by_cached_hint(&self, home: &Home, namespace: Namespace, key: BlockKey) -> Result<Option<BlockInfo>> {
        match self.named_in_cached_window(home, &self.host.lines().peek(home.first_line)?)? {
            Some(cell) => self.block_in(cell, namespace, key),
            None => Ok(None),
        }
    }

    /// The first cell that a window names for a key, as this host's caches hold it; `first` is its first line.
    #[inline]
    fn named_in_cached_window(&self, home: &Home, first: &HintLine) -> Result<Option<u64>> {
        let (mut named, mut is_all) = self.named_by(home, first);
        for step in 1..HINT_WINDOW {
            if named.is_some() || is_all {
                break;
            }
            (named, is_all) = self.named_by(home, &self.host.lines().peek(self.hint_line(home, step))?);
        }
        Ok(named)
    }

    /// The cell that a line names for a key, and whether that is all that the table has for it; the first of several.
    #[inline]
    fn named_by(&self, home: &Home, line: &HintLine) -> (Option<u64>, bool) {
        // Without a branch on where the hint stands, which cannot be predicted.
        let places =
            |fingerprint| (0..HINTS_PER_LINE).fold(0_u32, |mask, place| mask | u32::from(line.fingerprint(place) == fingerprint) << place);
        let empty = places(0);
        let named = places(home.fingerprint) & (empty & empty.wrapping_neg()).wrapping_sub(1);
        let place = named.trailing_zeros() as usize % HINTS_PER_LINE;
        let cell = match line.get(place) {
            Hint::Cell { cell, .. } if named != 0 && cell < self.cell_count => Some(cell),
            _ => None,
        };
        (cell, empty != 0 && named.count_ones() <= 1)
    }

    fn block_in(&self, cell: u64, namespace: Namespace, key: BlockKey) -> Result<Option<BlockInfo>> {
        let found = self.descriptor(cell)?.filter(|found| self.is_served(found, namespace, key));
        Ok(found.map(|found| BlockInfo::of(cell, &found)))
    }

    fn look_through_window(&self, home: &Home, namespace: Namespace, key: BlockKey) -> Result<Option<BlockInfo>> {
        for step in 0..HINT_WINDOW {
            let line = tombs_if_bad(self.host.lines().fetch(self.hint_line(home, step)))?;
            for hint in line.iter() {
                match hint {
                    Hint::Empty => return Ok(None),
                    Hint::Cell { fingerprint, cell } if fingerprint == home.fingerprint => {
                        if let Some(found) = self.block_in(cell, namespace, key)? {
                            return Ok(Some(found));
                        }
                    }
                    _ => {}
                }
            }
        }
        Ok(None)
    }

    /// Whether a descriptor is a block of the key whose owner is not known to be fenced: what a fenced host left must not hide the block
    /// that another host has published since.
    fn is_served(&self, found: &Descriptor, namespace: Namespace, key: BlockKey) -> bool {
        Self::is_block(found, namespace, key) && !self.known_fences.is_fenced(found.owner, found.incarnation)
    }

    /// Looks several keys up, with overlapped misses; `each` gets one answer for each key, in order, until it says that it is enough.
    pub(in crate::cache) fn look_up_all(
        &self,
        namespace: Namespace,
        keys: &[BlockKey],
        mut each: impl FnMut(Option<BlockInfo>) -> bool,
    ) -> Result<()> {
        self.renew_fences();
        let homes = self.homes(namespace);
        let lines = &mut [Line::ZERO; GROUP];
        for keys in keys.chunks(GROUP) {
            let group = &mut Group::of(namespace, keys);
            let mut remembered = Named::default();
            self.find_homes(group, &homes, &mut remembered);
            self.try_cells(group, &remembered, News::No, lines)?;
            if group.missing > 0 {
                self.try_cached_hints(group, lines)?;
            }
            if group.missing > 0 && looks_twice() {
                self.try_hints(group, lines)?;
            }
            for place in 0..keys.len() {
                if !each(group.get(place)) {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Where the keys of a group are looked for, and for a first round the cells where they were met before.
    fn find_homes(&self, group: &mut Group, homes: &Homes, remembered: &mut Named) {
        for (place, &key) in group.keys.iter().enumerate() {
            let home = homes.of(key);
            if let Some(cell) = self.locations.get(&home).filter(|&cell| cell < self.cell_count) {
                remembered.add(place as u8, cell);
            }
            group.homes.push(home);
        }
    }

    /// Looks at cells that may hold keys, all of them below the number of cells.
    fn try_cells(&self, group: &mut Group, named: &Named, news: News, lines: &mut [Line; GROUP]) -> Result<()> {
        if named.cells.is_empty() {
            return Ok(());
        }
        let opened = self.host.lines().fetch_some::<Descriptor>(&named.cells, lines)?;
        for ((&place, &cell), found) in named.places.iter().zip(&named.cells).zip(opened) {
            let place = usize::from(place);
            let (namespace, key) = (group.namespace, group.keys[place]);
            let found = match found {
                Some(found) => self.is_served(found, namespace, key).then(|| BlockInfo::of(cell, found)),
                // Perhaps in the middle of being written: one more look.
                None => self.block_in(cell, namespace, key)?,
            };
            if let Some(found) = found {
                group.set(place, found);
                if news == News::Yes {
                    self.locations.put(&group.homes[place], cell);
                }
            }
        }
        Ok(())
    }

    /// Second round: the cells that the windows of the keys not found yet name, as this host's caches hold them.
    fn try_cached_hints(&self, group: &mut Group, lines: &mut [Line; GROUP]) -> Result<()> {
        let missing = group.missing();
        let numbers = group.home_lines(&missing);
        let mut named = Named::default();
        for (&place, line) in missing.iter().zip(self.host.lines().peek_some::<HintLine>(&numbers, lines)?) {
            if let Some(cell) = self.named_in_cached_window(&group.homes[usize::from(place)], line)? {
                named.add(place, cell);
            }
        }
        self.try_cells(group, &named, News::Yes, lines)
    }

    /// The last rounds: home lines of the keys not found yet, as they are in the memory, then the cells that they name. What a home line
    /// does not settle goes through its window alone, which is rare.
    fn try_hints(&self, group: &mut Group, lines: &mut [Line; GROUP]) -> Result<()> {
        let missing = group.missing();
        let numbers = group.home_lines(&missing);
        let mut named = Named::default();
        let mut unsettled: ArrayVec<u8, GROUP> = ArrayVec::new();
        for (&place, line) in missing.iter().zip(self.host.lines().fetch_some::<HintLine>(&numbers, lines)?) {
            let home = &group.homes[usize::from(place)];
            let (cell, is_all) = line.map_or((None, false), |line| self.named_by(home, line));
            if let Some(cell) = cell {
                named.add(place, cell);
            }
            if !is_all {
                unsettled.push(place);
            }
        }
        self.try_cells(group, &named, News::Yes, lines)?;
        for place in unsettled.into_iter().map(usize::from) {
            if group.cells[place] != NOWHERE {
                continue;
            }
            let home = group.homes[place];
            if let Some(found) = self.look_through_window(&home, group.namespace, group.keys[place])? {
                group.set(place, found);
                self.locations.put(&home, found.cell);
            }
        }
        Ok(())
    }

    /// The leading blocks of a chain that are cached, in order.
    pub(in crate::cache) fn look_up_chain(&self, namespace: Namespace, keys: &[BlockKey]) -> Result<Vec<BlockInfo>> {
        let mut chain = Vec::with_capacity(keys.len().min(GROUP));
        self.look_up_all(namespace, keys, |found| {
            let Some(found) = found else { return false };
            // A chain that is there beyond its first blocks is mostly there to its end.
            if chain.len() == chain.capacity() {
                chain.reserve(keys.len() - chain.len());
            }
            chain.push(found);
            true
        })?;
        Ok(chain)
    }

    /// Brings what this process knows of the fences up to date, if that is older than a heartbeat.
    pub(super) fn renew_fences(&self) {
        let fences = &self.known_fences;
        let (now_ns, at_ns) = (self.host.platform().now_coarse_ns().max(1), fences.at_ns.load(Ordering::Relaxed));
        if at_ns != 0 && now_ns.saturating_sub(at_ns) <= self.host.config().heartbeat_ms * 1_000_000 {
            return;
        }
        // What cannot be read makes advice older, not wrong: a pull looks for itself.
        if let Ok(standings) = self.host.inner.standings() {
            for (known, (standing, _)) in fences.up_to.iter().zip(standings) {
                known.fetch_max(standing.fenced, Ordering::Relaxed);
            }
            fences.at_ns.store(now_ns, Ordering::Relaxed);
        }
    }
}

/// Whether a key that no cached hint led to has its hints fetched.
fn looks_twice() -> bool {
    !mutant!("cache.cached_hint_is_final")
}

/// Incarnation up to which each slot is fenced, as this process last fetched it.
pub(in crate::cache) struct KnownFences {
    at_ns: AtomicU64,
    up_to: [AtomicU32; MAX_SLOTS],
}

impl KnownFences {
    pub(super) fn is_fenced(&self, slot: u16, incarnation: u32) -> bool {
        self.up_to.get(usize::from(slot)).is_none_or(|up_to| up_to.load(Ordering::Relaxed) >= incarnation)
    }
}

impl Default for KnownFences {
    fn default() -> Self {
        KnownFences { at_ns: AtomicU64::new(0), up_to: [const { AtomicU32::new(0) }; MAX_SLOTS] }
    }
}

const _: () = assert!(crate::limits::MAX_CELLS < 1 << LocationCache::CELL_BITS);

#[cfg(test)]
mod tests;
