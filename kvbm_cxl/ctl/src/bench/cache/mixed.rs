// SPDX-License-Identifier: Apache-2.0
//! Hosts in processes of their own on one pool, as decode and prefill workers use it: each request asks how much of a prompt is there,
//! pulls that, and publishes the rest together. Some prompts are asked for much more often than others, and there are more blocks than
//! cells. With `--pause-ms` hosts rest between requests, as engines compute: what a host keeps at hand while it is busy, locks of the hint
//! table above all, may be elsewhere by then.
//!
//! Every block that is pulled is compared byte by byte with what its key stands for.

use super::{Lab, Member, NAMESPACE, alone, fill, join, key};
use crate::hosts::Lab as Pools;
use crate::peer::Peer;
use crate::stats::{median, quantile, time_text};
use crate::{Bench, Grid, wrong};
use cxl_pool::cache::{BlockKey, Cache, CacheConfig, PublishRequest, Pulled, Reservation, Reserved};
use cxl_pool::device::parse_size;
use cxl_pool::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Blocks of a prompt.
const PROMPT: u64 = 8;
/// Samples of each kind that a host hands over.
const MOST_SAMPLES: usize = 1000;
/// Longest run of one host, in seconds.
const MAX_SECONDS: u64 = 120;

/// Options of `bench mixed`.
#[derive(clap::Args, Debug)]
pub struct Load {
    /// Hosts, each a process; default: 1, then 2, then 4
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=8))]
    hosts: Option<u8>,
    /// Size of a block
    #[arg(long, value_parser = parse_size, default_value = "256K")]
    block: u64,
    /// Cells of the pool
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(64..=65536))]
    cells: u64,
    /// Rest of a host between two requests, in milliseconds
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=1000))]
    pause_ms: u64,
    /// A process of the test: pool, state directory, number of the host, requests
    #[arg(long, hide = true, num_args = 4, value_names = ["POOL", "STATE", "HOST", "REQUESTS"])]
    peer: Option<Vec<String>>,
}

impl Load {
    /// This is a process of the test.
    pub fn is_peer(&self) -> bool {
        self.peer.is_some()
    }
}

/// What one host did.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Side {
    asked: u64,
    hits: u64,
    stored: u64,
    /// Blocks that another host was just publishing.
    met: u64,
    /// Blocks for which there was no cell in time.
    refused: u64,
    ns: f64,
    lookup_ns: Vec<f64>,
    pull_ns: Vec<f64>,
    publish_ns: Vec<f64>,
}

/// One host.
pub fn peer(load: &Load) -> Result<Side> {
    let wrong_call = || Error::Invalid("a peer needs a pool, a state directory, its number and the number of requests".into());
    let Some([path, state, host, requests]) = load.peer.as_deref() else { return Err(wrong_call()) };
    let host: u8 = host.parse().map_err(|_| wrong_call())?;
    let requests: u64 = requests.parse().map_err(|_| wrong_call())?;
    let pool = Pools::open(&PathBuf::from(path))?;
    let member = join(&pool, &PathBuf::from(state), host, CacheConfig { checksums: true, ..alone() }, true)?;
    let side = ask(&member.cache, load, host, requests)?;
    member.leave()?;
    Ok(side)
}

/// Which prompt request `number` is of: low ones much more often. Both factors are spread evenly over the prompts.
fn prompt(random: &mut u64, prompts: u64) -> u64 {
    let mut below = || {
        *random ^= *random << 13;
        *random ^= *random >> 7;
        *random ^= *random << 17;
        *random % prompts
    };
    below() * below() / prompts.max(1)
}

