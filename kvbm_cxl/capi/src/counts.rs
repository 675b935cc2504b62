// SPDX-License-Identifier: Apache-2.0
//! What this process counts for its host: the pool's own counters, and those that callers hand in.

use crate::status::{Failure, Outcome, Status};
use crate::types::Count;
use cxl_pool::host::Host;
use cxl_pool::line::Lines;
use cxl_pool::metrics::Metrics;
use cxl_pool::metrics::stats::{Given, Stat, StatsBoard, read};
use std::sync::Arc;

/// How often a host publishes, in milliseconds.
const PERIOD_MS: u64 = 500;

pub struct Counts {
    /// Also the cache's, because a membership has one place among its host's.
    pub metrics: Arc<Metrics>,
    board: StatsBoard,
}

fn stat_of(counter: u32) -> Outcome<Stat> {
    Stat::at(counter as usize).ok_or_else(|| Failure::invalid(format!("counter {counter} is none that this library knows")))
}

impl Counts {
    pub fn of(host: &Host) -> Outcome<Counts> {
        Ok(Counts { metrics: Arc::default(), board: StatsBoard::of(host)? })
    }

    /// Takes over what a caller counted: all of it, or nothing.
    pub fn take(&self, counts: &[Count]) -> Outcome<()> {
        let stats = counts
            .iter()
            .map(|count| match stat_of(count.counter)? {
                _ if count.reserved != 0 => Err(Failure::invalid("reserved of cxl_shm_count_t is not zero")),
                stat if Given::is_possible(stat, count.change) => Ok(stat),
                stat if stat.is_given() => Err(Failure::invalid(format!("{} only rises", stat.name()))),
                stat => Err(Failure::invalid(format!("{} is counted by the library itself", stat.name()))),
            })
            .collect::<Outcome<Vec<Stat>>>()?;
        for (stat, count) in stats.into_iter().zip(counts) {
            self.metrics.given.add(stat, count.change);
        }
        Ok(())
    }

    /// Publishes what the processes of this host have counted, if none of them did just now.
    pub fn publish(&self, host: &Host) -> cxl_pool::Result<()> {
        self.board.publish_round(host, &self.metrics, PERIOD_MS).map(drop)
    }

    /// Publishes at once: this process leaves.
    pub fn publish_last(&self, host: &Host) -> Outcome<()> {
        self.metrics.given.let_go();
        self.board.publish_round(host, &self.metrics, 0)?;
        Ok(())
    }
}

pub fn of_host(lines: &Lines, slot: u32, counter: u32) -> Outcome<u64> {
    let stat = stat_of(counter)?;
    let slot = u16::try_from(slot).ok().filter(|slot| u32::from(*slot) < lines.layout().geometry().slots);
    let stats = read(lines, slot.ok_or_else(|| Failure::invalid("there is no such slot"))?)?;
    let none = |what: &str| Failure::new(Status::E_NOT_FOUND, what);
    if !stats.has(stat) {
        return Err(none("the pool was formatted by an older version, which had no such counter: format it again to get it"));
    }
    if stats.incarnation == 0 {
        return Err(none("the host in that slot has published no counters yet"));
    }
    Ok(stats.get(stat))
}
