// SPDX-License-Identifier: Apache-2.0
//! Publish and fetch of metadata lines, compared with the bare instructions, on a scratch file in /dev/shm.
//!
//! Baselines: one 64-byte non-temporal store and SFENCE; CLFLUSH, MFENCE and one load; for many lines at once the flushes, one MFENCE, the
//! loads. Strides defeat the prefetchers. Before each measurement a line to be published is in no cache, as a host's own lines are, and a
//! line to be fetched is, as after the last poll.

use crate::lab::{in_turn, instructions, time, wrong};
use crate::report::Bench;
use ctl_common::scratch::{self, Scratch};
use ctl_common::stats::Estimate;
use cxl_pool::Result;
use cxl_pool::coherence::{Bare, CoherenceOptions, CpuFeatures, Instructions, LineFlush, LineWrite};
use cxl_pool::limits::MAX_NUMBER;
use cxl_pool::line::{Line, Lines};
use cxl_pool::media::{Record, Region};
use std::hint::black_box;
use std::path::Path;

/// Lines of the working set.
const LINES: u64 = 4096;
/// Lines of one batch.
const BATCH: u64 = 512;
/// Lines of one `fetch_many`, as when a manager scans its hosts.
const MANY: usize = 16;
const SCRATCH_BYTES: u64 = 16 << 20;

/// The lines of one batch and what they hold.
struct Batch {
    indexes: Vec<u64>,
    records: Vec<Record>,
    sealed: Vec<Line>,
}

impl Batch {
    fn new(lines: &Lines, batch: u64) -> Batch {
        let indexes: Vec<u64> = (0..BATCH).map(|step| ((batch * BATCH + step) * 2477) % LINES).collect();
        let records: Vec<Record> = indexes.iter().map(|&index| record(index, batch)).collect();
        let sealed = indexes.iter().zip(&records).map(|(&index, &record)| lines.seal(index, record)).collect();
        Batch { indexes, records, sealed }
    }

    fn uncache(&self, bare: &Bare) {
        self.indexes.iter().for_each(|&index| bare.flush(index));
        bare.fence_all();
    }

    fn cache(&self, bare: &Bare) {
        self.indexes.iter().for_each(|&index| _ = black_box(bare.load(index)));
        bare.fence_all();
    }

    /// Demands that these records were fetched.
    fn check(&self, what: &str, found: &[Record]) -> Result<()> {
        let same = |(one, other): (&Record, &Record)| Record { crc: 0, ..*one } == Record { crc: 0, ..*other };
        let is_right = found.len() == self.records.len() && found.iter().zip(&self.records).all(same);
        if is_right { Ok(()) } else { Err(wrong(format!("{what} gave something else than was published"))) }
    }
}

fn record(index: u64, batch: u64) -> Record {
    let words = [0, 1, 2, 3, 4, 5, 6, 7].map(|word: u64| (index * 8 + word + 1).wrapping_mul(batch + 0x9e37_79b9_7f4a_7c15));
    let filled: Record = bytemuck::cast(words);
    let number = |value: u32| value & (MAX_NUMBER - 1);
    let (grant, version, incarnation) = (number(filled.grant), number(filled.version), number(filled.incarnation));
    Record { crc: 0, grant, version, incarnation, ..filled }
}

pub fn run(batches: u64) -> Result<Bench> {
    let chosen = instructions()?;
    let scratch = Scratch::file(Path::new("/dev/shm"), SCRATCH_BYTES)?;
    let mapped = scratch.memory(&CoherenceOptions::from_env()?)?;
    let layout = scratch.layout(LINES as u32)?;
    let lines = scratch::lines(&mapped, &layout);
    let write = if LineWrite::Avx512.is_available(&CpuFeatures::detect()) { LineWrite::Avx512 } else { chosen.write };
    let flush = LineFlush::available().first().copied().unwrap_or(chosen.flush);
    let first = layout.line_offset(Region::Record, 0)?;
    let bare = Bare::over(mapped.memory.clone(), first, LINES, Instructions { write, flush, ..chosen })?;
    let same = Bare::over(mapped.memory.clone(), first, LINES, chosen)?;
    let mut bench = Bench::new(format!("lines on {}, baselines write={write},flush={flush}", mapped.description));
    publishes(&mut bench, &lines, &bare, &same, batches)?;
    fetches(&mut bench, &lines, &bare, batches)?;
    Ok(bench)
}

