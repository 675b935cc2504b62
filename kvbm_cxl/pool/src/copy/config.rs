// SPDX-License-Identifier: Apache-2.0
//! How copies are made.

use crate::error::{Error, Result};
use crate::limits::LINE_BYTES;

/// How the CPU engine copies. The defaults were measured on one socket with ordinary memory; [`CopyConfig::measure`] asks the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyConfig {
    /// Threads that help the caller of a large copy, started when the first one is needed; 0 = the caller works alone.
    pub workers: usize,
    /// Copies of at least so many bytes are divided among the workers.
    pub parallel_from_bytes: u64,
    /// A pull flushes so many bytes ahead of those that it copies: a multiple of 64, at least 4096.
    pub window_bytes: usize,
    /// Pulls of at least so many bytes write their destination past the caches, piece by piece from 4 KiB on.
    pub stream_from_bytes: u64,
}

/// Smallest window, in bytes: a fence for less costs more than the copy.
const MIN_WINDOW_BYTES: usize = 4096;
/// Most workers: more than any machine's memory channels can use.
const MAX_WORKERS: usize = 64;

impl Default for CopyConfig {
    fn default() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
        CopyConfig { workers: (processors - 1).min(3), parallel_from_bytes: 1 << 20, window_bytes: 256 << 10, stream_from_bytes: 256 << 10 }
    }
}

impl CopyConfig {
    /// The defaults without workers.
    pub fn alone() -> Self {
        CopyConfig { workers: 0, ..Self::default() }
    }

    /// Refuses numbers that cannot be meant.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the number.
    pub fn check(&self) -> Result<()> {
        if self.window_bytes < MIN_WINDOW_BYTES || !self.window_bytes.is_multiple_of(LINE_BYTES) {
            return Err(Error::Invalid(format!(
                "window of a pull: {} bytes is no multiple of {LINE_BYTES} from {MIN_WINDOW_BYTES} on",
                self.window_bytes
            )));
        }
        if self.workers > MAX_WORKERS {
            return Err(Error::Invalid(format!("{} copy workers: at most {MAX_WORKERS} can be", self.workers)));
        }
        Ok(())
    }

    /// The nearest numbers that can be.
    pub(super) fn bounded(self) -> Self {
        let window_bytes = self.window_bytes.clamp(MIN_WINDOW_BYTES, 1 << 40).next_multiple_of(LINE_BYTES);
        CopyConfig { window_bytes, workers: self.workers.min(MAX_WORKERS), ..self }
    }
}
