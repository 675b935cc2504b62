// SPDX-License-Identifier: Apache-2.0
//! Lookups beside one bare fetch: CLFLUSH (or what the CPU has), MFENCE, load of one line.
//!
//! A lookup of a key that this process has met before looks at the descriptor right away ("met before"); otherwise it goes through the hint
//! ("first time"), which is two dependent fetches. Both kinds of lines, and those of the base line, are spread over as much memory.

use super::lab::{Lab, NAMESPACE, config, key};
use crate::bench::{Bench, Grid, wrong};
use crate::stats::{Estimate, median};
use cxl_pool::Result;
use cxl_pool::cache::{BlockKey, CacheConfig, Reserved, Wish};
use cxl_pool::pool::{CellArea, Share};
use std::hint::black_box;
use std::time::Instant;

/// Cells of the table: 64 Ki, of one line each.
const CELLS: u64 = 1 << 16;
/// Lookups of one batch.
const BATCH: u64 = 256;
/// Blocks of the long chain.
const LONG: usize = 10_000;
/// How full the cells are, in hundredths.
const FILLS: [u64; 5] = [10, 30, 50, 70, 90];

/// Times of one level of fill, in nanoseconds.
#[derive(Default)]
struct Taken {
    fetch: Vec<f64>,
    one: Vec<f64>,
    chain: Vec<f64>,
    long: Vec<f64>,
    missing: Vec<f64>,
}

/// Publishes blocks until `count` are there.
fn publish_up_to(lab: &Lab, from: u64, count: u64) -> Result<()> {
    let wishes: Vec<Wish> =
        (from..count).map(|number| Wish { namespace: NAMESPACE, key: key(number), parent: None, len_bytes: 64 }).collect();
    for (batch, wishes) in wishes.chunks(64).enumerate() {
        let mut filled = Vec::with_capacity(wishes.len());
        for (index, answer) in lab.cache.reserve_all(wishes)?.into_iter().enumerate() {
            let Reserved::Cell(mut reservation) = answer else {
                return Err(wrong(format!("block {} of batch {batch} found no place", index)));
            };
            reservation.fill([&[index as u8; 64][..]])?;
            filled.push(reservation);
        }
        lab.cache.commit_all(filled)?;
    }
    Ok(())
}

fn measure_fill(lab: &Lab, count: u64, batches: u64, with_long: bool) -> Result<Taken> {
    let mut taken = Taken::default();
    let lines = CELLS;
    let all: Vec<BlockKey> = (0..count).map(key).collect();
    for batch in 0..batches {
        let number = |step: u64| (batch * BATCH + step) * 2477 % count;
        let start = Instant::now();
        for step in 0..BATCH {
            black_box(lab.bare.fetch((batch * BATCH + step) * 2477 % lines));
        }
        taken.fetch.push(start.elapsed().as_nanos() as f64 / BATCH as f64);
        let mut found = 0;
        let start = Instant::now();
        for step in 0..BATCH {
            found += u64::from(lab.cache.lookup(NAMESPACE, black_box(key(number(step))))?.is_some());
        }
        taken.one.push(start.elapsed().as_nanos() as f64 / BATCH as f64);
        if found != BATCH {
            return Err(wrong(format!("{found} of {BATCH} blocks were found")));
        }
        let mut missed = 0;
        let start = Instant::now();
        for step in 0..BATCH {
            missed += u64::from(lab.cache.lookup(NAMESPACE, black_box(key((1 << 50) + step + batch * BATCH)))?.is_none());
        }
        taken.missing.push(start.elapsed().as_nanos() as f64 / BATCH as f64);
        let chains = 4;
        let mut blocks = 0;
        let start = Instant::now();
        for step in 0..chains {
            let first = ((batch * chains + step) * 1811 % (count - 64)) as usize;
            blocks += lab.cache.lookup_chain(NAMESPACE, black_box(&all[first..first + 64]))?.len();
        }
        taken.chain.push(start.elapsed().as_nanos() as f64 / chains as f64);
        if missed != BATCH || blocks as u64 != 64 * chains {
            return Err(wrong(format!("{missed} of {BATCH} lookups missed, {blocks} blocks of {chains} chains were found")));
        }
        if with_long && batch % 8 == 0 {
            let first = (batch * 1811 % (count - LONG as u64)) as usize;
            let start = Instant::now();
            let blocks = lab.cache.lookup_chain(NAMESPACE, &all[first..first + LONG])?.len();
            taken.long.push(start.elapsed().as_nanos() as f64);
            if blocks != LONG {
                return Err(wrong(format!("{blocks} of {LONG} blocks of a chain were found")));
            }
        }
    }
    Ok(taken)
}

