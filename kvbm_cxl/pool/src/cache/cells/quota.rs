// SPDX-License-Identifier: Apache-2.0
//! Quotas: a namespace has so many bytes of this process's cells and no more, whichever threads publish together.
//!
//! The bytes of a reservation are promised before they are taken, and count from then on. Room is made from blocks, never from open
//! reservations: so the promises alone must fit, and blocks of the namespace are evicted for them.

use crate::cache::publish::{PublishRequest, Reserved};
use crate::cache::{Few, Inner};
use crate::error::Result;

/// Times that blocks are looked for, at most: other threads may have them in hand, or have been promised what they leave.
const ROUNDS: usize = 64;
/// Longest wait for blocks that another thread has in hand, in nanoseconds.
const WAIT_NS: u64 = 500_000_000;

/// What requests were promised of their namespaces' quotas, until reservations take it over.
pub(in crate::cache) struct Promised<'a> {
    inner: &'a Inner,
    requests: &'a [PublishRequest],
    /// Bytes of each request, as far as there are any.
    bytes: Few<u64>,
}

impl<'a> Promised<'a> {
    pub fn none(inner: &'a Inner, requests: &'a [PublishRequest]) -> Self {
        Promised { inner, requests, bytes: Few::new() }
    }

    fn note(&mut self, index: usize, bytes: u64) {
        if self.bytes.len() <= index {
            self.bytes.resize(index + 1, 0);
        }
        self.bytes[index] = bytes;
    }

    pub fn hand_over(&mut self, index: usize) -> u64 {
        self.bytes.get_mut(index).map_or(0, std::mem::take)
    }
}

impl Drop for Promised<'_> {
    fn drop(&mut self) {
        for (request, &bytes) in self.requests.iter().zip(&self.bytes).filter(|(_, bytes)| **bytes > 0) {
            self.inner.store.cells().usage.end_promise(&request.namespace.0, bytes);
        }
    }
}

impl Inner {
    /// Promises request `index` its cell of `wanted_bytes`, if its namespace has a quota; or why it gets none. Blocks of the namespace are
    /// evicted for it if need be.
    pub(in crate::cache) fn promise(&self, promised: &mut Promised<'_>, index: usize, wanted_bytes: u64) -> Result<Option<Reserved>> {
        let request = &promised.requests[index];
        let Some(quota) = self.config.quota_of(&request.namespace) else { return Ok(None) };
        let (fits, excess) = {
            let mut own = self.store.cells();
            (own.usage.promise(&request.namespace.0, wanted_bytes, quota), own.usage.excess(&request.namespace.0, quota))
        };
        if fits {
            promised.note(index, wanted_bytes);
            if excess.bytes == 0 {
                return Ok(None);
            }
        }
        let refused = match self.index.look_up(request.namespace, request.key)? {
            Some(_) => Reserved::Exists,
            None if fits && self.make_quota(request, quota)? => return Ok(None),
            None => Reserved::OverQuota,
        };
        self.store.cells().usage.end_promise(&request.namespace.0, promised.hand_over(index));
        Ok(Some(refused))
    }

    /// Evicts blocks of a request's namespace until it is within its quota, promises included; false where they are in use.
    fn make_quota(&self, request: &PublishRequest, quota: u64) -> Result<bool> {
        let excess = || self.store.cells().usage.excess(&request.namespace.0, quota);
        let mut before = excess();
        for _ in 0..ROUNDS {
            if before.bytes == 0 {
                return Ok(true);
            }
            self.evict_of(request.namespace, before.bytes)?;
            let mut after = excess();
            // Another thread has them, and may have to put them back.
            let deadline_ns = self.host.platform().now_ns() + WAIT_NS;
            for round in 0.. {
                let is_at_it = after.are_going && self.host.platform().now_ns() < deadline_ns;
                if after.bytes == 0 || after.settled != before.settled || !is_at_it {
                    break;
                }
                self.host.platform().relax(round);
                after = excess();
            }
            if after.bytes > 0 && after.settled == before.settled {
                return Ok(false);
            }
            before = after;
        }
        Ok(before.bytes == 0)
    }
}
