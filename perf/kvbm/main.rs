// SPDX-License-Identifier: Apache-2.0
//! What the tier costs, between two processes that are two hosts of a pool: G2 to the pool (put), the pool to the other's G2 (get), and a
//! lookup. Beside it, in the same run and with blocks of the same sizes: a plain copy from one G2 to another in one process, a read by NIXL
//! UCX from another process's G2, and a file in memory by NIXL POSIX, as KVBM's own G3 is made. Every word that arrives is compared.
//!
//!     make perf-tier

mod g2;
mod nixl;
mod peers;

use cxl_pool::device::PoolSpec;
use cxl_pool::platform::MachineId;
use cxl_pool::pool::{CellArea, FormatOptions, Pool, Share};
use cxl_tier::{BlockShape, CxlBlocks, Model, Outcome, Ranks, Tier, TierConfig};
use dynamo_memory::nixl::NixlAgent;
use g2::G2;
use kvbm_engine::SequenceHash;
use kvbm_physical::layout::KvBlockLayout;
use peers::{Peer, number, serve, size};
use std::path::Path;
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const SIZES: [usize; 3] = [64 << 10, 1 << 20, 16 << 20];
/// Blocks in a batch. The largest comes first, so that it meets the memory before any other is timed.
const BATCHES: [usize; 3] = [64, 8, 1];
/// Bytes that are moved for one figure, about.
const MOVED: usize = 512 << 20;
/// Rounds of a figure whose times are left out: connections are made, and pages given.
const WARM_UP: usize = 2;
const KEYS: usize = 1000;
/// Longest wait until cells are free again.
const PATIENCE: Duration = Duration::from_secs(60);

fn chain(len: usize, seed: u64) -> Vec<SequenceHash> {
    let mut keys = vec![SequenceHash::root(seed)];
    while keys.len() < len {
        let last = keys[keys.len() - 1];
        keys.push(last.extend(seed ^ keys.len() as u64));
    }
    keys
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Medians of several rounds; a round is told its seed.
fn medians<const N: usize>(block_bytes: usize, batch: usize, mut round: impl FnMut(u64) -> Result<[f64; N]>) -> Result<[f64; N]> {
    let rounds = (MOVED / (batch * block_bytes)).clamp(3, 40);
    let mut times = [const { Vec::new() }; N];
    for number in 0..rounds + WARM_UP {
        let took = round((block_bytes * 1000 + batch * 100 + number + 1) as u64)?;
        if number >= WARM_UP {
            times.iter_mut().zip(took).for_each(|(times, took)| times.push(took));
        }
    }
    Ok(times.map(median))
}

fn blocks_of(tier: &Tier, block_bytes: usize) -> Result<CxlBlocks> {
    let model = Model { name: "figures".into(), dtype: "bfloat16".into(), ..Model::default() };
    Ok(tier.blocks(&model, BlockShape::new(&g2::config(block_bytes, 1)?, KvBlockLayout::Unknown)?, Ranks::ALONE)?)
}

fn expect(outcomes: &[Outcome], wanted: Outcome) -> Result<()> {
    match outcomes.iter().find(|outcome| **outcome != wanted) {
        Some(other) => Err(format!("a block's outcome is {}", other.name()).into()),
        None => Ok(()),
    }
}

/// A G2 of the largest batch of blocks of that size; the one before goes first, since some are large.
fn g2_of<'g>(held: &'g mut Option<G2>, name: &str, block_bytes: usize) -> Result<&'g G2> {
    if held.as_ref().is_none_or(|held| held.block_bytes != block_bytes) {
        *held = None;
        *held = Some(G2::new(NixlAgent::new(name)?, block_bytes, BATCHES[0])?);
    }
    Ok(held.as_ref().ok_or("no G2")?)
}

