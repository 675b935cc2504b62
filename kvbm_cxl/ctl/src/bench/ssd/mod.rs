// SPDX-License-Identifier: Apache-2.0
//! Pulls from a CXL device with flash behind a little memory, modelled ([`device`]): what its own prefetcher gives by its degree, what it
//! gives to be told of a chain's next blocks (`CXL_COPY=read_ahead=`), and what metadata on flash costs.
//!
//! The numbers are those of the CXL-SSD paper, all sizes a hundredth: 48 MiB of memory, up to 80 MiB of blocks of 128 KiB, 40 us a page.
//! The blocks are pulled by the production code of another host, chain by chain, and every byte of every pull is compared.

pub mod device;

use super::cache::{Lab, Member, NAMESPACE, join_over, key};
use super::{Bench, fill, wrong};
use crate::stats::{Estimate, median};
use cxl_pool::Result;
use cxl_pool::cache::{BlockKey, CacheConfig, Published, Pulled};
use cxl_pool::copy::{AheadPages, CopyConfig, LocalPlace, LocalRange, ReadAhead};
use device::{Clock, PAGE_BYTES, Spec, Ssd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

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

/// Ratios to the best degree, by order of the blocks: told of without a prefetcher, the same with as many blocks as is found out, told of
/// with the best degree.
const TOLD: [[&str; 3]; 2] = [
    ["ssd_told_over_best_degree", "ssd_auto_over_best_degree", "ssd_told_with_degree_8_over_best_degree"],
    ["ssd_told_over_best_degree_random", "ssd_auto_over_best_degree_random", "ssd_told_with_degree_8_over_best_degree_random"],
];

/// How blocks of a chain lie.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    /// One behind the other.
    Sequential,
    /// Anywhere.
    Random,
}

