// SPDX-License-Identifier: Apache-2.0
//! The copy engine on one thread beside bare copies, on a scratch file in /dev/shm.
//!
//! Base lines: for a publish, non-temporal stores and SFENCE; for a pull, the fastest of the loops that are safe on memory without
//! coherence: CLFLUSHOPT, MFENCE, then a copy with ordinary stores or with non-temporal ones, all at once or window by window with the
//! flushes one window ahead. For lists, one `memcpy` per piece, which is not safe at all, and one safe copy per piece.
//!
//! The pool's lines are in no cache before each measurement, as after another host's publish. Destinations go round a buffer much larger
//! than the second-level cache, so that no loop finds its own from the last time.

use super::{Bench, fill, wrong};
use crate::scratch::Scratch;
use crate::stats::{Estimate, median};
use cxl_pool::coherence::{Bare, Coherence, CoherenceOptions, Instructions, MappedMemory};
use cxl_pool::copy::{Checksum, CopyConfig, CopyEngine, CpuEngine, ReadList, WriteList, checksum_of};
use cxl_pool::limits::LINE_BYTES;
use cxl_pool::{Error, Result};
use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

/// Pool memory, in bytes.
const POOL_BYTES: usize = 64 << 20;
/// Local memory that destinations go round in, in bytes.
const LOCAL_BYTES: usize = 64 << 20;
/// Sizes of single copies, and what a publish and a pull may take of them beside their base lines. 95 % of the speed is 1/0.95 of the time.
const SIZES: [(usize, [&str; 2], f64, f64); 3] = [
    (64 << 10, ["publish_64k_over_nt_copy", "pull_64k_over_best_safe_loop"], 1.3, 1.5),
    (1 << 20, ["publish_1m_over_nt_copy", "pull_1m_over_best_safe_loop"], 1.0 / 0.95, 1.0 / 0.95),
    (4 << 20, ["publish_4m_over_nt_copy", "pull_4m_over_best_safe_loop"], 1.0 / 0.95, 1.0 / 0.95),
];
/// Window of the bare loop, in bytes.
const WINDOW_BYTES: usize = 256 << 10;
/// Names of the bare loops of a pull.
pub(super) const LOOPS: [&str; 3] =
    ["CLFLUSHOPT, MFENCE, memcpy", "CLFLUSHOPT, MFENCE, non-temporal copy", "the same in windows of 256 KiB"];
/// A block of one model: 64 layers of keys and values (Beluga section 6.1).
const GATHER_PIECES: usize = 128;
const GATHER_PIECE_BYTES: usize = 20 << 10;
/// A sparse read: some tokens of a block, each in many small pieces (Beluga section 6.1).
const TOKENS: usize = 16;
const TOKENS_OF_BLOCK: usize = 128;
const TOKEN_PIECES: usize = 1024;
const TOKEN_PIECE_BYTES: usize = 160;

/// A pull that is not streamed, and how far behind the start of a page its destination begins: large arrays that malloc() makes begin so.
const SHORT_BYTES: usize = 16 << 10;
const BEHIND_PAGE_BYTES: usize = 16;

/// The memory under measurement and what measures it.
struct Lab {
    mapped: MappedMemory,
    bare: Bare,
    engine: CpuEngine,
    helped: CpuEngine,
    local: Box<[u8]>,
    /// Where the next destination begins.
    next: usize,
    /// Bytes of its page in front of it.
    behind_bytes: usize,
}

