// SPDX-License-Identifier: Apache-2.0
//! Two hosts of this process, one thread each, that publish and pull blocks of 64 KiB of a common set larger than the cells, so that both
//! evict all the time. Four of five operations are pulls; a pull that misses is followed by a publish, as a prefill would. Every word of
//! every pull is compared.

use super::lab::{NAMESPACE, config, fill, is_block, join, key};
use crate::bench::hosts;
use crate::bench::{Bench, wrong};
use crate::stats::quantile;
use cxl_pool::cache::{Cache, Pulled};
use cxl_pool::pool::{CellArea, Share};
use cxl_pool::{Error, Result};
use std::time::Instant;

const BLOCK_BYTES: usize = 64 << 10;
/// Blocks that there are names for, and cells for half of them.
const BLOCKS: u64 = 512;

/// What one host did: times of its operations in nanoseconds.
#[derive(Default)]
struct Done {
    pulls: Vec<f64>,
    misses: u64,
    publishes: Vec<f64>,
    refused: u64,
}

fn work(cache: &Cache, operations: u64, seed: u64) -> Result<Done> {
    let mut done = Done::default();
    let mut state = seed;
    let mut bytes = vec![0; BLOCK_BYTES];
    for _ in 0..operations {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // The product of two draws: some blocks are asked for much more often than others.
        let (one, other) = (state >> 33 & 0xffff, state >> 49);
        let block = 13 << 40 | (one * other * BLOCKS) >> 31;
        let start = Instant::now();
        let pulled = cache.pull(NAMESPACE, key(block), &mut bytes)?;
        match pulled {
            Pulled::Hit { .. } if is_block(&bytes, block) => done.pulls.push(start.elapsed().as_nanos() as f64),
            Pulled::Hit { .. } => return Err(wrong(format!("block {block} came with other bytes"))),
            Pulled::Miss(_) => done.misses += 1,
        }
        if matches!(pulled, Pulled::Miss(_)) {
            fill(&mut bytes, block);
            let start = Instant::now();
            match cache.publish(NAMESPACE, key(block), None, &bytes) {
                Ok(_) => done.publishes.push(start.elapsed().as_nanos() as f64),
                Err(Error::Full { .. }) => done.refused += 1,
                Err(error) => return Err(error),
            }
        }
    }
    Ok(done)
}

/// Measures.
pub fn measure(bench: &mut Bench, batches: u64) -> Result<()> {
    let share = Share::Bytes(BLOCKS / 2 * BLOCK_BYTES as u64);
    let bed = hosts::Lab::with_cells(128 << 20, vec![CellArea { cell_bytes: BLOCK_BYTES as u64, share }])?;
    let hosts = [join(&bed, 0)?, join(&bed, 1)?];
    let services = [hosts[0].serve()?, hosts[1].serve()?];
    let caches = [Cache::open(&hosts[0], config())?, Cache::open(&hosts[1], config())?];
    let upkeep = [caches[0].serve()?, caches[1].serve()?];
    let operations = batches * 16;
    let start = Instant::now();
    let results: Vec<Result<Done>> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            caches.iter().enumerate().map(|(number, cache)| scope.spawn(move || work(cache, operations, number as u64 + 1))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(wrong("a thread of the bench panicked")))).collect()
    });
    let taken_s = start.elapsed().as_secs_f64();
    let mut all = Done::default();
    for done in results {
        let done = done?;
        all.pulls.extend(done.pulls);
        all.publishes.extend(done.publishes);
        (all.misses, all.refused) = (all.misses + done.misses, all.refused + done.refused);
    }
    let (pulls, publishes) = (all.pulls.len() as f64, all.publishes.len() as f64);
    bench.figure("pulls of 64 KiB that hit", pulls / taken_s, "/s");
    bench.figure("publishes of 64 KiB", publishes / taken_s, "/s");
    bench.figure("hits of pulls", 100.0 * pulls / (pulls + all.misses as f64).max(1.0), "%");
    bench.figure("publishes refused for want of a cell", all.refused as f64, "");
    for (name, times) in [("pull", &mut all.pulls), ("publish", &mut all.publishes)] {
        bench.figure(format!("{name}, median"), quantile(times, 0.5), "ns");
        bench.figure(format!("{name}, 99 %"), quantile(times, 0.99), "ns");
    }
    bench.target("every host pulled and published", pulls > 0.0 && publishes > 0.0);
    drop(upkeep);
    for cache in caches {
        cache.close()?;
    }
    drop(services);
    hosts.iter().try_for_each(cxl_pool::host::Host::leave)
}
