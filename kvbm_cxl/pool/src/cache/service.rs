// SPDX-License-Identifier: Apache-2.0
//! The upkeep of the cache: periodic work in the background of each process.

use super::cells::FoundBlock;
use super::cells::recency::CHUNKS_LEARNT_PER_ROUND;
use super::cells::store::CellStore;
use super::index::Inserted;
use super::{BlockKey, Cache, Inner, Namespace, cells::evict};
use crate::background::{Background, FailedRound, FailedRounds};
use crate::copy::CopyEngine;
use crate::cpus::ThreadKind;
use crate::error::{Error, Result};
use crate::fault::point;
use crate::host::Host;
use crate::limits::CELL_CLASSES;
use crate::metrics::stats::StatsBoard;
use crate::metrics::{AheadFate, Engine, FailureReason, Metrics};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Chunks taken over in one round.
const CHUNKS_PER_ROUND: usize = 4;
/// Blocks whose hints are looked after in one round.
const SCRUBBED_PER_ROUND: usize = 32;

pub(super) struct UpkeepState {
    host: Host,
    metrics: Arc<Metrics>,
    engine: Arc<dyn CopyEngine>,
    upkeep_at_ns: AtomicU64,
    /// The cell after the last one whose hint was checked.
    scrubbed: AtomicU64,
    board: StatsBoard,
}

impl UpkeepState {
    /// Before the first round.
    pub fn new(host: &Host, metrics: &Arc<Metrics>, engine: &Arc<dyn CopyEngine>) -> Result<Self> {
        Ok(UpkeepState {
            host: host.clone(),
            metrics: metrics.clone(),
            engine: engine.clone(),
            upkeep_at_ns: AtomicU64::new(0),
            scrubbed: AtomicU64::new(0),
            board: StatsBoard::of(host)?,
        })
    }

    /// Whether it is time for the work of each `period_ms`; notes it.
    fn is_time(&self, period_ms: u64) -> bool {
        let now_ns = self.host.platform().now_ns().max(1);
        let last_ns = self.upkeep_at_ns.load(Ordering::Relaxed);
        let is_time = last_ns == 0 || now_ns.saturating_sub(last_ns) >= period_ms * 1_000_000;
        if is_time {
            self.upkeep_at_ns.store(now_ns, Ordering::Relaxed);
        }
        is_time
    }

    /// Takes over what the copy engine counts, with the pages of the device that it read ahead.
    fn count_copies(&self) {
        for copied in self.engine.counters() {
            if let Some(engine) = Engine::ALL.into_iter().find(|engine| engine.text() == copied.engine) {
                let counter = self.metrics.copy_bytes_total.of(engine);
                counter.add((copied.published_bytes + copied.pulled_bytes).saturating_sub(counter.get()));
            }
            if copied.engine == Engine::Cuda.text() {
                let counter = &self.metrics.gpu_unflushed_bytes_total;
                counter.add(copied.unflushed_bytes.saturating_sub(counter.get()));
                self.metrics.gpu_registered_bytes.set(copied.registered_bytes as i64);
                self.metrics.gpu_queued_bytes.set(copied.queued_bytes as i64);
            }
        }
        let pages = self.engine.ahead_pages();
        let known = [(AheadFate::Given, pages.given), (AheadFate::Used, pages.used), (AheadFate::Wasted, pages.wasted)];
        for (fate, count) in known {
            let counter = self.metrics.ahead_pages_total.of(fate);
            counter.add(count.saturating_sub(counter.get()));
        }
    }

    fn count_damage(&self) {
        let counts = self.host.damage_counts();
        let known = [(&self.metrics.lock_damaged_total, counts.failed_calls), (&self.metrics.healed_lines_total, counts.healed_lines)];
        known.into_iter().for_each(|(counter, count)| counter.add(count.saturating_sub(counter.get())));
        for (reason, count) in FailureReason::ALL.into_iter().zip(self.host.failed_rounds().counts()) {
            let counter = self.metrics.failed_rounds_total.of(reason);
            counter.add(count.saturating_sub(counter.get()));
        }
    }

    fn publish_counters(&self, period_ms: u64) -> Result<()> {
        self.board.publish_round(&self.host, &self.metrics, period_ms).map(drop)
    }
}

impl CellStore {
    pub(super) fn release_quarantine(&self) -> Result<()> {
        let chunks = self.cells().chunks_in_quarantine();
        for chunk in chunks {
            let op = self.work()?;
            self.release(&op, chunk)?;
        }
        Ok(())
    }
}

impl Inner {
    pub(super) fn service_round(&self) -> Result<()> {
        // Also of a fenced host: the GPU has ended, and pins and cells are given back.
        self.flights.advance();
        drop(self.store.work()?);
        self.request_next()?;
        self.answer_asks()?;
        self.keep_water()?;
        self.metrics.pins.set(self.pins.cells() as i64);
        if !self.upkeep.is_time(self.config.upkeep_ms) {
            return Ok(());
        }
        self.follow_ticks()?;
        self.pins.reap_pins()?;
        self.store.sweep(CHUNKS_PER_ROUND)?;
        self.store.adopt_abandoned(CHUNKS_PER_ROUND)?;
        self.store.release_quarantine()?;
        self.scrub()?;
        self.metrics.quarantined_cells.set(self.store.cells().count_quarantined() as i64);
        self.metrics.moved_files.set(self.host.moved_files() as i64);
        self.upkeep.count_copies();
        self.upkeep.count_damage();
        self.upkeep.publish_counters(self.config.upkeep_ms)?;
        // Last, because only hits depend on it: pin lines that cannot be read keep nothing else from being done.
        self.store.learn_uses(CHUNKS_LEARNT_PER_ROUND)
    }