/// Measures.
pub fn run(batches: u64) -> Result<Bench> {
    let options = CoherenceOptions::from_env()?;
    if options.emulator.is_some() {
        return Err(Error::Invalid("emulated hosts have no instructions to measure: unset CXL_COHERENCE".into()));
    }
    let scratch = Scratch::file(Path::new("/dev/shm"), POOL_BYTES as u64)?;
    let mapped = scratch.memory(&options)?;
    let instructions = match options.instructions {
        Some(chosen) => chosen,
        None => Instructions::best()?,
    };
    let bare = Bare::over(mapped.memory.clone(), 0, (POOL_BYTES / LINE_BYTES) as u64, instructions)?;
    let helped = CopyConfig { parallel_from_bytes: 0, ..CopyConfig::default() };
    let mut lab = Lab {
        bare,
        engine: CpuEngine::new(CopyConfig::alone()),
        helped: CpuEngine::new(helped),
        // Not zeros, and the pool written once: pages that are not there yet would be all that is measured.
        local: vec![1; LOCAL_BYTES + 2 * 4096].into(),
        next: 0,
        behind_bytes: 0,
        mapped,
    };
    let title = format!("copies on {}, {}", lab.mapped.description, lab.engine.config());
    let mut bench = Bench { title, ..Bench::default() };
    lab.mapped.memory.copy_in(0, &vec![1; POOL_BYTES])?;
    for size in SIZES {
        single(&mut lab, &mut bench, batches, size)?;
    }
    behind_a_page(&mut lab, &mut bench, batches)?;
    gather(&mut lab, &mut bench, batches)?;
    sparse(&mut lab, &mut bench, batches)?;
    Ok(bench)
}

impl Lab {
    fn memory(&self) -> &dyn Coherence {
        &*self.mapped.memory
    }

    /// Where a destination of this length begins in the local memory: in a page that was not used for long.
    fn place(&mut self, len_bytes: usize) -> usize {
        let start = (self.local.as_ptr() as usize).wrapping_neg() % 4096;
        if self.next + len_bytes > LOCAL_BYTES {
            self.next = 0;
        }
        let at = start + self.next;
        self.next += (self.behind_bytes + len_bytes).next_multiple_of(4096);
        at + self.behind_bytes
    }

    /// Takes the lines of a block out of every cache.
    fn uncached(&self, offset: usize, len_bytes: usize) {
        self.bare.flush_range((offset / LINE_BYTES) as u64, len_bytes);
        self.bare.fence_all();
    }

    /// Times `copy` into a fresh destination and demands that it delivered `expected`.
    fn pulled(&mut self, what: &str, offset: usize, expected: &[u8], copy: impl FnOnce(&Lab, &mut [u8]) -> Result<()>) -> Result<f64> {
        let at = self.place(expected.len());
        let mut local = std::mem::take(&mut self.local);
        self.uncached(offset, expected.len());
        let destination = &mut local[at..at + expected.len()];
        let start = Instant::now();
        let done = copy(self, destination);
        let taken = start.elapsed().as_nanos() as f64;
        let is_right = destination == expected;
        destination[..LINE_BYTES].fill(0);
        self.local = local;
        done?;
        if is_right { Ok(taken) } else { Err(wrong(format!("{what} did not deliver what was published"))) }
    }

    /// Times `copy` to a block that is in no cache and demands that `source` lies there afterwards.
    fn published(&self, what: &str, offset: usize, source: &[u8], copy: impl FnOnce(&Lab) -> Result<()>) -> Result<f64> {
        self.uncached(offset, source.len());
        let start = Instant::now();
        copy(self)?;
        let taken = start.elapsed().as_nanos() as f64;
        self.uncached(offset, source.len());
        let mut found = vec![0; source.len()];
        self.memory().copy_out(offset as u64, &mut found)?;
        if found == source { Ok(taken) } else { Err(wrong(format!("{what} left something else in the pool than it was given"))) }
    }
}

