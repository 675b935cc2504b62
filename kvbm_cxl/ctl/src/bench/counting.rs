// SPDX-License-Identifier: Apache-2.0
//! Counts what a piece of work does to pool memory.

use cxl_pool::Result;
use cxl_pool::coherence::Coherence;
use cxl_pool::line::Line;
use serde::Serialize;
use std::ops::{AddAssign, Sub};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Accesses to pool memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Lines written, by whatever means.
    pub writes: u64,
    /// Lines loaded one by one, that is fetched.
    pub loads: u64,
    /// Full fences, each of which waits once for all the flushes before it.
    pub waits: u64,
}

impl Sub for Counts {
    type Output = Counts;

    fn sub(self, other: Counts) -> Counts {
        Counts { writes: self.writes - other.writes, loads: self.loads - other.loads, waits: self.waits - other.waits }
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.writes += other.writes;
        self.loads += other.loads;
        self.waits += other.waits;
    }
}

/// Memory that counts.
pub struct Counting {
    inner: Arc<dyn Coherence>,
    writes: AtomicU64,
    loads: AtomicU64,
    waits: AtomicU64,
}

impl Counting {
    /// Over `inner`, from zero.
    pub fn over(inner: Arc<dyn Coherence>) -> Arc<Counting> {
        Arc::new(Counting { inner, writes: AtomicU64::new(0), loads: AtomicU64::new(0), waits: AtomicU64::new(0) })
    }

    /// What was done so far.
    pub fn counts(&self) -> Counts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts { writes: read(&self.writes), loads: read(&self.loads), waits: read(&self.waits) }
    }
}

impl Coherence for Counting {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn load_line(&self, offset: u64) -> Result<Line> {
        self.loads.fetch_add(1, Ordering::Relaxed);
        self.inner.load_line(offset)
    }

    fn write_line(&self, offset: u64, line: &Line) -> Result<()> {
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.inner.write_line(offset, line)
    }

    fn flush_line(&self, offset: u64) -> Result<()> {
        self.inner.flush_line(offset)
    }

    fn fence_stores(&self) {
        self.inner.fence_stores();
    }

    fn fence_all(&self) {
        self.waits.fetch_add(1, Ordering::Relaxed);
        self.inner.fence_all();
    }

    fn fence_loads(&self) {
        self.inner.fence_loads();
    }

    fn flush_range(&self, offset: u64, len_bytes: u64) -> Result<()> {
        self.inner.flush_range(offset, len_bytes)
    }

    fn copy_in(&self, offset: u64, source: &[u8]) -> Result<()> {
        self.writes.fetch_add(source.len().div_ceil(64) as u64, Ordering::Relaxed);
        self.inner.copy_in(offset, source)
    }

    fn copy_out(&self, offset: u64, destination: &mut [u8]) -> Result<()> {
        self.inner.copy_out(offset, destination)
    }

    /// Nothing: what is done through an address cannot be counted.
    fn address(&self, _offset: u64, _len_bytes: u64) -> Option<NonNull<u8>> {
        None
    }
}
