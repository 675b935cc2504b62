// SPDX-License-Identifier: Apache-2.0
//! Why a lookup of a key hits or misses now.

use super::{BATCH, CacheView, CellInfo, CellState, ChunkState, Home, fetch_all};
use crate::cache::{BlockKey, Namespace};
use crate::error::Result;
use crate::limits::HINT_WINDOW;
use crate::media::{Descriptor, Hint, HintLine};

/// Namespaces and cells without hint that an explanation names at most.
const MOST_NAMED: usize = 64;

/// What a cell, or a hint that names it, does for a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The lookup hits, unless something changes before the pull.
    Hit,
    /// The block is complete and its hint is gone: its owner's scrub puts it back.
    NoHint,
    /// The hint stands after an empty place, where every probe ends.
    BehindTheEnd,
    /// The hint names a cell that the pool does not have.
    NoSuchCell,
    /// The descriptor does not verify.
    Damaged,
    /// The cell is free: the hint is stale.
    Free,
    /// A process is just publishing the block.
    Writing,
    /// The block is just being evicted.
    Evicting,
    /// The cell is on its way out of quarantine: its content is void.
    Retiring,
    /// The cell holds a block of another key: the hint is stale, or its fingerprint is the same by chance.
    OtherKey,
    /// The cell holds a block of the same key in another namespace.
    OtherNamespace,
    /// The owner's incarnation is fenced: what it published is void until its chunk is adopted.
    FencedOwner {
        /// A host that is there claims the chunk, so that the block is about to be stamped again or is in quarantine.
        is_claimed: bool,
    },
    /// The fences cannot be read: everything is void.
    FencesUnknown,
    /// The descriptor tells of more bytes than the cell has.
    TooLong,
}

impl Verdict {
    /// A stable word for programs.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Hit => "hit",
            Verdict::NoHint => "no-hint",
            Verdict::BehindTheEnd => "behind-the-end",
            Verdict::NoSuchCell => "no-such-cell",
            Verdict::Damaged => "damaged",
            Verdict::Free => "free",
            Verdict::Writing => "writing",
            Verdict::Evicting => "evicting",
            Verdict::Retiring => "retiring",
            Verdict::OtherKey => "other-key",
            Verdict::OtherNamespace => "other-namespace",
            Verdict::FencedOwner { is_claimed: true } => "fenced-owner-adopted",
            Verdict::FencedOwner { is_claimed: false } => "fenced-owner",
            Verdict::FencesUnknown => "fences-unknown",
            Verdict::TooLong => "too-long",
        }
    }

    /// How much it tells: the verdict nearest to a hit says most about why there is none.
    fn rank(self) -> u32 {
        match self {
            Verdict::Hit => 0,
            Verdict::FencedOwner { .. } | Verdict::FencesUnknown => 1,
            Verdict::TooLong => 2,
            Verdict::Writing | Verdict::Evicting => 3,
            Verdict::NoHint | Verdict::BehindTheEnd => 4,
            Verdict::Damaged => 5,
            Verdict::OtherNamespace => 6,
            Verdict::Retiring | Verdict::Free => 7,
            Verdict::OtherKey | Verdict::NoSuchCell => 8,
        }
    }
}

/// A hint with the fingerprint of the key, or a cell with the block and no hint.
#[derive(Clone, Debug)]
pub struct HintSeen {
    /// Hint line in which it stands; `None` of a cell that no hint names.
    pub line: Option<u64>,
    /// The cell that it names.
    pub cell: u64,
    /// What it does for the lookup.
    pub verdict: Verdict,
    /// The cell, if the pool has it.
    pub info: Option<CellInfo>,
}

/// What became of a key.
#[derive(Clone, Debug)]
pub struct Explanation {
    /// The namespace asked for.
    pub namespace: Namespace,
    /// The key asked for.
    pub key: BlockKey,
    /// First hint line of the key's window.
    pub home_line: u64,
    /// Hint lines of the window that do not verify, each of which counts as four tombs: a hint may be lost in them.
    pub damaged_lines: u64,
    /// Places of the window that are free for a new hint.
    pub free_places: u64,
    /// Everything found about the key.
    pub seen: Vec<HintSeen>,
    /// Every descriptor was looked at: otherwise cells without hints and other namespaces are not known.
    pub is_scanned: bool,
    /// Other namespaces that have a block of the same key.
    pub elsewhere: Vec<Namespace>,
}

impl Explanation {
    /// What tells most about the lookup; `None` when nothing was found about the key.
    pub fn answer(&self) -> Option<&HintSeen> {
        self.seen.iter().min_by_key(|seen| seen.verdict.rank())
    }

    /// A lookup hits now.
    pub fn is_hit(&self) -> bool {
        self.answer().is_some_and(|seen| seen.verdict == Verdict::Hit)
    }
}

impl CacheView {
    /// Says what a lookup of a key meets. With `scan` every descriptor is looked at for blocks that no hint names and for the same key in
    /// other namespaces.
    ///
    /// # Errors
    /// Those of the memory, except where only single lines fail.
    pub fn why(&self, namespace: Namespace, key: BlockKey, scan: bool) -> Result<Explanation> {
        let home = Home::of_key(self.geometry(), namespace, key);
        let mut told = Explanation {
            namespace,
            key,
            home_line: home.hint_line(self.geometry(), 0),
            damaged_lines: 0,
            free_places: 0,
            seen: Vec::new(),
            is_scanned: scan,
            elsewhere: Vec::new(),
        };
        self.follow_hints(&home, &mut told)?;
        if scan {
            self.scan_for(&mut told)?;
        }
        Ok(told)
    }

