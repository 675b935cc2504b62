// SPDX-License-Identifier: Apache-2.0
//! The copy engine on one thread, compared with bare copies, on a scratch file in /dev/shm.
//!
//! Baselines: for a publish, non-temporal stores and SFENCE; for a pull, the fastest of the loops that are safe on memory without
//! coherence (CLFLUSHOPT, MFENCE, then a copy). For lists: one `memcpy` per piece, which is not safe, and one safe copy per piece. The
//! pool's lines are in no cache before each measurement, as after another host's publish.

use crate::lab::{Destinations, fill, in_turn, instructions, time, uncache, wrong};
use crate::report::Bench;
use ctl_common::scratch::Scratch;
use ctl_common::stats::{Estimate, median};
use cxl_pool::Result;
use cxl_pool::coherence::{Bare, Coherence, CoherenceOptions, MappedMemory};
use cxl_pool::copy::{Checksum, CopyConfig, CopyEngine, CpuEngine, ReadList, WriteList};
use cxl_pool::limits::LINE_BYTES;
use std::hint::black_box;
use std::path::Path;

const POOL_BYTES: usize = 64 << 20;
/// Sizes of single copies, and how much longer a publish and a pull may take than their baselines.
const SIZES: [(usize, [&str; 2], [f64; 2]); 3] = [
    (64 << 10, ["publish_64k_over_nt_copy", "pull_64k_over_best_safe_loop"], [1.3, 1.5]),
    (1 << 20, ["publish_1m_over_nt_copy", "pull_1m_over_best_safe_loop"], [1.0 / 0.95; 2]),
    (4 << 20, ["publish_4m_over_nt_copy", "pull_4m_over_best_safe_loop"], [1.0 / 0.95; 2]),
];
/// Window of the third bare loop, in bytes.
const WINDOW_BYTES: usize = 256 << 10;
pub const LOOPS: [&str; 3] = ["CLFLUSHOPT, MFENCE, memcpy", "CLFLUSHOPT, MFENCE, non-temporal copy", "the same in windows of 256 KiB"];
/// A block of one model: 64 layers of keys and values (Beluga section 6.1).
const GATHER_PIECES: usize = 128;
const GATHER_PIECE_BYTES: usize = 20 << 10;
/// A sparse read: some tokens of a block, each in many small pieces (Beluga section 6.1).
const TOKENS: usize = 16;
const TOKENS_OF_BLOCK: usize = 128;
const TOKEN_PIECES: usize = 1024;
const TOKEN_PIECE_BYTES: usize = 160;
/// A pull too short to be streamed, and the offset in a page at which large arrays of malloc() begin.
const SHORT_BYTES: usize = 16 << 10;
const SKIP_BYTES: usize = 16;

struct Lab {
    mapped: MappedMemory,
    bare: Bare,
    engine: CpuEngine,
}

pub fn run(batches: u64) -> Result<Bench> {
    let chosen = instructions()?;
    let mapped = Scratch::file(Path::new("/dev/shm"), POOL_BYTES as u64)?.memory(&CoherenceOptions::from_env()?)?;
    let bare = Bare::over(mapped.memory.clone(), 0, (POOL_BYTES / LINE_BYTES) as u64, chosen)?;
    let lab = Lab { bare, engine: CpuEngine::new(CopyConfig::alone()), mapped };
    lab.memory().copy_in(0, &vec![1; POOL_BYTES])?;
    let mut bench = Bench::new(format!("copies on {}, {}", lab.mapped.description, lab.engine.config()));
    for (size, [publish_name, pull_name], [publish_limit, pull_limit]) in SIZES {
        publish(&lab, &mut bench, batches, size, publish_name, publish_limit)?;
        pull(&lab, &mut bench, batches, size, pull_name, pull_limit)?;
    }
    after_page_start(&lab, &mut bench, batches)?;
    gather(&lab, &mut bench, batches)?;
    sparse(&lab, &mut bench, batches.min(101))?;
    Ok(bench)
}

impl Lab {
    fn memory(&self) -> &dyn Coherence {
        &*self.mapped.memory
    }

    /// Times `copy` to a block that is in no cache, and demands that `source` lies there afterwards.
    fn time_publish(&self, offset: usize, source: &[u8], copy: impl FnOnce() -> Result<()>) -> Result<f64> {
        uncache(self.memory(), offset as u64, source.len())?;
        let taken_ns = time(copy)?;
        uncache(self.memory(), offset as u64, source.len())?;
        let mut found = vec![0; source.len()];
        self.memory().copy_out(offset as u64, &mut found)?;
        if found == source { Ok(taken_ns) } else { Err(wrong("a publish left other bytes in the pool than it was given")) }
    }

