// SPDX-License-Identifier: Apache-2.0
//! Publishing one block beside a bare copy of the same bytes to other lines of the same pool: non-temporal stores and SFENCE; and beside
//! that copy with the other accesses of a publish around it. SFENCE returns before what was stored has arrived; the same copy with MFENCE
//! tells when it has. A program that goes on waits for that: no store behind an SFENCE is made before those in front of it have arrived,
//! and only some dozens can wait without holding the processor up.
//!
//! The block before was evicted, outside of what is timed, so that a cell is free; the lines of both destinations are in no cache. No other
//! host uses the pool, so that the locks of the hint table stay with this one.

use super::accesses::Accesses;
use super::{BLOCKS, Lab, Member, NAMESPACE, Names, SIZES, alone, fill, join, key, place, refuse_emulated, uncache};
use crate::stats::{Estimate, median, quantile};
use crate::{Bench, wrong};
use cxl_pool::Result;
use cxl_pool::cache::{BlockKey, CacheConfig, PublishRequest, Published, Reservation, Reserved};
use cxl_pool::copy::{LocalPlace, LocalRange};
use cxl_pool::limits::LINE_BYTES;
use std::hint::black_box;
use std::ptr::NonNull;
use std::time::Instant;

/// Blocks that are published together in the batch figure.
const TOGETHER: u64 = 8;

/// Blocks published before anything is measured, so that the locks of all parts of the hint table are here.
const WARM: u64 = 200;

/// Names of the ratios beside a bare copy that has arrived, in the order of [`SIZES`].
const VS_ARRIVED: [&str; SIZES.len()] = ["publish_64k_vs_arrived", "publish_1m_vs_arrived", "publish_4m_vs_arrived"];

/// Measures.
pub fn run(batches: u64) -> Result<Bench> {
    refuse_emulated()?;
    let mut bench = Bench { title: "publish of blocks, pool in /dev/shm, one thread".into(), ..Bench::default() };
    for ((size, [names, _]), vs_arrived) in SIZES.into_iter().zip(VS_ARRIVED) {
        single(&mut bench, batches, size, names, vs_arrived)?;
    }
    let [small, large] = [together(batches.min(101), 4 << 10)?, together(batches.min(101), 64 << 10)?];
    batch_figures(&mut bench, &small, "4 KiB");
    batch_figures(&mut bench, &large, "64 KiB");
    bench.ratio("publish_together_over_one_by_one", Estimate::of_ratios(&small.together, &small.alone));
    bench.ratio("publish_64k_together_vs_bare", Estimate::of_ratios(&large.bare, &large.together));
    Ok(bench)
}

fn single(bench: &mut Bench, batches: u64, size: usize, names: Names, vs_arrived: &'static str) -> Result<()> {
    // A pool each, so that neither waits for locks of the other.
    let labs = [Lab::new(size as u64, BLOCKS, 8 << 20)?, Lab::new(size as u64, BLOCKS, 8 << 20)?];
    let [plain, summing] = &labs;
    let member = join(plain.pool(), &plain.state(), 0, alone(), false)?;
    let checked = join(summing.pool(), &summing.state(), 0, CacheConfig { checksums: true, ..alone() }, false)?;
    let data = plain.pool().layout().data_offset();
    let bare = plain.bare(data, size as u64)?;
    let accesses = Accesses::at(plain, data + size as u64)?;
    // Made once: memory that is given back and had again in between is what the system would be measured with.
    let (mut source, mut found) = (vec![0; size], vec![0; size]);
    let (mut ours, mut summed): (Vec<f64>, Vec<f64>) = Default::default();
    let (mut base, mut least, mut arrived): (Vec<f64>, Vec<f64>, Vec<f64>) = Default::default();
    // The first publishes of a host claim a chunk and take the locks of the hint table, which takes the manager.
    for number in 0..WARM {
        for (lab, member) in [(plain, &member), (summing, &checked)] {
            one(lab, member, u64::MAX - number, &source[..64])?;
        }
    }
    for batch in 0..batches {
        fill(&mut source, batch);
        for turn in 0..5 {
            let (lab, taken, taken_ns, offset) = match (turn + batch) % 5 {
                0 => {
                    let (taken_ns, offset) = one(plain, &member, batch, &source)?;
                    (plain, &mut ours, taken_ns, offset)
                }
                1 => {
                    let (taken_ns, offset) = one(summing, &checked, batch, &source)?;
                    (summing, &mut summed, taken_ns, offset)
                }
                way => {
                    let copy = || {
                        bare.copy_in(0, black_box(&source));
                        bare.fence_stores();
                    };
                    let start = Instant::now();
                    let taken = match way {
                        2 => {
                            copy();
                            &mut base
                        }
                        3 => {
                            accesses.publish(copy);
                            &mut least
                        }
                        _ => {
                            copy();
                            bare.fence_all();
                            &mut arrived
                        }
                    };
                    (plain, taken, start.elapsed().as_nanos() as f64, data)
                }
            };
            uncache(&**lab.memory(), offset, size)?;
            lab.memory().copy_out(offset, &mut found)?;
            if found != source {
                return Err(wrong("what was published is not what lies in the pool"));
            }
            uncache(&**lab.memory(), offset, size)?;
            taken.push(taken_ns);
        }
    }
    let text = format!("{} KiB", size >> 10);
    let [ratio, of_least, of_arrived] = [&base, &least, &arrived].map(|other| Estimate::of_ratios(other, &ours));
    for (what, taken) in [
        ("publish", &mut ours),
        ("publish with a checksum", &mut summed),
        ("bare accesses of a publish", &mut least),
        ("bare non-temporal copy, SFENCE", &mut base),
        ("bare non-temporal copy, MFENCE", &mut arrived),
    ] {
        bench.figure(format!("{what}, {text}"), median(taken), "ns");
        bench.figure(format!("{what}, {text}, p99"), quantile(taken, 0.99), "ns");
        bench.figure(format!("{what}, {text}, rate"), 1e9 / median(taken), "/s");
        bench.figure(format!("{what}, {text}, speed"), size as f64 / median(taken), "GB/s");
    }
    bench.at_least(&format!("publish of {text}, speed beside the bare one"), &ratio, names.least);
    bench.ratio(names.vs_bare, ratio);
    bench.ratio(names.vs_accesses, of_least);
    bench.ratio(vs_arrived, of_arrived);
    member.leave()?;
    checked.leave()
}

