// SPDX-License-Identifier: Apache-2.0
//! Memory in which a copy of a block can be stopped half way.

use super::{HALF_READ, HALF_WRITTEN};
use crate::Env;
use cxl_pool::Result;
use cxl_pool::coherence::Coherence;
use std::sync::Arc;

/// Memory whose copies of a block pass a point in the middle, where a choreography can stop them.
pub(in super::super) struct Halting {
    pub(in super::super) memory: Arc<dyn Coherence>,
    pub(in super::super) env: Env,
}

impl Halting {
    /// Bytes of the first half of a copy: whole lines.
    fn half(len_bytes: usize) -> usize {
        (len_bytes / 2).next_multiple_of(64).min(len_bytes)
    }
}

impl Coherence for Halting {
    cxl_pool::forward_coherence!(memory: len_bytes load_line write_line flush_line fence_stores fence_all fence_loads flush_range address);

    fn copy_in(&self, offset: u64, source: &[u8]) -> Result<()> {
        let (first, second) = source.split_at(Self::half(source.len()));
        self.memory.copy_in(offset, first)?;
        self.env.point(HALF_WRITTEN);
        self.memory.copy_in(offset + first.len() as u64, second)
    }

    fn copy_out(&self, offset: u64, destination: &mut [u8]) -> Result<()> {
        let (first, second) = destination.split_at_mut(Self::half(destination.len()));
        self.memory.copy_out(offset, first)?;
        self.env.point(HALF_READ);
        self.memory.copy_out(offset + first.len() as u64, second)
    }
}
