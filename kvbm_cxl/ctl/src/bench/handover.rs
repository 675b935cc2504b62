// SPDX-License-Identifier: Apache-2.0
//! One lock, wanted all the time by two processes that are two hosts.
//!
//! Under the lock each increments a counter in a line of the pool and notes who did; a lost increment is an error. A sample is the time of
//! an acquisition after which the line shows that the other one had the lock last.

use super::hosts::{Lab, config, real_machine};
use super::lock::{POOL_BYTES, TIMEOUT_MS};
use super::{Bench, wrong};
use crate::peer::Peer;
use crate::stats::{median, quantile};
use cxl_pool::host::Host;
use cxl_pool::line::Line;
use cxl_pool::lock::{FIRST_USER_LOCK, LockId};
use cxl_pool::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::{Duration, Instant};

const LOCK: LockId = FIRST_USER_LOCK;
/// Longest run of one side, in seconds.
const MAX_SECONDS: u64 = 60;

/// What one side did.
#[derive(Debug, Serialize, Deserialize)]
pub struct Side {
    increments: u64,
    handover_ns: Vec<f64>,
}

/// Hand-overs to measure on each side.
fn wanted(batches: u64) -> usize {
    batches.clamp(4, 400) as usize
}

/// The second process.
pub fn peer(arguments: &[PathBuf], batches: u64) -> Result<Side> {
    let [path, state] = arguments else { return Err(Error::Invalid("a peer needs a pool and a state directory".into())) };
    let pool = Lab::open(path)?;
    let machine = real_machine(&pool, state, 1)?;
    let host = cxl_pool::pool::join(pool.lines().clone(), std::sync::Arc::new(machine), config(&pool))?;
    let service = host.serve()?;
    let side = contend(&host, 1, wanted(batches))?;
    drop(service);
    host.leave()?;
    Ok(side)
}

/// Two words of the protected line: the counter, and who incremented it last, from 1.
fn read(host: &Host, offset: u64) -> Result<[u64; 2]> {
    let words: [u64; 8] = bytemuck::cast(host.lines().fetch_raw(offset)?);
    Ok([words[0], words[1]])
}

fn contend(host: &Host, side: u64, wanted: usize) -> Result<Side> {
    let offset = host.lines().layout().data_offset();
    let memory = host.lines().memory();
    let end = Instant::now() + Duration::from_secs(MAX_SECONDS);
    let mut done = Side { increments: 0, handover_ns: Vec::new() };
    while done.handover_ns.len() < wanted && Instant::now() < end {
        let start = Instant::now();
        let guard = host.acquire(LOCK, TIMEOUT_MS)?;
        let took_ns = start.elapsed().as_nanos() as f64;
        let [count, last] = read(host, offset)?;
        if last != 0 && last != side + 1 {
            done.handover_ns.push(took_ns);
        }
        let mut words = [0u64; 8];
        (words[0], words[1]) = (count + 1, side + 1);
        let line: Line = bytemuck::cast(words);
        memory.write_line(offset, &line)?;
        memory.fence_stores();
        done.increments += 1;
        drop(guard);
    }
    Ok(done)
}

/// Measures both sides, this process being the first.
pub fn measure(bench: &mut Bench, batches: u64) -> Result<()> {
    let lab = Lab::new(POOL_BYTES)?;
    let memory = lab.pool().lines().memory();
    let offset = lab.pool().layout().data_offset();
    memory.write_line(offset, &Line::ZERO)?;
    memory.fence_all();
    let member = lab.join(0, None)?;
    let service = member.host.serve()?;
    let text = |path: PathBuf| path.display().to_string();
    let mut arguments: Vec<String> = ["lock", "--batches"].map(String::from).to_vec();
    arguments.extend([batches.to_string(), "--peer".into(), text(lab.path()), text(lab.state())]);
    let other = Peer::start(&arguments, &[])?;
    let here = contend(&member.host, 0, wanted(batches))?;
    // The manager is here, and the other side may not be through yet.
    let (status, output) = other.wait(Duration::from_secs(2 * MAX_SECONDS))?;
    if !status.success() {
        return Err(wrong(format!("the second process of the hand-over test ended with {status}")));
    }
    let there: Side = serde_json::from_str(&output).map_err(|error| wrong(format!("the second process said {output:?} ({error})")))?;
    let [count, _] = read(&member.host, offset)?;
    if count != here.increments + there.increments {
        return Err(wrong(format!("{count} increments under the lock arrived of {} and {}", here.increments, there.increments)));
    }
    let mut taken: Vec<f64> = here.handover_ns.iter().chain(&there.handover_ns).copied().collect();
    if here.handover_ns.is_empty() || there.handover_ns.is_empty() {
        return Err(wrong("the lock did not go to and fro between the two processes"));
    }
    bench.figure("contended hand-over between two processes, median", median(&mut taken), "ns");
    bench.figure("contended hand-over between two processes, p99", quantile(&mut taken, 0.99), "ns");
    bench.figure("hand-overs measured", taken.len() as f64, "");
    bench.figure("increments under the lock, none lost", count as f64, "");
    drop(service);
    member.host.leave()
}