/// One of the bare loops that are safe.
pub(super) fn bare_pull(bare: &Bare, number: usize, first: u64, destination: &mut [u8]) -> Result<()> {
    let len = destination.len();
    let window = if number == 2 { WINDOW_BYTES.min(len) } else { len };
    bare.flush_range(first, window);
    bare.fence_all();
    let mut is_streamed = true;
    for done in (0..len).step_by(window) {
        let (now, behind) = (first + (done / LINE_BYTES) as u64, done + window);
        if behind < len {
            bare.flush_range(first + (behind / LINE_BYTES) as u64, window.min(len - behind));
        }
        let part = &mut destination[done..behind.min(len)];
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

fn gigabytes(len_bytes: usize, taken: &mut [f64]) -> f64 {
    len_bytes as f64 / median(taken)
}

/// Publish and pull of one piece.
fn single(
    lab: &mut Lab,
    bench: &mut Bench,
    batches: u64,
    (size, names, publish_limit, pull_limit): (usize, [&'static str; 2], f64, f64),
) -> Result<()> {
    let mut source = vec![0; size];
    let (mut publish, mut publish_bare, mut pull): (Vec<f64>, Vec<f64>, Vec<f64>) = Default::default();
    let (mut summed, mut pull_summed, mut helped, mut pull_helped): (Vec<f64>, Vec<f64>, Vec<f64>, Vec<f64>) = Default::default();
    let mut pull_bare: [Vec<f64>; LOOPS.len()] = Default::default();
    for batch in 0..batches {
        fill(&mut source, batch);
        let offset = (batch as usize * 5 * size) % POOL_BYTES;
        let list = WriteList::gather(offset as u64, [&source[..]]);
        let sum = checksum_of(&source);
        for turn in 0..2 {
            match (turn + batch) % 2 {
                0 => publish.push(lab.published("publish", offset, &source, |lab| {
                    lab.engine.publish(lab.memory(), black_box(&list), Checksum::Off).map(drop)
                })?),
                _ => publish_bare.push(lab.published("a bare copy", offset, &source, |lab| {
                    lab.bare.copy_in((offset / LINE_BYTES) as u64, black_box(&source));
                    lab.bare.fence_stores();
                    Ok(())
                })?),
            }
        }
        summed.push(lab.published("publish with a checksum", offset, &source, |lab| {
            same(lab.engine.publish(lab.memory(), black_box(&list), Checksum::Xxh3)?, sum)
        })?);
        helped.push(lab.published("publish with workers", offset, &source, |lab| {
            lab.helped.publish(lab.memory(), black_box(&list), Checksum::Off).map(drop)
        })?);
        let turns = LOOPS.len() as u64 + 1;
        for turn in 0..turns {
            match ((turn + batch) % turns) as usize {
                number if number < LOOPS.len() => {
                    let first = (offset / LINE_BYTES) as u64;
                    pull_bare[number].push(lab.pulled(LOOPS[number], offset, &source, |lab, to| bare_pull(&lab.bare, number, first, to))?);
                }
                _ => pull.push(lab.pulled("pull", offset, &source, |lab, to| {
                    lab.engine.pull(lab.memory(), &mut ReadList::scatter(offset as u64, [to]), Checksum::Off).map(drop)
                })?),
            }
        }
        pull_summed.push(lab.pulled("pull with a checksum", offset, &source, |lab, to| {
            same(lab.engine.pull(lab.memory(), &mut ReadList::scatter(offset as u64, [to]), Checksum::Xxh3)?, sum)
        })?);
        pull_helped.push(lab.pulled("pull with workers", offset, &source, |lab, to| {
            lab.helped.pull(lab.memory(), &mut ReadList::scatter(offset as u64, [to]), Checksum::Off).map(drop)
        })?);
    }
    let best =
        (0..LOOPS.len()).min_by(|&one, &other| median(&mut pull_bare[one].clone()).total_cmp(&median(&mut pull_bare[other].clone())));
    let best = best.unwrap_or(0);
    let text = format!("{} KiB", size >> 10);
    let publish_ratio = Estimate::of_ratios(&publish, &publish_bare);
    let pull_ratio = Estimate::of_ratios(&pull, &pull_bare[best]);
    let workers = lab.helped.config().workers;
    for (name, taken) in [
        (format!("publish of {text}"), &mut publish),
        (format!("bare non-temporal copy of {text}, SFENCE"), &mut publish_bare),
        (format!("publish of {text} with a checksum"), &mut summed),
        (format!("publish of {text}, {workers} workers"), &mut helped),
        (format!("pull of {text}"), &mut pull),
        (format!("bare: {}, {text}", LOOPS[best]), &mut pull_bare[best]),
        (format!("pull of {text} with a checksum"), &mut pull_summed),
        (format!("pull of {text}, {workers} workers"), &mut pull_helped),
    ] {
        bench.figure(name, gigabytes(size, taken), "GB/s");
    }
    bench.at_most(&format!("publish of {text} over a bare non-temporal copy"), &publish_ratio, publish_limit, "");
    bench.at_most(&format!("pull of {text} over the best safe loop"), &pull_ratio, pull_limit, "");
    let [publish_name, pull_name] = names;
    bench.ratio(publish_name, publish_ratio);
    bench.ratio(pull_name, pull_ratio);
    Ok(())
}

fn same(sum: Option<u64>, expected: u64) -> Result<()> {
    if sum == Some(expected) { Ok(()) } else { Err(wrong("a checksum of other bytes")) }
}

/// A short pull to memory a little behind the start of a page, as the source begins one, beside the same to the start of a page.
fn behind_a_page(lab: &mut Lab, bench: &mut Bench, batches: u64) -> Result<()> {
    let mut source = vec![0; SHORT_BYTES];
    let mut taken: [Vec<f64>; 2] = Default::default();
    for batch in 0..batches {
        fill(&mut source, batch);
        let offset = (batch as usize * 5 * SHORT_BYTES) % POOL_BYTES;
        lab.memory().copy_in(offset as u64, &source)?;
        for turn in 0..2 {
            let number = ((turn + batch) % 2) as usize;
            lab.behind_bytes = number * BEHIND_PAGE_BYTES;
            taken[number].push(lab.pulled("a short pull", offset, &source, |lab, to| {
                lab.engine.pull(lab.memory(), &mut ReadList::scatter(offset as u64, [to]), Checksum::Off).map(drop)
            })?);
        }
    }
    lab.behind_bytes = 0;
    let ratio = Estimate::of_ratios(&taken[1], &taken[0]);
    let [at, behind] = &mut taken;
    bench.figure("pull of 16 KiB to the start of a page", gigabytes(SHORT_BYTES, at), "GB/s");
    bench.figure("pull of 16 KiB to 16 bytes behind it", gigabytes(SHORT_BYTES, behind), "GB/s");
    bench.at_most("pull of 16 KiB to 16 bytes behind the start of a page, over one to the start", &ratio, 1.5, "");
    bench.ratio("pull_behind_page_over_page", ratio);
    Ok(())
}

/// Many local pieces to one block.
fn gather(lab: &mut Lab, bench: &mut Bench, batches: u64) -> Result<()> {
    const BLOCK_BYTES: usize = GATHER_PIECES * GATHER_PIECE_BYTES;
    // As many layers have theirs: apart from each other.
    let stride = GATHER_PIECE_BYTES + 4096;
    let mut layers = vec![0; GATHER_PIECES * stride];
    let (mut gathered, mut memcpy, mut each): (Vec<f64>, Vec<f64>, Vec<f64>) = Default::default();
    for batch in 0..batches {
        fill(&mut layers, batch);
        let offset = (batch as usize * 3 * BLOCK_BYTES) % (POOL_BYTES - BLOCK_BYTES) / 4096 * 4096;
        let pieces: Vec<&[u8]> = layers.chunks(stride).map(|layer| &layer[..GATHER_PIECE_BYTES]).collect();
        let block = pieces.concat();
        for turn in 0..3 {
            match (turn + batch) % 3 {
                0 => gathered.push(lab.published("gather", offset, &block, |lab| {
                    let list = WriteList::gather(offset as u64, black_box(&pieces).iter().copied());
                    lab.engine.publish(lab.memory(), &list, Checksum::Off).map(drop)
                })?),
                1 => memcpy.push(lab.published("memcpy of pieces", offset, &block, |lab| {
                    for (number, piece) in black_box(&pieces).iter().enumerate() {
                        lab.bare.store(((offset + number * GATHER_PIECE_BYTES) / LINE_BYTES) as u64, piece);
                    }
                    Ok(())
                })?),
                _ => each.push(lab.published("safe copies of pieces", offset, &block, |lab| {
                    for (number, piece) in black_box(&pieces).iter().enumerate() {
                        lab.memory().copy_in((offset + number * GATHER_PIECE_BYTES) as u64, piece)?;
                        lab.memory().fence_stores();
                    }
                    Ok(())
                })?),
            }
        }
    }
    bench.figure(format!("gather of {GATHER_PIECES} pieces of 20 KiB"), gigabytes(BLOCK_BYTES, &mut gathered), "GB/s");
    bench.figure("one memcpy per piece, seen by no other host", gigabytes(BLOCK_BYTES, &mut memcpy), "GB/s");
    bench.figure("one safe copy per piece", gigabytes(BLOCK_BYTES, &mut each), "GB/s");
    bench.ratio("gather_over_memcpy_per_piece", Estimate::of_ratios(&gathered, &memcpy));
    bench.ratio("gather_over_safe_copy_per_piece", Estimate::of_ratios(&gathered, &each));
    Ok(())
}

/// Many small pieces of a block to as many places.
fn sparse(lab: &mut Lab, bench: &mut Bench, batches: u64) -> Result<()> {
    const READ_BYTES: usize = TOKENS * TOKEN_PIECES * TOKEN_PIECE_BYTES;
    const ROW_BYTES: usize = TOKENS_OF_BLOCK * TOKEN_PIECE_BYTES;
    const BLOCK_BYTES: usize = TOKEN_PIECES * ROW_BYTES;
    let mut block = vec![0; BLOCK_BYTES];
    let (mut sparse, mut memcpy, mut each): (Vec<f64>, Vec<f64>, Vec<f64>) = Default::default();
    for batch in 0..batches.min(101) {
        fill(&mut block, batch);
        lab.engine.publish(lab.memory(), &WriteList::gather(0, [&block[..]]), Checksum::Off)?;
        let token = |number: usize| (number * 8 + batch as usize * 3) % TOKENS_OF_BLOCK;
        let mut offsets: Vec<usize> =
            (0..TOKEN_PIECES).flat_map(|row| (0..TOKENS).map(move |number| row * ROW_BYTES + token(number) * TOKEN_PIECE_BYTES)).collect();
        offsets.sort_unstable();
        let expected: Vec<u8> = offsets.iter().flat_map(|&offset| &block[offset..offset + TOKEN_PIECE_BYTES]).copied().collect();
        let mut found = vec![0; READ_BYTES];
        for turn in 0..3 {
            lab.uncached(0, BLOCK_BYTES);
            found.fill(0);
            let pieces = offsets.iter().zip(found.chunks_exact_mut(TOKEN_PIECE_BYTES));
            let start = Instant::now();
            let taken = match (turn + batch) % 3 {
                0 => {
                    let mut list = ReadList::new();
                    pieces.for_each(|(&offset, piece)| list.push(offset as u64, piece));
                    lab.engine.pull(lab.memory(), &mut list, Checksum::Off)?;
                    &mut sparse
                }
                1 => {
                    pieces.for_each(|(&offset, piece)| lab.bare.copy_out((offset / LINE_BYTES) as u64, offset % LINE_BYTES, piece));
                    &mut memcpy
                }
                _ => {
                    for (&offset, piece) in pieces {
                        lab.memory().flush_range(offset as u64, TOKEN_PIECE_BYTES as u64)?;
                        lab.memory().fence_all();
                        lab.memory().copy_out(offset as u64, piece)?;
                        lab.memory().fence_loads();
                    }
                    &mut each
                }
            };
            taken.push(start.elapsed().as_nanos() as f64);
            if found != expected {
                return Err(wrong("a sparse read did not deliver what was published"));
            }
        }
    }
    let ratio = Estimate::of_ratios(&sparse, &each);
    bench.figure(
        format!("sparse read of {TOKENS} tokens in pieces of {TOKEN_PIECE_BYTES} bytes"),
        gigabytes(READ_BYTES, &mut sparse),
        "GB/s",
    );
    bench.figure("one memcpy per piece, of bytes as old as may be", gigabytes(READ_BYTES, &mut memcpy), "GB/s");
    bench.figure("one safe copy per small piece", gigabytes(READ_BYTES, &mut each), "GB/s");
    bench.ratio("sparse_read_over_memcpy_per_piece", Estimate::of_ratios(&sparse, &memcpy));
    bench.at_most("sparse read over one safe copy per piece", &ratio, 1.0, "");
    bench.ratio("sparse_read_over_safe_copy_per_piece", ratio);
    Ok(())
}
