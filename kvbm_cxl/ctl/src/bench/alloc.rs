// SPDX-License-Identifier: Apache-2.0
//! The allocator: steady allocation and freeing, kept blocks, chunks.
//!
//! Base line of allocation and freeing: the process's own `malloc` and `free` of a block of the same class of use, in turn with it.

use super::counting::Counts;
use super::hosts::{Lab, machine};
use super::{Bench, wrong};
use crate::stats::{Estimate, median};
use cxl_pool::alloc::{AllocConfig, Allocator, Block, LocalArea};
use cxl_pool::machine::{Machine, State};
use cxl_pool::platform::Platform;
use cxl_pool::{Error, Result};
use std::collections::BTreeSet;
use std::hint::black_box;
use std::time::Instant;

/// Size of the pool, in bytes.
const POOL_BYTES: u64 = 192 << 20;
/// Size of a block, in bytes.
const BLOCK_BYTES: u64 = 4096;
/// Blocks in one batch: more than a free list's top, less than a chunk.
const BATCH: usize = 256;

/// Measures.
pub fn run(batches: u64) -> Result<Bench> {
    let lab = Lab::new(POOL_BYTES)?;
    let member = lab.join(0, None)?;
    let service = member.host.serve()?;
    // The host's segment is in use already; the allocator's part lies in one of its own.
    let state = State::open(&lab.state().join("alloc"), lab.pool().superblock().uuid(), machine(0))?;
    let chunks = lab.pool().layout().chunks();
    let memory = Machine::new(machine(0), state)?.local_memory(LocalArea::len_bytes(chunks))?;
    // SAFETY: the memory is mapped for as long as its owner lives, aligned to a page, of the length asked for, and used by this call alone.
    let area = unsafe { LocalArea::at(memory.start, chunks, memory.owner) }?;
    let config = AllocConfig { spare_chunks: usize::MAX, ..AllocConfig::default() };
    let allocator = Allocator::attach(&member.host, area, config)?;
    let mut bench = Bench { title: format!("allocator, blocks of {BLOCK_BYTES} bytes, pool in /dev/shm"), ..Bench::default() };
    claims(&mut bench, &lab, &allocator)?;
    // From here on nothing needs the manager, and the service's own accesses would be counted.
    drop(service);
    let counts = || member.counting.counts();
    steady(&mut bench, &allocator, batches, &counts)?;
    kept(&mut bench, &lab, &allocator, batches.min(64), &counts)?;
    allocator.close().or_else(|error| if error.is_fenced() { Ok(()) } else { Err(error) })?;
    Ok(bench)
}

/// Blocks that fill chunk after chunk, each new one of which is claimed under the chunk lock.
fn claims(bench: &mut Bench, lab: &Lab, allocator: &Allocator) -> Result<()> {
    let chunk_bytes = lab.pool().layout().geometry().chunk_bytes;
    let count = (lab.pool().layout().chunks() / 2).min(32);
    let mut taken = Vec::new();
    let mut blocks = Vec::new();
    for _ in 0..count {
        let start = Instant::now();
        blocks.push(allocator.alloc(black_box(chunk_bytes / 2 + 1))?);
        taken.push(start.elapsed().as_nanos() as f64);
    }
    verify(lab, &blocks)?;
    for block in &blocks {
        allocator.free(block.offset)?;
    }
    bench.figure("allocation that claims a chunk (sticky chunk lock)", median(&mut taken), "ns");
    Ok(())
}

/// Writes every block full of its own offset, then looks whether each still has its own: two that overlap do not.
fn verify(lab: &Lab, blocks: &[Block]) -> Result<()> {
    let memory = lab.pool().lines().memory();
    let layout = lab.pool().layout();
    let distinct: BTreeSet<u64> = blocks.iter().map(|block| block.offset).collect();
    let end = layout.data_offset() + layout.chunks() * layout.geometry().chunk_bytes;
    if distinct.len() != blocks.len()
        || blocks.iter().any(|block| block.offset < layout.data_offset() || block.offset + block.len_bytes > end)
    {
        return Err(wrong("the allocator gave a block twice, or one outside of the pool's chunks"));
    }
    let content = |block: &Block| block.offset.to_le_bytes().repeat(block.len_bytes as usize / 8);
    for block in blocks {
        memory.copy_in(block.offset, &content(block))?;
    }
    memory.fence_all();
    let mut found = Vec::new();
    for block in blocks {
        found.resize(block.len_bytes as usize, 0);
        memory.flush_range(block.offset, block.len_bytes)?;
        memory.fence_all();
        memory.copy_out(block.offset, &mut found)?;
        if found != content(block) {
            return Err(wrong("two blocks of the allocator overlap"));
        }
    }
    Ok(())
}

