// SPDX-License-Identifier: Apache-2.0
//! The upkeep of the cache: what has to be done now and then, in the background of each process.

use super::cells::FoundBlock;
use super::cells::recency::CHUNKS_LEARNT_PER_ROUND;
use super::index::Inserted;
use super::{BlockKey, Cache, Inner, Namespace, cells::evict};
use crate::background::{Background, FailedRound, FailedRounds};
use crate::cpus::ThreadKind;
use crate::error::{Error, Result};
use crate::fault::point;
use crate::limits::CELL_CLASSES;
use crate::metrics::stats::StatsBoard;
use crate::metrics::{AheadFate, Engine, FailureReason};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Chunks taken over in one round.
const CHUNKS_PER_ROUND: usize = 4;
/// Blocks whose hints are looked after in one round.
const SCRUBBED_PER_ROUND: usize = 32;

/// How far the upkeep of this process has come, and where it publishes its counters.
pub(super) struct Progress {
    /// When it last did what it does less often.
    upkeep_at_ns: AtomicU64,
    /// The cell behind the last one whose hint was looked after.
    scrubbed: AtomicU64,
    board: StatsBoard,
}

impl Progress {
    /// At the beginning.
    pub fn new(board: StatsBoard) -> Self {
        Progress { upkeep_at_ns: AtomicU64::new(0), scrubbed: AtomicU64::new(0), board }
    }
}

impl Inner {
    /// One round of the upkeep.
    pub(super) fn service_round(&self) -> Result<()> {
        // Also of a fenced host: the GPU has ended, and pins and cells are given back.
        self.flights.advance();
        drop(self.work()?);
        self.ask_next()?;
        self.answer_asks()?;
        self.keep_water()?;
        self.metrics.pins.set(self.pins.cells() as i64);
        let now_ns = self.host.platform().now_ns().max(1);
        let last_ns = self.progress.upkeep_at_ns.load(Ordering::Relaxed);
        if last_ns != 0 && now_ns.saturating_sub(last_ns) < self.config.upkeep_ms * 1_000_000 {
            return Ok(());
        }
        self.progress.upkeep_at_ns.store(now_ns, Ordering::Relaxed);
        self.follow_ticks()?;
        self.reap_pins()?;
        self.sweep(CHUNKS_PER_ROUND)?;
        self.adopt_abandoned(CHUNKS_PER_ROUND)?;
        self.release_quarantine()?;
        self.scrub()?;
        self.metrics.quarantined_cells.set(self.store.cells().quarantined() as i64);
        self.metrics.moved_files.set(self.host.moved_files() as i64);
        self.count_copies();
        self.count_damage();
        self.progress.board.publish_round(&self.host, &self.metrics, self.config.upkeep_ms)?;
        // Last, because only hits depend on it: pin lines that cannot be read keep nothing else from being done.
        self.learn_uses(CHUNKS_LEARNT_PER_ROUND)
    }

    /// Takes over what the copy engine counts by itself.
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
        self.count_ahead();
    }

    /// Takes over what is counted of the device's pages that were asked for.
    fn count_ahead(&self) {
        let pages = self.engine.ahead_pages();
        let known = [(AheadFate::Given, pages.given), (AheadFate::Used, pages.used), (AheadFate::Wasted, pages.wasted)];
        for (fate, count) in known {
            let counter = self.metrics.ahead_pages_total.of(fate);
            counter.add(count.saturating_sub(counter.get()));
        }
    }

    /// Takes over what the host layer counts by itself.
    fn count_damage(&self) {
        let counts = self.host.damage_counts();
        let known = [(&self.metrics.lock_damaged_total, counts.failed_calls), (&self.metrics.healed_lines_total, counts.healed_lines)];
        known.into_iter().for_each(|(counter, count)| counter.add(count.saturating_sub(counter.get())));
        for (reason, count) in FailureReason::ALL.into_iter().zip(self.host.failed_rounds().counts()) {
            let counter = self.metrics.failed_rounds_total.of(reason);
            counter.add(count.saturating_sub(counter.get()));
        }
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

    /// Looks whether cells may leave quarantine.
    pub(super) fn release_quarantine(&self) -> Result<()> {
        let chunks = self.store.cells().chunks_in_quarantine();
        for chunk in chunks {
            let op = self.work()?;
            self.release(&op, chunk)?;
        }
        Ok(())
    }

    /// Looks after the hints of some of this process's blocks: one without hint gets it back, or goes if another host has the same block.
    fn scrub(&self) -> Result<()> {
        let from = self.progress.scrubbed.load(Ordering::Relaxed);
        let blocks = self.store.cells().ready_from(from, SCRUBBED_PER_ROUND);
        let next = blocks.last().map_or(0, |(cell, _)| cell + 1);
        self.progress.scrubbed.store(if blocks.len() < SCRUBBED_PER_ROUND { 0 } else { next }, Ordering::Relaxed);
        let mut named = Vec::new();
        for (cell, found) in blocks {
            let (namespace, key) = (Namespace(found.namespace), BlockKey(found.key));
            let home = self.home(namespace, key);
            named.clear();
            self.candidates(&home, &mut named)?;
            if named.contains(&cell) {
                continue;
            }
            let guard = self.lock_stripe(&home)?;
            point!("cache.scrub");
            let inserted = self.insert(&home, namespace, key, cell)?;
            drop(guard);
            if matches!(inserted, Inserted::Exists) {
                self.remove_duplicate(FoundBlock::new(cell, &found))?;
            }
        }
        Ok(())
    }

    /// Ends this process's part in the cache.
    pub(super) fn shut(self) -> Result<()> {
        self.close_notes();
        self.count_copies();
        // What counts may be counted with further, for something else: this process holds nothing of the cache any more.
        self.metrics.pins.set(0);
        self.metrics.quarantined_cells.set(0);
        // The counts of this process go on in the host's sum; a host that is fenced has nothing to publish.
        let mut result = self.progress.board.publish_round(&self.host, &self.metrics, 0).map(drop);
        let mine: Vec<u64> = self.store.cells().chunks().collect();
        for chunk in mine {
            if result.is_ok() && self.store.cells().is_all_free(chunk) {
                result = self.give_back(chunk).map(drop);
            }
            self.store.cells().remove_chunk(chunk);
            // The next sweep of this host takes it over, unless a process has it already: what was given back may be another's by now.
            self.local.disown(chunk, self.host.inner.tag);
        }
        result
    }
}

impl Cache {
    /// One round of the upkeep: requests of others, eviction ahead of the need; and less often, recency, pins of processes that died,
    /// chunks that others left behind, quarantine, hints, counters. It waits for locks, and these need the host's own service: never call
    /// it on the thread that runs that one.
    ///
    /// # Errors
    /// [`Error::Fenced`] and [`Error::Timeout`], after which the next round goes on; those of the memory.
    pub fn service_round(&self) -> Result<()> {
        self.inner.service_round()
    }

    /// Runs the upkeep until the result is dropped, on a thread of its own, and one that looks after what is
    /// [queued](super::queued) once there is something. A round that fails is recorded in
    /// [`crate::host::Host::failed_rounds`], and the thread goes on.
    ///
    /// # Errors
    /// [`Error::Os`] when no thread can be had.
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
