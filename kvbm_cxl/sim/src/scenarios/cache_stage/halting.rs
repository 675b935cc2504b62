// SPDX-License-Identifier: Apache-2.0
//! Memory in which a copy of a block can be stopped half way.

use super::{HALF_READ, HALF_WRITTEN};
use crate::Env;
use cxl_pool::Result;
use cxl_pool::coherence::Coherence;
use cxl_pool::line::Line;
use std::ptr::NonNull;
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
    fn len_bytes(&self) -> u64 {
        self.memory.len_bytes()
    }

    fn load_line(&self, offset: u64) -> Result<Line> {
        self.memory.load_line(offset)
    }

    fn write_line(&self, offset: u64, line: &Line) -> Result<()> {
        self.memory.write_line(offset, line)
    }

    fn flush_line(&self, offset: u64) -> Result<()> {
        self.memory.flush_line(offset)
    }

    fn fence_stores(&self) {
        self.memory.fence_stores();
    }

    fn fence_all(&self) {
        self.memory.fence_all();
    }

    fn fence_loads(&self) {
        self.memory.fence_loads();
    }

    fn flush_range(&self, offset: u64, len_bytes: u64) -> Result<()> {
        self.memory.flush_range(offset, len_bytes)
    }

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

    fn address(&self, offset: u64, len_bytes: u64) -> Option<NonNull<u8>> {
        self.memory.address(offset, len_bytes)
    }
}
