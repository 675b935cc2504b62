// SPDX-License-Identifier: Apache-2.0
//! The hint table: from the fingerprint of namespace and key to a cell (CACHE.md section 3). Linear probing, without locks for readers,
//! and no decision depends on it: a reader that follows a hint looks at the descriptor.
//!
//! A stripe is a range of lines with one lock. A key's probe starts at its home line, wraps inside the stripe and ends after
//! [`HINT_WINDOW`] lines or at the first empty place.

pub(super) mod hint_room;
pub(super) mod insert;
pub(super) mod lookup;
pub(super) mod presence;

use super::cells::Pace;
use super::locks::CacheLocks;
use super::pull::fences::FenceView;
use super::{BlockKey, Namespace};
use crate::error::Result;
use crate::fault::{mutant, point};
use crate::host::Host;
use crate::limits::HINT_WINDOW;
use crate::line::if_whole;
use crate::lock::{FIRST_STRIPE_LOCK, LockGuard, LockId};
use crate::media::{Descriptor, Geometry, HINTS_PER_LINE, Hint, HintLine};
use arrayvec::ArrayVec;
use lookup::{KnownFences, LocationCache};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Home {
    pub fingerprint: u64,
    pub stripe: u32,
    line: u64,
    /// The same line's number among all.
    pub first_line: u64,
}

#[derive(Clone, Copy)]
pub(super) struct Table {
    stripes: u64,
    lines: u64,
}

impl Table {
    pub fn of(geometry: &Geometry) -> Self {
        Table { stripes: geometry.stripes.into(), lines: geometry.hint_lines_per_stripe() }
    }

    /// Where the keys of a namespace are looked for.
    pub fn homes(self, namespace: Namespace) -> Homes {
        Homes { table: self, state: mix(DIGEST_START, namespace.0) }
    }
}

/// The hint table, and what this process knows for finding blocks without it.
pub(super) struct Index {
    host: Host,
    fences: FenceView,
    locks: CacheLocks,
    cell_count: u64,
    table: Table,
    /// Where this process met keys last.
    pub locations: LocationCache,
    known_fences: KnownFences,
    hint_requests: Pace,
}

impl Index {
    /// In the pool of the host of these locks, with room for the locations of about `remembered_keys` keys.
    pub fn new(locks: &CacheLocks, remembered_keys: usize) -> Self {
        let geometry = locks.host.geometry();
        Index {
            host: locks.host.clone(),
            fences: FenceView::of(&locks.host),
            locks: locks.clone(),
            cell_count: geometry.cell_count(),
            table: Table::of(geometry),
            locations: LocationCache::new(remembered_keys, geometry.cell_count()),
            known_fences: KnownFences::default(),
            hint_requests: Pace::default(),
        }
    }

    /// Where the keys of a namespace are looked for.
    pub fn homes(&self, namespace: Namespace) -> Homes {
        self.table.homes(namespace)
    }
}

pub(super) struct Homes {
    table: Table,
    state: u64,
}

