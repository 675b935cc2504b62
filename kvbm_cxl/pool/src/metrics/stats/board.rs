// SPDX-License-Identifier: Apache-2.0
//! Adds up what the processes of a host counted, and publishes it.
//!
//! | what | who writes it |
//! |---|---|
//! | a row | the process whose tag is in it; once that is gone, the owner of the mutex |
//! | the bases, and which of them counts | the owner of the mutex |
//!
//! A row is moved to the base in one step, so that the death of the process that does it neither loses counts nor takes them twice: the sum
//! is composed in the base that does not count, one store makes it the one that counts and says which row is in it, and only then is the
//! row emptied. The next process finishes that first.

use super::{STATS, Stat};
use crate::error::{Error, Result};
use crate::fault::point;
use crate::host::local_mutex::{Asker, LocalMutex};
use crate::host::{Hooks, Host};
use crate::limits::MAX_PROCESSES;
use crate::media::{STATS_LINES, StatsLine};
use crate::metrics::{Kind, Metrics};
use crate::platform::LocalMemory;
use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Version of the structure: processes of different builds must not share a board that they lay out differently.
const VERSION: u32 = 2;

/// What one process counted, or all that are gone.
#[repr(C, align(64))]
struct CounterRow {
    /// Tag of the process; 0 = none.
    tag: AtomicU32,
    values: [AtomicU64; STATS],
}

impl Default for CounterRow {
    fn default() -> Self {
        CounterRow { tag: AtomicU32::new(0), values: std::array::from_fn(|_| AtomicU64::new(0)) }
    }
}

impl CounterRow {
    fn get(&self, stat: Stat) -> u64 {
        self.values.get(stat.place()).map_or(0, |value| value.load(Ordering::Relaxed))
    }

    fn set(&self, stat: Stat, value: u64) {
        if let Some(place) = self.values.get(stat.place()) {
            place.store(value, Ordering::Relaxed);
        }
    }

    /// Threads of a process may come here out of order, but no counter goes back.
    fn raise(&self, stat: Stat, value: u64) {
        match (stat.kind(), self.values.get(stat.place())) {
            (Kind::Gauge, Some(place)) => place.store(value, Ordering::Relaxed),
            (_, Some(place)) => drop(place.fetch_max(value, Ordering::Relaxed)),
            (_, None) => {}
        }
    }

    fn empty(&self) {
        self.values.iter().for_each(|value| value.store(0, Ordering::Relaxed));
        self.tag.store(0, Ordering::Release);
    }
}

#[repr(C, align(64))]
struct Area {
    version: AtomicU32,
    mutex: LocalMutex,
    published_at_ns: AtomicU64,
    /// The base that counts in bit 0; above it the number of the row that is in that base and not yet emptied, plus one.
    state: AtomicU64,
    bases: [CounterRow; 2],
    rows: [CounterRow; MAX_PROCESSES],
}

/// The rows of a host, as mapped by this process. Clones are the same board.
#[derive(Clone)]
pub struct StatsBoard {
    start: NonNull<Area>,
    _owner: Arc<dyn Any + Send + Sync>,
}

/// What the host calls of the counters: room for the board, which has nothing in the pool's memory but lines.
pub(crate) const HOOKS: Hooks = Hooks { name: "counters", local_bytes: |_| StatsBoard::LEN_BYTES, flush_residue: |_| Ok(()) };

// SAFETY: the area is only used through atomics, and `_owner` keeps it mapped.
unsafe impl Send for StatsBoard {}
// SAFETY: as above.
unsafe impl Sync for StatsBoard {}

impl StatsBoard {
    /// Bytes that a board takes; its start is aligned to 64.
    pub const LEN_BYTES: usize = size_of::<Area>();

