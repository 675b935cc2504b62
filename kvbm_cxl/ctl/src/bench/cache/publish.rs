// SPDX-License-Identifier: Apache-2.0
//! Publish of one block compared with a bare copy of the same bytes: non-temporal stores and SFENCE; with that copy and the accesses around
//! it that a publish needs; and with the copy and MFENCE, which waits until the stores have arrived, as every program that continues does.
//!
//! The lines of all destinations are in no cache. No other host uses the pool, so the locks of the hint table stay with this one.

use super::accesses::Accesses;
use super::{Names, SIZES};
use crate::lab::{BLOCKS, Lab, Member, NAMESPACE, alone, fill, in_turn, key, place, publish_together, time, uncache, wrong};
use crate::report::Bench;
use ctl_common::stats::Estimate;
use cxl_pool::Result;
use cxl_pool::cache::{BlockKey, Published};
use cxl_pool::limits::LINE_BYTES;
use std::hint::black_box;

/// Blocks that are published together.
const TOGETHER: u64 = 8;
/// Blocks published before the measurement, so that this host holds the locks of the whole hint table.
const WARM: u64 = 200;
/// Ratios to a bare copy that has arrived, in the order of [`SIZES`].
const VS_ARRIVED: [&str; SIZES.len()] = ["publish_64k_vs_arrived", "publish_1m_vs_arrived", "publish_4m_vs_arrived"];

pub fn run(batches: u64) -> Result<Bench> {
    let mut bench = Bench::new("publish of blocks, pool in /dev/shm, one thread");
    for ((size, [names, _]), vs_arrived) in SIZES.into_iter().zip(VS_ARRIVED) {
        single(&mut bench, batches, size, names, vs_arrived)?;
    }
    let [together, one_by_one, _] = together(&mut bench, batches.min(101), 4 << 10)?;
    bench.ratio("publish_together_over_one_by_one", Estimate::of_ratios(&together, &one_by_one));
    let [together, _, bare] = self::together(&mut bench, batches.min(101), 64 << 10)?;
    bench.ratio("publish_64k_together_vs_bare", Estimate::of_ratios(&bare, &together));
    Ok(bench)
}

fn single(bench: &mut Bench, batches: u64, size: usize, names: Names, vs_arrived: &'static str) -> Result<()> {
    let lab = Lab::new(size as u64, BLOCKS, 8 << 20)?;
    let member = lab.join(0, alone())?;
    let data = lab.pool.layout().data_offset();
    let bare = lab.bare(data, size as u64)?;
    let accesses = Accesses::at(&lab, data + size as u64)?;
    let (mut source, mut found) = (vec![0; size], vec![0; size]);
    for number in 0..WARM {
        one(&lab, &member, u64::MAX - number, &source[..64])?;
    }
    let [ours, base, least, arrived] = in_turn(batches, |batch, way| {
        fill(&mut source, batch);
        let copy = || {
            bare.copy_in(0, black_box(&source));
            bare.fence_stores();
        };
        let (taken_ns, offset) = match way {
            0 => one(&lab, &member, batch, &source)?,
            _ => {
                let work = || {
                    match way {
                        1 => copy(),
                        2 => accesses.publish(copy),
                        _ => {
                            copy();
                            bare.fence_all();
                        }
                    }
                    Ok(())
                };
                (time(work)?, data)
            }
        };
        check(&lab, offset, &source, &mut found)?;
        Ok(taken_ns)
    })?;
    let text = format!("{} KiB", size >> 10);
    for (what, taken) in [
        ("publish", &ours),
        ("bare accesses of a publish", &least),
        ("bare non-temporal copy, SFENCE", &base),
        ("bare non-temporal copy, MFENCE", &arrived),
    ] {
        bench.time(format!("{what}, {text}"), taken);
        bench.speed(format!("{what}, {text}, speed"), size, taken);
    }
    bench.at_least(names.vs_bare, Estimate::of_ratios(&base, &ours), names.least);
    bench.ratio(names.vs_accesses, Estimate::of_ratios(&least, &ours));
    bench.ratio(vs_arrived, Estimate::of_ratios(&arrived, &ours));
    member.leave()
}

/// Demands that `expected` lies at `offset`, and takes its lines out of the cache.
fn check(lab: &Lab, offset: u64, expected: &[u8], found: &mut [u8]) -> Result<()> {
    uncache(&**lab.memory(), offset, expected.len())?;
    lab.memory().copy_out(offset, found)?;
    uncache(&**lab.memory(), offset, expected.len())?;
    if found == expected { Ok(()) } else { Err(wrong("a publish left other bytes in the pool than it was given")) }
}

/// Publishes a new block and evicts it: its bytes stay until the cell is used again. The time of the publish, and the block's offset.
fn one(lab: &Lab, member: &Member, number: u64, source: &[u8]) -> Result<(f64, u64)> {
    let key = key(number);
    let taken_ns = time(|| match member.cache.publish(NAMESPACE, key, None, black_box(source))? {
        Published::Stored => Ok(()),
        _ => Err(wrong("a new block was not stored")),
    })?;
    let offset = place(&member.cache, &lab.pool, key)?;
    if !member.cache.evict(NAMESPACE, key)? {
        return Err(wrong("a block of this process could not be evicted"));
    }
    Ok((taken_ns, offset))
}

/// Times of each block: published together, one by one, and copied bare.
fn together(bench: &mut Bench, batches: u64, size: usize) -> Result<[Vec<f64>; 3]> {
    let lab = Lab::new(size as u64, 4 * TOGETHER, 2 * TOGETHER * size as u64)?;
    let member = lab.join(0, alone())?;
    let data = lab.pool.layout().data_offset();
    let bare = lab.bare(data, TOGETHER * size as u64)?;
    let lines = (size / LINE_BYTES) as u64;
    let mut blocks: Vec<Vec<u8>> = vec![vec![0; size]; TOGETHER as usize];
    let mut found = vec![0; size];
    let mut taken = in_turn::<3>(batches + 1, |batch, way| {
        let first = (3 * batch + way as u64) * TOGETHER;
        blocks.iter_mut().zip(first..).for_each(|(block, number)| fill(block, number));
        // Hashing is the engine's part.
        let keys: Vec<BlockKey> = (first..first + TOGETHER).map(key).collect();
        let taken_ns = time(|| {
            match way {
                0 => publish_together(&member, &keys, &blocks)?,
                1 => blocks.iter().zip(&keys).try_for_each(|(block, &key)| member.cache.publish(NAMESPACE, key, None, block).map(drop))?,
                _ => blocks.iter().zip(0..).for_each(|(block, number)| {
                    bare.copy_in(number * lines, black_box(block));
                    bare.fence_stores();
                }),
            }
            Ok(())
        })?;
        for (index, block) in blocks.iter().enumerate() {
            let offset = if way == 2 { data + (index * size) as u64 } else { place(&member.cache, &lab.pool, keys[index])? };
            check(&lab, offset, block, &mut found)?;
        }
        member.cache.clear(Some(NAMESPACE))?;
        Ok(taken_ns / TOGETHER as f64)
    })?;
    member.leave()?;
    // The first batch claims the cells and the locks.
    taken.iter_mut().for_each(|times| _ = times.remove(0));
    bench.time(format!("publish of {} KiB, {TOGETHER} together, each", size >> 10), &taken[0]);
    bench.time(format!("publish of {} KiB, one by one, each", size >> 10), &taken[1]);
    bench.time(format!("bare non-temporal copy of {} KiB, SFENCE, each", size >> 10), &taken[2]);
    Ok(taken)
}