    /// Times `copy` from a block that is in no cache, and demands that it delivered `expected`.
    fn time_pull(&self, offset: usize, expected: &[u8], to: &mut [u8], copy: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<f64> {
        uncache(self.memory(), offset as u64, expected.len())?;
        let taken_ns = time(|| copy(to))?;
        let is_right = *to == *expected;
        to[..LINE_BYTES].fill(0);
        if is_right { Ok(taken_ns) } else { Err(wrong("a pull delivered other bytes than were published")) }
    }

    fn engine_pull(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        self.engine.pull(self.memory(), &mut ReadList::scatter(offset as u64, [to]), Checksum::Off).map(drop)
    }
}

/// One of the bare loops that are safe.
pub fn bare_pull(bare: &Bare, number: usize, first: u64, destination: &mut [u8]) -> Result<()> {
    let len = destination.len();
    let window = if number == 2 { WINDOW_BYTES.min(len) } else { len };
    bare.flush_range(first, window);
    bare.fence_all();
    let mut is_streamed = true;
    for done in (0..len).step_by(window) {
        let (now, next) = (first + (done / LINE_BYTES) as u64, done + window);
        if next < len {
            bare.flush_range(first + (next / LINE_BYTES) as u64, window.min(len - next));
        }
        let part = &mut destination[done..next.min(len)];
        match number {
            0 => bare.copy_out(now, 0, part),
            _ => is_streamed &= bare.stream_out(now, part),
        }
        if number > 0 {
            bare.fence_all();
        }
    }
    bare.fence_loads();
    if is_streamed { Ok(()) } else { Err(wrong("a destination does not start a line")) }
}

/// The bare loop with the shortest median.
pub fn fastest(loops: &[&Vec<f64>]) -> usize {
    let typical = |number: usize| median(&mut loops[number].clone());
    (0..loops.len()).min_by(|&one, &other| typical(one).total_cmp(&typical(other))).unwrap_or(0)
}

fn publish(lab: &Lab, bench: &mut Bench, batches: u64, size: usize, name: &'static str, limit: f64) -> Result<()> {
    let mut source = vec![0; size];
    let [ours, bare] = in_turn(batches, |batch, way| {
        fill(&mut source, batch);
        let offset = (batch as usize * 5 * size) % POOL_BYTES;
        let list = WriteList::gather(offset as u64, [&source[..]]);
        lab.time_publish(offset, &source, || match way {
            0 => lab.engine.publish(lab.memory(), black_box(&list), Checksum::Off).map(drop),
            _ => {
                lab.bare.copy_in((offset / LINE_BYTES) as u64, black_box(&source));
                lab.bare.fence_stores();
                Ok(())
            }
        })
    })?;
    bench.speed(format!("publish of {} KiB", size >> 10), size, &ours);
    bench.speed(format!("bare non-temporal copy of {} KiB, SFENCE", size >> 10), size, &bare);
    bench.at_most(name, Estimate::of_ratios(&ours, &bare), limit);
    Ok(())
}

fn pull(lab: &Lab, bench: &mut Bench, batches: u64, size: usize, name: &'static str, limit: f64) -> Result<()> {
    let (mut source, mut destinations) = (vec![0; size], Destinations::new());
    let [loops @ .., ours] = in_turn::<{ LOOPS.len() + 1 }>(batches, |batch, way| {
        fill(&mut source, batch);
        let offset = (batch as usize * 5 * size) % POOL_BYTES;
        lab.memory().copy_in(offset as u64, &source)?;
        lab.time_pull(offset, &source, destinations.next(size, 0), |to| match way {
            way if way < LOOPS.len() => bare_pull(&lab.bare, way, (offset / LINE_BYTES) as u64, to),
            _ => lab.engine_pull(offset, to),
        })
    })?;
    let best = fastest(&loops.each_ref());
    bench.speed(format!("pull of {} KiB", size >> 10), size, &ours);
    bench.speed(format!("bare: {}, {} KiB", LOOPS[best], size >> 10), size, &loops[best]);
    bench.at_most(name, Estimate::of_ratios(&ours, &loops[best]), limit);
    Ok(())
}

/// A short pull to the start of a page, and to memory a little after it.
fn after_page_start(lab: &Lab, bench: &mut Bench, batches: u64) -> Result<()> {
    let (mut source, mut destinations) = (vec![0; SHORT_BYTES], Destinations::new());
    let [start, after] = in_turn(batches, |batch, way| {
        fill(&mut source, batch);
        let offset = (batch as usize * 5 * SHORT_BYTES) % POOL_BYTES;
        lab.memory().copy_in(offset as u64, &source)?;
        lab.time_pull(offset, &source, destinations.next(SHORT_BYTES, way * SKIP_BYTES), |to| lab.engine_pull(offset, to))
    })?;
    bench.speed("pull of 16 KiB to the start of a page", SHORT_BYTES, &start);
    bench.speed("pull of 16 KiB to 16 bytes after it", SHORT_BYTES, &after);
    bench.at_most("pull_behind_page_over_page", Estimate::of_ratios(&after, &start), 1.5);
    Ok(())
}

/// Many local pieces to one block.
fn gather(lab: &Lab, bench: &mut Bench, batches: u64) -> Result<()> {
    const BLOCK_BYTES: usize = GATHER_PIECES * GATHER_PIECE_BYTES;
    // Layers are apart from each other.
    let stride = GATHER_PIECE_BYTES + 4096;
    let mut layers = vec![0; GATHER_PIECES * stride];
    let [gathered, memcpy, each] = in_turn(batches, |batch, way| {
        fill(&mut layers, batch);
        let offset = (batch as usize * 3 * BLOCK_BYTES) % (POOL_BYTES - BLOCK_BYTES) / 4096 * 4096;
        let pieces: Vec<&[u8]> = layers.chunks(stride).map(|layer| &layer[..GATHER_PIECE_BYTES]).collect();
        lab.time_publish(offset, &pieces.concat(), || {
            let places = (offset..).step_by(GATHER_PIECE_BYTES).zip(black_box(&pieces));
            match way {
                0 => {
                    let list = WriteList::gather(offset as u64, black_box(&pieces).iter().copied());
                    lab.engine.publish(lab.memory(), &list, Checksum::Off)?;
                }
                1 => places.for_each(|(offset, piece)| lab.bare.store((offset / LINE_BYTES) as u64, piece)),
                _ => {
                    for (offset, piece) in places {
                        lab.memory().copy_in(offset as u64, piece)?;
                        lab.memory().fence_stores();
                    }
                }
            }
            Ok(())
        })
    })?;
    bench.speed(format!("gather of {GATHER_PIECES} pieces of 20 KiB"), BLOCK_BYTES, &gathered);
    bench.speed("one memcpy per piece, seen by no other host", BLOCK_BYTES, &memcpy);
    bench.speed("one safe copy per piece", BLOCK_BYTES, &each);
    bench.ratio("gather_over_memcpy_per_piece", Estimate::of_ratios(&gathered, &memcpy));
    bench.ratio("gather_over_safe_copy_per_piece", Estimate::of_ratios(&gathered, &each));
    Ok(())
}

/// Many small pieces of a block to as many places.
fn sparse(lab: &Lab, bench: &mut Bench, batches: u64) -> Result<()> {
    const READ_BYTES: usize = TOKENS * TOKEN_PIECES * TOKEN_PIECE_BYTES;
    const ROW_BYTES: usize = TOKENS_OF_BLOCK * TOKEN_PIECE_BYTES;
    const BLOCK_BYTES: usize = TOKEN_PIECES * ROW_BYTES;
    let (mut block, mut found) = (vec![0; BLOCK_BYTES], vec![0; READ_BYTES]);
    let [sparse, memcpy, each] = in_turn(batches, |batch, way| {
        fill(&mut block, batch);
        lab.engine.publish(lab.memory(), &WriteList::gather(0, [&block[..]]), Checksum::Off)?;
        let token = |number: usize| (number * 8 + batch as usize * 3) % TOKENS_OF_BLOCK;
        let of_row = |row: usize| (0..TOKENS).map(move |number| row * ROW_BYTES + token(number) * TOKEN_PIECE_BYTES);
        let mut offsets: Vec<usize> = (0..TOKEN_PIECES).flat_map(of_row).collect();
        offsets.sort_unstable();
        let expected: Vec<u8> = offsets.iter().flat_map(|&offset| &block[offset..offset + TOKEN_PIECE_BYTES]).copied().collect();
        uncache(lab.memory(), 0, BLOCK_BYTES)?;
        found.fill(0);
        let mut pieces = offsets.iter().zip(found.chunks_exact_mut(TOKEN_PIECE_BYTES));
        let taken_ns = time(|| {
            match way {
                0 => {
                    let mut list = ReadList::new();
                    pieces.for_each(|(&offset, piece)| list.push(offset as u64, piece));
                    lab.engine.pull(lab.memory(), &mut list, Checksum::Off)?;
                }
                1 => pieces.for_each(|(&offset, piece)| lab.bare.copy_out((offset / LINE_BYTES) as u64, offset % LINE_BYTES, piece)),
                _ => pieces.try_for_each(|(&offset, piece)| {
                    uncache(lab.memory(), offset as u64, TOKEN_PIECE_BYTES)?;
                    lab.memory().copy_out(offset as u64, piece)?;
                    lab.memory().fence_loads();
                    Ok::<_, cxl_pool::Error>(())
                })?,
            }
            Ok(())
        })?;
        if found == expected { Ok(taken_ns) } else { Err(wrong("a sparse read delivered other bytes than were published")) }
    })?;
    bench.speed(format!("sparse read of {TOKENS} tokens in pieces of {TOKEN_PIECE_BYTES} bytes"), READ_BYTES, &sparse);
    bench.speed("one memcpy per piece, of bytes that may be stale", READ_BYTES, &memcpy);
    bench.speed("one safe copy per small piece", READ_BYTES, &each);
    bench.ratio("sparse_read_over_memcpy_per_piece", Estimate::of_ratios(&sparse, &memcpy));
    bench.at_most("sparse_read_over_safe_copy_per_piece", Estimate::of_ratios(&sparse, &each), 1.0);
    Ok(())
}
