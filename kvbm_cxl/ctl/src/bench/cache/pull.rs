// SPDX-License-Identifier: Apache-2.0
//! Pull of a block of another host compared with the fastest of the bare loops that are safe on memory without coherence (those of
//! `cxl-bench copy`), over the same lines; and with that loop and the other accesses of a pull around it. The lines are in no cache.

use super::accesses::Accesses;
use super::{Names, SIZES};
use crate::copy::{LOOPS, bare_pull, fastest};
use crate::lab::{BLOCKS, Destinations, Lab, Member, NAMESPACE, alone, fill, in_turn, key, place, time, uncache, wrong};
use crate::report::Bench;
use ctl_common::stats::Estimate;
use cxl_pool::Result;
use cxl_pool::cache::{CacheConfig, Pulled};
use cxl_pool::limits::LINE_BYTES;

pub fn run(batches: u64) -> Result<Bench> {
    let mut bench = Bench::new("pull of blocks of another host, pool in /dev/shm, one thread");
    for (size, [_, names]) in SIZES {
        single(&mut bench, batches, size, names)?;
    }
    Ok(bench)
}

fn single(bench: &mut Bench, batches: u64, size: usize, names: Names) -> Result<()> {
    let lab = Lab::new(size as u64, BLOCKS, 2 << 20)?;
    let owner = lab.join(0, CacheConfig { checksums: true, ..alone() })?;
    let (reader, checking) = (lab.join(1, alone())?, lab.join(2, CacheConfig { checksums: true, ..alone() })?);
    let mut source = vec![0; size];
    let mut offsets = Vec::new();
    for number in 0..BLOCKS {
        fill(&mut source, number);
        owner.cache.publish(NAMESPACE, key(number), None, &source)?;
        offsets.push(place(&owner.cache, &lab.pool, key(number))?);
    }
    let first = offsets.iter().copied().min().unwrap_or(0);
    let span = offsets.iter().copied().max().unwrap_or(0) - first + size as u64;
    let bare = lab.bare(first, span)?;
    let accesses = Accesses::at(&lab, lab.pool.layout().data_offset())?;
    let mut destinations = Destinations::new();
    // The bare loop with the lowest sum of times so far is that of the way with all accesses.
    let mut sums = [0.0; LOOPS.len()];
    let mut taken: [Vec<f64>; LOOPS.len() + 3] = in_turn(batches + 1, |batch, way| {
        let number = batch * 5 % BLOCKS;
        let offset = offsets[number as usize];
        fill(&mut source, number);
        uncache(&**lab.memory(), offset, size)?;
        let to = destinations.next(size, 0);
        let line = (offset - first) / LINE_BYTES as u64;
        let best = (0..LOOPS.len()).min_by(|&one, &other| f64::total_cmp(&sums[one], &sums[other])).unwrap_or(0);
        let taken_ns = time(|| match way {
            way if way < LOOPS.len() => bare_pull(&bare, way, line, to),
            way if way == LOOPS.len() => accesses.pull(|| bare_pull(&bare, best, line, to)),
            way => {
                let member = if way == LOOPS.len() + 1 { &reader } else { &checking };
                match member.cache.pull(NAMESPACE, key(number), to)? {
                    Pulled::Hit { .. } => Ok(()),
                    missed => Err(wrong(format!("a block that is there was not pulled: {missed:?}"))),
                }
            }
        })?;
        if *to != source[..] {
            return Err(wrong("a pull delivered other bytes than were published"));
        }
        to[..LINE_BYTES].fill(0);
        if let Some(sum) = sums.get_mut(way) {
            *sum += taken_ns;
        }
        Ok(taken_ns)
    })?;
    // The first batch maps the local pages.
    taken.iter_mut().for_each(|times| _ = times.remove(0));
    let [loops @ .., least, ours, checked] = taken;
    let best = fastest(&loops.each_ref());
    let text = format!("{} KiB", size >> 10);
    let bare_name = format!("bare: {}", LOOPS[best]);
    for (what, taken) in
        [("pull", &ours), ("pull with a checksum", &checked), ("bare accesses of a pull", &least), (&bare_name, &loops[best])]
    {
        bench.time(format!("{what}, {text}"), taken);
        bench.speed(format!("{what}, {text}, speed"), size, taken);
    }
    bench.at_least(names.vs_bare, Estimate::of_ratios(&loops[best], &ours), names.least);
    bench.ratio(names.vs_accesses, Estimate::of_ratios(&least, &ours));
    [reader, checking, owner].into_iter().try_for_each(Member::leave)
}
