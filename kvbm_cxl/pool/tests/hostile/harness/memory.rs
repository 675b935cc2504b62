// SPDX-License-Identifier: Apache-2.0
//! Pool memory that notices every access outside itself and counts them all.

use cxl_pool::Result;
use cxl_pool::coherence::Coherence;
use cxl_pool::line::Line;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Accesses that one operation may make. Most need some ten thousand, a hundred service rounds that all wait some ten million.
const MOST_ACCESSES: u64 = 100_000_000;

/// Coherent memory of a pool.
pub struct Memory {
    bytes: Mutex<Vec<u8>>,
    len_bytes: u64,
    accesses: AtomicU64,
}

impl Memory {
    /// Memory that holds `bytes`.
    pub fn new(bytes: Vec<u8>) -> Self {
        Memory { len_bytes: bytes.len() as u64, bytes: Mutex::new(bytes), accesses: AtomicU64::new(0) }
    }

    /// Allows the next operation its accesses.
    pub fn start_operation(&self) {
        self.accesses.store(0, Ordering::Relaxed);
    }

    /// Everything in it.
    pub fn image(&self) -> Vec<u8> {
        self.bytes.lock().unwrap().clone()
    }

    /// Runs `work` on its bytes.
    pub fn with<T>(&self, work: impl FnOnce(&mut [u8]) -> T) -> T {
        work(&mut self.bytes.lock().unwrap())
    }

    fn access<T>(&self, offset: u64, len_bytes: u64, work: impl FnOnce(&mut [u8]) -> T) -> Result<T> {
        let count = self.accesses.fetch_add(1, Ordering::Relaxed);
        assert!(count < MOST_ACCESSES, "an operation does not end: {count} accesses");
        // The layers above have to check what they take out of the pool before they use it: this is the last line, not the first.
        let inside = offset.checked_add(len_bytes).is_some_and(|end| end <= self.len_bytes);
        assert!(inside, "access to {offset:#x} (+{len_bytes} bytes) outside the {:#x} bytes of the pool", self.len_bytes);
        Ok(work(&mut self.bytes.lock().unwrap()[offset as usize..(offset + len_bytes) as usize]))
    }
}

impl Coherence for Memory {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn load_line(&self, offset: u64) -> Result<Line> {
        let mut line = Line::ZERO;
        self.access(offset, 64, |bytes| line.0.copy_from_slice(bytes))?;
        Ok(line)
    }

    fn write_line(&self, offset: u64, line: &Line) -> Result<()> {
        self.access(offset, 64, |bytes| bytes.copy_from_slice(&line.0))
    }

    fn flush_line(&self, offset: u64) -> Result<()> {
        self.access(offset, 64, |_| ())
    }

    fn fence_stores(&self) {}
    fn fence_all(&self) {}
    fn fence_loads(&self) {}

    fn flush_range(&self, offset: u64, len_bytes: u64) -> Result<()> {
        self.access(offset, len_bytes, |_| ())
    }

    fn copy_in(&self, offset: u64, source: &[u8]) -> Result<()> {
        self.access(offset, source.len() as u64, |bytes| bytes.copy_from_slice(source))
    }

    fn copy_out(&self, offset: u64, destination: &mut [u8]) -> Result<()> {
        self.access(offset, destination.len() as u64, |bytes| destination.copy_from_slice(bytes))
    }

    fn address(&self, _offset: u64, _len_bytes: u64) -> Option<NonNull<u8>> {
        None
    }
}
