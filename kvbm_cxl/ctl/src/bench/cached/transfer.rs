// SPDX-License-Identifier: Apache-2.0
//! Publish and pull of whole blocks.
//!
//! Base lines, on memory of the same pool: for a publish, a non-temporal copy and SFENCE; for a pull, the fastest of the bare loops that are
//! safe without coherence (`super::super::copy`). Blocks are in no cache before they are pulled or written, as after another host's publish.
//! What a publish needs besides the copy (descriptor, hint, lock, fence checks) and a pull (lookup, pin, two looks at the descriptor and the
//! fences) is in its time.

use super::lab::{BARE_BYTES, Lab, NAMESPACE, fill, is_block, key};
use super::ucx::Peer;
use crate::bench::copy::{LOOPS, bare_pull};
use crate::bench::{Bench, wrong};
use crate::stats::{Estimate, median};
use cxl_pool::Result;
use cxl_pool::cache::{Published, Pulled};
use cxl_pool::limits::LINE_BYTES;
use std::hint::black_box;
use std::time::Instant;

/// Sizes with the names of their ratios and how much of the base line's speed is promised.
const SIZES: [(usize, [&str; 2], [f64; 2]); 3] = [
    (64 << 10, ["publish_64k_vs_bare", "pull_64k_vs_bare"], [1.0 / 1.3, 1.0 / 1.5]),
    (1 << 20, ["publish_1m_vs_bare", "pull_1m_vs_bare"], [0.95, 0.95]),
    (4 << 20, ["publish_4m_vs_bare", "pull_4m_vs_bare"], [0.95, 0.95]),
];
/// Blocks of 1 MiB that are pulled beside the reads of others: more bytes than most last-level caches have.
const WORKING_SET: u64 = 512;

fn gigabytes(len_bytes: usize, taken: &mut [f64]) -> f64 {
    len_bytes as f64 / median(taken)
}

fn elapsed(start: Instant) -> f64 {
    start.elapsed().as_nanos() as f64
}

/// Publishes block `block` of `size` bytes and says how long that took.
fn published(lab: &Lab, block: u64, bytes: &[u8]) -> Result<f64> {
    let start = Instant::now();
    let outcome = lab.cache.publish(NAMESPACE, key(block), None, black_box(bytes))?;
    let taken = elapsed(start);
    if outcome == Published::Stored { Ok(taken) } else { Err(wrong(format!("block {block} was there already"))) }
}

/// Publish beside the bare copy.
pub fn publish(lab: &Lab, bench: &mut Bench, batches: u64) -> Result<()> {
    for (number, (size, names, promised)) in SIZES.into_iter().enumerate() {
        let mut source = vec![0; size];
        let mut found = vec![0; size];
        let (mut ours, mut bare): (Vec<f64>, Vec<f64>) = Default::default();
        for batch in 0..batches {
            let block = (number as u64 + 1) << 32 | batch;
            fill(&mut source, block);
            let offset = (batch as usize * 5 * size) % BARE_BYTES;
            lab.uncached(lab.bare_offset + offset as u64, size)?;
            for turn in 0..2 {
                if (turn + batch) % 2 == 0 {
                    ours.push(published(lab, block, &source)?);
                } else {
                    let start = Instant::now();
                    lab.bare.copy_in((offset / LINE_BYTES) as u64, black_box(&source));
                    lab.bare.fence_stores();
                    bare.push(elapsed(start));
                }
            }
            let at = lab.offset_of(block)?;
            lab.uncached(at, size)?;
            lab.memory().copy_out(at, &mut found)?;
            if found != source {
                return Err(wrong(format!("block {block} lies in the pool otherwise than it was published")));
            }
            lab.uncached(at, size)?;
            // Room for the next one is made outside of its time, as the background evictor does.
            lab.cache.evict(NAMESPACE, key(block))?;
        }
        let ratio = Estimate::of_ratios(&bare, &ours);
        let text = format!("{} KiB", size >> 10);
        bench.figure(format!("publish of {text}"), gigabytes(size, &mut ours), "GB/s");
        bench.figure(format!("bare non-temporal copy of {text}, SFENCE"), gigabytes(size, &mut bare), "GB/s");
        bench.at_least(&format!("publish of {text}, speed beside a bare non-temporal copy"), &ratio, promised[0]);
        bench.ratio(names[0], ratio);
    }
    Ok(())
}

