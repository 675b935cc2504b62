// SPDX-License-Identifier: Apache-2.0
//! The thread that watches queued copies. A process that queues nothing has none.

use super::{Flight, PAUSES, Queued};
use crate::background::{Background, held};
use crate::cache::Cache;
use crate::cpus::CpuSet;
use std::sync::Arc;
use std::time::Duration;

/// Between two looks of a thread that has nothing to look after; it is woken.
const IDLE: Duration = Duration::from_secs(3600);

#[derive(Default)]
pub(super) enum Watcher {
    /// The upkeep does not run: a caller of [`Cache::service_round`], or one that asks for the end, continues the queued copies.
    #[default]
    Off,
    /// It starts with the first that is queued, on these CPUs.
    Waits(Option<CpuSet>),
    Runs(Background),
}

impl Cache {
    pub(super) fn look_after(&self, flight: Flight) -> Queued {
        let flight = Arc::new(flight);
        let flights = &self.inner.flights;
        held(&flights.under_way).push(flight.clone());
        let mut watcher = held(&flights.watcher);
        if let Watcher::Waits(cpus) = &*watcher {
            let cache = self.clone();
            let round = move || Some(if cache.inner.flights.advance() { PAUSES[1] / 5 } else { IDLE });
            match Background::start("cxl-cache-gpu", "start the thread that looks after queued blocks", cpus.as_ref(), round) {
                Ok(thread) => *watcher = Watcher::Runs(thread),
                // The next one tries again.
                Err(error) => self.inner.host.failed_rounds().record("the thread that looks after queued blocks", &error),
            }
        }
        if let Watcher::Runs(thread) = &*watcher {
            thread.wake();
        }
        Queued { flight }
    }

    /// Has such a thread start when it is needed, until [`Cache::end_watcher`].
    pub(in crate::cache) fn allow_watcher(&self, cpus: Option<CpuSet>) {
        let mut watcher = held(&self.inner.flights.watcher);
        if let Watcher::Off = *watcher {
            *watcher = Watcher::Waits(cpus);
        }
    }

    /// Ends the thread, and starts none any more.
    pub(in crate::cache) fn end_watcher(&self) {
        // Not under the lock: it is waited for.
        let ended = std::mem::take(&mut *held(&self.inner.flights.watcher));
        drop(ended);
    }
}