/// Publishes a new block, and evicts it: its bytes stay until the cell is used again. How long the publish took, and where the block lay.
fn one(lab: &Lab, member: &Member, number: u64, source: &[u8]) -> Result<(f64, u64)> {
    let key = key(number);
    let start = Instant::now();
    let published = member.cache.publish(NAMESPACE, key, None, black_box(source))?;
    let taken_ns = start.elapsed().as_nanos() as f64;
    if published != Published::Stored {
        return Err(wrong("a new block was not stored"));
    }
    let offset = place(&member.cache, lab.pool(), key)?;
    if !member.cache.evict(NAMESPACE, key)? {
        return Err(wrong("a block of this process could not be evicted"));
    }
    Ok((taken_ns, offset))
}

/// How long blocks of one size took, each, in nanoseconds.
struct Batches {
    alone: Vec<f64>,
    together: Vec<f64>,
    bare: Vec<f64>,
}

/// Blocks one by one, in batches that share their fences, and copied bare to as many other places.
fn together(batches: u64, size: usize) -> Result<Batches> {
    let lab = Lab::new(size as u64, 4 * TOGETHER, 2 * TOGETHER * size as u64)?;
    let member = join(lab.pool(), &lab.state(), 0, alone(), false)?;
    let data = lab.pool().layout().data_offset();
    let bare = lab.bare(data, TOGETHER * size as u64)?;
    let lines = (size / LINE_BYTES) as u64;
    let mut blocks: Vec<Vec<u8>> = vec![vec![0; size]; TOGETHER as usize];
    let mut found = vec![0; size];
    let mut taken = Batches { alone: Vec::new(), together: Vec::new(), bare: Vec::new() };
    for batch in 0..batches + 1 {
        for turn in 0..3 {
            let first = (3 * batch + turn) * TOGETHER;
            blocks.iter_mut().zip(first..).for_each(|(block, number)| fill(block, number));
            // Hashing is the engine's part, and done before.
            let keys: Vec<BlockKey> = (first..first + TOGETHER).map(key).collect();
            let way = (turn + batch) % 3;
            let start = Instant::now();
            let times = match way {
                0 => {
                    publish_together(&member, &keys, &blocks)?;
                    &mut taken.together
                }
                1 => {
                    for (block, &key) in blocks.iter().zip(&keys) {
                        member.cache.publish(NAMESPACE, key, None, block)?;
                    }
                    &mut taken.alone
                }
                _ => {
                    for (block, number) in blocks.iter().zip(0..) {
                        bare.copy_in(number * lines, black_box(block));
                        bare.fence_stores();
                    }
                    &mut taken.bare
                }
            };
            let taken_ns = start.elapsed().as_nanos() as f64 / TOGETHER as f64;
            if batch > 0 {
                times.push(taken_ns);
            }
            for (index, block) in blocks.iter().enumerate() {
                let offset = match way {
                    0 | 1 => place(&member.cache, lab.pool(), keys[index])?,
                    _ => data + (index * size) as u64,
                };
                uncache(&**lab.memory(), offset, size)?;
                lab.memory().copy_out(offset, &mut found)?;
                uncache(&**lab.memory(), offset, size)?;
                if found != *block {
                    return Err(wrong("what was published is not what lies in the pool"));
                }
            }
            member.cache.clear(Some(NAMESPACE))?;
        }
    }
    member.leave()?;
    Ok(taken)
}

/// Publishes blocks as those of one step of an engine.
pub fn publish_together<B: AsRef<[u8]>>(member: &Member, keys: &[BlockKey], blocks: &[B]) -> Result<()> {
    let request = |(block, &key): (&B, &BlockKey)| {
        let len_bytes = block.as_ref().len() as u64;
        PublishRequest { namespace: NAMESPACE, key, parent: None, len_bytes }
    };
    let requests: Vec<PublishRequest> = blocks.iter().zip(keys).map(request).collect();
    let cells = member.cache.reserve_all(&requests)?.into_iter().map(|reserved| match reserved {
        Reserved::Cell(reservation) => Ok(reservation),
        _ => Err(wrong("a new block got no cell")),
    });
    let mut cells = cells.collect::<Result<Vec<_>>>()?;
    let range = |block: &B| LocalRange { address: NonNull::from(block.as_ref()).cast(), len_bytes: block.as_ref().len() };
    // SAFETY: the blocks are borrowed until this returns, and memory of this process.
    unsafe { Reservation::fill_all_raw(&mut cells, LocalPlace::Host, |index| blocks.get(index).map(range)) }?;
    member.cache.commit_all(cells)
}

fn batch_figures(bench: &mut Bench, taken: &Batches, text: &str) {
    bench.figure(format!("publish of {text}, one by one, each"), median(&mut taken.alone.clone()), "ns");
    bench.figure(format!("publish of {text}, {TOGETHER} together, each"), median(&mut taken.together.clone()), "ns");
    bench.figure(format!("bare non-temporal copies of {text}, SFENCE, {TOGETHER}, each"), median(&mut taken.bare.clone()), "ns");
}
