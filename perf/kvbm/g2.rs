// SPDX-License-Identifier: Apache-2.0
//! Host memory as G2, with blocks of which no two words are equal.

use crate::Result;
use cxl_tier::memory::{Lies, host_layout};
use dynamo_memory::nixl::NixlAgent;
use kvbm_physical::layout::{LayoutConfig, PhysicalLayout};

/// Layers with K and V of each: pieces of a block.
const LAYERS: usize = 16;
const PAGE: usize = 16;

/// Blocks in one piece of memory, block after block.
pub struct G2 {
    pub layout: PhysicalLayout,
    pub block_bytes: usize,
}

pub fn config(block_bytes: usize, num_blocks: usize) -> Result<LayoutConfig> {
    let inner = block_bytes / LAYERS / 2 / PAGE / 2;
    Ok(LayoutConfig::builder().num_blocks(num_blocks).num_layers(LAYERS).outer_dim(2).page_size(PAGE).inner_dim(inner).build()?)
}

impl G2 {
    pub fn new(agent: NixlAgent, block_bytes: usize, num_blocks: usize) -> Result<G2> {
        Ok(G2 { layout: host_layout(agent, &config(block_bytes, num_blocks)?, Lies::Contiguous)?, block_bytes })
    }

    pub fn start(&self, id: usize) -> Result<usize> {
        Ok(self.layout.memory_region(id, 0, 0)?.addr())
    }

    fn words(&self, id: usize) -> Result<&'static mut [u64]> {
        let start = std::ptr::with_exposed_provenance_mut(self.start(id)?);
        // SAFETY: a block of the layout, which is in one piece and aligned. The one thread of this program that uses it uses a block once
        // at a time, and not behind the end of this value.
        Ok(unsafe { std::slice::from_raw_parts_mut(start, self.block_bytes / 8) })
    }

    /// Blocks 0 to `batch`, with the words of `seed`.
    pub fn fill(&self, batch: usize, seed: u64) -> Result<()> {
        for id in 0..batch {
            self.words(id)?.iter_mut().enumerate().for_each(|(at, place)| *place = word(seed, id, at));
        }
        Ok(())
    }

    /// An error unless blocks 0 to `batch` have the words of `seed`.
    pub fn check(&self, batch: usize, seed: u64) -> Result<()> {
        for id in 0..batch {
            if let Some(at) = self.words(id)?.iter().enumerate().position(|(at, found)| *found != word(seed, id, at)) {
                return Err(format!("block {id} of {batch} of {} KiB is wrong at word {at}", self.block_bytes >> 10).into());
            }
        }
        Ok(())
    }

    /// What it costs to copy blocks without anything between.
    pub fn copy_to(&self, to: &G2, batch: usize) -> Result<()> {
        for id in 0..batch {
            to.words(id)?.copy_from_slice(self.words(id)?);
        }
        Ok(())
    }
}

fn word(seed: u64, id: usize, at: usize) -> u64 {
    (seed << 40 ^ (id as u64) << 28 ^ at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
