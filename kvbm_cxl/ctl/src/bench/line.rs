// SPDX-License-Identifier: Apache-2.0
//! Publish and fetch beside the bare instructions.
//!
//! Base lines: one 64-byte non-temporal store and SFENCE; CLFLUSH, MFENCE and one load; for many lines at once the flushes, one MFENCE, the
//! loads. Lines are taken in strides that no prefetcher follows. Before each measurement they are brought into the same state: a line to
//! be published is in no cache, as a host's own lines are, and one to be fetched is, as after the last poll. Without that, what was
//! measured before decides a good part of the cost.

use super::{Bench, wrong};
use crate::output::{Exit, Failure};
use crate::scratch::{self, Scratch};
use crate::stats::{Estimate, median};
use cxl_pool::coherence::{Bare, CoherenceOptions, CpuFeatures, Instructions, LineFlush, LineWrite};
use cxl_pool::device::Sysfs;
use cxl_pool::limits::LINE_BYTES;
use cxl_pool::limits::MAX_NUMBER;
use cxl_pool::line::{Line, Lines};
use cxl_pool::media::{Record, Region};
use cxl_pool::{Error, Result};
use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

/// Lines of the working set.
const LINES: u64 = 4096;
/// Lines of one batch.
const BATCH: u64 = 512;
/// Lines of one `fetch_many`, as a manager's look at its hosts.
const MANY: usize = 16;
/// Scratch memory, in bytes.
const SCRATCH_BYTES: u64 = 16 << 20;

/// What one batch took, in nanoseconds per line.
#[derive(Default)]
struct LineTimes {
    publish: Vec<f64>,
    publish_bare: Vec<f64>,
    publish_same: Vec<f64>,
    fetch: Vec<f64>,
    fetch_bare: Vec<f64>,
    many: Vec<f64>,
    many_bare: Vec<f64>,
}

fn record(index: u64, batch: u64) -> Record {
    let mut words = [0u64; 8];
    for (word, value) in words.iter_mut().enumerate() {
        *value = (index * 8 + word as u64 + 1).wrapping_mul(batch + 0x9e37_79b9_7f4a_7c15);
    }
    let filled: Record = bytemuck::cast(words);
    let number = |value: u32| value & (MAX_NUMBER - 1);
    let (grant, version, incarnation) = (number(filled.grant), number(filled.version), number(filled.incarnation));
    Record { crc: 0, grant, version, incarnation, ..filled }
}

/// All that the caller put into a record, in one word.
fn digest(record: &Record) -> u64 {
    let words: [u64; 8] = bytemuck::cast(*record);
    words[1..].iter().fold(words[0] >> 32, |all, word| all.rotate_left(7) ^ word)
}

fn per_line(start: Instant) -> f64 {
    start.elapsed().as_nanos() as f64 / BATCH as f64
}

/// Measures. How it ends where it cannot tells what is wrong: the options, or the device.
pub fn run(pool: Option<&str>, offset: Option<u64>, batches: u64) -> std::result::Result<Bench, Failure> {
    let options = CoherenceOptions::from_env()?;
    if options.emulator.is_some() {
        return Err(Error::Invalid("emulated hosts have no instructions to measure: unset CXL_COHERENCE".into()).into());
    }
    let scratch = match pool {
        None if offset.is_some() => return Err(Failure::usage("--scratch-offset is a place on a device: name it with --pool")),
        None => Scratch::file(Path::new("/dev/shm"), SCRATCH_BYTES)?,
        Some(pool) => {
            let spec = crate::pool::spec(Some(pool))?;
            let mut devices = spec.parts();
            let (Some(device), None) = (devices.next(), devices.next()) else {
                return Err(Failure::usage("lines are measured on one device: name exactly one with --pool"));
            };
            let scratch = Scratch::beside(&device, offset, SCRATCH_BYTES, false, &Sysfs::default());
            let scratch = scratch.map_err(|error| Failure::new(Exit::CannotOpen, error.to_string()))?;
            scratch.map_err(|reason| Failure::new(Exit::Failed, reason))?
        }
    };
    let mapped = scratch.memory(&options)?;
    let layout = scratch.layout(LINES as u32)?;
    let lines = scratch::lines(&mapped, &layout);
    let chosen = match options.instructions {
        Some(chosen) => chosen,
        None => Instructions::best()?,
    };
    let write = if LineWrite::Avx512.is_available(&CpuFeatures::detect()) { LineWrite::Avx512 } else { chosen.write };
    let flush = LineFlush::available().first().copied().unwrap_or(chosen.flush);
    let first = layout.line_offset(Region::Record, 0)?;
    let bare = Bare::over(mapped.memory.clone(), first, LINES, Instructions { write, flush, ..chosen })?;
    let same = Bare::over(mapped.memory.clone(), first, LINES, chosen)?;

    let mut taken = LineTimes::default();
    for batch in 0..batches {
        measure_batch(&lines, &bare, &same, batch, &mut taken)?;
    }
    Ok(report(taken, format!("{} on {}, base lines write={write},flush={flush}", mapped.description, scratch.part())))
}

