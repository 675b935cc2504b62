// SPDX-License-Identifier: Apache-2.0
//! Pulling one block that another host has published beside the fastest of the bare loops that are safe on memory without coherence
//! (those of `cxl-bench copy`), over the very same lines; and beside that loop with the other accesses of a pull around it.
//!
//! The lines of the block are in no cache. Destinations go round a buffer much larger than the second-level cache.

use super::accesses::Accesses;
use super::{BLOCKS, Lab, NAMESPACE, Names, SIZES, alone, fill, join, key, place, refuse_emulated, uncache};
use crate::copy::{LOOPS, bare_pull};
use crate::stats::{Estimate, median, quantile};
use crate::{Bench, wrong};
use cxl_pool::Result;
use cxl_pool::cache::{CacheConfig, Pulled};
use cxl_pool::limits::LINE_BYTES;
use std::time::Instant;

/// Local memory that destinations go round in, in bytes.
const LOCAL_BYTES: usize = 64 << 20;

/// Measures.
pub fn run(batches: u64) -> Result<Bench> {
    refuse_emulated()?;
    let mut bench = Bench { title: "pull of blocks of another host, pool in /dev/shm, one thread".into(), ..Bench::default() };
    for (size, [_, names]) in SIZES {
        single(&mut bench, batches, size, names)?;
    }
    Ok(bench)
}

/// Destinations that begin a page and were not used for long.
struct Local {
    bytes: Box<[u8]>,
    next: usize,
}

impl Local {
    fn place(&mut self, len_bytes: usize) -> &mut [u8] {
        let start = (self.bytes.as_ptr() as usize).wrapping_neg() % 4096;
        if self.next + len_bytes > LOCAL_BYTES {
            self.next = 0;
        }
        let at = start + self.next;
        self.next += len_bytes.next_multiple_of(4096);
        &mut self.bytes[at..at + len_bytes]
    }
}

/// The bare loop that has been the fastest so far.
fn fastest(base: &[Vec<f64>; LOOPS.len()]) -> usize {
    let typical = |number: usize| median(&mut base[number].clone());
    (0..LOOPS.len()).min_by(|&one, &other| typical(one).total_cmp(&typical(other))).unwrap_or(0)
}

fn single(bench: &mut Bench, batches: u64, size: usize, names: Names) -> Result<()> {
    let lab = Lab::new(size as u64, BLOCKS, 2 << 20)?;
    let owner = join(lab.pool(), &lab.state(), 0, CacheConfig { checksums: true, ..alone() }, false)?;
    let reader = join(lab.pool(), &lab.state(), 1, alone(), false)?;
    let checking = join(lab.pool(), &lab.state(), 2, CacheConfig { checksums: true, ..alone() }, false)?;
    let mut sources = vec![vec![0; size]; BLOCKS as usize];
    let mut offsets = Vec::new();
    for (number, source) in (0..BLOCKS).zip(&mut sources) {
        fill(source, number);
        owner.cache.publish(NAMESPACE, key(number), None, source)?;
        offsets.push(place(&owner.cache, lab.pool(), key(number))?);
    }
    let first = offsets.iter().copied().min().unwrap_or(0);
    let span = offsets.iter().copied().max().unwrap_or(0) - first + size as u64;
    // The bare loops touch no line but those of the blocks; the power of two above them lies within the cells.
    let bare = lab.bare(first, span)?;
    let accesses = Accesses::at(&lab, lab.pool().layout().data_offset())?;
    // Not zeros: those would be pages that the system has yet to find, one by one, in the middle of a pull.
    let mut local = Local { bytes: vec![1; LOCAL_BYTES + 4096].into(), next: 0 };
    let (mut ours, mut checked, mut least): (Vec<f64>, Vec<f64>, Vec<f64>) = Default::default();
    let mut base: [Vec<f64>; LOOPS.len()] = Default::default();
    let turns = LOOPS.len() as u64 + 3;
    for batch in 0..batches + 1 {
        let number = (batch * 5 % BLOCKS) as usize;
        for turn in 0..turns {
            let which = ((turn + batch) % turns) as usize;
            uncache(&**lab.memory(), offsets[number], size)?;
            let destination = local.place(size);
            let bare_loop = |number_of_loop: usize, destination: &mut [u8]| {
                bare_pull(&bare, number_of_loop, (offsets[number] - first) / LINE_BYTES as u64, destination)
            };
            let best = fastest(&base);
            let start = Instant::now();
            match which {
                loop_number if loop_number < LOOPS.len() => bare_loop(loop_number, destination)?,
                loop_number if loop_number == LOOPS.len() + 2 => accesses.pull(|| bare_loop(best, destination))?,
                _ => {
                    let cache = if which == LOOPS.len() { &reader.cache } else { &checking.cache };
                    let pulled = cache.pull(NAMESPACE, key(number as u64), destination)?;
                    if pulled != (Pulled::Hit { len_bytes: size as u64 }) {
                        return Err(wrong(format!("a block that is there was not pulled: {pulled:?}")));
                    }
                }
            }
            let taken_ns = start.elapsed().as_nanos() as f64;
            if *destination != sources[number][..] {
                return Err(wrong("a pull did not deliver what was published"));
            }
            destination[..LINE_BYTES].fill(0);
            // The first round makes the local pages.
            if batch > 0 {
                let taken = match which {
                    loop_number if loop_number < LOOPS.len() => &mut base[loop_number],
                    _ if which == LOOPS.len() => &mut ours,
                    _ if which == LOOPS.len() + 1 => &mut checked,
                    _ => &mut least,
                };
                taken.push(taken_ns);
            }
        }
    }
    let best = fastest(&base);
    let text = format!("{} KiB", size >> 10);
    let (ratio, of_least) = (Estimate::of_ratios(&base[best], &ours), Estimate::of_ratios(&least, &ours));
    let bare_name = format!("bare: {}", LOOPS[best]);
    for (what, taken) in [
        ("pull", &mut ours),
        ("pull with a checksum", &mut checked),
        ("bare accesses of a pull", &mut least),
        (&bare_name, &mut base[best]),
    ] {
        bench.figure(format!("{what}, {text}"), median(taken), "ns");
        bench.figure(format!("{what}, {text}, p99"), quantile(taken, 0.99), "ns");
        bench.figure(format!("{what}, {text}, rate"), 1e9 / median(taken), "/s");
        bench.figure(format!("{what}, {text}, speed"), size as f64 / median(taken), "GB/s");
    }
    bench.at_least(&format!("pull of {text}, speed beside the bare one"), &ratio, names.least);
    bench.ratio(names.vs_bare, ratio);
    bench.ratio(names.vs_accesses, of_least);
    [reader, checking, owner].into_iter().try_for_each(super::Member::leave)
}