    /// Evicts ahead of the need, once the pool has no chunk left for this process.
    fn keep_water(&self) -> Result<()> {
        for class in 0..CELL_CLASSES {
            let (free, ready, all) = self.store.cells().counts(class);
            if all == 0 || self.store.may_claim(class) || free * 100 >= all * u64::from(self.config.low_water_percent) {
                continue;
            }
            let wanted = (all * u64::from(self.config.high_water_percent)).div_ceil(100).saturating_sub(free).min(ready);
            self.evict(class, (wanted as usize).min(8 * evict::BATCH))?;
        }
        Ok(())
    }

    /// Looks after the hints of some of this process's blocks: one without hint gets it back, or goes if another host has the same block.
    fn scrub(&self) -> Result<()> {
        let from = self.upkeep.scrubbed.load(Ordering::Relaxed);
        let blocks = self.store.cells().ready_from(from, SCRUBBED_PER_ROUND);
        let next = blocks.last().map_or(0, |(cell, _)| cell + 1);
        self.upkeep.scrubbed.store(if blocks.len() < SCRUBBED_PER_ROUND { 0 } else { next }, Ordering::Relaxed);
        let mut named = Vec::new();
        for (cell, found) in blocks {
            let (namespace, key) = (Namespace(found.namespace), BlockKey(found.key));
            let home = self.index.home(namespace, key);
            named.clear();
            self.index.candidates(&home, &mut named)?;
            if named.contains(&cell) {
                continue;
            }
            let guard = self.index.lock_stripe(&home)?;
            point!("cache.scrub");
            let inserted = self.index.insert(&home, namespace, key, cell)?;
            drop(guard);
            if matches!(inserted, Inserted::Exists) {
                self.remove_each(vec![FoundBlock::new(cell, &found)], evict::Reason::Duplicate)?;
            }
        }
        Ok(())
    }

    pub(super) fn shut(self) -> Result<()> {
        self.pins.close_notes();
        self.upkeep.count_copies();
        // What counts may be counted with further, for something else: this process holds nothing of the cache any more.
        self.metrics.pins.set(0);
        self.metrics.quarantined_cells.set(0);
        // The counts of this process stay in the host's sum; a host that is fenced has nothing to publish.
        let mut result = self.upkeep.publish_counters(0);
        let mine: Vec<u64> = self.store.cells().chunks().collect();
        for chunk in mine {
            if result.is_ok() && self.store.cells().is_all_free(chunk) {
                result = self.store.give_back(chunk).map(drop);
            }
            self.store.cells().remove_chunk(chunk);
            // The next sweep of this host takes it over, unless a process has it already: a chunk that was given back may be another's by
            // now.
            self.store.local.disown(chunk, self.host.inner.tag);
        }
        result
    }
}

impl Cache {
    /// One round of the upkeep: requests of others, eviction ahead of the need; and less often, recency, pins of processes that died,
    /// chunks that others left, quarantine, hints, counters. It waits for locks, and these need the host's own service: never call it on
    /// the thread that runs that one.
    ///
    /// # Errors
    /// [`Error::Fenced`] and [`Error::Timeout`], after which the next round continues; those of the memory.
    pub fn service_round(&self) -> Result<()> {
        self.inner.service_round()
    }

    /// Runs the upkeep until the result is dropped, on a thread of its own, and one that watches [queued](super::queued) copies once there
    /// are any. A round that fails is recorded in [`crate::host::Host::failed_rounds`], and the thread continues.
    ///
    /// # Errors
    /// [`Error::Os`] when no thread can be started.
    pub fn serve(&self) -> Result<Upkeep> {
        let cache = self.clone();
        let failed_rounds = self.inner.host.failed_rounds().clone();
        let round = move || match cache.service_round() {
            Ok(()) => Some(Duration::from_millis(cache.inner.config.service_ms)),
            Err(Error::Closed) => None,
            // Whatever it is: the calls of this process meet it too.
            Err(error) => {
                cache.inner.host.failed_rounds().record("the upkeep of the cache", &error);
                Some(Duration::from_millis(cache.inner.config.upkeep_ms))
            }
        };
        let cpus = self.inner.host.config().cpus.set_of(ThreadKind::Upkeep);
        let thread = Background::start("cxl-cache", "start the upkeep thread of the cache", cpus, round)?;
        self.allow_watcher(cpus.cloned());
        Ok(Upkeep { _thread: thread, cache: self.clone(), failed_rounds })
    }
}

/// The upkeep on threads of its own; dropping it stops them.
pub struct Upkeep {
    _thread: Background,
    cache: Cache,
    failed_rounds: Arc<FailedRounds>,
}

impl Drop for Upkeep {
    fn drop(&mut self) {
        self.cache.end_watcher();
    }
}

impl Upkeep {
    /// The latest round that failed of this process's background threads on this host; a later round that went well does not clear it.
    pub fn last_error(&self) -> Option<FailedRound> {
        self.failed_rounds.last()
    }
}
