// SPDX-License-Identifier: Apache-2.0
//! Size classes: the block sizes that a chunk can be cut into.

use crate::limits::MIN_BLOCK_BYTES;

/// The block sizes of a pool, in rising order: 2^k and 3 * 2^(k-1) multiples of a line up to half a chunk, and a whole chunk.
///
/// A block wastes at most a third of itself. Sizes between half a chunk and a chunk would leave as much of the chunk over as they save.
pub(super) struct Classes {
    sizes: Vec<u64>,
}

impl Classes {
    /// The classes of a pool with chunks of `chunk_bytes`, a power of two.
    pub fn new(chunk_bytes: u64) -> Self {
        let powers = (0..).map(|step| MIN_BLOCK_BYTES << step).take_while(|&power| power < chunk_bytes);
        let mut sizes: Vec<u64> = powers
            .flat_map(|power| [power, power / 2 * 3])
            .filter(|&size| size % MIN_BLOCK_BYTES == 0 && size <= chunk_bytes / 2)
            .collect();
        sizes.push(chunk_bytes);
        Classes { sizes }
    }

    pub fn count(&self) -> usize {
        self.sizes.len()
    }

    /// Block size of a class, in bytes.
    pub fn bytes(&self, class: usize) -> u64 {
        self.sizes[class]
    }

    /// The smallest class whose blocks hold `len_bytes`; `None` when that takes more than a chunk.
    pub fn holding(&self, len_bytes: u64) -> Option<usize> {
        let class = self.sizes.partition_point(|&size| size < len_bytes);
        (class < self.sizes.len()).then_some(class)
    }

    /// The class with exactly this block size.
    pub fn exactly(&self, block_bytes: u64) -> Option<usize> {
        self.sizes.binary_search(&block_bytes).ok()
    }
}

#[cfg(test)]
mod tests;