fn measure_batch(lines: &Lines, bare: &Bare, same: &Bare, batch: u64, taken: &mut LineTimes) -> Result<()> {
    let indexes: Vec<u64> = (0..BATCH).map(|step| ((batch * BATCH + step) * 2477) % LINES).collect();
    let records: Vec<Record> = indexes.iter().map(|&index| record(index, batch)).collect();
    let sealed: Vec<Line> = indexes.iter().zip(&records).map(|(&index, &record)| lines.seal(index, record)).collect();
    let expected = records.iter().fold(0u64, |all, record| all.wrapping_add(digest(record)));
    let check = |what: &str, found: u64| {
        if found == expected { Ok(()) } else { Err(wrong(format!("batch {batch}: {what} gave something else than was published"))) }
    };
    // Whatever was measured before has left the lines in this cache or not, and a publish or flush costs differently then.
    let uncached = || {
        indexes.iter().for_each(|&index| bare.flush(index));
        bare.fence_all();
    };
    let cached = || {
        indexes.iter().for_each(|&index| _ = black_box(bare.load(index)));
        bare.fence_all();
    };
    for turn in 0..3 {
        match (turn + batch) % 3 {
            0 => {
                uncached();
                let start = Instant::now();
                for (&index, record) in indexes.iter().zip(&records) {
                    lines.publish(index, *black_box(record))?;
                }
                taken.publish.push(per_line(start));
                cached();
                let start = Instant::now();
                let mut found = 0u64;
                for &index in &indexes {
                    found = found.wrapping_add(digest(&lines.fetch(index)?));
                }
                taken.fetch.push(per_line(start));
                check("fetch", found)?;
                let mut several: Vec<Result<Record>> = Vec::with_capacity(MANY);
                let mut found = 0u64;
                cached();
                let start = Instant::now();
                for part in indexes.chunks_exact(MANY) {
                    lines.fetch_many(part, &mut several)?;
                    for record in several.drain(..) {
                        found = found.wrapping_add(digest(&record?));
                    }
                }
                taken.many.push(per_line(start));
                check("fetch_many", found)?;
            }
            1 => {
                uncached();
                let start = Instant::now();
                for (&index, line) in indexes.iter().zip(&sealed) {
                    bare.publish(index, black_box(line));
                }
                taken.publish_bare.push(per_line(start));
                cached();
                let start = Instant::now();
                let mut found = [0u64; (LINE_BYTES / 8) - 1];
                for &index in &indexes {
                    let words: [u64; 8] = bytemuck::cast(bare.fetch(index));
                    found.iter_mut().zip(&words[1..]).for_each(|(sum, word)| *sum ^= word);
                }
                taken.fetch_bare.push(per_line(start));
                black_box(found);
                cached();
                let start = Instant::now();
                for part in indexes.chunks_exact(MANY) {
                    part.iter().for_each(|&index| bare.flush(index));
                    bare.fence_all();
                    part.iter().for_each(|&index| _ = black_box(bare.load(index)));
                }
                taken.many_bare.push(per_line(start));
                if indexes.iter().zip(&sealed).any(|(&index, line)| bare.fetch(index) != *line) {
                    return Err(wrong(format!("batch {batch}: a bare fetch gave something else than was published")));
                }
            }
            _ => {
                uncached();
                let start = Instant::now();
                for (&index, line) in indexes.iter().zip(&sealed) {
                    same.publish(index, black_box(line));
                }
                taken.publish_same.push(per_line(start));
            }
        }
    }
    Ok(())
}

fn report(mut taken: LineTimes, title: String) -> Bench {
    let mut bench = Bench { title, ..Bench::default() };
    let publish = Estimate::of_ratios(&taken.publish, &taken.publish_bare);
    let publish_same = Estimate::of_ratios(&taken.publish, &taken.publish_same);
    let fetch = Estimate::of_ratios(&taken.fetch, &taken.fetch_bare);
    let many = Estimate::of_ratios(&taken.many, &taken.many_bare);
    for (name, values) in [
        ("publish", &mut taken.publish),
        ("bare 64-byte non-temporal store, SFENCE", &mut taken.publish_bare),
        ("bare write as in publish, SFENCE", &mut taken.publish_same),
        ("fetch", &mut taken.fetch),
        ("bare CLFLUSH, MFENCE, load", &mut taken.fetch_bare),
        ("fetch_many, 16 at once, each", &mut taken.many),
        ("bare: 16 CLFLUSH, MFENCE, 16 loads, each", &mut taken.many_bare),
    ] {
        bench.figure(name, median(values), "ns");
    }
    bench.at_most("publish over a bare non-temporal store and SFENCE", &publish, 1.3, "");
    bench.at_most("fetch over bare CLFLUSH, MFENCE, load", &fetch, 1.3, "");
    bench.ratio("publish_over_nt_store", publish);
    bench.ratio("publish_over_same_write", publish_same);
    bench.ratio("fetch_over_bare", fetch);
    bench.ratio("fetch_many_over_bare", many);
    bench
}
