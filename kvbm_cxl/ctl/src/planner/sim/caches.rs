// SPDX-License-Identifier: Apache-2.0
//! The caches and their blocks: accelerators' memory and DRAM of each instance, and the pool.
//!
//! A hit is a block that is in any of them and has all blocks of its chain before it there too. Chains are used from their end to their
//! start, as the pool does, so that a start is never older than what continues it. A use of a block counts in every cache that has it.

use super::pool::PoolCells;
use super::{Ns, Setup, gib_blocks};
use crate::counted::CountedCache;
use crate::planner::error::Planned;
use crate::planner::trace::Trace;
use cxl_pool::cache::policy::{CYCLE_TICKS, PolicyKind};

/// Nanoseconds of a tick of the policies' clocks.
const TICK_NS: Ns = 5_000_000_000;

/// The tick of a time. Policies keep exact orders within a tick.
pub fn tick(now: Ns) -> u32 {
    CYCLE_TICKS.saturating_add(u32::try_from(now / TICK_NS).unwrap_or(u32::MAX))
}

/// The leading blocks of a chain that are found, by the first cache that has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Match {
    pub hbm: usize,
    pub dram: usize,
    pub pool: usize,
}

impl Match {
    pub fn blocks(&self) -> usize {
        self.hbm + self.dram + self.pool
    }
}

pub struct Caches<'a> {
    trace: &'a Trace,
    hbm: Vec<CountedCache>,
    dram: Vec<PoolCells<'a>>,
    pool: Option<PoolCells<'a>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    Hbm,
    Dram,
    Pool,
}

impl<'a> Caches<'a> {
    /// Empty caches. Only the pool's eviction policy is an input: engines evict the least recently used block.
    pub fn new(setup: &Setup<'a>) -> Self {
        let (blocks, block_bytes) = (setup.trace.blocks.len(), setup.block_bytes());
        let (count, hbm_cells) = (setup.rack.instances as usize, gib_blocks(setup.rack.hbm_gib, block_bytes));
        let has_dram = setup.system.has_dram();
        Caches {
            trace: setup.trace,
            hbm: (0..count).map(|_| CountedCache::new(PolicyKind::Lru, hbm_cells, blocks)).collect(),
            dram: (0..count).filter(|_| has_dram).map(|_| PoolCells::new(setup, setup.dram_gib, 1, PolicyKind::Lru)).collect(),
            pool: setup.system.has_pool().then(|| PoolCells::new(setup, setup.pool_gib, count, setup.eviction)),
        }
    }

    /// Where a block is, as an instance sees it.
    pub fn tier_of(&self, instance: usize, block: u32) -> Option<Tier> {
        if self.hbm.get(instance).is_some_and(|cache| cache.has(block)) {
            Some(Tier::Hbm)
        } else if self.dram.get(instance).is_some_and(|cells| cells.has(block)) {
            Some(Tier::Dram)
        } else if self.pool.as_ref().is_some_and(|pool| pool.has(block)) {
            Some(Tier::Pool)
        } else {
            None
        }
    }

    /// What an instance would find of a chain.
    pub fn find(&self, instance: usize, chain: &[u32]) -> Match {
        let mut found = Match::default();
        for &block in chain {
            match self.tier_of(instance, block) {
                Some(Tier::Hbm) => found.hbm += 1,
                Some(Tier::Dram) => found.dram += 1,
                Some(Tier::Pool) => found.pool += 1,
                None => break,
            }
        }
        found
    }

    /// The device that has a block, or will have it, where devices are filled one after the other. A full pool puts it wherever a block
    /// goes.
    pub fn device(&self, block: u32, devices: usize) -> usize {
        self.pool.as_ref().map_or(0, |pool| pool.device(block, devices))
    }

    /// Blocks of a chain that a cache does not have.
    pub fn missing(&self, tier: Tier, instance: usize, chain: &[u32]) -> Vec<u32> {
        let has = |block: u32| match tier {
            Tier::Hbm => self.hbm.get(instance).is_none_or(|cache| cache.has(block)),
            Tier::Dram => self.dram.get(instance).is_none_or(|cells| cells.has(block)),
            Tier::Pool => self.pool.as_ref().is_none_or(|pool| pool.has(block)),
        };
        chain.iter().copied().filter(|&block| !has(block)).collect()
    }

    /// The blocks are used by an instance.
    pub fn use_all(&mut self, instance: usize, chain: &[u32], now: Ns) {
        let tick = tick(now);
        for &block in chain.iter().rev() {
            self.hbm.get_mut(instance).into_iter().for_each(|cache| cache.touch(block, tick));
            self.dram.get_mut(instance).into_iter().for_each(|cells| cells.touch(0, block, tick));
            self.pool.iter_mut().for_each(|pool| pool.touch(instance, block, tick));
        }
    }

    /// The blocks of a chain are in a cache from now on.
    pub fn enter(&mut self, tier: Tier, instance: usize, chain: &[u32], now: Ns) -> Planned<()> {
        let (trace, tick) = (self.trace, tick(now));
        match tier {
            Tier::Hbm => self.hbm.get_mut(instance).map_or(Ok(()), |cache| {
                // An engine holds all blocks of its request while it computes.
                chain.iter().rev().for_each(|&block| cache.touch(block, tick));
                for &block in chain {
                    if let Some(named) = trace.blocks.get(block as usize).filter(|_| !cache.has(block)) {
                        cache.insert(block, named.key, named.parent, tick)?;
                    }
                }
                chain.iter().rev().for_each(|&block| cache.touch(block, tick));
                Ok(())
            }),
            Tier::Dram => self.dram.get_mut(instance).map_or(Ok(()), |cells| cells.publish(0, chain, tick)),
            Tier::Pool => self.pool.as_mut().map_or(Ok(()), |pool| pool.publish(instance, chain, tick)),
        }
    }
}
