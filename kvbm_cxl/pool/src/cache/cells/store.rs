// SPDX-License-Identifier: Apache-2.0
//! What one process owns of the pool's cells, with what it knows for finding more: the state of the rooms under `cells`.

use super::Cells;
use super::claims::CellClaimant;
use super::local::LocalCells;
use crate::background::held;
use crate::cache::locks::CacheLocks;
use crate::cache::observe::events::Events;
use crate::cache::policy::{PolicyKind, TickClock};
use crate::error::{Error, Result};
use crate::host::{Host, Op};
use crate::limits::{CELL_CLASSES, MAX_SLOTS};
use crate::metrics::Metrics;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

pub(in crate::cache) struct Recency {
    /// Up to which incarnation each slot's hosts are gone, so that their ticks tell nothing.
    pub(super) over: [AtomicU32; MAX_SLOTS],
    pub(super) learnt: AtomicU64,
}

impl Default for Recency {
    fn default() -> Self {
        Recency { over: [const { AtomicU32::new(0) }; MAX_SLOTS], learnt: AtomicU64::new(0) }
    }
}

impl Recency {
    /// Whether the ticks in a pin line of this slot and incarnation tell something, as far as this process has heard.
    pub fn counts(&self, slot: usize, incarnation: u32) -> bool {
        self.over.get(slot).is_some_and(|over| over.load(Ordering::Relaxed) < incarnation)
    }
}

/// The cells of one process, with the clock that their recency is counted by.
pub(in crate::cache) struct CellStore {
    pub(in crate::cache) host: Host,
    pub(in crate::cache) local: LocalCells,
    pub(in crate::cache) locks: CacheLocks,
    pub(in crate::cache) events: Events,
    pub(in crate::cache) metrics: Arc<Metrics>,
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
    /// Chunks in which this process found nothing, with the claimants that they had then. Who writes to such a chunk claims it first.
    pub(super) left_empty: Mutex<HashMap<u64, Vec<CellClaimant>>>,
}

impl CellStore {
    /// Nothing yet. Hosts begin their search for chunks at different claim lines.
    pub fn new(locks: &CacheLocks, local: &LocalCells, events: &Events, policy: PolicyKind) -> Self {
        let (host, geometry) = (&locks.host, locks.host.geometry());
        let claim_hint = geometry.cell_claim_lines() * u64::from(host.slot()) / u64::from(geometry.slots);
        CellStore {
            host: host.clone(),
            local: local.clone(),
            locks: locks.clone(),
            events: events.clone(),
            metrics: locks.metrics.clone(),
            cells: Mutex::new(Cells::new(geometry, policy)),
            incarnation: AtomicU32::new(0),
            recency: Recency::default(),
            tick: AtomicU32::new(TickClock::default().now()),
            claim_hint: AtomicU64::new(claim_hint),
            exhausted: Default::default(),
            left_empty: Mutex::default(),
        }
    }

    pub fn cells(&self) -> MutexGuard<'_, Cells> {
        held(&self.cells)
    }

    /// Incarnation of the host that the cells follow; 0 before the first.
    pub fn incarnation(&self) -> u32 {
        self.incarnation.load(Ordering::Acquire)
    }

    /// Notes the incarnation that the cells follow; returns the one before.
    pub(super) fn set_incarnation(&self, incarnation: u32) -> u32 {
        self.incarnation.swap(incarnation, Ordering::AcqRel)
    }

    pub fn clock_now(&self) -> u32 {
        self.clock().now()
    }

    /// The clock of the eviction policies as it stands now.
    pub fn clock(&self) -> TickClock {
        TickClock::at(self.tick.load(Ordering::Relaxed))
    }

    /// Takes over a tick as it stands in the pool; true when the clock advanced.
    pub(super) fn observe_tick(&self, number: u8) -> bool {
        let observed = |count| Some(TickClock::at(count).observe(number));
        // Every count has a successor: this cannot fail.
        self.tick.fetch_update(Ordering::Relaxed, Ordering::Relaxed, observed).is_ok_and(|before| before != self.clock_now())
    }

    pub(super) fn claim_hint(&self) -> u64 {
        self.claim_hint.load(Ordering::Relaxed)
    }

    pub(super) fn found_chunk_at(&self, claim_line: u64) {
        self.claim_hint.store(claim_line, Ordering::Relaxed);
    }

    pub fn may_claim(&self, class: usize) -> bool {
        self.exhausted.get(class).is_some_and(|exhausted| !exhausted.load(Ordering::Relaxed))
    }

    pub(super) fn has_exhausted(&self, class: usize, exhausted: bool) {
        if let Some(known) = self.exhausted.get(class) {
            known.store(exhausted, Ordering::Relaxed);
        }
    }

    /// Begins work that publishes lines of this process's cells, after a re-join under the new incarnation.
    pub(in crate::cache) fn work(&self) -> Result<Op<'_>> {
        for _ in 0..2 {
            let op = self.host.enter()?;
            if op.incarnation() == self.incarnation() {
                return Ok(op);
            }
            drop(op);
            drop(self.lock_claims()?);
        }
        Err(Error::Fenced { slot: self.host.slot(), incarnation: self.host.incarnation() })
    }
}
