// SPDX-License-Identifier: Apache-2.0
//! Lock-free lookups: one block, or the longest cached prefix of a chain, with the misses of a batch overlapped (TraCT section 4.2).
//!
//! A lookup looks at the descriptors, not only at hints, and at the fences as this process knew them a moment ago. It is still only advice:
//! between it and a pull the block may go. Whoever needs a hit to stay pins it ([`super::Cache::pin_chain`]).
//!
//! Where this process met a key before, it remembers the cell and looks at that descriptor right away: a right guess saves the hint, a
//! wrong one costs one line.

use super::index::{Home, tombs_if_bad};
use super::{BlockKey, Inner, Namespace};
use crate::error::Result;
use crate::fault::mutant;
use crate::limits::{HINT_WINDOW, LINE_BYTES, MAX_SLOTS};
use crate::line::Line;
use crate::media::{Descriptor, Hint, HintLine, Region};
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

/// A guess where a key lies: direct-mapped, one word per entry, so that entries are never torn.
pub(super) struct Guesses {
    words: Box<[AtomicU64]>,
}

impl Guesses {
    const CELL_BITS: u32 = 33;

    /// Room for about `entries` keys, 8 bytes each.
    pub fn new(entries: usize) -> Self {
        Guesses { words: (0..entries.next_power_of_two().max(64)).map(|_| AtomicU64::new(0)).collect() }
    }

    fn word(&self, home: &Home) -> (&AtomicU64, u64) {
        let place = home.fingerprint as usize & (self.words.len() - 1);
        (&self.words[place], home.fingerprint >> Self::CELL_BITS << Self::CELL_BITS)
    }

    /// Remembers the cell of a key.
    pub fn put(&self, home: &Home, cell: u64) {
        let (word, tag) = self.word(home);
        word.store(tag | (cell + 1), Ordering::Relaxed);
    }

    /// The cell that the key was in when it was last met here.
    pub fn get(&self, home: &Home) -> Option<u64> {
        let (word, tag) = self.word(home);
        let found = word.load(Ordering::Relaxed);
        let cell = found & ((1 << Self::CELL_BITS) - 1);
        (found & !((1 << Self::CELL_BITS) - 1) == tag).then(|| cell.checked_sub(1)).flatten()
    }
}

/// The keys that are looked up together. Nothing of a lookup is on the heap: an allocation costs about as much as a miss.
type Group = ArrayVec<Wanted, GROUP>;

/// A key of a batch on its way.
struct Wanted {
    home: Home,
    key: BlockKey,
    found: Option<(u64, Descriptor)>,
}

impl Inner {
    /// Whether a descriptor is a complete block of the key.
    pub(super) fn is_block(found: &Descriptor, namespace: Namespace, key: BlockKey) -> bool {
        found.state == Descriptor::READY && ((found.key == key.0 && found.namespace == namespace.0) || mutant!("cache.hint_is_trusted"))
    }

    /// Whether a block of the key is there, as far as can be told without pinning it.
    pub(super) fn look_up(&self, namespace: Namespace, key: BlockKey) -> Result<Option<(u64, Descriptor)>> {
        self.renew_fences();
        let home = self.home(namespace, key);
        let mut found = self.block_by_guess(&home, namespace, key)?;
        if found.is_none() {
            found = self.look_through_window(&home, 0, namespace, key)?;
        }
        Ok(self.remember(&home, found))
    }

    /// Whether a block of the key is in the cell where this process last met it.
    pub(super) fn is_where_it_was(&self, namespace: Namespace, key: BlockKey) -> Result<bool> {
        self.renew_fences();
        Ok(self.block_by_guess(&self.home(namespace, key), namespace, key)?.is_some())
    }

    /// The block of a key, if it is in the cell where this process last met it.
    fn block_by_guess(&self, home: &Home, namespace: Namespace, key: BlockKey) -> Result<Option<(u64, Descriptor)>> {
        match self.guesses.get(home) {
            Some(cell) => self.block_in(cell, namespace, key),
            None => Ok(None),
        }
    }

    /// The block of a key in a cell, if it is there.
    fn block_in(&self, cell: u64, namespace: Namespace, key: BlockKey) -> Result<Option<(u64, Descriptor)>> {
        let found = self.descriptor(cell)?.filter(|found| self.is_served(found, namespace, key));
        Ok(found.map(|found| (cell, found)))
    }

