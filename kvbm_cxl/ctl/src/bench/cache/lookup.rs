// SPDX-License-Identifier: Apache-2.0
//! Lookups by a host that did not publish the blocks, compared with one bare fetch of a descriptor: CLFLUSH, MFENCE, load.
//!
//! A lookup of a key that this process never met fetches the key's hint line, then the descriptor that it names: two waits at least. A
//! lookup of a key that it met lately fetches the descriptor alone. 70 % of the cells are full.

use crate::lab::{Lab, Member, NAMESPACE, alone, fill, in_turn, key, publish_together, wrong};
use crate::report::Bench;
use ctl_common::stats::Estimate;
use cxl_pool::Result;
use cxl_pool::cache::{BlockKey, Cache, CacheConfig};
use cxl_pool::coherence::Bare;
use cxl_pool::media::Region;
use std::hint::black_box;
use std::time::Instant;

/// Cells of the pool, a power of two.
const CELLS: u64 = 16384;
const CELL_BYTES: u64 = 128;
/// Blocks in the cells.
const PUBLISHED: u64 = CELLS * 70 / 100;
/// Blocks published together.
const TOGETHER: usize = 128;
/// Lookups in one batch.
const BATCH: u64 = 64;

pub fn run(batches: u64) -> Result<Bench> {
    let lab = Lab::new(CELL_BYTES, CELLS, 2 << 20)?;
    let owner = lab.join(0, alone())?;
    // One that forgets at once where keys are, and one that remembers.
    let new = lab.join(1, CacheConfig { remembered_keys: 0, ..alone() })?;
    let known = lab.join(2, alone())?;
    let bare = lab.bare(lab.pool.layout().line_offset(Region::Descriptor, 0)?, CELLS * 64)?;
    publish(&owner)?;
    let mut bench = Bench::new(format!("lookups, {CELLS} cells, 70 % full, pool in /dev/shm"));
    single(&mut bench, [&new.cache, &known.cache], &bare, batches)?;
    let [one, one_known] = chain(&mut bench, [&new.cache, &known.cache], &bare, 64, batches)?;
    bench.at_most("lookup64_vs_fetch", one, 12.0);
    bench.ratio("lookup64_known_vs_fetch", one_known);
    let [one, _] = chain(&mut bench, [&new.cache, &known.cache], &bare, 10_000, batches.min(21))?;
    bench.ratio("lookup10000_vs_fetch", one);
    [new, known, owner].into_iter().try_for_each(Member::leave)?;
    Ok(bench)
}

/// Length of block `number`, in bytes: an answer for another block shows.
fn len_bytes(number: u64) -> u64 {
    1 + number % CELL_BYTES
}

fn publish(owner: &Member) -> Result<()> {
    let numbers: Vec<u64> = (0..PUBLISHED).collect();
    for group in numbers.chunks(TOGETHER) {
        let block = |&number: &u64| {
            let mut bytes = vec![0; CELL_BYTES as usize];
            fill(&mut bytes, number);
            bytes.truncate(len_bytes(number) as usize);
            bytes
        };
        let (keys, blocks): (Vec<BlockKey>, Vec<Vec<u8>>) = group.iter().map(|number| (key(*number), block(number))).unzip();
        publish_together(owner, &keys, &blocks)?;
    }
    Ok(())
}

/// Looks keys up one by one; nanoseconds of each.
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

fn fetch(bare: &Bare, cells: impl Iterator<Item = u64>) -> f64 {
    let cells: Vec<u64> = cells.collect();
    let start = Instant::now();
    cells.iter().for_each(|&cell| _ = black_box(bare.fetch(cell)));
    start.elapsed().as_nanos() as f64 / cells.len() as f64
}

fn single(bench: &mut Bench, [new, known]: [&Cache; 2], bare: &Bare, batches: u64) -> Result<()> {
    let [of_new, of_known, fetches] = in_turn(batches, |batch, way| {
        // In an order that no prefetcher follows.
        let numbers = (0..BATCH).map(|step| (batch * BATCH + step).wrapping_mul(0x9e37_79b9_7f4a_7c15) % PUBLISHED);
        let keys: Vec<(BlockKey, u64)> = numbers.clone().map(|number| (key(number), len_bytes(number))).collect();
        match way {
            0 => look(new, &keys),
            1 => {
                look(known, &keys)?;
                look(known, &keys)
            }
            _ => Ok(fetch(bare, numbers)),
        }
    })?;
    bench.time("lookup of a new key", &of_new);
    bench.time("lookup of a known key", &of_known);
    bench.time("bare fetch", &fetches);
    bench.at_most("lookup1_vs_fetch", Estimate::of_ratios(&of_new, &fetches), 2.0);
    bench.ratio("lookup1_known_vs_fetch", Estimate::of_ratios(&of_known, &fetches));
    Ok(())
}

/// Lookups of whole chains of `length` blocks, new and known, by one bare fetch.
fn chain(bench: &mut Bench, [new, known]: [&Cache; 2], bare: &Bare, length: u64, batches: u64) -> Result<[Estimate; 2]> {
    let [of_new, of_known, fetches] = in_turn(batches, |batch, way| {
        let first = (batch * 2477) % (PUBLISHED - length);
        let keys: Vec<BlockKey> = (first..first + length).map(key).collect();
        let ask = |cache: &Cache| {
            let start = Instant::now();
            let found = cache.lookup_chain(NAMESPACE, black_box(&keys))?;
            let taken_ns = start.elapsed().as_nanos() as f64;
            let is_right = found.iter().zip(first..).all(|(found, number)| found.len_bytes == len_bytes(number));
            if found.len() == keys.len() && is_right {
                Ok(taken_ns)
            } else {
                Err(wrong("a lookup found fewer or other blocks of a chain than were published"))
            }
        };
        match way {
            0 => ask(new),
            1 => {
                ask(known)?;
                ask(known)
            }
            _ => Ok(fetch(bare, (0..16).map(|step| (batch * 2477 + step * 331) % CELLS))),
        }
    })?;
    bench.time(format!("lookup of a chain of {length} new keys"), &of_new);
    Ok([Estimate::of_ratios(&of_new, &fetches), Estimate::of_ratios(&of_known, &fetches)])
}
