// SPDX-License-Identifier: Apache-2.0
//! Waiting for other hosts, and work that needs this machine as a host.

use crate::output::Failure;
use cxl_pool::cache::{Cache, CacheConfig};
use cxl_pool::host::Host;
use std::time::{Duration, Instant};

/// Rest between two polls.
const REST: Duration = Duration::from_millis(5);

/// Polls `look` until it gives something; none once `timeout_ms` has passed. It looks once at least.
pub fn until<T>(timeout_ms: u64, mut look: impl FnMut() -> Result<Option<T>, Failure>) -> Result<Option<T>, Failure> {
    let deadline = Instant::now() + Duration::from_millis(timeout_ms);
    loop {
        let found = look()?;
        let left = deadline.saturating_duration_since(Instant::now());
        if found.is_some() || left.is_zero() {
            return Ok(found);
        }
        std::thread::sleep(REST.min(left));
    }
}

/// Serves as `host` while it does `work`, then leaves, whatever came of it.
pub fn as_host<T>(host: Host, work: impl FnOnce(&Host) -> Result<T, Failure>) -> Result<T, Failure> {
    let outcome = host.serve().map_err(Failure::from).and_then(|service| {
        let outcome = work(&host);
        // Before the host leaves: the service must not take the manager role while the host gives it up.
        drop(service);
        outcome
    });
    let left = host.leave();
    let done = outcome?;
    left?;
    Ok(done)
}

/// The same with a cache that verifies what it pulls, and its upkeep.
pub fn with_cache<T>(host: Host, work: impl FnOnce(&Host, &Cache) -> Result<T, Failure>) -> Result<T, Failure> {
    as_host(host, |host| {
        let cache = Cache::open(host, CacheConfig { checksums: true, ..CacheConfig::default() })?;
        let outcome = cache.serve().map_err(Failure::from).and_then(|_upkeep| work(host, &cache));
        let closed = cache.close();
        let done = outcome?;
        closed?;
        Ok(done)
    })
}