    /// The board of `host`.
    ///
    /// # Errors
    /// [`Error::Invalid`] when another build laid it out.
    pub fn of(host: &Host) -> Result<Self> {
        let LocalMemory { start, owner, .. } = host.local_part(&HOOKS)?;
        // SAFETY: the part is as long as the board, begins on a multiple of 64 as every part does, and nothing else uses it.
        unsafe { Self::at(start, owner) }
    }

    /// The board at `start`, which is all zero or a board already; `owner` keeps it mapped.
    ///
    /// # Safety
    /// `start` is aligned to 64 and valid for reads and writes of [`StatsBoard::LEN_BYTES`] bytes for as long as `owner` lives, and
    /// every process of this host, and no other, uses those bytes in this way.
    ///
    /// # Errors
    /// [`Error::Invalid`] when another build laid it out.
    pub unsafe fn at(start: NonNull<u8>, owner: Arc<dyn Any + Send + Sync>) -> Result<Self> {
        let board = StatsBoard { start: start.cast(), _owner: owner };
        match board.area().version.compare_exchange(0, VERSION, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) | Err(VERSION) => Ok(board),
            Err(found) => Err(Error::Invalid(format!(
                "the local board of counters has version {found}, this build {VERSION}: stop the older processes of this machine first"
            ))),
        }
    }

    /// A board of its own, for a host with a single process or for tests that share it by cloning.
    pub fn private() -> Result<Self> {
        // Built in place, because it is larger than what a stack should carry around.
        let row = CounterRow::default;
        let area: Arc<Area> = Arc::new(Area {
            version: AtomicU32::new(0),
            mutex: LocalMutex::default(),
            published_at_ns: AtomicU64::new(0),
            state: AtomicU64::new(0),
            bases: std::array::from_fn(|_| row()),
            rows: std::array::from_fn(|_| row()),
        });
        let start = NonNull::from(&*area).cast::<u8>();
        // SAFETY: an `Area` is aligned to 64, made of atomics, and lives with the owner.
        unsafe { Self::at(start, area) }
    }

    fn area(&self) -> &Area {
        // SAFETY: `at` demands size and alignment; Area is atomics only, valid for any bytes.
        unsafe { self.start.as_ref() }
    }

    /// Takes over what `metrics` has counted by now; and when the last publish of this host is `interval_ms` ago and no other process is
    /// at it, publishes the sums. True when it did. To be called by every process about once in `interval_ms`; with 0 it publishes at
    /// once, as before leaving.
    ///
    /// # Errors
    /// [`Error::Fenced`] and [`Error::Closed`] as every operation of a host; the errors of the memory.
    pub fn publish_round(&self, host: &Host, metrics: &Metrics, interval_ms: u64) -> Result<bool> {
        // While this operation runs the host does not detach, so that no process takes the row of this one for a dead one's.
        let op = host.enter()?;
        let inner = &host.inner;
        let row = self.row(host)?;
        let is_mine = row.tag.load(Ordering::Acquire) == inner.tag;
        if is_mine {
            Stat::ALL.iter().for_each(|stat| row.raise(*stat, stat.of(metrics)));
        }
        let now_ns = inner.platform.now_ns();
        // A time to come can only be something that was left there.
        let since_ns = now_ns.checked_sub(self.area().published_at_ns.load(Ordering::Relaxed));
        if is_mine && since_ns.is_some_and(|since_ns| since_ns < interval_ms.saturating_mul(1_000_000)) {
            return Ok(false);
        }
        let is_alive = |tag| inner.is_tag_alive(tag);
        let asker = Asker { tag: inner.tag, platform: &*inner.platform, is_alive: &is_alive };
        if self.area().mutex.try_lock_or_inherit(&asker).is_none() {
            return Ok(false);
        }
        self.fold_gone(&is_alive);
        if !is_mine {
            self.claim(row, inner.tag, metrics);
        }
        let published = self.publish(host, op.incarnation());
        if published.is_ok() {
            self.area().published_at_ns.store(now_ns, Ordering::Relaxed);
        }
        self.area().mutex.unlock(&*inner.platform);
        published.map(|()| true)
    }

    fn row(&self, host: &Host) -> Result<&CounterRow> {
        let full =
            Error::Full { what: "the board of counters", limit: MAX_PROCESSES as u64, advice: "attach fewer processes of this machine" };
        self.area().rows.get(host.process_index()).ok_or(full)
    }

    /// Gives this process its row. What an earlier process of the same place left in it is in the base by now, or is moved there.
    fn claim(&self, row: &CounterRow, tag: u32, metrics: &Metrics) {
        if row.tag.load(Ordering::Acquire) != 0
            && let Some(index) = self.area().rows.iter().position(|known| std::ptr::eq(known, row))
        {
            self.fold(index);
        }
        Stat::ALL.iter().for_each(|stat| row.set(*stat, stat.of(metrics)));
        row.tag.store(tag, Ordering::Release);
    }

    /// Moves the rows of processes that are gone to the base. The caller holds the mutex.
    fn fold_gone(&self, is_alive: &dyn Fn(u32) -> bool) {
        self.finish_fold();
        for (index, row) in self.area().rows.iter().enumerate() {
            let tag = row.tag.load(Ordering::Acquire);
            if tag != 0 && !is_alive(tag) {
                self.fold(index);
            }
        }
    }

    /// The base that counts and the one that does not.
    fn bases(&self) -> (u64, &CounterRow, &CounterRow) {
        let current = self.area().state.load(Ordering::Acquire) & 1;
        let [zero, one] = &self.area().bases;
        if current == 0 { (0, zero, one) } else { (1, one, zero) }
    }

    /// Moves a row to the base. The caller holds the mutex and has finished the last fold.
    fn fold(&self, index: usize) {
        self.count_in(index);
        self.finish_fold();
    }

    /// Makes the base that does not count the sum of the other one and of a row, and then the one that counts.
    fn count_in(&self, index: usize) {
        let Some(row) = self.area().rows.get(index) else { return };
        let (current, base, next) = self.bases();
        for stat in Stat::ALL {
            let gone = if stat.kind() == Kind::Gauge { 0 } else { row.get(*stat) };
            next.set(*stat, base.get(*stat).wrapping_add(gone));
        }
        point!("stats.folding");
        self.area().state.store((index as u64 + 1) << 1 | (1 - current), Ordering::Release);
        point!("stats.folded");
    }

    fn finish_fold(&self) {
        let state = self.area().state.load(Ordering::Acquire);
        let Some(index) = (state >> 1).checked_sub(1) else { return };
        if let Some(row) = self.area().rows.get(index as usize) {
            row.empty();
        }
        self.area().state.store(state & 1, Ordering::Release);
    }

    /// What the host counted. The caller holds the mutex and has finished the last fold.
    fn total(&self, stat: Stat) -> u64 {
        let (_, base, _) = self.bases();
        self.area().rows.iter().fold(base.get(stat), |sum, row| sum.wrapping_add(row.get(stat)))
    }

    fn publish(&self, host: &Host, incarnation: u32) -> Result<()> {
        let line_count = host.lines().layout().geometry().stats_lines;
        let mut lines = [StatsLine { incarnation, ..StatsLine::default() }; STATS_LINES];
        for stat in Stat::ALL {
            let (line, counter) = (stat.place() / lines[0].counters.len(), stat.place() % lines[0].counters.len());
            if let Some(place) = lines.get_mut(line).and_then(|line| line.counters.get_mut(counter)) {
                *place = self.total(*stat);
            }
        }
        let first = u64::from(host.slot()) * u64::from(line_count);
        for (index, line) in (first..).zip(lines).take(line_count as usize) {
            host.lines().write(index, line)?;
            point!("stats.written");
        }
        host.lines().fence_published();
        Ok(())
    }
}

#[cfg(test)]
mod tests;
