// SPDX-License-Identifier: Apache-2.0
//! A quick look at which way of copying is fastest here: a few hundred pulls, tens of milliseconds.

use super::config::{CopyConfig, EngineChoice};
use super::{Checksum, CopyEngine, CpuEngine, ReadList};
use crate::coherence::Coherence;
use crate::error::{Error, Result};
use std::time::{Duration, Instant};

/// Sizes that are looked at, in bytes, in rising order.
const SIZES: [usize; 4] = [64 << 10, 256 << 10, 1 << 20, 4 << 20];
/// Windows that are looked at, in bytes.
const WINDOWS: [usize; 3] = [64 << 10, 256 << 10, 1 << 20];
/// Pulls of each kind; the fastest counts, because everything that disturbs only makes it slower.
const ROUNDS: usize = 7;
/// Destinations that are used in turn, so that each is out of the nearest cache again.
const DESTINATIONS: usize = 4;
/// The more costly choice has to be faster by so many parts in a hundred.
const WORTH_PERCENT: u128 = 10;

const LARGEST: usize = 4 << 20;

struct Bench<'m> {
    memory: &'m dyn Coherence,
    offset: u64,
    destinations: Vec<Vec<u8>>,
}

impl Bench<'_> {
    fn fastest(&mut self, config: CopyConfig, len_bytes: usize) -> Result<Duration> {
        let engine = CpuEngine::new(config);
        let mut fastest = Duration::MAX;
        for round in 0..ROUNDS {
            let turn = round % DESTINATIONS;
            let Some(destination) = self.destinations.get_mut(turn).and_then(|all| all.get_mut(..len_bytes)) else { continue };
            let mut list = ReadList::scatter(self.offset, [destination]);
            let start = Instant::now();
            engine.pull(self.memory, &mut list, Checksum::Off)?;
            fastest = fastest.min(start.elapsed());
        }
        Ok(fastest)
    }
}

fn is_worth(more: Duration, less: Duration) -> bool {
    more.as_nanos() * (100 + WORTH_PERCENT) < less.as_nanos() * 100
}

/// The smallest of [`SIZES`] from which on `wins` holds, `u64::MAX` if it does not for the largest.
fn from_bytes(wins: &[bool]) -> u64 {
    let losing = wins.iter().rposition(|wins| !wins).map_or(0, |last| last + 1);
    SIZES.get(losing).map_or(u64::MAX, |&size| size as u64)
}

impl CopyConfig {
    /// The fastest of some configurations for pulls from the 4 MiB of the pool that begin at `offset`: pulled, never written, so any mapped
    /// range of the kind of memory that matters will do. The choice of the engine is the default's.
    ///
    /// Not for simulated hosts, which have no speed: there it is [`CopyConfig::alone`].
    ///
    /// # Errors
    /// [`Error::OutOfRange`] when there are no 4 MiB, and the errors of the memory.
    pub fn measure(memory: &dyn Coherence, offset: u64) -> Result<CopyConfig> {
        let (len_bytes, limit_bytes) = (LARGEST as u64, memory.len_bytes());
        if offset.checked_add(len_bytes).is_none_or(|end| end > limit_bytes) {
            return Err(Error::OutOfRange { what: "range to measure copies on", offset, len_bytes, limit_bytes });
        }
        let mut best = CopyConfig { engine: EngineChoice::default(), ..CopyConfig::alone() };
        if memory.address(offset, len_bytes).is_none() {
            return Ok(best);
        }
        // Not zeros: pages that are not there yet would be all that is measured.
        let mut bench = Bench { memory, offset, destinations: vec![vec![1; LARGEST]; DESTINATIONS] };
        let mut fastest = Duration::MAX;
        for window_bytes in WINDOWS {
            let taken = bench.fastest(CopyConfig { window_bytes, stream_from_bytes: 0, ..best }, LARGEST)?;
            if taken < fastest {
                (fastest, best.window_bytes) = (taken, window_bytes);
            }
        }
        let mut wins = Vec::new();
        for size in SIZES {
            let [streamed, plain] = [0, u64::MAX].map(|stream_from_bytes| bench.fastest(CopyConfig { stream_from_bytes, ..best }, size));
            wins.push(streamed? < plain?);
        }
        best.stream_from_bytes = from_bytes(&wins);
        let workers = CopyConfig::default().workers;
        wins.clear();
        for size in SIZES {
            let helped = bench.fastest(CopyConfig { workers, parallel_from_bytes: 0, ..best }, size)?;
            wins.push(workers > 0 && is_worth(helped, bench.fastest(best, size)?));
        }
        best.parallel_from_bytes = from_bytes(&wins);
        best.workers = if best.parallel_from_bytes == u64::MAX { 0 } else { workers };
        best.check().map(|()| best)
    }
}

#[cfg(test)]
mod tests;