/// A device with all blocks, and who pulls them.
struct Rig {
    lab: Lab,
    ssd: Arc<Ssd>,
    owner: Member,
    /// Numbers of the blocks as they lie, one behind the other.
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

/// What it gave.
struct Got {
    /// Megabytes a second, pass by pass.
    rates: Vec<f64>,
    /// Pages of which the device was told, and that flash read, by pages that were pulled.
    pages: AheadPages,
    reads: f64,
}

impl Got {
    fn rate(&self) -> f64 {
        median(&mut self.rates.clone())
    }
}

impl Rig {
    /// With metadata on flash too, or in memory of its own.
    fn new(is_metadata_on_flash: bool) -> Result<Rig> {
        let count = (MOST_GB * BLOCKS_PER_GB) as u64;
        let lab = Lab::new(BLOCK_BYTES as u64, count + 64, 2 << 20)?;
        let layout = lab.pool().layout();
        // Services read metadata beside who pulls.
        let (start, clock) = match is_metadata_on_flash {
            true => (0, Clock::Wall(Instant::now())),
            false => (layout.cells_offset(), Clock::of_this_thread()?),
        };
        let ssd = Ssd::over(lab.memory().clone(), start..lab.memory().len_bytes(), PAPER, clock);
        let owner = join_over(lab.pool(), ssd.clone(), &lab.state(), 0, config(ReadAhead::Off, PAGE_BYTES as usize))?;
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

    /// Pulls the working set, once untimed and then `passes` times.
    fn measure(&self, way: Way, passes: usize) -> Result<Got> {
        self.ssd.become_new(way.spec);
        let reader = join_over(self.lab.pool(), self.ssd.clone(), &self.lab.state(), 1, config(way.ahead, way.page_bytes))?;
        let numbers = self.order(&way);
        let mut room = vec![0u8; CHAIN * BLOCK_BYTES];
        let mut expected = vec![0u8; BLOCK_BYTES];
        let (mut rates, mut pulled) = (Vec::new(), 0);
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
            pulled += numbers.len();
            if pass > 0 {
                rates.push((numbers.len() * BLOCK_BYTES) as f64 * 1e3 / taken_ns as f64);
            }
        }
        let pages = reader.cache.copy_engine().ahead_pages();
        reader.leave()?;
        let reads = self.ssd.reads() as f64 / (pulled * BLOCK_BYTES) as f64 * PAGE_BYTES as f64;
        Ok(Got { rates, pages, reads })
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

fn compared(bench: &mut Bench, name: &'static str, above: &Got, below: &Got) {
    bench.ratio(name, Estimate::of_ratios(&above.rates, &below.rates));
}

fn best(of: &[Got]) -> &Got {
    of.iter().max_by(|one, other| one.rate().total_cmp(&other.rate())).unwrap_or(&of[0])
}

fn figures(rates: &[Got]) -> Vec<String> {
    rates.iter().map(|got| format!("{:.0}", got.rate())).collect()
}

fn row(name: impl Into<String>, cells: impl IntoIterator<Item = String>) -> Vec<String> {
    std::iter::once(name.into()).chain(cells).collect()
}

/// Measures; `passes` over the working set in each case.
pub fn run(passes: usize) -> Result<Bench> {
    super::cache::refuse_emulated()?;
    let title = "pulls from a modelled CXL-SSD, MB/s: 40 us a page of 4 KiB, sizes a hundredth of the paper's".into();
    let mut bench = Bench { title, ..Bench::default() };
    let rig = Rig::new(false)?;
    let plain = Way { gb: MOST_GB, order: Order::Sequential, spec: PAPER, ahead: ReadAhead::Off, page_bytes: PAGE_BYTES as usize };

    let sizes: Vec<Got> = (1..=MOST_GB).map(|gb| rig.measure(Way { gb, ..plain }, passes)).collect::<Result<_>>()?;
    let mut rows = vec![row("working set, GB", (1..=MOST_GB).map(|gb| gb.to_string()))];
    rows.push(row("no prefetch", figures(&sizes)));
    bench.grids.push(super::Grid { title: "By working set (the device's memory: 4.8 GB)".into(), rows });
    compared(&mut bench, "ssd_cliff", &sizes[3], &sizes[MOST_GB - 1]);

    let mut rows = vec![row("8 GB, the device's degree", DEGREES.map(|degree| degree.to_string()))];
    let orders = [(Order::Sequential, "blocks in order"), (Order::Random, "blocks anywhere")];
    let mut by_degree = Vec::new();
    for (order, name) in orders {
        let of = |degree| rig.measure(Way { order, spec: Spec { degree, ..PAPER }, ..plain }, passes);
        let got = DEGREES.into_iter().map(of).collect::<Result<Vec<Got>>>()?;
        rows.push(row(name, figures(&got)));
        by_degree.push(got);
    }
    bench.grids.push(super::Grid { title: "By pages that the device fetches ahead by itself".into(), rows });
    compared(&mut bench, "ssd_degree_8_over_0", &by_degree[0][4], &by_degree[0][0]);
    compared(&mut bench, "ssd_degree_8_over_0_random", &by_degree[1][4], &by_degree[1][0]);

    let ways: Vec<ReadAhead> = [1, 2, 4, 8].map(ReadAhead::Blocks).into_iter().chain([ReadAhead::Auto]).collect();
    let mut rows = vec![row("8 GB, blocks told of", ways.iter().map(ReadAhead::to_string))];
    for (place, (order, name)) in orders.into_iter().enumerate() {
        let [alone, auto, with_degree] = TOLD[place];
        let degrees = &by_degree[place];
        // A device that reads nine pages for one is told of each ninth page.
        for (degree, page_bytes) in [(0, PAGE_BYTES as usize), (8, 9 * PAGE_BYTES as usize)] {
            let of = |&ahead: &ReadAhead| rig.measure(Way { order, spec: Spec { degree, ..PAPER }, ahead, page_bytes, ..plain }, passes);
            let got = ways.iter().map(of).collect::<Result<Vec<Got>>>()?;
            rows.push(row(format!("{name}, degree {degree}"), figures(&got)));
            if degree > 0 {
                compared(&mut bench, with_degree, best(&got), best(degrees));
                continue;
            }
            compared(&mut bench, alone, best(&got), best(degrees));
            compared(&mut bench, auto, &got[4], best(degrees));
            if order == Order::Sequential {
                compared(&mut bench, "ssd_told_over_no_prefetch", best(&got), &degrees[0]);
            }
            let AheadPages { given, used, wasted } = got[4].pages;
            let reads = [&degrees[4], &got[4]].map(|got| format!("{:.2}", got.reads)).join(" and ");
            bench.notes.push(format!(
                "{name}: told of {given} pages with auto, {used} copied, {wasted} in vain; flash read {reads} pages for each that was \
                 copied, with degree 8 and told of"
            ));
        }
    }
    bench.grids.push(super::Grid { title: "By blocks that the device is told of before they are pulled".into(), rows });
    rig.owner.leave()?;
    metadata(&mut bench, passes)?;
    bench.notes.push("A device modelled in front of this machine's memory: the software is real, no figure is a device's".into());
    Ok(bench)
}

/// What a process finds of chains that it never met, on a device whose memory holds none of them, with metadata on flash and in memory of
/// its own.
fn metadata(bench: &mut Bench, passes: usize) -> Result<()> {
    let mut taken: [Vec<f64>; 2] = Default::default();
    for (taken, is_on_flash) in taken.iter_mut().zip([false, true]) {
        let rig = Rig::new(is_on_flash)?;
        let numbers =
            rig.order(&Way { gb: MOST_GB, order: Order::Random, spec: PAPER, ahead: ReadAhead::Off, page_bytes: PAGE_BYTES as usize });
        for _ in 0..passes {
            let reader = join_over(rig.lab.pool(), rig.ssd.clone(), &rig.lab.state(), 1, config(ReadAhead::Off, PAGE_BYTES as usize))?;
            for chain in numbers.chunks(CHAIN) {
                rig.ssd.become_new(PAPER);
                let keys: Vec<BlockKey> = chain.iter().map(|&number| key(number)).collect();
                let begun = Instant::now();
                let found = reader.cache.lookup_chain(NAMESPACE, &keys)?.len();
                taken.push(begun.elapsed().as_nanos() as f64);
                if found != chain.len() {
                    return Err(wrong(format!("{found} of {} blocks were found", chain.len())));
                }
            }
            reader.leave()?;
        }
        rig.owner.leave()?;
    }
    bench.ratio("ssd_cold_lookup_on_flash_over_in_memory", Estimate::of_ratios(&taken[1], &taken[0]));
    let names = ["memory of its own", "flash"];
    for (taken, name) in taken.iter_mut().zip(names) {
        bench.figure(format!("lookup of a chain of {CHAIN} blocks that was never met, metadata on {name}"), median(taken), "ns");
    }
    Ok(())
}
