// SPDX-License-Identifier: Apache-2.0
//! Counts of layers above this crate, on their way to what their host publishes.

use super::{STATS, Stat};
use crate::metrics::Kind;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// The counts of layers above this crate. They hand over the changes since the last time, now and then: no place for a hot path.
pub struct Given([AtomicU64; STATS]);

impl Default for Given {
    fn default() -> Self {
        Given(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl fmt::Debug for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let given = Stat::ALL.iter().filter(|stat| stat.is_given());
        f.debug_map().entries(given.map(|stat| (stat.name(), self.get(stat.place())))).finish()
    }
}

impl Given {
    /// Whether [`Given::add`] takes a change: only gauges fall, and what this crate counts by itself is not given.
    pub fn is_possible(stat: Stat, change: i64) -> bool {
        stat.is_given() && (change >= 0 || stat.kind() == Kind::Gauge)
    }

    /// Adds the change since the last time to a counter or gauge. False, and nothing is changed, for an impossible change.
    pub fn add(&self, stat: Stat, change: i64) -> bool {
        match self.0.get(stat.place()) {
            Some(place) if Self::is_possible(stat, change) => {
                place.fetch_add(change.cast_unsigned(), Ordering::Relaxed);
                true
            }
            _ => false,
        }
    }

    /// Makes every gauge zero: the process that holds something here is about to go.
    pub fn let_go(&self) {
        for stat in Stat::ALL.iter().filter(|stat| stat.kind() == Kind::Gauge) {
            if let Some(place) = self.0.get(stat.place()) {
                place.store(0, Ordering::Relaxed);
            }
        }
    }

    /// The sum of the changes of the counter at `place`.
    pub fn get(&self, place: usize) -> u64 {
        let value = self.0.get(place).map_or(0, |value| value.load(Ordering::Relaxed));
        // Changes of a gauge come in any order, so that it may be below zero for a moment.
        match Stat::at(place).map(Stat::kind) {
            Some(Kind::Gauge) => super::positive(value.cast_signed()),
            _ => value,
        }
    }
}
