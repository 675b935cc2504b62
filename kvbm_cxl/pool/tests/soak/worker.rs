// SPDX-License-Identifier: Apache-2.0
//! A child process: one process of one host, with threads that use the cache and one that watches over them.

use crate::leases::host_config;
use crate::log::Log;
use crate::operate::{Counts, Operator};
use crate::payload::{Names, Random};
use cxl_pool::cache::policy::PolicyKind;
use cxl_pool::cache::{Cache, CacheConfig};
use cxl_pool::device::PoolSpec;
use cxl_pool::host::Host;
use cxl_pool::metrics::{Label, MissReason};
use cxl_pool::pool::{OpenOptions, Pool};
use cxl_pool::{Error, Result};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Names the pool; only set for children.
pub const POOL: &str = "SOAK_POOL";
/// Path of the child's log.
pub const LOG: &str = "SOAK_LOG";
/// Path of a file that tells the children that the storm is over.
pub const CALM: &str = "SOAK_CALM";
/// Path of a file that tells the child to leave.
pub const STOP: &str = "SOAK_STOP";
/// Number of the child's start, different in every start.
pub const START: &str = "SOAK_START";
/// Seed of what the child does at random.
pub const RANDOM: &str = "SOAK_RANDOM";

/// What the names of misses begin with in a log.
pub const MISS: &str = "miss_";

/// Deadline of locks, in milliseconds.
const TIMEOUT_MS: u64 = 20_000;
/// Publications and hits of a start after the storm that show that it gets on.
const CALM_STORED: u64 = 16;
const CALM_HITS: u64 = 16;

/// How a start uses the cache: policies and checksums take turns.
pub fn cache_config(start: u64, names: &Names) -> CacheConfig {
    let mut config = CacheConfig {
        policy: PolicyKind::ALL[start as usize % PolicyKind::ALL.len()],
        checksums: start.is_multiple_of(3),
        lock_timeout_ms: Some(TIMEOUT_MS),
        service_ms: 5,
        upkeep_ms: 50,
        // Few enough that keys throw each other out.
        remembered_keys: 512,
        ..CacheConfig::default()
    };
    if start.is_multiple_of(5) {
        config.quotas.insert(names.spaces[0], 200 << 10);
    }
    config
}

/// What the threads of a child share.
pub struct Shared {
    pub cache: Cache,
    pub host: Host,
    pub names: Names,
    pub counts: Counts,
    pub log: Log,
    pub start: u64,
    pub stopping: AtomicBool,
}

impl Shared {
    /// Reports something that must not be, and ends the process at once, so that as little as possible happens afterwards.
    pub fn bad(&self, what: &str) -> ! {
        let _ = self.log.bad(what);
        std::process::exit(3);
    }
}

/// Runs the child if this process is one; the result is its exit status.
pub fn run_if_child() -> Option<i32> {
    let spec = std::env::var(POOL).ok()?;
    let start = std::env::var(START).ok()?.parse().ok()?;
    let log = Log::open(&PathBuf::from(std::env::var(LOG).ok()?), start).ok()?;
    match run(&spec, start, log) {
        Ok(()) => Some(0),
        Err(_) => Some(1),
    }
}

/// Repeats what a fence or a stopped process of this host interrupted.
fn again<T>(mut work: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        match work() {
            Err(Error::Fenced { .. } | Error::Timeout { .. }) => std::thread::sleep(Duration::from_millis(2)),
            other => return other,
        }
    }
}

fn run(spec: &str, start: u64, log: Log) -> Result<()> {
    let told = |what: &str, error: Error| {
        let _ = log.bad(&format!("{what}: {error}"));
        error
    };
    let pool = Pool::open(&PoolSpec::parse(spec)?, &OpenOptions::default()).map_err(|error| told("open", error))?;
    let host = pool.join(host_config()).map_err(|error| told("join", error))?;
    let service = host.serve()?;
    let names = Names::new();
    let config = cache_config(start, &names);
    let cache = again(|| Cache::open(&host, config.clone())).map_err(|error| told("open the cache", error))?;
    let upkeep = cache.serve()?;
    let seed: u64 = std::env::var(RANDOM).ok().and_then(|seed| seed.parse().ok()).unwrap_or(start);
    let shared = Arc::new(Shared { cache, host, names, counts: Counts::default(), log, start, stopping: AtomicBool::new(false) });
    let threads = 1 + start % 2;
    let operators = (0..threads).map(|thread| {
        let mut operator = Operator::new(shared.clone(), seed ^ thread << 40, thread);
        std::thread::spawn(move || operator.run())
    });
    let operators: Vec<_> = operators.collect();
    watch(&shared, &mut Random::new(seed));
    shared.stopping.store(true, Ordering::Release);
    for operator in operators {
        if operator.join().is_err() {
            shared.bad("a thread panicked");
        }
    }
    drop(upkeep);
    tell(&shared);
    let Some(Shared { cache, host, log, .. }) = Arc::into_inner(shared) else { return Err(Error::Closed) };
    match cache.close() {
        // What stays behind is adopted.
        Err(Error::Fenced { .. } | Error::Timeout { .. }) | Ok(()) => {}
        Err(error) => {
            let _ = log.bad(&format!("close: {error}"));
            return Err(error);
        }
    }
    host.leave().inspect_err(|error| {
        let _ = log.bad(&format!("leave: {error}"));
    })?;
    drop(service);
    Ok(())
}

/// Writes down what was counted.
fn tell(shared: &Shared) {
    let metrics = shared.cache.metrics();
    let misses = MissReason::VALUES.iter().zip(metrics.misses_total.iter()).map(|(name, count)| (format!("{MISS}{name}"), count.get()));
    let more = [
        ("evicted", metrics.evictions_total.total()),
        ("evict_pinned", metrics.evictions_pinned_total.get()),
        ("adopted", metrics.adopted_total.get()),
        ("rejoins", metrics.rejoins_total.get()),
    ];
    let counts = shared.counts.all().chain(more).map(|(name, value)| (name.to_owned(), value));
    let _ = shared.log.counts(counts.chain(misses));
}

/// Tells now and then what was counted, until it is time to leave: when the parent says so, or when this start has had enough.
fn watch(shared: &Shared, random: &mut Random) {
    let [calm, stop] = [CALM, STOP].map(|name| PathBuf::from(std::env::var(name).unwrap_or_default()));
    let enough = random.below(2).eq(&0).then(|| Instant::now() + Duration::from_millis(300 + random.below(5_000)));
    let mut told = Instant::now();
    let mut calm_from = None;
    while !stop.exists() {
        std::thread::sleep(Duration::from_millis(20));
        if told.elapsed() > Duration::from_millis(250) {
            told = Instant::now();
            tell(shared);
        }
        let now = shared.counts.progress();
        if !calm.exists() {
            if enough.is_some_and(|enough| Instant::now() >= enough) {
                return;
            }
            continue;
        }
        let (from, done) = calm_from.get_or_insert((now, false));
        let got = |index: usize| now[index] - from[index];
        // Also blocks that other hosts have.
        if !*done && got(0) >= CALM_STORED && got(1) >= CALM_HITS && got(2) > 0 {
            *done = true;
            let _ = shared.log.calm();
        }
    }
}
