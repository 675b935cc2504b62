// SPDX-License-Identifier: Apache-2.0
//! A cache of so many cells that serves a trace, and what it had when it was asked.
//!
//! A request looks for its blocks one after the other, from the first on, and publishes those that are not there, evicting where there is
//! no room. The first quarter of the requests fills the cache and is not counted.

use super::workload::Trace;
use ctl_common::counted::CountedCache;
use cxl_pool::cache::policy::PolicyKind;
use cxl_pool::{Error, Result};
use serde::Serialize;
use std::collections::BinaryHeap;

/// Requests per tick of the pool.
const TICK_REQUESTS: usize = 50;

/// What decides about eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Contender {
    /// In order of entry: LRU that is told of no use.
    Fifo,
    /// TraCT's order: a chain is used from its first block to its last.
    Lru,
    /// LRU that is told of a chain's blocks from the last to the first.
    LruBackwards,
    S3Fifo,
    Sieve,
    LeafLru,
    /// Belady's: whatever is needed last, known from the trace. No policy has more block hits, and so none more prefix hits.
    Optimal,
}

impl Contender {
    /// All of them.
    pub const ALL: [Contender; 7] = {
        use Contender::*;
        [Fifo, Lru, LruBackwards, S3Fifo, Sieve, LeafLru, Optimal]
    };

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Contender::Fifo => "fifo",
            Contender::Lru => "lru",
            Contender::LruBackwards => "lru-backwards",
            Contender::S3Fifo => "s3-fifo",
            Contender::Sieve => "sieve",
            Contender::LeafLru => "leaf-lru",
            Contender::Optimal => "optimal",
        }
    }

    fn kind(self) -> PolicyKind {
        match self {
            Contender::Fifo | Contender::Lru | Contender::LruBackwards | Contender::Optimal => PolicyKind::Lru,
            Contender::S3Fifo => PolicyKind::S3Fifo,
            Contender::Sieve => PolicyKind::Sieve,
            Contender::LeafLru => PolicyKind::LeafLru,
        }
    }
}

/// Parts of the blocks asked for, from 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Rates {
    /// Found, wherever in their chain.
    pub block: f64,
    /// Found with all blocks before them in their chain: what saves prefill.
    pub prefix: f64,
}

/// Counts hits, of all but the first quarter of the requests.
struct Tally {
    to_skip: usize,
    blocks: u64,
    hits: u64,
    prefix_hits: u64,
}

impl Tally {
    fn new(trace: &Trace) -> Self {
        Tally { to_skip: trace.requests().count() / 4, blocks: 0, hits: 0, prefix_hits: 0 }
    }

    fn request(&mut self, found: &[bool]) {
        if self.to_skip > 0 {
            self.to_skip -= 1;
            return;
        }
        self.blocks += found.len() as u64;
        self.hits += found.iter().filter(|&&found| found).count() as u64;
        self.prefix_hits += found.iter().take_while(|&&found| found).count() as u64;
    }

    fn rates(&self) -> Rates {
        let part = |hits: u64| hits as f64 / self.blocks.max(1) as f64;
        Rates { block: part(self.hits), prefix: part(self.prefix_hits) }
    }
}

/// Serves the trace with room for `room` blocks.
pub fn replay(trace: &Trace, room: usize, contender: Contender) -> Result<Rates> {
    match contender {
        Contender::Optimal => optimal(trace, room),
        _ => count(trace, &mut CountedCache::new(contender.kind(), room, trace.blocks.len()), contender),
    }
}

fn damaged() -> Error {
    Error::Invalid("the trace names a block that it does not have".into())
}

fn count(trace: &Trace, cache: &mut CountedCache, contender: Contender) -> Result<Rates> {
    let (touches, backwards) = (contender != Contender::Fifo, contender == Contender::LruBackwards);
    let mut tally = Tally::new(trace);
    let mut found = Vec::new();
    for (number, chain) in trace.requests().enumerate() {
        let tick = 7 + (number / TICK_REQUESTS) as u32;
        if backwards {
            chain.iter().rev().for_each(|&block| cache.touch(block, tick));
        }
        found.clear();
        for &block in chain {
            let is_here = cache.has(block);
            found.push(is_here);
            if !is_here {
                let named = trace.blocks.get(block as usize).ok_or_else(damaged)?;
                cache.insert(block, named.key, named.parent, tick)?;
            } else if touches && !backwards {
                cache.touch(block, tick);
            }
        }
        if backwards {
            chain.iter().rev().for_each(|&block| cache.touch(block, tick));
        }
        tally.request(&found);
    }
    Ok(tally.rates())
}

/// Never again.
const NEVER: usize = usize::MAX;

fn optimal(trace: &Trace, room: usize) -> Result<Rates> {
    let mut next_of = vec![NEVER; trace.blocks.len()];
    let mut next: Vec<usize> = Vec::with_capacity(trace.accesses().len());
    for (at, &block) in trace.accesses().iter().enumerate().rev() {
        next.push(std::mem::replace(next_of.get_mut(block as usize).ok_or_else(damaged)?, at));
    }
    next.reverse();
    // For each block in the cache when it is asked for next; in the heap entries that are overtaken stay until they come up.
    let mut held: Vec<Option<usize>> = vec![None; trace.blocks.len()];
    let mut heap: BinaryHeap<(usize, u32)> = BinaryHeap::new();
    let (mut count, mut uses) = (0, next.into_iter());
    let mut tally = Tally::new(trace);
    let mut found = Vec::new();
    for chain in trace.requests() {
        found.clear();
        for (&block, next) in chain.iter().zip(&mut uses) {
            let slot = held.get_mut(block as usize).ok_or_else(damaged)?;
            found.push(slot.is_some());
            count -= usize::from(slot.is_some());
            *slot = None;
            if next == NEVER {
                continue;
            }
            *slot = Some(next);
            heap.push((next, block));
            count += 1;
            while count > room {
                let Some((next, block)) = heap.pop() else { break };
                let slot = held.get_mut(block as usize).ok_or_else(damaged)?;
                if *slot == Some(next) {
                    *slot = None;
                    count -= 1;
                }
            }
        }
        tally.request(&found);
    }
    Ok(tally.rates())
}
