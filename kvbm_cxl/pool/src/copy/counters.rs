// SPDX-License-Identifier: Apache-2.0
//! How much an engine has moved.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What one engine has moved since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Name of the engine.
    pub engine: &'static str,
    /// Bytes of the lists that were copied into the pool without an error.
    pub published_bytes: u64,
    /// Bytes of the lists that were copied out of the pool without an error.
    pub pulled_bytes: u64,
    /// Lists that ended with an error, or that were given to another engine.
    pub failed_lists: u64,
    /// Bytes that a GPU copied to or from the pool itself and that were not flushed, because its DMA goes past the caches.
    pub unflushed_bytes: u64,
    /// Bytes of the pool that GPUs reach themselves now: registered with their driver.
    pub registered_bytes: u64,
    /// Bytes of copies that streams of GPUs order, and that have not ended.
    pub queued_bytes: u64,
}

#[derive(Default)]
pub(super) struct Counters {
    published_bytes: AtomicU64,
    pulled_bytes: AtomicU64,
    failed_lists: AtomicU64,
    unflushed_bytes: AtomicU64,
}

impl Counters {
    pub(super) fn published(&self, len_bytes: u64) {
        self.published_bytes.fetch_add(len_bytes, Relaxed);
    }

    /// Bytes that were counted ahead of their copy, which then failed.
    pub(super) fn not_published(&self, len_bytes: u64) {
        self.published_bytes.fetch_sub(len_bytes, Relaxed);
        self.failed(1);
    }

    pub(super) fn pulled(&self, len_bytes: u64) {
        self.pulled_bytes.fetch_add(len_bytes, Relaxed);
    }

    pub(super) fn failed(&self, lists: u64) {
        self.failed_lists.fetch_add(lists, Relaxed);
    }

    pub(super) fn unflushed(&self, len_bytes: u64) {
        self.unflushed_bytes.fetch_add(len_bytes, Relaxed);
    }

    pub(super) fn look(&self, engine: &'static str) -> Copied {
        Copied {
            engine,
            published_bytes: self.published_bytes.load(Relaxed),
            pulled_bytes: self.pulled_bytes.load(Relaxed),
            failed_lists: self.failed_lists.load(Relaxed),
            unflushed_bytes: self.unflushed_bytes.load(Relaxed),
            registered_bytes: 0,
            queued_bytes: 0,
        }
    }
}
