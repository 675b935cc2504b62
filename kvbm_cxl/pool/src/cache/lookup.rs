// SPDX-License-Identifier: Apache-2.0
//! Lock-free lookups: one block, or the longest cached prefix of a chain, with the misses of a batch overlapped (TraCT section 4.2).
//!
//! A lookup looks at the descriptors, not only at hints, and at the fences as this process knew them a moment ago. It is still only advice:
//! between it and a pull the block may go. Whoever needs a hit to stay pins it ([`super::Cache::pin_chain`]).
//!
//! Where this process met a key before, it remembers the cell and looks at that descriptor right away: a right guess saves the hint, a
//! wrong one costs one line.

use super::index::Home;
use super::{BlockKey, Inner, Namespace};
use crate::error::Result;
use crate::fault::mutant;
use crate::limits::MAX_SLOTS;
use crate::line::Line;
use crate::media::{Descriptor, HintLine, Region};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Blocks that a chain lookup looks at together; a chain that ends early costs no more than this beyond its end.
pub(super) const BATCH: usize = 256;
/// Blocks of the first batch of a chain: most chains that miss, miss early.
const FIRST_BATCH: usize = 64;

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
        let mut found = Vec::with_capacity(1);
        self.look_up_batch(namespace, &[key], &mut found)?;
        Ok(found.pop().flatten())
    }

    /// Looks several keys up, with overlapped misses; one answer for each key, in order.
    pub(super) fn look_up_batch(&self, namespace: Namespace, keys: &[BlockKey], out: &mut Vec<Option<(u64, Descriptor)>>) -> Result<()> {
        let mut wanted: Vec<Wanted> = keys.iter().map(|&key| Wanted { home: self.home(namespace, key), key, found: None }).collect();
        self.renew_fences();
        self.try_guesses(namespace, &mut wanted)?;
        self.try_home_lines(namespace, &mut wanted)?;
        out.extend(wanted.iter().map(|wanted| {
            let (cell, found) = wanted.found?;
            self.guesses.put(&wanted.home, cell);
            Some((cell, found))
        }));
        Ok(())
    }

    fn offset_of_descriptor(&self, cell: u64) -> Result<u64> {
        self.lines().layout().line_offset(Region::Descriptor, cell)
    }

    /// First round: descriptors of the cells where the keys were met before.
    fn try_guesses(&self, namespace: Namespace, wanted: &mut [Wanted]) -> Result<()> {
        let mut guessed = Vec::with_capacity(wanted.len());
        for (index, wanted) in wanted.iter().enumerate() {
            if let Some(cell) = self.guesses.get(&wanted.home).filter(|&cell| cell < self.geometry().cell_count()) {
                guessed.push((index, cell));
            }
        }
        self.try_cells(namespace, wanted, &guessed)
    }

    /// Looks at cells that may hold keys: (index of the key, cell).
    fn try_cells(&self, namespace: Namespace, wanted: &mut [Wanted], cells: &[(usize, u64)]) -> Result<()> {
        if cells.is_empty() {
            return Ok(());
        }
        let offsets = cells.iter().map(|&(_, cell)| self.offset_of_descriptor(cell)).collect::<Result<Vec<u64>>>()?;
        let mut lines: Vec<Line> = Vec::with_capacity(offsets.len());
        self.lines().fetch_group(&offsets, &mut lines)?;
        for (&(index, cell), line) in cells.iter().zip(&lines) {
            let wanted = &mut wanted[index];
            if wanted.found.is_some() {
                continue;
            }
            let found = match self.lines().open::<Descriptor>(cell, line) {
                Ok(found) => found,
                // Perhaps in the middle of being written: one more look.
                Err(_) => match self.descriptor(cell)? {
                    Some(found) => found,
                    None => continue,
                },
            };
            // What a fenced host left must not hide the block that somebody has published since.
            if Self::is_block(&found, namespace, wanted.key) && !self.known_fences.is_fenced(found.owner, found.incarnation) {
                wanted.found = Some((cell, found));
            }
        }
        Ok(())
    }

    /// Second and third round: home lines of the keys not found yet, then the cells that they name. What a home line does not settle goes
    /// through the rest of its window alone, which is rare.
    fn try_home_lines(&self, namespace: Namespace, wanted: &mut [Wanted]) -> Result<()> {
        let missing: Vec<usize> = (0..wanted.len()).filter(|&index| wanted[index].found.is_none()).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let layout = self.lines().layout();
        let homes: Vec<u64> = missing.iter().map(|&index| self.hint_line(&wanted[index].home, 0)).collect();
        let offsets = homes.iter().map(|&line| layout.line_offset(Region::Hint, line)).collect::<Result<Vec<u64>>>()?;
        let mut lines: Vec<Line> = Vec::with_capacity(offsets.len());
        self.lines().fetch_group(&offsets, &mut lines)?;
        let (mut named, mut unsettled, mut cells) = (Vec::with_capacity(missing.len()), Vec::new(), Vec::new());
        for ((&index, &line), bytes) in missing.iter().zip(&homes).zip(&lines) {
            cells.clear();
            let ended = match self.lines().open::<HintLine>(line, bytes) {
                Ok(hints) => self.matches(&wanted[index].home, &hints, &mut cells),
                Err(_) => {
                    unsettled.push((index, 0));
                    continue;
                }
            };
            named.extend(cells.iter().map(|&cell| (index, cell)));
            if !ended {
                unsettled.push((index, 1));
            }
        }
        self.try_cells(namespace, wanted, &named)?;
        for (index, step) in unsettled {
            if wanted[index].found.is_some() {
                continue;
            }
            cells.clear();
            self.candidates(&wanted[index].home, step, &mut cells)?;
            let named: Vec<(usize, u64)> = cells.iter().map(|&cell| (index, cell)).collect();
            self.try_cells(namespace, wanted, &named)?;
        }
        Ok(())
    }

    /// The leading blocks of a chain that are cached.
    pub(super) fn look_up_chain(&self, namespace: Namespace, keys: &[BlockKey]) -> Result<Vec<(u64, Descriptor)>> {
        let mut chain = Vec::with_capacity(keys.len().min(BATCH));
        let mut found = Vec::with_capacity(keys.len().min(BATCH));
        let mut rest = keys;
        while !rest.is_empty() {
            let limit = if chain.is_empty() { FIRST_BATCH } else { BATCH };
            let (batch, behind) = rest.split_at(rest.len().min(limit));
            found.clear();
            self.look_up_batch(namespace, batch, &mut found)?;
            for block in &found {
                match block {
                    Some(block) => chain.push(*block),
                    None => return Ok(chain),
                }
            }
            rest = behind;
        }
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