    /// Follows the hints of a window from line `step` on, one line after the other.
    fn look_through_window(&self, home: &Home, step: u64, namespace: Namespace, key: BlockKey) -> Result<Option<(u64, Descriptor)>> {
        for step in step..HINT_WINDOW {
            let line = tombs_if_bad(self.lines().fetch(self.hint_line(home, step)))?;
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
    /// that somebody has published since.
    fn is_served(&self, found: &Descriptor, namespace: Namespace, key: BlockKey) -> bool {
        Self::is_block(found, namespace, key) && !self.known_fences.is_fenced(found.owner, found.incarnation)
    }

    fn remember(&self, home: &Home, found: Option<(u64, Descriptor)>) -> Option<(u64, Descriptor)> {
        if let Some((cell, _)) = found {
            self.guesses.put(home, cell);
        }
        found
    }

    /// Looks several keys up, with overlapped misses; `each` gets one answer for each key, in order, until it says that it is enough.
    pub(super) fn look_up_all(
        &self,
        namespace: Namespace,
        keys: &[BlockKey],
        mut each: impl FnMut(Option<(u64, Descriptor)>) -> bool,
    ) -> Result<()> {
        self.renew_fences();
        for group in keys.chunks(GROUP) {
            let wanted: &mut Group = &mut group.iter().map(|&key| Wanted { home: self.home(namespace, key), key, found: None }).collect();
            self.try_guesses(namespace, wanted)?;
            self.try_home_lines(namespace, wanted)?;
            for wanted in wanted {
                if !each(self.remember(&wanted.home, wanted.found)) {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// First round: descriptors of the cells where the keys were met before.
    fn try_guesses(&self, namespace: Namespace, wanted: &mut Group) -> Result<()> {
        let cell_count = self.geometry().cell_count();
        let guess = |(index, wanted): (usize, &Wanted)| Some((index, self.guesses.get(&wanted.home).filter(|&cell| cell < cell_count)?));
        let guessed: ArrayVec<(usize, u64), GROUP> = wanted.iter().enumerate().filter_map(guess).collect();
        self.try_cells(namespace, wanted, &guessed)
    }

    /// Looks at cells that may hold keys: (index of the key, cell).
    fn try_cells(&self, namespace: Namespace, wanted: &mut Group, cells: &[(usize, u64)]) -> Result<()> {
        if cells.is_empty() {
            return Ok(());
        }
        // Cells of hints and guesses are below the number of cells, so the sum is the offset of a line.
        let first = self.lines().layout().line_offset(Region::Descriptor, 0)?;
        let mut lines = [Line::ZERO; GROUP];
        let lines = &mut lines[..cells.len().min(GROUP)];
        self.lines().fetch_raw_many(cells.iter().map(|&(_, cell)| first + cell * LINE_BYTES as u64), lines)?;
        for (&(index, cell), line) in cells.iter().zip(lines) {
            let Some(wanted) = wanted.get_mut(index).filter(|wanted| wanted.found.is_none()) else { continue };
            wanted.found = match self.lines().open::<Descriptor>(cell, line) {
                Ok(found) => self.is_served(&found, namespace, wanted.key).then_some((cell, found)),
                // Perhaps in the middle of being written: one more look.
                Err(_) => self.block_in(cell, namespace, wanted.key)?,
            };
        }
        Ok(())
    }

    /// Second and third round: home lines of the keys not found yet, then the cells that they name. What a home line does not settle goes
    /// through its window alone, which is rare.
    fn try_home_lines(&self, namespace: Namespace, wanted: &mut Group) -> Result<()> {
        let missing: ArrayVec<usize, GROUP> = (0..wanted.len()).filter(|&index| wanted[index].found.is_none()).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let homes: ArrayVec<u64, GROUP> = missing.iter().map(|&index| self.hint_line(&wanted[index].home, 0)).collect();
        let first = self.lines().layout().line_offset(Region::Hint, 0)?;
        let mut lines = [Line::ZERO; GROUP];
        let lines = &mut lines[..homes.len()];
        self.lines().fetch_raw_many(homes.iter().map(|line| first + line * LINE_BYTES as u64), lines)?;
        let mut named: ArrayVec<(usize, u64), GROUP> = ArrayVec::new();
        let mut unsettled: ArrayVec<(usize, u64), GROUP> = ArrayVec::new();
        for ((&index, &number), bytes) in missing.iter().zip(&homes).zip(lines) {
            let Ok(line) = self.lines().open::<HintLine>(number, bytes) else {
                unsettled.push((index, 0));
                continue;
            };
            let (mut ended, mut from_step, mut is_named) = (false, 1, false);
            for hint in line.iter() {
                match hint {
                    Hint::Empty => {
                        ended = true;
                        break;
                    }
                    Hint::Cell { fingerprint, cell }
                        if fingerprint == wanted[index].home.fingerprint && cell < self.geometry().cell_count() =>
                    {
                        // Two hints of one key are rare: there is room for one, and the window is looked through again.
                        if is_named || named.try_push((index, cell)).is_err() {
                            from_step = 0;
                        }
                        is_named = true;
                    }
                    _ => {}
                }
            }
            if !ended || from_step == 0 {
                unsettled.push((index, from_step));
            }
        }
        self.try_cells(namespace, wanted, &named)?;
        for (index, step) in unsettled {
            if let Some(wanted) = wanted.get_mut(index).filter(|wanted| wanted.found.is_none()) {
                wanted.found = self.look_through_window(&wanted.home, step, namespace, wanted.key)?;
            }
        }
        Ok(())
    }

    /// The leading blocks of a chain that are cached, in order.
    pub(super) fn look_up_chain<T>(
        &self,
        namespace: Namespace,
        keys: &[BlockKey],
        mut of: impl FnMut(u64, &Descriptor) -> T,
    ) -> Result<Vec<T>> {
        let mut chain = Vec::with_capacity(keys.len().min(GROUP));
        self.look_up_all(namespace, keys, |found| {
            let Some((cell, found)) = found else { return false };
            // A chain that goes on beyond its first blocks mostly goes on to its end.
            if chain.len() == chain.capacity() {
                chain.reserve(keys.len() - chain.len());
            }
            chain.push(of(cell, &found));
            true
        })?;
        Ok(chain)
    }

    /// Brings what this process knows of the fences up to date, if that is older than a heartbeat.
    fn renew_fences(&self) {
        let (now_ns, at_ns) = (self.host.platform().now_ns().max(1), self.known_fences.at_ns.load(Ordering::Relaxed));
        if at_ns != 0 && now_ns.saturating_sub(at_ns) <= self.host.config().heartbeat_ms * 1_000_000 {
            return;
        }
        // What cannot be read makes advice older, not wrong: a pull looks for itself.
        if let Ok(standings) = crate::host::fence::standings(self.lines()) {
            for (known, standing) in self.known_fences.up_to.iter().zip(standings) {
                known.fetch_max(standing.fenced, Ordering::Relaxed);
            }
            self.known_fences.at_ns.store(now_ns, Ordering::Relaxed);
        }
    }
}

/// Incarnation up to which each slot is fenced, as this process last fetched it.
pub(super) struct KnownFences {
    at_ns: AtomicU64,
    up_to: [AtomicU32; MAX_SLOTS],
}

impl KnownFences {
    fn is_fenced(&self, slot: u16, incarnation: u32) -> bool {
        self.up_to.get(usize::from(slot)).is_none_or(|up_to| up_to.load(Ordering::Relaxed) >= incarnation)
    }
}

impl Default for KnownFences {
    fn default() -> Self {
        KnownFences { at_ns: AtomicU64::new(0), up_to: [const { AtomicU32::new(0) }; MAX_SLOTS] }
    }
}

const _: () = assert!(crate::limits::MAX_CELLS < 1 << Guesses::CELL_BITS);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guess_is_of_its_key_alone() {
        let guesses = Guesses::new(64);
        let home = |fingerprint| Home::of(fingerprint);
        let (one, other) = (home(0x1111_2222_3333_4441), home(0x5111_2222_3333_4441));
        assert_eq!(guesses.get(&one), None);
        guesses.put(&one, u64::from(u32::MAX));
        assert_eq!((guesses.get(&one), guesses.get(&other)), (Some(u32::MAX.into()), None));
        guesses.put(&other, 0);
        assert_eq!((guesses.get(&one), guesses.get(&other)), (None, Some(0)));
    }
}
