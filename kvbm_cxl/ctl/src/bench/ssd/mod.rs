// SPDX-License-Identifier: Apache-2.0
//! Pulls from a modelled CXL device with flash and a little memory ([`device`]): by the degree of its own prefetcher, and with
//! read-ahead of a chain's next blocks (`CXL_COPY=read_ahead=`).
//!
//! The numbers are those of the CXL-SSD paper, all sizes a hundredth: 48 MiB of memory, up to 80 MiB of blocks of 128 KiB, 40 us a page.
//! The blocks are pulled by the production code of another host, chain by chain, and every byte of every pull is compared.

pub mod device;

use crate::lab::{Lab, Member, NAMESPACE, fill, instructions, key, wrong};
use crate::report::Bench;
use ctl_common::stats::{Estimate, median};
use cxl_pool::Result;
use cxl_pool::cache::{BlockKey, CacheConfig, Published, Pulled};
use cxl_pool::copy::{CopyConfig, LocalPlace, LocalRange, ReadAhead};
use device::{Clock, PAGE_BYTES, Spec, Ssd};
use std::ptr::NonNull;
use std::sync::Arc;

/// A chunk of 256 tokens there.
const BLOCK_BYTES: usize = 128 << 10;
/// Blocks of 10 MiB, which stand for one GB there.
const BLOCKS_PER_GB: usize = (10 << 20) / BLOCK_BYTES;
/// The largest working set.
const MOST_GB: usize = 8;
/// Blocks of a chain: 16 MiB, a prompt of 32 K tokens there.
const CHAIN: usize = 128;
/// The device of the paper; ways and buffers are assumed, as in the planner's preset.
const PAPER: Spec =
    Spec { cache_pages: (48 << 20) / PAGE_BYTES as u32, read_ns: 40_000, write_ns: 200_000, degree: 0, ways: 64, buffers: 12 };
/// Degrees of the device's prefetcher that the paper tried.
const DEGREES: [u32; 5] = [0, 1, 2, 4, 8];

/// Ratios, by order of the blocks: the working set that fits by the one that does not (in order only), degree 8 by 0, and to the best
/// degree read-ahead without a prefetcher, the same with an automatic depth, and with degree 8.
const RATIOS: [[&str; 5]; 2] = [
    [
        "ssd_cliff",
        "ssd_degree_8_over_0",
        "ssd_told_over_best_degree",
        "ssd_auto_over_best_degree",
        "ssd_told_with_degree_8_over_best_degree",
    ],
    [
        "",
        "ssd_degree_8_over_0_random",
        "ssd_told_over_best_degree_random",
        "ssd_auto_over_best_degree_random",
        "ssd_told_with_degree_8_over_best_degree_random",
    ],
];

/// How blocks of a chain lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Sequential,
    Random,
}

/// A device with all blocks, and who pulls them.
struct Rig {
    lab: Lab,
    ssd: Arc<Ssd>,
    owner: Member,
    /// Numbers of the blocks in the order of their cells.
    as_they_lie: Vec<u64>,
}

/// One way to pull.
#[derive(Clone, Copy)]
struct Way {
    gb: usize,
    order: Order,
    spec: Spec,
    ahead: ReadAhead,
    /// What the device is taken to fetch for one line.
    page_bytes: usize,
}

impl Rig {
    fn new() -> Result<Rig> {
        let count = (MOST_GB * BLOCKS_PER_GB) as u64;
        let lab = Lab::new(BLOCK_BYTES as u64, count + 64, 2 << 20)?;
        // Metadata lies in memory of its own.
        let flash = lab.pool.layout().cells_offset()..lab.memory().len_bytes();
        let ssd = Ssd::over(lab.memory().clone(), flash, PAPER, Clock::of_this_thread()?);
        let owner = lab.join_over(ssd.clone(), 0, config(ReadAhead::Off, PAGE_BYTES as usize))?;
        let mut block = vec![0; BLOCK_BYTES];
        let mut lie = Vec::new();
        for number in 0..count {
            fill(&mut block, number);
            if owner.cache.publish(NAMESPACE, key(number), None, &block)? != Published::Stored {
                return Err(wrong("a new block was not stored"));
            }
            let found = owner.cache.lookup(NAMESPACE, key(number))?.ok_or_else(|| wrong("a block that was published is not there"))?;
            lie.push((found.cell, number));
        }
        lie.sort_unstable();
        Ok(Rig { lab, ssd, owner, as_they_lie: lie.into_iter().map(|(_, number)| number).collect() })
    }

    /// Numbers of the blocks of a working set in the order in which they are pulled.
    fn order(&self, way: &Way) -> Vec<u64> {
        let mut numbers = self.as_they_lie[..way.gb * BLOCKS_PER_GB].to_vec();
        if way.order == Order::Random {
            let mut random = 0x9e37_79b9_7f4a_7c15u64;
            for last in (1..numbers.len()).rev() {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                numbers.swap(last, (random >> 33) as usize % (last + 1));
            }
        }
        numbers
    }

