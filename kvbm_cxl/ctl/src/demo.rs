// SPDX-License-Identifier: Apache-2.0
//! `cxlctl demo`: two processes as two hosts on one pool. One publishes blocks in the prefix cache; the other pulls them and compares every
//! byte.

use crate::format;
use crate::output::{Exit, Failure, Out};
use crate::peer::Peer;
use crate::text::bytes;
use crate::wait;
use cxl_pool::cache::{BlockKey, Cache, Namespace, Published, Pulled, chain};
use cxl_pool::device::PoolSpec;
use cxl_pool::escaped;
use cxl_pool::host::HostConfig;
use cxl_pool::machine::{Machine, State, random_bytes};
use cxl_pool::platform::MachineId;
use cxl_pool::pool::{CellArea, FormatOptions, Pool, Share};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

const NAMESPACE: Namespace = Namespace(*b"cxlctl demo     ");
const BLOCK_BYTES: usize = 64 << 10;
/// Blocks that are exchanged, if the pool has cells for twice as many.
const BLOCKS: u64 = 128;
/// Size of the pool where none is named, in bytes.
const POOL_BYTES: u64 = 64 << 20;
/// Longest run of the second process.
const TIMEOUT: Duration = Duration::from_secs(120);

/// What the reader reports.
#[derive(Serialize, Deserialize)]
struct Report {
    blocks: u64,
    pulled_ns: u64,
}

/// A block's bytes, which no other block has.
fn fill(number: u64, block: &mut [u8]) {
    for (index, word) in block.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&(number << 32 | index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    }
}

fn key(number: u64) -> BlockKey {
    chain(None, &[number as u32], b"demo")
}

/// A pool in an unnamed file in memory: the kernel frees it however its processes end.
fn unnamed_file() -> Result<(std::fs::File, String), Failure> {
    let failed = |error: std::io::Error| Failure::new(Exit::Failed, format!("making a file in /dev/shm: {error}"));
    let file = tempfile::tempfile_in("/dev/shm").map_err(failed)?;
    file.set_len(POOL_BYTES).map_err(failed)?;
    let spec = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    Ok((file, spec))
}

/// The demo makes a pool where there is nothing, and only there.
fn no_pool(error: cxl_pool::Error) -> Failure {
    match error {
        cxl_pool::Error::HasContent { device, found, .. } => {
            let message = format!("{}: it holds {found}; name an empty pool, or erase it with `cxlctl erase --force`", escaped(&device));
            Failure::new(Exit::Refused, message)
        }
        other => format::failed(other),
    }
}

pub fn run(pool: Option<&str>, out: &mut Out) -> Result<Exit, Failure> {
    let (_file, name) = match pool {
        Some(name) => (None, name.to_owned()),
        None => unnamed_file().map(|(file, name)| (Some(file), name))?,
    };
    let spec = PoolSpec::parse(&name).map_err(|error| Failure::usage(error.to_string()))?;
    let machines = [MachineId(random_bytes()?), MachineId(random_bytes()?)];
    let area = CellArea { cell_bytes: BLOCK_BYTES as u64, share: Share::Percent(50) };
    let options = FormatOptions { machine: Some(machines[0]), cells: vec![area], ..FormatOptions::default() };
    let pool = Pool::format(&spec, &options).map_err(no_pool)?;
    let directory = tempfile::Builder::new().prefix("cxlctl-demo-").tempdir()?;
    let state = State::open(&directory.path().join("publisher"), pool.superblock().uuid(), machines[0])?;
    let machine = Machine::new(machines[0], state)?;
    let config = HostConfig { seats: pool.superblock().seats(), ..HostConfig::from_env()? };
    let host = cxl_pool::pool::join(pool.lines().clone(), std::sync::Arc::new(machine), config)?;
    let blocks = BLOCKS.min(pool.layout().geometry().cell_count() / 2);
    let reader = directory.path().join("reader");
    let (published_ns, report) = wait::with_cache(host, |_, cache| exchange(cache, blocks, &name, machines[1], &reader))?;
    if report.blocks != blocks {
        return Err(Failure::new(Exit::Failed, format!("{} of {blocks} blocks were pulled", report.blocks)));
    }
    let len_bytes = blocks * BLOCK_BYTES as u64;
    let rate = |ns: u64| len_bytes as f64 / ns.max(1) as f64;
    let (publish, pull) = (rate(published_ns), rate(report.pulled_ns));
    out.answer(
        || json!({"blocks": blocks, "bytes": len_bytes, "verified": true, "publish_gb_per_s": publish, "pull_gb_per_s": pull}),
        || {
            let size = bytes(BLOCK_BYTES as u64);
            format!(
                "{blocks} blocks of {size}: published at {publish:.1} GB/s, pulled by another host at {pull:.1} GB/s, every byte verified\n"
            )
        },
    )?;
    Ok(Exit::Done)
}

/// Publishes the blocks and has another process pull them. The time of the publishes, and what it reports.
fn exchange(cache: &Cache, blocks: u64, pool: &str, machine: MachineId, state: &Path) -> Result<(u64, Report), Failure> {
    let mut block = vec![0; BLOCK_BYTES];
    let mut published_ns = 0;
    for number in 0..blocks {
        fill(number, &mut block);
        let start = Instant::now();
        let published = cache.publish(NAMESPACE, key(number), None, &block)?;
        published_ns += start.elapsed().as_nanos() as u64;
        if published != Published::Stored {
            return Err(Failure::new(Exit::Failed, format!("block {number} was not stored: {published:?}")));
        }
    }
    let environment = [("CXL_MACHINE_ID", machine.to_string()), ("CXL_STATE_DIR", state.display().to_string())];
    let arguments = ["--pool".into(), pool.into(), "demo-reader".into(), blocks.to_string()];
    Ok((published_ns, Peer::start(&arguments, &environment)?.answer(TIMEOUT)?))
}

/// The second process: pulls and compares the blocks.
pub fn read(pool: Option<&str>, blocks: u64, out: &mut Out) -> Result<Exit, Failure> {
    let pool = crate::pool::open(pool, false)?;
    let pulled_ns = wait::with_cache(pool.join(HostConfig::from_env()?)?, |_, cache| pull_all(cache, blocks))?;
    out.line(json!(Report { blocks, pulled_ns }).to_string())?;
    Ok(Exit::Done)
}

fn pull_all(cache: &Cache, blocks: u64) -> Result<u64, Failure> {
    let (mut expected, mut found) = (vec![0; BLOCK_BYTES], vec![0; BLOCK_BYTES]);
    let mut pulled_ns = 0;
    for number in 0..blocks {
        let start = Instant::now();
        let pulled = cache.pull(NAMESPACE, key(number), &mut found)?;
        pulled_ns += start.elapsed().as_nanos() as u64;
        fill(number, &mut expected);
        if !matches!(pulled, Pulled::Hit { .. }) || found != expected {
            return Err(Failure::new(Exit::Failed, format!("block {number} was not pulled as it was published: {pulled:?}")));
        }
    }
    Ok(pulled_ns)
}