/// Pull beside the best bare loop.
pub fn pull(lab: &Lab, bench: &mut Bench, batches: u64) -> Result<()> {
    for (number, (size, names, promised)) in SIZES.into_iter().enumerate() {
        let blocks = (48 << 20) / size as u64;
        let name = |index: u64| (number as u64 + 1) << 40 | index;
        let mut source = vec![0; size];
        for index in 0..blocks {
            fill(&mut source, name(index));
            published(lab, name(index), &source)?;
        }
        // Destinations go round as much memory as the sources, so that no loop finds its own from the last time.
        let mut local = vec![1u8; (BARE_BYTES / size).max(2) * size + 4096];
        let start_of = local.as_ptr().align_offset(4096);
        let mut ours: Vec<f64> = Vec::new();
        let mut bare: [Vec<f64>; LOOPS.len()] = Default::default();
        let turns = LOOPS.len() as u64 + 1;
        let mut next = 0;
        for batch in 0..batches {
            let block = name((batch * 7) % blocks);
            let offset = (batch as usize * 5 * size) % BARE_BYTES;
            fill(&mut source, block);
            lab.memory().copy_in(lab.bare_offset + offset as u64, &source)?;
            lab.memory().fence_stores();
            let at = lab.offset_of(block)?;
            for turn in 0..turns {
                let place = start_of + next * size;
                next = (next + 1) % (BARE_BYTES / size).max(2);
                let destination = &mut local[place..place + size];
                destination[..LINE_BYTES].fill(0);
                match ((turn + batch) % turns) as usize {
                    loop_number if loop_number < LOOPS.len() => {
                        lab.uncached(lab.bare_offset + offset as u64, size)?;
                        let start = Instant::now();
                        bare_pull(&lab.bare, loop_number, (offset / LINE_BYTES) as u64, destination)?;
                        bare[loop_number].push(elapsed(start));
                    }
                    _ => {
                        lab.uncached(at, size)?;
                        let start = Instant::now();
                        let pulled = lab.cache.pull(NAMESPACE, key(block), destination)?;
                        ours.push(elapsed(start));
                        if pulled != (Pulled::Hit { len_bytes: size as u64 }) {
                            return Err(wrong(format!("block {block} was not pulled: {pulled:?}")));
                        }
                    }
                }
                if destination != source {
                    return Err(wrong(format!("a copy of block {block} has other bytes")));
                }
            }
        }
        let middle = |number: usize| median(&mut bare[number].clone());
        let best = (0..LOOPS.len()).min_by(|&one, &other| middle(one).total_cmp(&middle(other))).unwrap_or(0);
        let ratio = Estimate::of_ratios(&bare[best], &ours);
        let text = format!("{} KiB", size >> 10);
        bench.figure(format!("pull of {text}"), gigabytes(size, &mut ours), "GB/s");
        bench.figure(format!("bare: {}, {text}", LOOPS[best]), gigabytes(size, &mut bare[best]), "GB/s");
        bench.at_least(&format!("pull of {text}, speed beside the best safe loop"), &ratio, promised[1]);
        bench.ratio(names[1], ratio);
    }
    lab.cache.clear(None)?;
    Ok(())
}

/// Pull of 1 MiB beside reads of NIXL UCX between two processes, both from more memory than the last-level cache has, into one buffer.
pub fn pull_beside_ucx(lab: &Lab, bench: &mut Bench, peer: &mut Peer, batches: u64) -> Result<()> {
    let size = 1 << 20;
    let mut source = vec![0; size];
    for index in 0..WORKING_SET {
        fill(&mut source, 9 << 40 | index);
        published(lab, 9 << 40 | index, &source)?;
    }
    let mut destination = vec![0; size];
    let (mut ours, mut theirs): (Vec<f64>, Vec<f64>) = Default::default();
    // The first reads set the connection up.
    peer.ask("read 1048576 8")?;
    for batch in 0..batches {
        for turn in 0..2 {
            if (turn + batch) % 2 == 0 {
                let block = (9 << 40) + (batch * 247 + turn) % WORKING_SET;
                let start = Instant::now();
                let pulled = lab.cache.pull(NAMESPACE, key(block), &mut destination)?;
                ours.push(elapsed(start));
                if pulled != (Pulled::Hit { len_bytes: size as u64 }) || !is_block(&destination, block) {
                    return Err(wrong(format!("block {block} was not pulled as it was published: {pulled:?}")));
                }
            } else {
                theirs.extend(peer.ask("read 1048576 1")?);
            }
        }
    }
    let ratio = Estimate::of_ratios(&theirs, &ours);
    bench.figure("pull of 1 MiB, working set 512 MiB", gigabytes(size, &mut ours), "GB/s");
    bench.figure("read of 1 MiB by NIXL UCX, working set 512 MiB", gigabytes(size, &mut theirs), "GB/s");
    bench.at_least("pull of 1 MiB, speed beside NIXL UCX", &ratio, 1.0);
    bench.ratio("pull_1m_vs_ucx", ratio);
    lab.cache.clear(None)?;
    Ok(())
}