fn steady(bench: &mut Bench, allocator: &Allocator, batches: u64, counts: &dyn Fn() -> Counts) -> Result<()> {
    let mut blocks: Vec<Block> = Vec::with_capacity(BATCH);
    // The chunks that the batches need are this process's from here on.
    for _ in 0..BATCH {
        blocks.push(allocator.alloc(BLOCK_BYTES)?);
    }
    blocks.drain(..).try_for_each(|block| allocator.free(block.offset))?;
    let (mut pairs, mut allocs, mut frees, mut base) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut touched = Counts::default();
    let mut seen = BTreeSet::new();
    for batch in 0..batches {
        for turn in 0..2 {
            if (turn + batch) % 2 == 0 {
                let before = counts();
                let start = Instant::now();
                for _ in 0..BATCH {
                    let block = allocator.alloc(black_box(BLOCK_BYTES))?;
                    allocator.free(black_box(block.offset))?;
                }
                pairs.push(start.elapsed().as_nanos() as f64 / BATCH as f64);
                let start = Instant::now();
                for _ in 0..BATCH {
                    blocks.push(allocator.alloc(black_box(BLOCK_BYTES))?);
                }
                allocs.push(start.elapsed().as_nanos() as f64 / BATCH as f64);
                seen.clear();
                seen.extend(blocks.iter().map(|block| block.offset));
                if seen.len() != BATCH {
                    return Err(wrong("the allocator gave a block twice"));
                }
                let start = Instant::now();
                for block in &blocks {
                    allocator.free(black_box(block.offset))?;
                }
                frees.push(start.elapsed().as_nanos() as f64 / BATCH as f64);
                touched += counts() - before;
                blocks.clear();
            } else {
                let start = Instant::now();
                for _ in 0..BATCH {
                    drop(black_box(Vec::<u8>::with_capacity(black_box(BLOCK_BYTES as usize))));
                }
                base.push(start.elapsed().as_nanos() as f64 / BATCH as f64);
            }
        }
    }
    // A double free must be noticed, or the frees above prove nothing.
    let block = allocator.alloc(BLOCK_BYTES)?;
    allocator.free(block.offset)?;
    if !matches!(allocator.free(block.offset), Err(Error::NotFound(_))) {
        return Err(wrong("the allocator freed a block twice"));
    }
    let (pair, alloc, free) = (Estimate::of(pairs.clone()), Estimate::of(allocs), Estimate::of(frees));
    bench.figure("alloc and free of one block, the pair", pair.median, "ns");
    bench.figure("alloc, 256 in a row", alloc.median, "ns");
    bench.figure("free, 256 in a row", free.median, "ns");
    bench.figure("malloc and free of the same size, the pair", median(&mut base.clone()), "ns");
    bench.at_most("alloc and free of one block, the pair", &pair, 150.0, " ns");
    bench.target(
        format!("shared lines written in {batches} batches: {}, read: {}, must be none", touched.writes, touched.loads),
        touched == Counts::default(),
    );
    bench.ratio("alloc_free_over_malloc_free", Estimate::of_ratios(&pairs, &base));
    Ok(())
}

/// Keeping a block and freeing a kept one publish a line each.
fn kept(bench: &mut Bench, lab: &Lab, allocator: &Allocator, batches: u64, counts: &dyn Fn() -> Counts) -> Result<()> {
    const COUNT: usize = 64;
    let (mut keeps, mut frees) = (Vec::new(), Vec::new());
    let (mut keeping, mut freeing) = (Counts::default(), Counts::default());
    for batch in 0..batches {
        let blocks: Vec<Block> = (0..COUNT).map(|_| allocator.alloc(BLOCK_BYTES)).collect::<Result<_>>()?;
        if batch == 0 {
            verify(lab, &blocks)?;
        }
        let before = counts();
        let start = Instant::now();
        for block in &blocks {
            allocator.keep(block.offset)?;
        }
        keeps.push(start.elapsed().as_nanos() as f64 / COUNT as f64);
        let between = counts();
        let start = Instant::now();
        for block in &blocks {
            allocator.free(block.offset)?;
        }
        frees.push(start.elapsed().as_nanos() as f64 / COUNT as f64);
        keeping += between - before;
        freeing += counts() - between;
    }
    let share = |count: u64| count as f64 / (batches * COUNT as u64) as f64;
    bench.figure("keep", median(&mut keeps), "ns");
    bench.figure("keep: lines written", share(keeping.writes), "");
    bench.figure("keep: lines read", share(keeping.loads), "");
    bench.figure("free of a kept block", median(&mut frees), "ns");
    bench.figure("free of a kept block: lines written", share(freeing.writes), "");
    bench.figure("free of a kept block: lines read", share(freeing.loads), "");
    Ok(())
}
