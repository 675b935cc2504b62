// SPDX-License-Identifier: Apache-2.0
//! Bad input: whatever stands in the pool, every operation ends with a result or an error, in bounded time, inside the pool.
//!
//! `HOSTILE_CASES` runs more cases, `HOSTILE_SEED` exactly one, as a failure tells.

mod files;
mod harness;

use harness::{Choices, World};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Cases of a plain `cargo test`.
const CASES: u64 = 3000;
/// Threads that share the cases.
const THREADS: u64 = 2;
/// Longest that one case may take in real time. Most take a few milliseconds.
const LONGEST: Duration = Duration::from_secs(120);

fn from_env(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is not a number: {text:?}")))
}

/// Failures after which the rest is not run any more.
const ENOUGH: usize = 20;

/// Runs a case and says how to run it again if it fails.
fn case(seed: u64) -> bool {
    let ended = catch_unwind(AssertUnwindSafe(|| harness::pool_image(&mut Choices::of_seed(seed))));
    if ended.is_err() {
        eprintln!("seed {seed} failed; again: HOSTILE_SEED={seed} cargo test -p cxl-pool --test hostile every_operation");
    }
    ended.is_ok()
}

/// Ends the process when a case hangs: a loop over shared memory that does not end cannot be unwound.
fn watch(seeds: &[AtomicU64], finished: &AtomicU64) {
    let mut since = vec![(u64::MAX, Instant::now()); seeds.len()];
    while finished.load(Ordering::Acquire) < seeds.len() as u64 {
        std::thread::sleep(Duration::from_millis(20));
        for (seed, (known, start)) in seeds.iter().zip(&mut since) {
            let running = seed.load(Ordering::Acquire);
            if running != *known {
                (*known, *start) = (running, Instant::now());
            } else if running != u64::MAX && start.elapsed() > LONGEST {
                eprintln!("seed {running} hangs; again: HOSTILE_SEED={running} cargo test -p cxl-pool --test hostile every_operation");
                std::process::abort();
            }
        }
    }
}

#[test]
fn every_operation_on_a_damaged_pool_ends_with_a_result_or_an_error() {
    if let Some(seed) = from_env("HOSTILE_SEED") {
        assert!(case(seed));
        return;
    }
    let cases = from_env("HOSTILE_CASES").unwrap_or(CASES);
    let running: Vec<AtomicU64> = (0..THREADS).map(|_| AtomicU64::new(u64::MAX)).collect();
    let finished = AtomicU64::new(0);
    let failed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for (thread, running) in running.iter().enumerate() {
            let (finished, failed) = (&finished, &failed);
            scope.spawn(move || {
                for seed in (thread as u64..cases).step_by(THREADS as usize) {
                    running.store(seed, Ordering::Release);
                    if !case(seed) {
                        failed.lock().unwrap().push(seed);
                    }
                    if failed.lock().unwrap().len() >= ENOUGH {
                        break;
                    }
                }
                running.store(u64::MAX, Ordering::Release);
                finished.fetch_add(1, Ordering::Release);
            });
        }
        watch(&running, &finished);
    });
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "of {cases} cases, these seeds failed: {failed:?}");
}

#[test]
fn the_other_fuzz_targets_pass_on_pseudo_random_inputs() {
    for target in [harness::join, harness::alloc_load, harness::objects, harness::fsck, harness::cache] {
        for input in 0..150u64 {
            let mut random = Choices::of_seed(input);
            let bytes: Vec<u8> = (0..random.below(400)).map(|_| random.below(256) as u8).collect();
            target(&mut Choices::of_bytes(&bytes));
        }
    }
}

#[test]
fn damage_never_makes_a_block_of_other_bytes() {
    if let Some(seed) = from_env("HOSTILE_SEED") {
        harness::cache_in_rubbish(&mut Choices::of_seed(seed));
        return;
    }
    let cases = from_env("HOSTILE_CASES").unwrap_or(CASES / 3);
    let failed: Vec<u64> = (0..cases)
        .filter(|&seed| catch_unwind(AssertUnwindSafe(|| harness::cache_in_rubbish(&mut Choices::of_seed(seed)))).is_err())
        .take(ENOUGH)
        .collect();
    assert!(failed.is_empty(), "of {cases} cases, these seeds failed: {failed:?} (HOSTILE_SEED runs one of them)");
}

#[test]
fn an_undamaged_pool_serves_and_has_nothing_wrong_with_it() {
    for is_apart in [false, true] {
        let world = World::lived_in(is_apart);
        let report = cxl_pool::fsck::check(&world.lines, &world.seats).unwrap();
        assert!(report.findings.iter().all(|finding| finding.severity < cxl_pool::fsck::Severity::Error), "{:?}", report.findings);
        let audit = cxl_pool::alloc::audit(&world.lines).unwrap();
        assert!(audit.kept_blocks >= 12 && audit.owned >= 3, "{audit:?}");
    }
}