fn per_line(taken_ns: f64) -> f64 {
    taken_ns / BATCH as f64
}

fn publishes(bench: &mut Bench, lines: &Lines, bare: &Bare, same: &Bare, batches: u64) -> Result<()> {
    let [publish, nt_store, same_write] = in_turn(batches, |number, way| {
        let batch = Batch::new(lines, number);
        batch.uncache(bare);
        let taken_ns = time(|| {
            let written = batch.indexes.iter().zip(&batch.records).zip(&batch.sealed);
            match way {
                0 => written.into_iter().try_for_each(|((&index, record), _)| lines.publish(index, *black_box(record)))?,
                1 => written.into_iter().for_each(|((&index, _), line)| bare.publish(index, black_box(line))),
                _ => written.into_iter().for_each(|((&index, _), line)| same.publish(index, black_box(line))),
            }
            Ok(())
        })?;
        let found = batch.indexes.iter().map(|&index| lines.fetch(index)).collect::<Result<Vec<Record>>>()?;
        batch.check("a line", &found)?;
        Ok(per_line(taken_ns))
    })?;
    bench.time("publish", &publish);
    bench.time("bare 64-byte non-temporal store, SFENCE", &nt_store);
    bench.time("bare write as in publish, SFENCE", &same_write);
    bench.at_most("publish_over_nt_store", Estimate::of_ratios(&publish, &nt_store), 1.3);
    bench.ratio("publish_over_same_write", Estimate::of_ratios(&publish, &same_write));
    Ok(())
}

fn fetches(bench: &mut Bench, lines: &Lines, bare: &Bare, batches: u64) -> Result<()> {
    let [fetch, many, fetch_bare, many_bare] = in_turn(batches, |number, way| {
        let batch = Batch::new(lines, number);
        batch.indexes.iter().zip(&batch.records).try_for_each(|(&index, &record)| lines.publish(index, record))?;
        batch.cache(bare);
        let mut found: Vec<Record> = Vec::with_capacity(BATCH as usize);
        let mut several: Vec<Result<Record>> = Vec::with_capacity(MANY);
        let taken_ns = time(|| {
            match way {
                0 => batch.indexes.iter().try_for_each(|&index| lines.fetch(index).map(|record| found.push(record)))?,
                1 => {
                    for part in batch.indexes.chunks_exact(MANY) {
                        lines.fetch_many(part, &mut several)?;
                        several.drain(..).try_for_each(|record| record.map(|record| found.push(record)))?;
                    }
                }
                2 => batch.indexes.iter().for_each(|&index| found.push(bytemuck::cast(bare.fetch(index)))),
                _ => {
                    for part in batch.indexes.chunks_exact(MANY) {
                        part.iter().for_each(|&index| bare.flush(index));
                        bare.fence_all();
                        part.iter().for_each(|&index| found.push(bytemuck::cast(bare.load(index))));
                    }
                }
            }
            Ok(())
        })?;
        batch.check("a fetch", &found)?;
        Ok(per_line(taken_ns))
    })?;
    bench.time("fetch", &fetch);
    bench.time("bare CLFLUSH, MFENCE, load", &fetch_bare);
    bench.time("fetch_many, 16 at once, each", &many);
    bench.time("bare: 16 CLFLUSH, MFENCE, 16 loads, each", &many_bare);
    bench.at_most("fetch_over_bare", Estimate::of_ratios(&fetch, &fetch_bare), 1.3);
    bench.ratio("fetch_many_over_bare", Estimate::of_ratios(&many, &many_bare));
    Ok(())
}