fn ask(cache: &Cache, load: &Load, host: u8, requests: u64) -> Result<Side> {
    let len_bytes = load.block as usize;
    let (mut expected, mut found) = (vec![0; len_bytes], vec![0; len_bytes]);
    let mut random = 0x9e37_79b9_7f4a_7c15 ^ (u64::from(host) + 1) << 32;
    let mut side = Side::default();
    // Twice as many blocks as cells.
    let prompts = (load.cells * 2 / PROMPT).max(2);
    let (start, mut aside) = (Instant::now(), Duration::ZERO);
    for _ in 0..requests {
        if start.elapsed() > Duration::from_secs(MAX_SECONDS) {
            return Err(Error::Timeout { what: "the requests of a host".into(), timeout_ms: MAX_SECONDS * 1000 });
        }
        let resting = Instant::now();
        std::thread::sleep(Duration::from_millis(load.pause_ms));
        aside += resting.elapsed();
        let first = prompt(&mut random, prompts) * PROMPT;
        let keys: Vec<BlockKey> = (first..first + PROMPT).map(key).collect();
        let began = Instant::now();
        let there = cache.lookup_chain(NAMESPACE, &keys)?.len();
        side.lookup_ns.push(began.elapsed().as_nanos() as f64);
        let mut missing = Vec::new();
        for (place, (&block, number)) in keys.iter().zip(first..).enumerate() {
            side.asked += 1;
            let began = Instant::now();
            if place >= there || !matches!(cache.pull(NAMESPACE, block, &mut found)?, Pulled::Hit { .. }) {
                let parent = place.checked_sub(1).map(|before| keys[before]);
                missing.push((number, PublishRequest { namespace: NAMESPACE, key: block, parent, len_bytes: load.block }));
                continue;
            }
            side.pull_ns.push(began.elapsed().as_nanos() as f64);
            side.hits += 1;
            let check = Instant::now();
            fill(&mut expected, number);
            if found != expected {
                return Err(wrong(format!("block {number} was pulled with other bytes than were published")));
            }
            aside += check.elapsed();
        }
        if !missing.is_empty() {
            aside += publish(cache, &missing, &mut side)?;
        }
    }
    [&mut side.lookup_ns, &mut side.pull_ns, &mut side.publish_ns].into_iter().for_each(thin);
    side.ns = start.elapsed().saturating_sub(aside).as_nanos() as f64;
    Ok(side)
}

/// Publishes blocks together; returns how long it took to make their bytes.
fn publish(cache: &Cache, missing: &[(u64, PublishRequest)], side: &mut Side) -> Result<Duration> {
    let making = Instant::now();
    let made = missing.iter().map(|&(number, wish)| {
        let mut bytes = vec![0; wish.len_bytes as usize];
        fill(&mut bytes, number);
        bytes
    });
    let blocks: Vec<Vec<u8>> = made.collect();
    let making = making.elapsed();
    let wishes: Vec<PublishRequest> = missing.iter().map(|&(_, wish)| wish).collect();
    let began = Instant::now();
    let mut cells: Vec<Reservation> = Vec::with_capacity(wishes.len());
    for (reserved, block) in cache.reserve_all(&wishes)?.into_iter().zip(&blocks) {
        match reserved {
            Reserved::Cell(mut cell) => {
                cell.fill([&block[..]])?;
                cells.push(cell);
            }
            Reserved::Exists | Reserved::Busy => side.met += 1,
            Reserved::NoCell | Reserved::NoHint | Reserved::OverQuota => side.refused += 1,
        }
    }
    side.stored += cells.len() as u64;
    cache.commit_all(cells)?;
    side.publish_ns.push(began.elapsed().as_nanos() as f64);
    Ok(making)
}

/// Leaves every so many-th of them: what a process tells must fit a pipe.
fn thin(values: &mut Vec<f64>) {
    let step = values.len().div_ceil(MOST_SAMPLES).max(1);
    *values = std::mem::take(values).into_iter().step_by(step).collect();
}

