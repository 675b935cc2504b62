// SPDX-License-Identifier: Apache-2.0
//! The checksum of a payload: XXH3-64 with seed 0 over the bytes in the order of the pool, however a list was cut.
//!
//! 64 bits, because CRC32C lets one in 2^32 torn mixes pass (protocols/CACHE.md section 5). It is taken inside the copy, of the very bytes
//! that were delivered, while they are in the cache.

use std::hash::Hasher;
use twox_hash::XxHash3_64;

/// Whether a copy computes a checksum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checksum {
    /// None. The list need not be one stretch of the pool.
    #[default]
    Off,
    /// XXH3-64. The pieces of the list have to adjoin in the pool.
    Xxh3,
}

impl Checksum {
    pub(super) fn is_on(self) -> bool {
        self != Checksum::Off
    }

    pub(super) fn start(self) -> Option<Running> {
        self.is_on().then(Running::new)
    }
}

pub(crate) struct Running(XxHash3_64);

impl Running {
    pub(crate) fn new() -> Self {
        Running(XxHash3_64::new())
    }

    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    pub(crate) fn finish(&self) -> u64 {
        self.0.finish()
    }
}

/// The checksum of bytes that lie in one piece, to compare with what a copy computed.
pub fn checksum_of(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}
