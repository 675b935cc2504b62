// SPDX-License-Identifier: Apache-2.0
//! Leaves one step of publish, fetch or copy out, to show that the litmus tests notice.

use cxl_pool::Result;
use cxl_pool::coherence::Coherence;
use cxl_pool::line::Line;
use std::ptr::NonNull;
use std::sync::Arc;

/// A step that can be left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Step {
    /// The flush of a fetched line.
    Flush,
    /// The fence behind published lines and copied payload.
    StoreFence,
    /// The fence between a flush and its load.
    FullFence,
    /// The flush of a payload before it is copied out.
    PayloadFlush,
}

/// Memory without one of its steps.
pub struct LeftOut {
    /// The whole.
    pub inner: Arc<dyn Coherence>,
    /// What does nothing.
    pub step: Step,
}

impl Coherence for LeftOut {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn load_line(&self, offset: u64) -> Result<Line> {
        self.inner.load_line(offset)
    }

    fn write_line(&self, offset: u64, line: &Line) -> Result<()> {
        self.inner.write_line(offset, line)
    }

    fn flush_line(&self, offset: u64) -> Result<()> {
        if self.step == Step::Flush { Ok(()) } else { self.inner.flush_line(offset) }
    }

    fn fence_stores(&self) {
        if self.step != Step::StoreFence {
            self.inner.fence_stores();
        }
    }

    fn fence_all(&self) {
        if self.step != Step::FullFence {
            self.inner.fence_all();
        }
    }

    fn fence_loads(&self) {
        self.inner.fence_loads();
    }

    fn flush_range(&self, offset: u64, len_bytes: u64) -> Result<()> {
        if self.step == Step::PayloadFlush { Ok(()) } else { self.inner.flush_range(offset, len_bytes) }
    }

    fn copy_in(&self, offset: u64, source: &[u8]) -> Result<()> {
        self.inner.copy_in(offset, source)
    }

    fn copy_out(&self, offset: u64, destination: &mut [u8]) -> Result<()> {
        self.inner.copy_out(offset, destination)
    }

    fn address(&self, offset: u64, len_bytes: u64) -> Option<NonNull<u8>> {
        self.inner.address(offset, len_bytes)
    }

    fn device_address(&self, offset: u64, len_bytes: u64) -> Option<NonNull<u8>> {
        self.inner.device_address(offset, len_bytes)
    }
}