    /// Namespaces of which some cell holds the key, complete or not; found by looking at every descriptor. At most 64 are named.
    ///
    /// # Errors
    /// Those of the memory, except where only single lines fail.
    pub fn namespaces_of(&self, key: BlockKey) -> Result<Vec<Namespace>> {
        let mut namespaces = Vec::new();
        self.scan(|_, found| {
            let namespace = Namespace(found.namespace);
            let is_block = matches!(found.state, Descriptor::WRITING | Descriptor::READY | Descriptor::EVICTING);
            if is_block && found.key == key.0 && namespaces.len() < MOST_NAMED && !namespaces.contains(&namespace) {
                namespaces.push(namespace);
            }
        })?;
        Ok(namespaces)
    }

    /// Cells that hold complete blocks which `wanted` says, also those that are just being evicted.
    ///
    /// # Errors
    /// Those of the memory, except where only single lines fail.
    pub fn blocks_that(&self, wanted: impl Fn(Namespace, BlockKey) -> bool) -> Result<Vec<u64>> {
        let mut cells = Vec::new();
        self.scan(|cell, found| {
            let is_block = matches!(found.state, Descriptor::READY | Descriptor::EVICTING);
            if is_block && wanted(Namespace(found.namespace), BlockKey(found.key)) {
                cells.push(cell);
            }
        })?;
        Ok(cells)
    }

    fn scan(&self, mut each: impl FnMut(u64, &Descriptor)) -> Result<()> {
        for first in (0..self.cell_count()).step_by(BATCH as usize) {
            let cells: Vec<u64> = (first..self.cell_count().min(first + BATCH)).collect();
            let found: Vec<Option<Descriptor>> = fetch_all(&self.lines, &cells)?;
            cells.iter().zip(&found).for_each(|(&cell, found)| {
                if let Some(found) = found {
                    each(cell, found);
                }
            });
        }
        Ok(())
    }

    fn follow_hints(&self, home: &Home, told: &mut Explanation) -> Result<()> {
        let indexes: Vec<u64> = (0..HINT_WINDOW).map(|step| home.hint_line(self.geometry(), step)).collect();
        let window: Vec<Option<HintLine>> = fetch_all(&self.lines, &indexes)?;
        let mut has_ended = false;
        for (&number, line) in indexes.iter().zip(&window) {
            let Some(line) = line else {
                told.damaged_lines += 1;
                continue;
            };
            for hint in line.iter() {
                match hint {
                    Hint::Empty => {
                        has_ended = true;
                        told.free_places += 1;
                    }
                    Hint::Tomb => told.free_places += 1,
                    Hint::Cell { fingerprint, cell } if fingerprint == home.fingerprint => {
                        let info = self.cells(cell, 1)?.pop();
                        let verdict = match &info {
                            _ if has_ended => Verdict::BehindTheEnd,
                            None => Verdict::NoSuchCell,
                            Some(info) => self.judge(info, told.namespace, told.key)?,
                        };
                        told.seen.push(HintSeen { line: Some(number), cell, verdict, info });
                    }
                    Hint::Cell { .. } => {}
                }
            }
        }
        Ok(())
    }

    fn judge(&self, cell: &CellInfo, namespace: Namespace, key: BlockKey) -> Result<Verdict> {
        let is_same = (cell.key(), cell.namespace()) == (key, namespace);
        Ok(match cell.state {
            CellState::Damaged => Verdict::Damaged,
            CellState::Free => Verdict::Free,
            CellState::Retiring => Verdict::Retiring,
            _ if cell.key() == key && !is_same => Verdict::OtherNamespace,
            _ if !is_same => Verdict::OtherKey,
            CellState::Writing => Verdict::Writing,
            CellState::Evicting => Verdict::Evicting,
            CellState::Ready if self.hosts.is_hidden(cell.descriptor.owner) => Verdict::FencesUnknown,
            CellState::Ready if cell.is_void => {
                Verdict::FencedOwner { is_claimed: matches!(self.chunk(cell.chunk)?.state, ChunkState::Claimed(_)) }
            }
            CellState::Ready if u64::from(cell.descriptor.len_bytes) > cell.cell_bytes => Verdict::TooLong,
            CellState::Ready => Verdict::Hit,
        })
    }

    fn scan_for(&self, told: &mut Explanation) -> Result<()> {
        let mut cells = Vec::new();
        self.scan(|cell, found| {
            if found.state == Descriptor::READY && found.key == told.key.0 {
                cells.push(cell);
            }
        })?;
        for cell in cells {
            let Some(info) = self.cells(cell, 1)?.pop().filter(|info| info.key() == told.key) else { continue };
            if info.namespace() != told.namespace {
                let is_new = info.is_served() && !told.elsewhere.contains(&info.namespace());
                if is_new && told.elsewhere.len() < MOST_NAMED {
                    told.elsewhere.push(info.namespace());
                }
            } else if told.seen.len() < MOST_NAMED && told.seen.iter().all(|seen| seen.cell != cell) {
                let verdict = match self.judge(&info, told.namespace, told.key)? {
                    Verdict::Hit => Verdict::NoHint,
                    other => other,
                };
                told.seen.push(HintSeen { line: None, cell, verdict, info: Some(info) });
            }
        }
        Ok(())
    }
}
