// SPDX-License-Identifier: Apache-2.0
//! What publishing and fetching a metadata line cost beside the bare instructions.
//!
//! Ours and bare batches alternate in one run over one working set, so that whatever else the machine does falls on both; each ratio is that
//! of the medians. What is fetched is compared with what was published. `CXL_COHERENCE` chooses the instructions under test.
//!
//! Usage: `line_cost [FILE]` — a file or devdax stand-in of at least 32 MiB to map; anonymous shared memory without it. The last line is
//! `RATIOS` and JSON; the exit status is 0 only when the contents were right.

use cxl_pool::coherence::{CoherenceOptions, Mapping, Segment, over_mapping};
use cxl_pool::line::{Line, Lines};
use cxl_pool::media::{Geometry, Layout, MediaLine, Record, Region};
use std::error::Error;
use std::hint::black_box;
use std::os::fd::AsRawFd;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::time::Instant;

const POOL_BYTES: u64 = 32 << 20;
const LINES: u64 = 4096;
const BATCH: u64 = 512;
const BATCHES: u64 = 801;

/// The bare instructions that the recipes are measured against.
#[cfg(target_arch = "x86_64")]
mod bare {
    use std::arch::x86_64::*;

    /// One whole-line store past the cache, then SFENCE.
    pub fn publish(to: *mut u8, line: &[u8; 64]) {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the CPU has the instruction; `to` is a mapped line.
            unsafe { store_wide(to, line) };
        } else {
            for index in 0..4 {
                // SAFETY: SSE2 is part of x86-64; `to` is a mapped line.
                unsafe { _mm_stream_si128(to.cast::<__m128i>().add(index), _mm_loadu_si128(line.as_ptr().cast::<__m128i>().add(index))) };
            }
        }
        // SAFETY: a fence touches nothing.
        unsafe { _mm_sfence() };
    }

    #[target_feature(enable = "avx512f")]
    unsafe fn store_wide(to: *mut u8, line: &[u8; 64]) {
        // SAFETY: the caller's.
        unsafe { _mm512_stream_si512(to.cast(), _mm512_loadu_si512(line.as_ptr().cast())) };
    }

    /// CLFLUSH, MFENCE, eight loads.
    pub fn fetch(from: *mut u8) -> u64 {
        // SAFETY: `from` is a mapped line.
        unsafe {
            _mm_clflush(from);
            _mm_mfence();
            (0..8).map(|index| from.cast::<u64>().add(index).read_volatile()).fold(0, |all, word| all ^ word)
        }
    }
}

/// The bare instructions that the recipes are measured against.
#[cfg(target_arch = "aarch64")]
mod bare {
    use std::arch::asm;

    /// Eight stores, DC CVAC, DSB.
    pub fn publish(to: *mut u8, line: &[u8; 64]) {
        // SAFETY: `to` is a mapped line.
        unsafe {
            std::ptr::copy_nonoverlapping(line.as_ptr(), to, 64);
            asm!("dc cvac, {}", "dsb sy", in(reg) to, options(nostack, preserves_flags));
        }
    }

    /// DC CIVAC, DSB, eight loads.
    pub fn fetch(from: *mut u8) -> u64 {
        // SAFETY: `from` is a mapped line.
        unsafe {
            asm!("dc civac, {}", "dsb sy", in(reg) from, options(nostack, preserves_flags));
            (0..8).map(|index| from.cast::<u64>().add(index).read_volatile()).fold(0, |all, word| all ^ word)
        }
    }
}

fn map(path: Option<&str>) -> Result<Mapping, Box<dyn Error>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let (flags, file) = match path {
        Some(path) => (libc::MAP_SHARED, Some(std::fs::File::options().read(true).write(true).open(path)?)),
        None => (libc::MAP_SHARED | libc::MAP_ANONYMOUS, None),
    };
    let descriptor = file.as_ref().map_or(-1, |file| file.as_raw_fd());
    // SAFETY: a new mapping at a place of the kernel's choice; it stays until the process ends.
    let base = unsafe { libc::mmap(null_mut(), POOL_BYTES as usize, protection, flags, descriptor, 0) };
    if base == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error().into());
    }
    Ok(Mapping {
        base: NonNull::new(base.cast()).ok_or("mapped at zero")?,
        len_bytes: POOL_BYTES,
        devices: vec![path.unwrap_or("memory").into()],
        segments: vec![Segment { start: 0, len_bytes: POOL_BYTES, device: 0 }],
        owner: Arc::new(()),
    })
}