/// Measures.
pub fn measure(bench: &mut Bench, batches: u64) -> Result<()> {
    let cells = vec![CellArea { cell_bytes: 64, share: Share::Bytes(CELLS * 64) }];
    // More places than keys, or so few that hardly any key is remembered.
    let met = CacheConfig { remembered_keys: 1 << 20, ..config() };
    let first_time = CacheConfig { remembered_keys: 64, ..config() };
    let mut lab = Lab::new(256 << 20, cells, met.clone())?;
    let mut rows = vec![vec!["cells in use".to_owned(), "met before".into(), "first time".into(), "absent".into(), "chain of 64".into()]];
    let (mut of_fill, mut there) = (Vec::new(), 0);
    for fill in FILLS {
        let count = CELLS * fill / 100;
        publish_up_to(&lab, there, count)?;
        there = count;
        let known = measure_fill(&lab, count, batches, fill == 90)?;
        lab = lab.reopen(first_time.clone())?;
        let unknown = measure_fill(&lab, count, batches.min(101), fill == 90)?;
        lab = lab.reopen(met.clone())?;
        let beside = |taken: &[f64], fetch: &[f64]| Estimate::of_ratios(taken, fetch);
        let of = [
            beside(&known.one, &known.fetch),
            beside(&unknown.one, &unknown.fetch),
            beside(&unknown.missing, &unknown.fetch),
            beside(&known.chain, &known.fetch),
            beside(&unknown.chain, &unknown.fetch),
        ];
        let mut row = vec![format!("{fill} %")];
        row.extend(of[..4].iter().map(|of| format!("{:.2}", of.median)));
        rows.push(row);
        of_fill.push((of, known, unknown));
    }
    bench.grids.push(Grid { title: "Time of a lookup in bare fetches of one line, by cells in use".into(), rows });
    let (Some((first, ..)), Some((last, known, unknown))) = (of_fill.first().map(|one| (one.0, &one.1)), of_fill.last()) else {
        return Ok(());
    };
    bench.figure("one bare fetch of a line", median(&mut known.fetch.clone()), "ns");
    bench.figure("lookup of one block, met before", median(&mut known.one.clone()), "ns");
    bench.figure("lookup of one block, first time", median(&mut unknown.one.clone()), "ns");
    bench.figure("lookup of a chain of 64, met before", median(&mut known.chain.clone()), "ns");
    bench.figure("lookup of a chain of 64, first time", median(&mut unknown.chain.clone()), "ns");
    let long = |taken: &Taken| median(&mut taken.long.clone()) / LONG as f64 / (median(&mut taken.chain.clone()) / 64.0);
    bench.figure("a block in a chain of 10 000 over one in a chain of 64, met before", long(known), "x");
    bench.figure("the same, first time", long(unknown), "x");
    bench.at_most("lookup of one block, met before, in bare fetches", &last[0], 2.0, "");
    bench.at_most("lookup of one block, first time, in bare fetches", &last[1], 2.0, "");
    bench.at_most("lookup of a chain of 64, met before, in bare fetches", &last[3], 12.0, "");
    bench.at_most("lookup of a chain of 64, first time, in bare fetches", &last[4], 12.0, "");
    bench.ratio("lookup1_vs_fetch", last[0]);
    bench.ratio("lookup1_first_time_vs_fetch", last[1]);
    bench.ratio("lookup64_vs_fetch", last[3]);
    bench.ratio("lookup64_first_time_vs_fetch", last[4]);
    let flat = |index: usize| last[index].median / first[index].median;
    bench.target(format!("cost at 90 % of the cells over cost at 10 %: {:.2}, at most 1.25", flat(1)), flat(1) <= 1.25);
    lab.end()
}
