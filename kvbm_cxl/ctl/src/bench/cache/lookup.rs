// SPDX-License-Identifier: Apache-2.0
//! Lookups by a host that did not publish the blocks, beside one bare fetch of a descriptor: CLFLUSH, MFENCE, load.
//!
//! A lookup of a key that this process never met fetches the key's hint line, then the descriptor that it names: two waits at least. One
//! that it met lately goes to the descriptor right away. Both are measured. Lines are left in the cache by what was measured before, in the
//! same way for both sides.

use super::{Lab, Member, NAMESPACE, alone, fill, join, key, refuse_emulated};
use crate::stats::{Estimate, median, quantile, time_text};
use crate::{Bench, Grid, wrong};
use cxl_pool::Result;
use cxl_pool::cache::survey::CacheView;
use cxl_pool::cache::{BlockKey, Cache, CacheConfig, PublishRequest, Reserved};
use cxl_pool::coherence::Bare;
use cxl_pool::media::Region;
use std::hint::black_box;
use std::time::Instant;

/// Cells of the pool, a power of two.
const CELLS: u64 = 16384;
/// Size of a cell in bytes.
const CELL_BYTES: u64 = 128;
/// Blocks published together.
const TOGETHER: usize = 128;
/// Lookups in one batch.
const BATCH: u64 = 64;
/// How full the cache is, in hundredths of its cells.
const FILLS: [u64; 5] = [10, 30, 50, 70, 90];
/// The fill at which the ratios are taken, in hundredths.
const RATIOS_AT: u64 = 70;
/// Blocks of the chains.
const CHAINS: [u64; 2] = [64, 10_000];

/// What one fill gave, in nanoseconds.
#[derive(Default)]
struct LookupTimes {
    new: Vec<f64>,
    known: Vec<f64>,
    missing: Vec<f64>,
    fetch: Vec<f64>,
    chain: [Vec<f64>; CHAINS.len()],
    chain_known: [Vec<f64>; CHAINS.len()],
    chain_fetch: [Vec<f64>; CHAINS.len()],
}

/// Measures.
pub fn run(batches: u64) -> Result<Bench> {
    refuse_emulated()?;
    let lab = Lab::new(CELL_BYTES, CELLS, 2 << 20)?;
    let owner = join(lab.pool(), &lab.state(), 0, alone(), false)?;
    // One that forgets at once where keys are, and one that remembers.
    let new = join(lab.pool(), &lab.state(), 1, CacheConfig { remembered_keys: 0, ..alone() }, false)?;
    let known = join(lab.pool(), &lab.state(), 2, alone(), false)?;
    let descriptors = lab.pool().layout().line_offset(Region::Descriptor, 0)?;
    let bare = lab.bare(descriptors, CELLS * 64)?;
    let mut bench = Bench { title: format!("lookups, {CELLS} cells, pool in /dev/shm"), ..Bench::default() };
    let titles = [
        "cells full",
        "hints full",
        "1 block, new",
        "p99",
        "known",
        "missing",
        "chain of 64",
        "known",
        "chain of 10000",
        "each",
        "bare fetch",
    ];
    let mut rows = vec![titles.map(String::from).to_vec()];
    let mut published = 0;
    for fill in FILLS {
        let wanted = CELLS * fill / 100;
        publish(&owner.cache, published..wanted)?;
        published = wanted;
        let mut taken = LookupTimes::default();
        for batch in 0..batches.max(3) {
            single(&new.cache, &known.cache, &bare, published, batch, &mut taken)?;
        }
        for (place, &length) in CHAINS.iter().enumerate() {
            for batch in 0..if length > 1000 { batches.clamp(3, 21) } else { batches.max(3) } {
                chain(&new.cache, &known.cache, &bare, (published, length, batch), (&mut taken, place))?;
            }
        }
        rows.push(row(&lab, fill, published, &taken)?);
        if fill == RATIOS_AT {
            let (new, chain) = (Estimate::of_ratios(&taken.new, &taken.fetch), Estimate::of_ratios(&taken.chain[0], &taken.chain_fetch[0]));
            bench.at_most("lookup of one block, beside one bare fetch", &new, 2.0, "");
            bench.at_most("lookup of a chain of 64, beside one bare fetch", &chain, 12.0, "");
            bench.ratio("lookup1_vs_fetch", new);
            bench.ratio("lookup1_known_vs_fetch", Estimate::of_ratios(&taken.known, &taken.fetch));
            bench.ratio("lookup64_vs_fetch", chain);
            bench.ratio("lookup64_known_vs_fetch", Estimate::of_ratios(&taken.chain_known[0], &taken.chain_fetch[0]));
            bench.ratio("lookup10000_vs_fetch", Estimate::of_ratios(&taken.chain[1], &taken.chain_fetch[1]));
            let lookups = [("lookup of a new key", &taken.new), ("lookup of a known key", &taken.known), ("bare fetch", &taken.fetch)];
            for (name, taken) in lookups {
                bench.figure(format!("{name}, {fill} % of the cells full"), median(&mut taken.clone()), "ns");
                bench.figure(format!("{name}, p99 of batches of {BATCH}"), quantile(&mut taken.clone(), 0.99), "ns");
            }
            bench.figure(format!("lookups of new keys, {fill} % of the cells full"), 1e9 / median(&mut taken.new.clone()), "/s");
        }
    }
    bench.grids.push(Grid { title: "By how full the cache is (medians)".into(), rows });
    [new, known, owner].into_iter().try_for_each(Member::leave)?;
    Ok(bench)
}

