// SPDX-License-Identifier: Apache-2.0
//! The lock: sticky acquisition, first acquisition, hand-over between two processes, growth with the number of hosts.
//!
//! Base line of the sticky acquisition: locking and unlocking a free `std::sync::Mutex`, in turn with it.

use super::counting::Counts;
use super::hosts::Lab;
use super::{Bench, handover, scaling, wrong};
use crate::stats::{Estimate, median, quantile};
use cxl_pool::Result;
use cxl_pool::lock::{FIRST_USER_LOCK, LockId};
use std::hint::black_box;
use std::sync::Mutex;
use std::time::Instant;

/// Acquisitions in one batch.
const BATCH: u64 = 512;
/// Longest wait for a lock, in milliseconds.
pub const TIMEOUT_MS: u64 = 20_000;
/// Size of the pools, in bytes.
pub const POOL_BYTES: u64 = 32 << 20;
/// Lock of the sticky test; those behind it are acquired for the first time.
const STICKY: LockId = FIRST_USER_LOCK;

/// Measures.
pub fn run(batches: u64) -> Result<Bench> {
    let mut bench = Bench { title: "locks, pool in /dev/shm".into(), ..Bench::default() };
    sticky(&mut bench, batches)?;
    first(&mut bench, batches)?;
    handover::measure(&mut bench, batches)?;
    scaling::measure(&mut bench, batches)?;
    Ok(bench)
}

/// Acquire and release of a lock that this host holds already. No other host is on the pool, and the service runs between batches only, so
/// that every access counted is the lock's own.
fn sticky(bench: &mut Bench, batches: u64) -> Result<()> {
    let lab = Lab::new(POOL_BYTES)?;
    let member = lab.join(0, None)?;
    let host = &member.host;
    let service = host.serve()?;
    drop(host.acquire(STICKY, TIMEOUT_MS)?);
    drop(service);
    let mutex = Mutex::new(0u64);
    let (mut ours, mut base) = (Vec::new(), Vec::new());
    let mut touched = Counts::default();
    let mut done = 0u64;
    for batch in 0..batches {
        for turn in 0..2 {
            if (turn + batch) % 2 == 0 {
                let before = member.counting.counts();
                let start = Instant::now();
                for _ in 0..BATCH {
                    let guard = host.acquire(black_box(STICKY), TIMEOUT_MS)?;
                    done += 1;
                    drop(black_box(guard));
                }
                ours.push(start.elapsed().as_nanos() as f64 / BATCH as f64);
                touched += member.counting.counts() - before;
            } else {
                let start = Instant::now();
                for _ in 0..BATCH {
                    let Ok(mut guard) = mutex.lock() else { return Err(wrong("the mutex of the base line is poisoned")) };
                    *guard += 1;
                    drop(black_box(guard));
                }
                base.push(start.elapsed().as_nanos() as f64 / BATCH as f64);
            }
        }
        if batch.is_multiple_of(16) {
            host.service_round()?;
        }
    }
    if done != batches * BATCH || mutex.into_inner().ok() != Some(batches * BATCH) {
        return Err(wrong("not every acquisition was done"));
    }
    let estimate = Estimate::of(ours.clone());
    bench.figure("sticky acquire and release", median(&mut ours.clone()), "ns");
    bench.figure("free std::sync::Mutex, lock and unlock", median(&mut base.clone()), "ns");
    bench.at_most("sticky acquire and release", &estimate, 200.0, " ns");
    bench.target(
        format!("shared lines written by {done} sticky acquisitions: {}, read: {}, must be none", touched.writes, touched.loads),
        touched == Counts::default(),
    );
    bench.ratio("sticky_over_mutex", Estimate::of_ratios(&ours, &base));
    host.leave()
}

/// The first acquisition of locks without a holder, through the manager, which is this host's own service thread.
fn first(bench: &mut Bench, batches: u64) -> Result<()> {
    let lab = Lab::new(POOL_BYTES)?;
    let member = lab.join(0, None)?;
    let service = member.host.serve()?;
    let mut taken = Vec::new();
    for lock in 0..(batches as u32).min(128) {
        let start = Instant::now();
        drop(member.host.acquire(STICKY + lock, TIMEOUT_MS)?);
        taken.push(start.elapsed().as_nanos() as f64);
    }
    bench.figure("first acquisition through the manager, median", median(&mut taken), "ns");
    bench.figure("first acquisition through the manager, p99", quantile(&mut taken, 0.99), "ns");
    drop(service);
    member.host.leave()
}