    /// Pulls the working set, once untimed and then `passes` times. Megabytes a second of each pass.
    fn measure(&self, bench: &mut Bench, way: Way, passes: usize) -> Result<Vec<f64>> {
        self.ssd.become_new(way.spec);
        let reader = self.lab.join_over(self.ssd.clone(), 1, config(way.ahead, way.page_bytes))?;
        let numbers = self.order(&way);
        let mut room = vec![0u8; CHAIN * BLOCK_BYTES];
        let mut expected = vec![0u8; BLOCK_BYTES];
        let mut rates = Vec::new();
        for pass in 0..=passes {
            let mut taken_ns = 0;
            for chain in numbers.chunks(CHAIN) {
                taken_ns += pull(&self.ssd, &reader, chain, &mut room)?;
                for (number, found) in chain.iter().zip(room.chunks(BLOCK_BYTES)) {
                    fill(&mut expected, *number);
                    if found != expected {
                        return Err(wrong(format!("block {number} was not pulled as it was published")));
                    }
                }
                room.fill(0);
            }
            if pass > 0 {
                rates.push((numbers.len() * BLOCK_BYTES) as f64 * 1e3 / taken_ns as f64);
            }
        }
        reader.leave()?;
        let Way { gb, order, spec: Spec { degree, .. }, ahead, .. } = way;
        bench.figure(format!("{gb} GB, {order:?}, degree {degree}, read-ahead {ahead}"), rate(&rates), "MB/s");
        Ok(rates)
    }
}

fn config(read_ahead: ReadAhead, ahead_page_bytes: usize) -> CacheConfig {
    CacheConfig { copy: Some(CopyConfig { read_ahead, ahead_page_bytes, ..CopyConfig::alone() }), ..CacheConfig::default() }
}

/// Pulls the blocks of a chain side by side into `room`; how long it took by the device's clock.
fn pull(ssd: &Ssd, reader: &Member, chain: &[u64], room: &mut [u8]) -> Result<u64> {
    let keys: Vec<BlockKey> = chain.iter().map(|&number| key(number)).collect();
    let places: Vec<NonNull<u8>> = room.chunks_mut(BLOCK_BYTES).map(|place| NonNull::from(place).cast()).collect();
    let begun_ns = ssd.now_ns();
    let pieces = |place: usize, _| [LocalRange { address: places[place], len_bytes: BLOCK_BYTES }];
    // SAFETY: each range is a part of `room` of its own, which this function borrows alone, and memory of this process.
    let pulled = unsafe { reader.cache.pull_all_raw(NAMESPACE, &keys, LocalPlace::Host, pieces) }?;
    let taken_ns = ssd.now_ns() - begun_ns;
    match pulled.iter().position(|pulled| *pulled != Pulled::Hit { len_bytes: BLOCK_BYTES as u64 }) {
        None => Ok(taken_ns),
        Some(place) => Err(wrong(format!("block {} was not pulled: {:?}", chain[place], pulled[place]))),
    }
}

fn ratio_of(bench: &mut Bench, name: &'static str, above: &[f64], below: &[f64]) {
    bench.ratio(name, Estimate::of_ratios(above, below));
}

fn rate(rates: &[f64]) -> f64 {
    median(&mut rates.to_vec())
}

fn best(of: &[Vec<f64>]) -> &[f64] {
    of.iter().max_by(|one, other| rate(one).total_cmp(&rate(other))).unwrap_or(&of[0])
}

/// Measures; `passes` over the working set in each case.
pub fn run(passes: usize) -> Result<Bench> {
    instructions()?;
    let mut bench =
        Bench::new("pulls from a modelled CXL-SSD: 40 us a page of 4 KiB, sizes a hundredth of the paper's; no figure is a device's");
    let rig = Rig::new()?;
    let plain = Way { gb: MOST_GB, order: Order::Sequential, spec: PAPER, ahead: ReadAhead::Off, page_bytes: PAGE_BYTES as usize };
    let fits = rig.measure(&mut bench, Way { gb: MOST_GB / 2, ..plain }, passes)?;
    let ways: Vec<ReadAhead> = [1, 2, 4, 8].map(ReadAhead::Blocks).into_iter().chain([ReadAhead::Auto]).collect();
    for (order, [cliff, degree_8, alone, auto, with_degree]) in [(Order::Sequential, RATIOS[0]), (Order::Random, RATIOS[1])] {
        let of_degree = |degree| Way { order, spec: Spec { degree, ..PAPER }, ..plain };
        let degrees = DEGREES.map(of_degree).map(|way| rig.measure(&mut bench, way, passes));
        let degrees = degrees.into_iter().collect::<Result<Vec<_>>>()?;
        if order == Order::Sequential {
            ratio_of(&mut bench, cliff, &fits, &degrees[0]);
        }
        ratio_of(&mut bench, degree_8, &degrees[4], &degrees[0]);
        // A device that reads nine pages for one gets a hint for each ninth page.
        for (degree, page_bytes) in [(0, PAGE_BYTES as usize), (8, 9 * PAGE_BYTES as usize)] {
            let of_ahead = |&ahead: &ReadAhead| rig.measure(&mut bench, Way { ahead, page_bytes, ..of_degree(degree) }, passes);
            let got = ways.iter().map(of_ahead).collect::<Result<Vec<_>>>()?;
            if degree > 0 {
                ratio_of(&mut bench, with_degree, best(&got), best(&degrees));
            } else {
                ratio_of(&mut bench, alone, best(&got), best(&degrees));
                ratio_of(&mut bench, auto, &got[4], best(&degrees));
            }
        }
    }
    rig.owner.leave()?;
    Ok(bench)
}