/// Length of block `number`: lookups that answer for another block show.
fn len_bytes(number: u64) -> u64 {
    1 + number % CELL_BYTES
}

fn publish(cache: &Cache, numbers: std::ops::Range<u64>) -> Result<()> {
    let numbers: Vec<u64> = numbers.collect();
    let mut bytes = [0; CELL_BYTES as usize];
    for group in numbers.chunks(TOGETHER) {
        let request = |&number: &u64| PublishRequest { namespace: NAMESPACE, key: key(number), parent: None, len_bytes: len_bytes(number) };
        let requests: Vec<PublishRequest> = group.iter().map(request).collect();
        let mut filled = Vec::with_capacity(requests.len());
        for (reserved, &number) in cache.reserve_all(&requests)?.into_iter().zip(group) {
            let Reserved::Cell(mut reservation) = reserved else { return Err(wrong(format!("block {number} got no cell"))) };
            fill(&mut bytes, number);
            reservation.fill([&bytes[..len_bytes(number) as usize]])?;
            filled.push(reservation);
        }
        cache.commit_all(filled)?;
    }
    Ok(())
}

/// Numbers that go round all of `count`, in no order that a prefetcher knows.
fn numbers(batch: u64, count: u64) -> impl Iterator<Item = u64> {
    (0..BATCH).map(move |step| (batch * BATCH + step).wrapping_mul(0x9e37_79b9_7f4a_7c15) % count)
}

fn look(cache: &Cache, keys: &[(BlockKey, u64)]) -> Result<f64> {
    let start = Instant::now();
    let mut sum = 0;
    for (key, _) in keys {
        sum += cache.lookup(NAMESPACE, black_box(*key))?.map_or(0, |found| found.len_bytes);
    }
    let taken_ns = start.elapsed().as_nanos() as f64 / keys.len() as f64;
    if sum != keys.iter().map(|(_, len_bytes)| len_bytes).sum::<u64>() {
        return Err(wrong("a lookup answered for another block, or missed one that is there"));
    }
    Ok(taken_ns)
}

fn single(new: &Cache, known: &Cache, bare: &Bare, published: u64, batch: u64, taken: &mut LookupTimes) -> Result<()> {
    let keys: Vec<(BlockKey, u64)> = numbers(batch, published).map(|number| (key(number), len_bytes(number))).collect();
    let missing: Vec<(BlockKey, u64)> = numbers(batch, CELLS).map(|number| (key(number + CELLS), 0)).collect();
    let cells: Vec<u64> = numbers(batch, published).collect();
    // So that it knows them, whatever it met since.
    look(known, &keys)?;
    for turn in 0..4 {
        match (turn + batch) % 4 {
            0 => taken.new.push(look(new, &keys)?),
            1 => taken.known.push(look(known, &keys)?),
            2 => taken.missing.push(look(new, &missing)?),
            _ => {
                let start = Instant::now();
                cells.iter().for_each(|&cell| _ = black_box(bare.fetch(cell)));
                taken.fetch.push(start.elapsed().as_nanos() as f64 / cells.len() as f64);
            }
        }
    }
    Ok(())
}

fn chain(
    new: &Cache,
    known: &Cache,
    bare: &Bare,
    (published, length, batch): (u64, u64, u64),
    (taken, place): (&mut LookupTimes, usize),
) -> Result<()> {
    // A chain that ends within the blocks that are there; one that is longer than they are ends behind the last.
    let first = if length < published { (batch * 2477) % (published - length) } else { 0 };
    let keys: Vec<BlockKey> = (first..first + length).map(key).collect();
    let there = length.min(published) as usize;
    let ask = |cache: &Cache| {
        let start = Instant::now();
        let found = cache.lookup_chain(NAMESPACE, black_box(&keys))?;
        let taken_ns = start.elapsed().as_nanos() as f64;
        let is_right = found.iter().zip(first..).all(|(found, number)| found.len_bytes == len_bytes(number));
        if found.len() == there && is_right { Ok(taken_ns) } else { Err(wrong("a chain is shorter than what was published of it")) }
    };
    ask(known)?;
    for turn in 0..3 {
        match (turn + batch) % 3 {
            0 => taken.chain[place].push(ask(new)?),
            1 => taken.chain_known[place].push(ask(known)?),
            _ => {
                let start = Instant::now();
                (0..16).for_each(|step| _ = black_box(bare.fetch((batch * 2477 + step * 331) % CELLS)));
                taken.chain_fetch[place].push(start.elapsed().as_nanos() as f64 / 16.0);
            }
        }
    }
    Ok(())
}

fn row(lab: &Lab, fill: u64, published: u64, taken: &LookupTimes) -> Result<Vec<String>> {
    let summary = CacheView::load(lab.pool().lines())?.summary(true)?;
    let hints = summary.hints.unwrap_or_default();
    if summary.served != published || hints.unreachable_blocks > 0 {
        return Err(wrong(format!("{} blocks of {published} are there, {} out of reach", summary.served, hints.unreachable_blocks)));
    }
    let time = |values: &Vec<f64>| time_text(median(&mut values.clone()));
    Ok(vec![
        format!("{fill} %"),
        format!("{} %", hints.used * 100 / hints.places.max(1)),
        time(&taken.new),
        time_text(quantile(&mut taken.new.clone(), 0.99)),
        time(&taken.known),
        time(&taken.missing),
        time(&taken.chain[0]),
        time(&taken.chain_known[0]),
        time(&taken.chain[1]),
        time_text(median(&mut taken.chain[1].clone()) / CHAINS[1].min(published) as f64),
        time(&taken.fetch),
    ])
}
