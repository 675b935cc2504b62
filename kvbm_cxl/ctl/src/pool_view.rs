// SPDX-License-Identifier: Apache-2.0
//! What can be seen of a pool from outside, for those who watch it: one look of `cxlctl exporter` and `cxlctl top`.

use cxl_pool::Result;
use cxl_pool::cache::survey::{CacheSummary, CacheView};
use cxl_pool::fsck::{SeatInfo, SlotInfo, SlotState, survey};
use cxl_pool::metrics::stats::{HostStats, Stat, read_all};
use cxl_pool::pool::Pool;
use std::time::Instant;

/// A slot that was ever used.
pub struct HostView {
    pub slot: SlotInfo,
    /// What its host published under the incarnation that is bound to it.
    pub stats: Option<HostStats>,
}

impl HostView {
    /// A counter, if the host has published it.
    pub fn stat(&self, stat: Stat) -> Option<u64> {
        self.stats.as_ref().filter(|stats| stats.has(stat)).map(|stats| stats.get(stat))
    }
}

/// A pool at one moment; a running one is seen at slightly different moments in different lines.
pub struct PoolView {
    pub at: Instant,
    /// Slots, those included that were never used.
    pub slot_count: usize,
    /// Lines with counters that each of them has.
    pub stats_lines: usize,
    /// Slots that were ever used.
    pub hosts: Vec<HostView>,
    pub seats: Vec<SeatInfo>,
}

impl PoolView {
    /// Looks at a pool.
    ///
    /// # Errors
    /// [`cxl_pool::Error::Replaced`] when it is not the pool that was opened any more; the errors of the memory.
    pub fn of(pool: &Pool) -> Result<PoolView> {
        pool.check_not_replaced()?;
        let survey = survey(pool.lines(), &pool.superblock().seats())?;
        let slot_count = survey.slots.len();
        let hosts = survey.slots.into_iter().zip(read_all(pool.lines())?).filter(|(slot, _)| slot.state != SlotState::Free);
        // What an earlier incarnation counted is not this one's, and would make counters go back when this one publishes.
        let of_incarnation = |slot: &SlotInfo, stats: HostStats| (stats.incarnation == slot.incarnation).then_some(stats);
        let hosts = hosts.map(|(slot, stats)| HostView { stats: of_incarnation(&slot, stats), slot }).collect();
        let stats_lines = pool.layout().geometry().stats_lines as usize;
        Ok(PoolView { at: Instant::now(), slot_count, stats_lines, hosts, seats: survey.seats })
    }

    pub fn count(&self, state: SlotState) -> usize {
        match state {
            SlotState::Free => self.slot_count - self.hosts.len(),
            _ => self.hosts.iter().filter(|host| host.slot.state == state).count(),
        }
    }
}

/// Summary of the cells of a pool; `None` if it was formatted without any. Reads every descriptor: 64 MiB for a million cells.
pub fn cells(pool: &Pool) -> Result<Option<CacheSummary>> {
    if pool.layout().geometry().cell_chunks() == 0 {
        return Ok(None);
    }
    CacheView::load(pool.lines())?.summary(false).map(Some)
}
