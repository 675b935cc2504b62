// SPDX-License-Identifier: Apache-2.0
//! The lock: acquisition while this host holds it (sticky), first acquisition, hand-over between two processes.
//!
//! Baseline of the sticky acquisition: lock and unlock of a free `std::sync::Mutex`. For the hand-over, two processes as two hosts
//! increment one counter under the lock; a lost increment is an error.

use crate::lab::{Lab, in_turn, join_host, open, time, wrong};
use crate::report::{Bench, to_json};
use ctl_common::peer::Peer;
use ctl_common::stats::{Estimate, median, quantile};
use cxl_pool::Result;
use cxl_pool::host::Host;
use cxl_pool::line::Line;
use cxl_pool::lock::{FIRST_USER_LOCK, LockId};
use serde::{Deserialize, Serialize};
use std::hint::black_box;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Acquisitions in one batch.
const BATCH: u64 = 512;
const TIMEOUT_MS: u64 = 20_000;
/// The lock of the sticky and hand-over tests; those with higher numbers are acquired for the first time.
const LOCK: LockId = FIRST_USER_LOCK;
/// Longest run of one side.
const LONGEST: Duration = Duration::from_secs(60);

pub fn run(batches: u64) -> Result<Bench> {
    let mut bench = Bench::new("locks, pool in /dev/shm");
    let lab = Lab::new(0, 0, 0)?;
    let (host, service) = join_host(&lab.pool, &lab.state(), 0)?;
    sticky(&mut bench, &host, batches)?;
    let mut first = Vec::new();
    for lock in 1..=(batches as u32).min(128) {
        first.push(time(|| host.acquire(LOCK + lock, TIMEOUT_MS).map(drop))?);
    }
    bench.time("first acquisition through the manager", &first);
    handover(&mut bench, &lab, &host, batches)?;
    drop(service);
    host.leave()?;
    Ok(bench)
}

fn sticky(bench: &mut Bench, host: &Host, batches: u64) -> Result<()> {
    drop(host.acquire(LOCK, TIMEOUT_MS)?);
    let mutex = Mutex::new(0u64);
    let [ours, base] = in_turn(batches, |_, way| {
        let taken_ns = time(|| {
            for _ in 0..BATCH {
                match way {
                    0 => drop(black_box(host.acquire(black_box(LOCK), TIMEOUT_MS)?)),
                    _ => *mutex.lock().map_err(|_| wrong("the mutex is poisoned"))? += 1,
                }
            }
            Ok(())
        })?;
        Ok(taken_ns / BATCH as f64)
    })?;
    if mutex.into_inner().ok() != Some(batches * BATCH) {
        return Err(wrong("not every lock of the mutex was counted"));
    }
    bench.time("sticky acquire and release", &ours);
    bench.time("free std::sync::Mutex, lock and unlock", &base);
    bench.ratio("sticky_over_mutex", Estimate::of_ratios(&ours, &base));
    Ok(())
}

/// What one side of the hand-over test did.
#[derive(Debug, Serialize, Deserialize)]
struct Side {
    increments: u64,
    handover_ns: Vec<f64>,
}

/// The second process.
pub fn peer(pool: &Path, state: &Path, batches: u64) -> Result<serde_json::Value> {
    let pool = open(pool)?;
    let (host, service) = join_host(&pool, state, 1)?;
    let side = contend(&host, 2, batches)?;
    drop(service);
    host.leave()?;
    to_json(&side)
}

/// The words of the protected line: the counter, and the side that incremented it last.
fn read(host: &Host) -> Result<[u64; 2]> {
    let words: [u64; 8] = bytemuck::cast(host.lines().fetch_raw(host.lines().layout().data_offset())?);
    Ok([words[0], words[1]])
}

fn contend(host: &Host, side: u64, batches: u64) -> Result<Side> {
    let (offset, memory) = (host.lines().layout().data_offset(), host.lines().memory());
    let end = Instant::now() + LONGEST;
    let mut done = Side { increments: 0, handover_ns: Vec::new() };
    while done.handover_ns.len() < batches.clamp(4, 400) as usize && Instant::now() < end {
        let start = Instant::now();
        let guard = host.acquire(LOCK, TIMEOUT_MS)?;
        let taken_ns = start.elapsed().as_nanos() as f64;
        let [count, last] = read(host)?;
        if last != 0 && last != side {
            done.handover_ns.push(taken_ns);
        }
        let line: Line = bytemuck::cast([count + 1, side, 0, 0, 0, 0, 0, 0]);
        memory.write_line(offset, &line)?;
        memory.fence_stores();
        done.increments += 1;
        drop(guard);
    }
    Ok(done)
}

fn handover(bench: &mut Bench, lab: &Lab, host: &Host, batches: u64) -> Result<()> {
    lab.memory().write_line(lab.pool.layout().data_offset(), &Line::ZERO)?;
    lab.memory().fence_all();
    let arguments = ["peer".into(), "lock".into(), "--batches".into(), batches.to_string()];
    let other = Peer::start(&[&arguments[..], &lab.arguments()].concat(), &[])?;
    let here = contend(host, 1, batches)?;
    // The manager runs here, and the other side may not have finished.
    let there: Side = other.answer(2 * LONGEST)?;
    let [count, _] = read(host)?;
    if count != here.increments + there.increments {
        return Err(wrong(format!("{count} increments under the lock arrived of {} and {}", here.increments, there.increments)));
    }
    if here.handover_ns.is_empty() || there.handover_ns.is_empty() {
        return Err(wrong("the lock did not change hands between the two processes"));
    }
    let mut taken = [here.handover_ns, there.handover_ns].concat();
    bench.figure("contended hand-over between two processes, median", median(&mut taken), "ns");
    bench.figure("contended hand-over between two processes, p99", quantile(&mut taken, 0.99), "ns");
    bench.figure("increments under the lock, none lost", count as f64, "");
    Ok(())
}