/// Measures.
pub fn run(load: &Load, batches: u64) -> Result<Bench> {
    let title = format!("hosts that look up, pull and publish blocks of {} KiB, {} cells, pool in /dev/shm", load.block >> 10, load.cells);
    let mut bench = Bench { title, ..Bench::default() };
    let titles = ["hosts", "blocks/s", "GB/s", "hits", "lookup of 8", "p99", "pull", "p99", "publish of the rest", "p99", "refused"];
    let mut rows = vec![titles.map(String::from).to_vec()];
    let hosts = load.hosts.map_or(vec![1, 2, 4], |hosts| vec![hosts]);
    for &hosts in &hosts {
        let sides = together(load, hosts, batches.max(4))?;
        let sum = |of: fn(&Side) -> u64| sides.iter().map(of).sum::<u64>();
        let all = |of: fn(&Side) -> &Vec<f64>| sides.iter().flat_map(|side| of(side).iter().copied()).collect::<Vec<f64>>();
        let (mut lookups, mut pulls, mut publishes) =
            (all(|side| &side.lookup_ns), all(|side| &side.pull_ns), all(|side| &side.publish_ns));
        // Each host's rate over its own time: all of them run at once.
        let rate: f64 = sides.iter().map(|side| (side.hits + side.stored) as f64 * 1e9 / side.ns.max(1.0)).sum();
        let mut row = vec![
            hosts.to_string(),
            format!("{rate:.0}"),
            format!("{:.2}", rate * load.block as f64 / 1e9),
            format!("{:.0} %", sum(|side| side.hits) as f64 * 100.0 / sum(|side| side.asked).max(1) as f64),
        ];
        for values in [&mut lookups, &mut pulls, &mut publishes] {
            row.extend([time_text(median(values)), time_text(quantile(values, 0.99))]);
        }
        row.push(sum(|side| side.refused).to_string());
        rows.push(row);
        let told = |what: &str| format!("{what}, {hosts} hosts");
        bench.figure(told("blocks pulled and verified"), sum(|side| side.hits) as f64, "");
        bench.figure(told("blocks published"), sum(|side| side.stored) as f64, "");
        bench.figure(told("blocks moved"), rate, "/s");
        bench.figure(told("bytes moved"), rate * load.block as f64 / 1e9, "GB/s");
        bench.figure(told("publish of what is missing of a prompt"), median(&mut publishes), "ns");
        bench.figure(told("publish of what is missing of a prompt, p99"), quantile(&mut publishes, 0.99), "ns");
    }
    bench.grids.push(Grid { title: "By number of hosts; times without making and comparing the bytes".into(), rows });
    Ok(bench)
}

/// All hosts at once; this process is the first.
fn together(load: &Load, hosts: u8, requests: u64) -> Result<Vec<Side>> {
    let lab = Lab::new(load.block, load.cells, 2 << 20)?;
    let member: Member = join(lab.pool(), &lab.state(), 0, CacheConfig { checksums: true, ..alone() }, true)?;
    let mut peers = Vec::new();
    for host in 1..hosts {
        let mut arguments: Vec<String> = vec!["mixed".into()];
        arguments.extend(["--block".into(), load.block.to_string(), "--cells".into(), load.cells.to_string()]);
        arguments.extend(["--pause-ms".into(), load.pause_ms.to_string(), "--peer".into()]);
        arguments.extend([lab.path().display().to_string(), lab.state().display().to_string(), host.to_string(), requests.to_string()]);
        peers.push(Peer::start(&arguments, &[])?);
    }
    let mut sides = vec![ask(&member.cache, load, 0, requests)?];
    // The manager is here, and the others may not be through yet.
    for peer in peers {
        let (status, output) = peer.wait(Duration::from_secs(2 * MAX_SECONDS))?;
        if !status.success() {
            return Err(wrong(format!("a host of the test ended with {status}")));
        }
        sides.push(serde_json::from_str(&output).map_err(|error| wrong(format!("a host of the test said {output:?} ({error})")))?);
    }
    member.leave()?;
    Ok(sides)
}
