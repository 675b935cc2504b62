// SPDX-License-Identifier: Apache-2.0
//! What is cached where: accelerators' memory and DRAM of each instance, and the pool.
//!
//! A hit is a block that is in any of them and has all blocks of its chain before it there too. Chains are used from their end to their
//! start, as the pool does, so that a start is never older than what continues it. A use of a block counts in every cache that has it.

use super::{Ns, Setup, gib_blocks};
use crate::counted::CountedCache;
use crate::planner::error::Planned;
use crate::planner::trace::Trace;
use cxl_pool::cache::policy::{CYCLE_TICKS, PolicyKind};

/// Nanoseconds of a tick of the policies' clocks.
const TICK_NS: Ns = 1_000_000_000;

/// The tick of a time. Policies keep exact orders within a tick.
pub fn tick(now: Ns) -> u32 {
    CYCLE_TICKS.saturating_add(u32::try_from(now / TICK_NS).unwrap_or(u32::MAX))
}

/// The leading blocks of a chain that are found, by the first cache that has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Match {
    /// In the accelerators' memory.
    pub hbm: usize,
    /// In own DRAM.
    pub dram: usize,
    /// In the pool.
    pub pool: usize,
}

impl Match {
    /// All of them.
    pub fn blocks(&self) -> usize {
        self.hbm + self.dram + self.pool
    }
}

/// All caches of a rack.
pub struct Caches<'a> {
    trace: &'a Trace,
    hbm: Vec<CountedCache>,
    dram: Vec<CountedCache>,
    pool: Option<CountedCache>,
    pool_cells: usize,
}

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// An instance's accelerators.
    Hbm,
    /// An instance's own DRAM.
    Dram,
    /// The pool.
    Pool,
}

impl<'a> Caches<'a> {
    /// Empty ones. Only the pool's eviction is chosen: engines evict what was used least recently.
    pub fn new(setup: &Setup<'a>) -> Self {
        let (blocks, block_bytes) = (setup.trace.blocks.len(), setup.block_bytes());
        let each = |gib: f64| {
            let cache = |_| CountedCache::new(PolicyKind::Lru, gib_blocks(gib, block_bytes), blocks);
            (0..setup.rack.instances as usize).map(cache).collect()
        };
        let pool_cells = gib_blocks(setup.pool_gib, block_bytes);
        Caches {
            trace: setup.trace,
            hbm: each(setup.rack.hbm_gib),
            dram: if setup.system.has_dram() { each(setup.dram_gib) } else { Vec::new() },
            pool: setup.system.has_pool().then(|| CountedCache::new(setup.eviction, pool_cells, blocks)),
            pool_cells,
        }
    }

    fn cache(&mut self, tier: Tier, instance: usize) -> Option<&mut CountedCache> {
        match tier {
            Tier::Hbm => self.hbm.get_mut(instance),
            Tier::Dram => self.dram.get_mut(instance),
            Tier::Pool => self.pool.as_mut(),
        }
    }

    /// Where a block is, as an instance sees it.
    pub fn tier_of(&self, instance: usize, block: u32) -> Option<Tier> {
        let has = |cache: Option<&CountedCache>| cache.is_some_and(|cache| cache.has(block));
        if has(self.hbm.get(instance)) {
            Some(Tier::Hbm)
        } else if has(self.dram.get(instance)) {
            Some(Tier::Dram)
        } else if has(self.pool.as_ref()) {
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
        let Some(pool) = self.pool.as_ref() else { return 0 };
        let next = Some(pool.len()).filter(|&cell| cell < self.pool_cells);
        match pool.cell(block).map(|cell| cell as usize).or(next) {
            Some(cell) => (cell as u128 * devices as u128 / self.pool_cells.max(1) as u128) as usize,
            None => block as usize % devices.max(1),
        }
    }

    /// Blocks of a chain that a cache does not have.
    pub fn missing(&mut self, tier: Tier, instance: usize, chain: &[u32]) -> Vec<u32> {
        let Some(cache) = self.cache(tier, instance) else { return Vec::new() };
        chain.iter().copied().filter(|&block| !cache.has(block)).collect()
    }

    /// The blocks are used by an instance.
    pub fn use_all(&mut self, instance: usize, chain: &[u32], now: Ns) {
        for tier in [Tier::Hbm, Tier::Dram, Tier::Pool] {
            if let Some(cache) = self.cache(tier, instance) {
                chain.iter().rev().for_each(|&block| cache.touch(block, tick(now)));
            }
        }
    }

    /// The blocks of a chain are in a cache from now on.
    pub fn enter(&mut self, tier: Tier, instance: usize, chain: &[u32], now: Ns) -> Planned<()> {
        let trace = self.trace;
        let Some(cache) = self.cache(tier, instance) else { return Ok(()) };
        // What is there is used first, so that it does not go for the rest of its own chain.
        chain.iter().rev().for_each(|&block| cache.touch(block, tick(now)));
        for &block in chain {
            if let Some(named) = trace.blocks.get(block as usize).filter(|_| !cache.has(block)) {
                cache.insert(block, named.key, named.parent, tick(now))?;
            }
        }
        chain.iter().rev().for_each(|&block| cache.touch(block, tick(now)));
        Ok(())
    }
}
