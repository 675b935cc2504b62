// SPDX-License-Identifier: Apache-2.0
//! Times that grow with the load of the machine: a test that shares two cores with a build must not fail by its clock.
//!
//! Tests wait for conditions, and a deadline only ends a test that hangs. Times that are a part of what is tested, such as the silence
//! after which a host counts as dead, grow as well, or a host that only waits for a core would count as dead.

#![allow(dead_code, reason = "each test program uses what it needs")]

use std::sync::OnceLock;
use std::time::Duration;

/// A parent's [`factor`], so that its children have the same times. Set by hand it makes all tests more patient.
pub const ENV_FACTOR: &str = "CXL_TEST_LOAD_FACTOR";
/// Most that times grow.
const MOST: u64 = 16;

/// How many threads share a core, now or in the last minute, as this process began to ask: 1 on an idle machine.
pub fn factor() -> u64 {
    static FACTOR: OnceLock<u64> = OnceLock::new();
    *FACTOR.get_or_init(|| {
        let given = std::env::var(ENV_FACTOR).ok().and_then(|text| text.parse().ok());
        given.unwrap_or_else(measured).clamp(1, MOST)
    })
}

fn measured() -> u64 {
    let cores = std::thread::available_parallelism().map_or(1, |count| count.get()) as f64;
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let mut words = text.split(' ');
    let last_minute = words.next().and_then(|word| word.parse().ok()).unwrap_or(0.0);
    let running = words.nth(2).and_then(|word| word.split('/').next()?.parse().ok()).unwrap_or(0.0);
    (f64::max(last_minute, running) / cores).ceil() as u64
}

/// So many milliseconds on an idle machine.
pub fn ms(idle_ms: u64) -> u64 {
    idle_ms * factor()
}

/// So many seconds on an idle machine.
pub fn secs(idle_secs: u64) -> Duration {
    Duration::from_secs(idle_secs * factor())
}
