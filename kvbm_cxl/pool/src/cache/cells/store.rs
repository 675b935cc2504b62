// SPDX-License-Identifier: Apache-2.0
//! What one process owns of the pool's cells, with what it knows for finding more: the state of the rooms under `cells`.

use super::Cells;
use super::give_back::LeftEmpty;
use super::recency::Recency;
use crate::background::held;
use crate::cache::policy::{PolicyKind, TickClock};
use crate::limits::CELL_CLASSES;
use crate::media::Geometry;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

/// The cells of one process, with the clock that their recency is counted by.
pub(in crate::cache) struct CellStore {
    cells: Mutex<Cells>,
    /// Incarnation of the host that `cells` follows; 0 before the first.
    incarnation: AtomicU32,
    pub(super) recency: Recency,
    /// What a [`TickClock`] of this process says.
    tick: AtomicU32,
    /// Claim line where the last chunk was found.
    claim_hint: AtomicU64,
    /// Classes of which the pool had no chunk left when this process last looked.
    exhausted: [AtomicBool; CELL_CLASSES],
    pub(super) left_empty: LeftEmpty,
}

impl CellStore {
    /// Nothing yet, in a pool of this geometry; the search for chunks begins at claim line `claim_hint`.
    pub fn new(geometry: &Geometry, policy: PolicyKind, claim_hint: u64) -> Self {
        CellStore {
            cells: Mutex::new(Cells::new(geometry, policy)),
            incarnation: AtomicU32::new(0),
            recency: Recency::default(),
            tick: AtomicU32::new(TickClock::default().now()),
            claim_hint: AtomicU64::new(claim_hint),
            exhausted: Default::default(),
            left_empty: LeftEmpty::default(),
        }
    }

    /// The cells, for as long as the guard lives.
    pub fn cells(&self) -> MutexGuard<'_, Cells> {
        held(&self.cells)
    }

    /// Incarnation of the host that the cells follow; 0 before the first.
    pub fn incarnation(&self) -> u32 {
        self.incarnation.load(Ordering::Acquire)
    }

    /// Follows the host to an incarnation; returns the one before.
    pub(super) fn follow(&self, incarnation: u32) -> u32 {
        self.incarnation.swap(incarnation, Ordering::AcqRel)
    }

    /// Ticks that went by, as the eviction policies count them.
    pub fn clock_now(&self) -> u32 {
        self.clock().now()
    }

    /// The clock of the eviction policies as it stands now.
    pub fn clock(&self) -> TickClock {
        TickClock::at(self.tick.load(Ordering::Relaxed))
    }

    /// Takes over a tick as it stands in the pool; true when the clock went on.
    pub(super) fn observe_tick(&self, number: u8) -> bool {
        let observed = |count| Some(TickClock::at(count).observe(number));
        // Every count has one behind it: this cannot fail.
        self.tick.fetch_update(Ordering::Relaxed, Ordering::Relaxed, observed).is_ok_and(|before| before != self.clock_now())
    }

    /// Claim line where the search for a chunk begins.
    pub(super) fn claim_hint(&self) -> u64 {
        self.claim_hint.load(Ordering::Relaxed)
    }

    /// Notes where a chunk was found.
    pub(super) fn found_chunk_at(&self, claim_line: u64) {
        self.claim_hint.store(claim_line, Ordering::Relaxed);
    }

    /// Whether it is worth looking for one more chunk of a class.
    pub fn may_claim(&self, class: usize) -> bool {
        self.exhausted.get(class).is_some_and(|exhausted| !exhausted.load(Ordering::Relaxed))
    }

    /// Notes whether the pool has no chunk of a class left.
    pub(super) fn has_exhausted(&self, class: usize, exhausted: bool) {
        if let Some(known) = self.exhausted.get(class) {
            known.store(exhausted, Ordering::Relaxed);
        }
    }
}
