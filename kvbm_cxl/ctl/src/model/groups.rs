// SPDX-License-Identifier: Apache-2.0
//! KV cache groups as vLLM 0.31 makes them: layers of one kind that share a block table, about as many in each group.

use super::config::{Kind, KvCache};
use cxl_pool::limits::LINE_BYTES;

/// Least tokens of a block of an attention backend.
const KERNEL_TOKENS: u64 = 16;

/// One group.
#[derive(Debug, PartialEq, Eq)]
pub struct Group {
    /// What its layers keep.
    pub kind: Kind,
    /// Layers.
    pub layers: u64,
    /// Tokens of a block.
    pub tokens: u64,
    /// Bytes of a block in the pool.
    pub block_bytes: u64,
}

/// The groups of a cache with blocks of `block_size` tokens, in vLLM's order.
pub fn groups(cache: &KvCache, block_size: u64) -> Vec<Group> {
    let tokens = block_tokens(cache, block_size);
    let mut buckets: Vec<(Kind, u64)> = Vec::new();
    for &kind in &cache.layers {
        match buckets.iter_mut().find(|bucket| bucket.0 == kind) {
            Some(bucket) => bucket.1 += 1,
            None => buckets.push((kind, 1)),
        }
    }
    let least = buckets.iter().map(|bucket| bucket.1).min().unwrap_or(1);
    let most = buckets.iter().map(|bucket| bucket.1).max().unwrap_or(1);
    // vLLM pads groups that are nearly equal, and divides the larger ones otherwise.
    let size = if 2 * most < 3 * least { most } else { least };
    let mut groups = Vec::new();
    for (kind, layers) in buckets {
        let count = layers.div_ceil(size);
        for first in 0..count {
            let layers = (layers - first).div_ceil(count);
            let page_bytes = if kind == Kind::State { cache.state_bytes } else { cache.token_bytes.saturating_mul(tokens) };
            groups.push(Group { kind, layers, tokens, block_bytes: page_bytes.saturating_mul(layers) });
        }
    }
    groups
}

/// Tokens of a block: with recurrent layers so many that an attention layer's part of a block is at least as large as a state.
fn block_tokens(cache: &KvCache, block_size: u64) -> u64 {
    if cache.state_bytes == 0 || cache.token_bytes == 0 {
        return block_size;
    }
    let step = block_size.max(KERNEL_TOKENS);
    step.saturating_mul(cache.state_bytes.div_ceil(step.saturating_mul(cache.token_bytes)))
}

/// Cells that hold a block of every group.
pub fn cell_bytes(groups: &[Group]) -> u64 {
    let largest = groups.iter().map(|group| group.block_bytes).max().unwrap_or(0);
    largest.checked_next_multiple_of(LINE_BYTES as u64).unwrap_or(largest)
}