fn record(index: u64, round: u64) -> Record {
    let mut words = [0u64; 8];
    for (word, value) in words.iter_mut().enumerate() {
        *value = (index * 8 + word as u64 + 1).wrapping_mul(round + 0x9e37_79b9_7f4a_7c15);
    }
    let mut record: Record = bytemuck::cast(words);
    record.crc = 0;
    record
}

/// All that the caller put into a record, in one word.
fn digest(record: &Record) -> u64 {
    let words: [u64; 8] = bytemuck::cast(*record);
    words[1..].iter().fold(words[0] >> 32, |all, word| all ^ word)
}

/// Nanoseconds for each step of a batch that began at `start`.
fn per_step(start: Instant) -> f64 {
    start.elapsed().as_nanos() as f64 / BATCH as f64
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1);
    let pool = over_mapping(map(path.as_deref())?, &CoherenceOptions::from_env()?)?;
    let geometry = Geometry { objects: LINES as u32, chunk_bytes: 1 << 20, ..Geometry::with_len(POOL_BYTES) };
    let layout = Arc::new(Layout::new(geometry)?);
    let lines = Lines::new(pool.memory.clone(), layout.clone(), b"line cost sample");
    let start = layout.line_offset(Region::Record, 0)?;
    let place = pool.memory.address(start, LINES * 64).ok_or("no mapping to measure")?.as_ptr();
    // SAFETY: inside the range just asked for.
    let at = |index: u64| unsafe { place.add(index as usize * 64) };

    let (mut publish, mut publish_bare, mut fetch, mut fetch_bare) = (vec![], vec![], vec![], vec![]);
    for batch in 0..BATCHES {
        // Strides through the lines that no prefetcher follows; each line of a batch comes once.
        let indexes: Vec<u64> = (0..BATCH).map(|step| ((batch * BATCH + step) * 2477) % LINES).collect();
        let records: Vec<Record> = indexes.iter().map(|&index| record(index, batch)).collect();
        let sealed: Vec<Line> = indexes.iter().zip(&records).map(|(&index, &record)| lines.seal(index, record)).collect();

        // Who goes first changes, because the second finds what the first has left in caches and buffers.
        for ours in [batch % 2 == 0, batch % 2 != 0] {
            if ours {
                let start = Instant::now();
                for (&index, record) in indexes.iter().zip(&records) {
                    lines.publish(index, *black_box(record))?;
                }
                publish.push(per_step(start));
                let start = Instant::now();
                let mut found = 0;
                for &index in &indexes {
                    found ^= digest(&lines.fetch(index)?);
                }
                fetch.push(per_step(start));
                if found != records.iter().fold(0, |all, record| all ^ digest(record)) {
                    return Err(format!("batch {batch}: a line of {:?} holds something else than was published", Record::REGION).into());
                }
            } else {
                let start = Instant::now();
                for (&index, line) in indexes.iter().zip(&sealed) {
                    bare::publish(at(index), black_box(&line.0));
                }
                publish_bare.push(per_step(start));
                let start = Instant::now();
                for &index in &indexes {
                    black_box(bare::fetch(at(index)));
                }
                fetch_bare.push(per_step(start));
            }
        }
    }

    let [publish, publish_bare, fetch, fetch_bare] = [publish, publish_bare, fetch, fetch_bare].map(median);
    println!("{}", pool.description);
    println!("publish {publish:.1} ns, bare {publish_bare:.1} ns; fetch {fetch:.1} ns, bare {fetch_bare:.1} ns");
    println!("RATIOS {{\"publish_vs_bare\": {:.3}, \"fetch_vs_bare\": {:.3}}}", publish / publish_bare, fetch / fetch_bare);
    Ok(())
}