impl Homes {
    /// Where a key is looked for.
    #[inline]
    pub fn of(&self, key: BlockKey) -> Home {
        let Table { stripes, lines } = self.table;
        let fingerprint = finish(mix(self.state, key.0)).max(1);
        let spread = u128::from(fingerprint.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let stripe = ((spread * u128::from(stripes)) >> 64) as u64;
        let line = ((u128::from(fingerprint.rotate_left(32)) * u128::from(lines)) >> 64) as u64;
        Home { fingerprint, stripe: stripe as u32, line, first_line: stripe * lines + line }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Inserted {
    Done {
        line: u64,
    },
    /// A block of this key is there or being written.
    Exists,
    /// A block of this key is there and may be about to go.
    Busy,
    Full,
}

type HintPosition = (usize, usize);
type Window = ArrayVec<HintLine, { HINT_WINDOW as usize }>;

impl Home {
    #[cfg(test)]
    pub fn of(fingerprint: u64) -> Self {
        Home { fingerprint, stripe: 0, line: 0, first_line: 0 }
    }

    /// Where a key is looked for in a pool of this geometry.
    pub fn of_key(geometry: &Geometry, namespace: Namespace, key: BlockKey) -> Self {
        Table::of(geometry).homes(namespace).of(key)
    }

    pub fn hint_line(&self, geometry: &Geometry, step: u64) -> u64 {
        if step == 0 {
            return self.first_line;
        }
        let lines = geometry.hint_lines_per_stripe();
        u64::from(self.stripe) * lines + (self.line + step) % lines.max(1)
    }

    /// The lock of the stripe.
    pub fn lock(&self) -> LockId {
        FIRST_STRIPE_LOCK + self.stripe
    }
}

/// Mixes namespace and key to 64 well-spread bits. Keys are hashes already, but nothing forces callers to use good ones.
fn digest(namespace: Namespace, key: BlockKey) -> u64 {
    finish(mix(mix(DIGEST_START, namespace.0), key.0))
}

const DIGEST_START: u64 = 0x243f_6a88_85a3_08d3;

#[inline]
fn mix(mut state: u64, bytes: [u8; 16]) -> u64 {
    let words: [u64; 2] = bytemuck::cast(bytes);
    for word in words {
        let product = u128::from(state ^ word) * u128::from(0x9e37_79b9_7f4a_7c15_u64);
        state = (product as u64 ^ (product >> 64) as u64).wrapping_add(0xd1b5_4a32_d192_ed03).rotate_left(29);
    }
    state
}

#[inline]
fn finish(state: u64) -> u64 {
    state ^ state >> 32
}

impl Index {
    pub(super) fn home(&self, namespace: Namespace, key: BlockKey) -> Home {
        self.homes(namespace).of(key)
    }

    pub(super) fn hint_line(&self, home: &Home, step: u64) -> u64 {
        home.hint_line(self.host.geometry(), step)
    }

    pub(super) fn home_line(&self, home: &Home) -> Result<HintLine> {
        tombs_if_bad(self.host.lines().fetch(self.hint_line(home, 0)))
    }

    /// The window of a key up to the line with the first empty place; a line that does not verify is four tombs. `first` is its first line,
    /// as just fetched.
    ///
    /// After an empty place there is no hint of the key: it would have got that place, and a place becomes empty only in front of another
    /// empty one. Mostly the home line has one.
    fn window_from(&self, home: &Home, first: HintLine, window: &mut Window) -> Result<()> {
        window.clear();
        window.push(first);
        if has_empty(&first) {
            return Ok(());
        }
        let indexes: ArrayVec<u64, { HINT_WINDOW as usize }> = (1..HINT_WINDOW).map(|step| self.hint_line(home, step)).collect();
        let mut fetched = Vec::with_capacity(indexes.len());
        self.host.lines().fetch_many(&indexes, &mut fetched)?;
        for line in fetched {
            let line = tombs_if_bad(line)?;
            window.push(line);
            if has_empty(&line) {
                break;
            }
        }
        Ok(())
    }

    /// Cells that may hold the key: lines of the window are fetched one after the other, up to the first empty place.
    pub(super) fn candidates(&self, home: &Home, out: &mut Vec<u64>) -> Result<()> {
        for step in 0..HINT_WINDOW {
            let line = tombs_if_bad(self.host.lines().fetch(self.hint_line(home, step)))?;
            if self.matches(home, &line, out) {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Adds the cells of a line that may hold the key; true when the probe ends in this line.
    pub(super) fn matches(&self, home: &Home, line: &HintLine, out: &mut Vec<u64>) -> bool {
        for hint in line.iter() {
            match hint {
                Hint::Empty => return true,
                Hint::Cell { fingerprint, cell } if fingerprint == home.fingerprint && cell < self.cell_count => out.push(cell),
                _ => {}
            }
        }
        false
    }

    pub(super) fn lock_stripe(&self, home: &Home) -> Result<Option<LockGuard<'_>>> {
        if !locks_stripes() {
            return Ok(None);
        }
        self.locks.acquire(home.lock()).map(|guard| Some(usable(guard)))
    }

    /// Takes the locks of several stripes, each as soon as it comes, and calls `work` with the place of its home while it is held.
    pub(super) fn lock_stripes<'a>(
        &self,
        homes: impl ExactSizeIterator<Item = &'a Home>,
        mut work: impl FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        if !locks_stripes() {
            return (0..homes.len()).try_for_each(work);
        }
        let locks: Vec<LockId> = homes.map(Home::lock).collect();
        self.locks.acquire_each(&locks, |guard| {
            let guard = usable(guard);
            locks.iter().position(|&lock| lock == guard.lock()).map_or(Ok(()), &mut work)
        })
    }

    /// As [`Index::lock_stripe`] where that needs no other host; `None` where it would have to wait.
    pub(super) fn lock_stripe_if_here(&self, home: &Home) -> Result<Option<LockGuard<'_>>> {
        if !locks_stripes() {
            return Ok(None);
        }
        Ok(self.locks.acquire_if_here(home.lock())?.map(usable))
    }

    /// Publishes a hint for `cell` unless a block of the key is there. The caller holds the stripe's lock and has published WRITING.
    pub(super) fn insert(&self, home: &Home, namespace: Namespace, key: BlockKey, cell: u64) -> Result<Inserted> {
        let inserted = self.write_hint(home, namespace, key, cell, self.home_line(home)?);
        self.host.lines().fence_published();
        inserted
    }

    /// As [`Index::insert`], but the hint is written without a fence, which the caller makes before it gives the lock back. `first` is the
    /// key's home line, fetched since the lock was taken, WRITING was published and hints were written to it.
    pub(super) fn write_hint(&self, home: &Home, namespace: Namespace, key: BlockKey, cell: u64, first: HintLine) -> Result<Inserted> {
        let mut window = Window::new();
        self.window_from(home, first, &mut window)?;
        let (mut stale_same, mut free) = (None, None);
        for (step, line) in window.iter().enumerate() {
            for (place, hint) in line.iter().enumerate() {
                match hint {
                    Hint::Cell { fingerprint, cell: other } if fingerprint == home.fingerprint => {
                        match self.holds(other, namespace, key)? {
                            Some(inserted) if other != cell => return Ok(inserted),
                            _ => stale_same = stale_same.or(Some((step, place))),
                        }
                    }
                    Hint::Cell { .. } => {}
                    Hint::Empty | Hint::Tomb => free = free.or(Some((step, place))),
                }
            }
        }
        let chosen: Option<HintPosition> = match stale_same.or(free) {
            Some(place) => Some(place),
            None => self.stale(home, &window)?,
        };
        let Some((step, place)) = chosen else { return Ok(Inserted::Full) };
        window[step].set(place, Hint::Cell { fingerprint: home.fingerprint, cell });
        point!("cache.hint_chosen");
        let line = self.hint_line(home, step as u64);
        self.host.lines().write(line, window[step])?;
        point!("cache.hinted");
        Ok(Inserted::Done { line })
    }

    /// What a cell is to a publisher of the key: `None` when a hint that names it for the key is stale.
    fn holds(&self, cell: u64, namespace: Namespace, key: BlockKey) -> Result<Option<Inserted>> {
        if cell >= self.cell_count {
            return Ok(None);
        }
        // A line that is just being written may be that of a block of this key; one that stays damaged belongs to no key.
        let found: Option<Descriptor> = if_whole(self.host.inner.patiently(|| self.host.lines().fetch(cell)))?;
        let Some(found) = found else { return Ok(None) };
        let same = found.key == key.0 && found.namespace == namespace.0;
        let state = match found.state {
            Descriptor::WRITING | Descriptor::READY => Inserted::Exists,
            Descriptor::EVICTING => Inserted::Busy,
            _ => return Ok(None),
        };
        if !same {
            return Ok(None);
        }
        let fenced = self.fences.fences(std::iter::once(found.owner))?.of(found.owner, found.incarnation);
        Ok((fenced == Some(false)).then_some(state))
    }

    /// A descriptor, if its line verifies and the cell exists.
    pub(super) fn descriptor(&self, cell: u64) -> Result<Option<Descriptor>> {
        if cell >= self.cell_count {
            return Ok(None);
        }
        if_whole(self.host.lines().fetch(cell))
    }

    /// The first place in a window whose hint, of another key, names a cell that does not hold what it says.
    fn stale(&self, home: &Home, window: &Window) -> Result<Option<HintPosition>> {
        let hints =
            window.iter().enumerate().flat_map(|(step, line)| line.iter().enumerate().map(move |(place, hint)| ((step, place), hint)));
        let of_others = hints.filter_map(|(place, hint)| match hint {
            Hint::Cell { fingerprint, cell } if fingerprint != home.fingerprint => Some((place, fingerprint, cell)),
            _ => None,
        });
        let hints: ArrayVec<(HintPosition, u64, u64), { HINT_WINDOW as usize * HINTS_PER_LINE }> = of_others.collect();
        let known: Vec<u64> = hints.iter().map(|(_, _, cell)| *cell).filter(|&cell| cell < self.cell_count).collect();
        let mut fetched: Vec<Result<Descriptor>> = Vec::with_capacity(known.len());
        self.host.lines().fetch_many(&known, &mut fetched)?;
        let mut descriptors = fetched.into_iter();
        for (place, fingerprint, cell) in hints {
            if cell >= self.cell_count {
                return Ok(Some(place));
            }
            let named = match descriptors.next() {
                Some(Ok(found)) if !matches!(found.state, Descriptor::FREE | Descriptor::RETIRING) => {
                    digest(Namespace(found.namespace), BlockKey(found.key)).max(1) == fingerprint
                }
                Some(Ok(_)) => false,
                // Unreadable now, so perhaps in the middle of being written.
                _ => true,
            };
            if !named {
                return Ok(Some(place));
            }
        }
        Ok(None)
    }

    /// Removes the hint that names `cell` for the key, if there is one. The caller holds the stripe's lock.
    pub(super) fn remove(&self, home: &Home, cell: u64) -> Result<()> {
        let mut window = Window::new();
        self.window_from(home, self.home_line(home)?, &mut window)?;
        let mine = Hint::Cell { fingerprint: home.fingerprint, cell };
        let found = window.iter().enumerate().find_map(|(step, line)| line.iter().position(|hint| hint == mine).map(|place| (step, place)));
        let Some((step, place)) = found else { return Ok(()) };
        if mutant!("cache.remove_writes_empty") {
            window[step].set(place, Hint::Empty);
            return self.host.lines().publish(self.hint_line(home, step as u64), window[step]);
        }
        window[step].set(place, Hint::Tomb);
        let changed = sweep_tombs(&mut window, (step, place));
        // The last line first: a reader in between must never meet an empty place in front of one that is still used.
        for step in changed.rev() {
            self.host.lines().publish(self.hint_line(home, step as u64), window[step])?;
            point!("cache.hint_removed");
        }
        Ok(())
    }
}

fn locks_stripes() -> bool {
    !mutant!("cache.no_stripe_lock")
}

/// Nothing is to be repaired after an unclean end: every line is whole, and hints may be anything.
fn usable(mut guard: LockGuard<'_>) -> LockGuard<'_> {
    if guard.needs_repair() {
        guard.repaired();
    }
    guard
}

pub(super) fn has_empty(line: &HintLine) -> bool {
    line.iter().any(|hint| hint == Hint::Empty)
}

pub(super) fn tombs_if_bad(line: Result<HintLine>) -> Result<HintLine> {
    if_whole(line).map(or_tombs)
}

/// As [`tombs_if_bad`], of a line that is not there if it did not verify.
pub(super) fn or_tombs(line: Option<HintLine>) -> HintLine {
    line.unwrap_or_else(|| {
        let mut tombs = HintLine::default();
        (0..HINTS_PER_LINE).for_each(|place| tombs.set(place, Hint::Tomb));
        tombs
    })
}

/// Turns the tomb at `from`, and those right before it, into empty places if the place after it is empty; a probe that would have continued
/// to that place ends there anyway. Returns the steps of the lines that changed, the tomb's own among them.
fn sweep_tombs(window: &mut [HintLine], from: HintPosition) -> std::ops::Range<usize> {
    let at = |index: usize| (index / HINTS_PER_LINE, index % HINTS_PER_LINE);
    let last = from.0 * HINTS_PER_LINE + from.1;
    // The place after the window is not known, so the last place of it stays.
    let is_empty_behind = last + 1 < window.len() * HINTS_PER_LINE && window[at(last + 1).0].get(at(last + 1).1) == Hint::Empty;
    let mut first_step = from.0;
    if is_empty_behind {
        for index in (0..=last).rev() {
            let (step, place) = at(index);
            if window[step].get(place) != Hint::Tomb {
                break;
            }
            window[step].set(place, Hint::Empty);
            first_step = step;
        }
    }
    first_step..from.0 + 1
}

#[cfg(test)]
mod tests;