fn prefill() -> Result<()> {
    let tier = Tier::open(&TierConfig::from_env()?)?;
    let mut from = None;
    serve(|words| match words[0] {
        "put" => {
            let (block_bytes, batch, seed) = (size(words, 1)?, size(words, 2)?, number(words, 3)?);
            let blocks = blocks_of(&tier, block_bytes)?;
            tier.cache().clear(None)?;
            let deadline = Instant::now() + PATIENCE;
            while tier.cache().usage().ready + tier.cache().usage().quarantined > 0 {
                if Instant::now() > deadline {
                    return Err(format!("cells are not free again: {:?}", tier.cache().usage()).into());
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            let from = g2_of(&mut from, "prefill", block_bytes)?;
            from.fill(batch.min(BATCHES[0]), seed)?;
            let (keys, ids) = (chain(batch, seed), (0..batch).map(|id| id % BATCHES[0]).collect::<Vec<_>>());
            let begun = Instant::now();
            // SAFETY: this thread alone uses the layout.
            let outcomes = unsafe { blocks.put(&keys, &from.layout, &ids) };
            let took = begun.elapsed();
            expect(&outcomes, Outcome::Done)?;
            Ok(took.as_secs_f64().to_string())
        }
        "free" => {
            from = None;
            Ok(String::new())
        }
        other => Err(format!("{other} is no ask").into()),
    })
}

fn decode() -> Result<()> {
    let tier = Tier::open(&TierConfig::from_env()?)?;
    let (mut plain, mut to) = (None, None);
    serve(|words| match words[0] {
        "get" => {
            let (block_bytes, batch, seed) = (size(words, 1)?, size(words, 2)?, number(words, 3)?);
            let blocks = blocks_of(&tier, block_bytes)?;
            let (plain, to) = (g2_of(&mut plain, "plain", block_bytes)?, g2_of(&mut to, "decode", block_bytes)?);
            plain.fill(batch, seed + 50)?;
            let (keys, ids) = (chain(batch, seed), (0..batch).collect::<Vec<_>>());
            let begun = Instant::now();
            plain.copy_to(to, batch)?;
            let copied = begun.elapsed();
            to.check(batch, seed + 50)?;
            let begun = Instant::now();
            // SAFETY: this thread alone uses the layout.
            let outcomes = unsafe { blocks.get(&keys, &to.layout, &ids) };
            let got = begun.elapsed();
            expect(&outcomes, Outcome::Done)?;
            to.check(batch, seed)?;
            Ok(format!("{} {}", copied.as_secs_f64(), got.as_secs_f64()))
        }
        "has" => {
            let blocks = blocks_of(&tier, size(words, 1)?)?;
            let keys = chain(size(words, 2)?, number(words, 3)?);
            let mut times = Vec::new();
            for _ in 0..50 {
                let begun = Instant::now();
                let outcomes = blocks.has(&keys);
                times.push(begun.elapsed().as_secs_f64());
                expect(&outcomes, Outcome::Done)?;
            }
            let first = times[0];
            Ok(format!("{first} {}", median(times)))
        }
        "free" => {
            (plain, to) = (None, None);
            Ok(String::new())
        }
        other => Err(format!("{other} is no ask").into()),
    })
}

/// Seconds of a batch of blocks.
struct Row {
    block_bytes: usize,
    batch: usize,
    copy: f64,
    put: f64,
    get: f64,
    ucx: f64,
    disk: f64,
}

fn measure(directory: &Path, hosts: &mut [Peer; 2], block_bytes: usize) -> Result<Vec<Row>> {
    let [prefill, decode] = hosts;
    let mut rows = Vec::new();
    for batch in BATCHES {
        let [put, copy, get] = medians(block_bytes, batch, |seed| {
            let [put] = prefill.times(&format!("put {block_bytes} {batch} {seed}"))?;
            let [copy, get] = decode.times(&format!("get {block_bytes} {batch} {seed}"))?;
            Ok([put, copy, get])
        })?;
        rows.push(Row { block_bytes, batch, copy, put, get, ucx: 0.0, disk: 0.0 });
    }
    prefill.ask("free")?;
    decode.ask("free")?;
    // Threads of UCX never rest: its processes live while they are measured.
    let (mut source, mut reader) = (Peer::start("source", directory, &[])?, Peer::start("reader", directory, &[])?);
    let offer = source.ask(&format!("offer {block_bytes} {}", BATCHES[0]))?;
    reader.ask(&format!("know {block_bytes} {} {}", BATCHES[0], offer.join(" ")))?;
    for row in &mut rows {
        [row.ucx] = medians(block_bytes, row.batch, |seed| {
            source.ask(&format!("fill {} {seed}", row.batch))?;
            reader.times(&format!("read {} {seed}", row.batch))
        })?;
    }
    drop((source, reader));
    let mut disk = Peer::start("disk", directory, &[])?;
    disk.ask(&format!("know {block_bytes} {}", BATCHES[0]))?;
    for row in &mut rows {
        let [write, read] = medians(block_bytes, row.batch, |seed| disk.times(&format!("round {} {seed}", row.batch)))?;
        row.disk = write + read;
    }
    drop(disk);
    std::fs::remove_file(directory.join("g3"))?;
    Ok(rows)
}

fn figures() -> Result<()> {
    let directory = tempfile::Builder::new().prefix("kvbm-cxl-figures-").tempdir_in("/dev/shm")?;
    let pool = format!("{},size=1536M", directory.path().join("pool").display());
    let area =
        |cell_bytes: usize, cells: usize| CellArea { cell_bytes: cell_bytes as u64, share: Share::Bytes((cell_bytes * cells) as u64) };
    let cells = vec![area(SIZES[0], KEYS + 152), area(SIZES[1], 80), area(SIZES[2], 72)];
    let machine = |number: u8| MachineId([number; 16]);
    Pool::format(
        &PoolSpec::parse(&pool)?,
        &FormatOptions { cells, chunk_bytes: 16 << 20, machine: Some(machine(1)), ..FormatOptions::default() },
    )?;
    let host = |role: &'static str, number: u8| {
        let state = directory.path().join(role).display().to_string();
        let pool = ("DYN_KVBM_CXL_POOL", pool.clone());
        let variables =
            [pool, ("CXL_STATE_DIR", state), ("CXL_MACHINE_ID", machine(number).to_string()), ("CXL_SUSPECT_MS", "10000".into())];
        Peer::start(role, directory.path(), &variables)
    };
    // The first host has the manager's seat.
    let mut hosts = [host("prefill", 1)?, host("decode", 2)?];
    println!("medians in ms per GB, every word compared");
    println!("{:>8} {:>6} {:>8} {:>8} {:>8} {:>9} {:>11}", "block", "batch", "memcpy", "put", "get", "NIXL UCX", "POSIX, both");
    let (mut ratios, mut copy_1m) = (Vec::new(), 0.0);
    for block_bytes in SIZES {
        for Row { block_bytes, batch, copy, put, get, ucx, disk } in measure(directory.path(), &mut hosts, block_bytes)? {
            let per_gb = |seconds: f64| seconds * 1e12 / (batch * block_bytes) as f64;
            println!(
                "{:>6} K {batch:>6} {:>8.0} {:>8.0} {:>8.0} {:>9.0} {:>11.0}",
                block_bytes >> 10,
                per_gb(copy),
                per_gb(put),
                per_gb(get),
                per_gb(ucx),
                per_gb(disk)
            );
            let mut tell =
                |what: &str, than: &str, ratio: f64| ratios.push((format!("{what}_{batch}_of_{}k_{than}", block_bytes >> 10), ratio));
            tell("put", "over_memcpy", put / copy);
            tell("get", "over_memcpy", get / copy);
            tell("get", "vs_ucx", ucx / get);
            tell("put_and_get", "vs_ucx", ucx / (put + get));
            tell("put_and_get", "vs_posix", disk / (put + get));
            if (block_bytes, batch) == (SIZES[1], 1) {
                copy_1m = copy;
            }
        }
    }
    let [prefill, decode] = &mut hosts;
    prefill.ask(&format!("put {} {KEYS} 7", SIZES[0]))?;
    let [first, again] = decode.times(&format!("has {} {KEYS} 7", SIZES[0]))?;
    println!("lookup of {KEYS} keys of another host: {:.2} ms the first time, {:.2} ms afterwards", first * 1e3, again * 1e3);
    ratios.push((format!("lookup_{KEYS}_first_over_memcpy_1m"), first / copy_1m));
    ratios.push((format!("lookup_{KEYS}_over_memcpy_1m"), again / copy_1m));
    drop(hosts);
    let json: Vec<String> = ratios.iter().map(|(name, ratio)| format!("{name:?}: {ratio:.4}")).collect();
    println!("RATIOS {{{}}}", json.join(", "));
    Ok(())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let roles: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match roles[..] {
        [] => figures(),
        ["prefill", _] => prefill(),
        ["decode", _] => decode(),
        ["source", _] => nixl::source(),
        ["reader", _] => nixl::reader(),
        ["disk", directory] => nixl::disk(Path::new(directory)),
        _ => Err(format!("{arguments:?}: this program takes no arguments").into()),
    }
}
