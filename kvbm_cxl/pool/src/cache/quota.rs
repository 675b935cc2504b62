// SPDX-License-Identifier: Apache-2.0
//! Quotas: a namespace has so many bytes of this process's cells and no more, whoever publishes together.
//!
//! What a reservation is to take is promised before it is taken, and counts from then on. Open reservations do not go to make room, blocks
//! do: so it is the promises alone that must fit, and for what is promised blocks of the namespace are evicted.

use super::publish::{Reserved, Wish};
use super::{Few, Inner};
use crate::background::held;
use crate::error::Result;

/// Times that blocks are looked for, at most: other threads may have them in hand, or have been promised what they leave.
const ROUNDS: usize = 64;
/// Longest wait for blocks that another thread has in hand, in nanoseconds.
const WAIT_NS: u64 = 500_000_000;

/// What wishes were promised of their namespaces' quotas, until reservations take it over.
pub(super) struct Promised<'a> {
    inner: &'a Inner,
    wishes: &'a [Wish],
    /// Bytes of each wish, as far as there are any.
    bytes: Few<u64>,
}

impl<'a> Promised<'a> {
    pub fn none(inner: &'a Inner, wishes: &'a [Wish]) -> Self {
        Promised { inner, wishes, bytes: Few::new() }
    }

    /// Notes what wish `index` was promised.
    fn note(&mut self, index: usize, bytes: u64) {
        if self.bytes.len() <= index {
            self.bytes.resize(index + 1, 0);
        }
        self.bytes[index] = bytes;
    }

    /// What wish `index` was promised, for its reservation to end.
    pub fn hand_over(&mut self, index: usize) -> u64 {
        self.bytes.get_mut(index).map_or(0, std::mem::take)
    }
}

impl Drop for Promised<'_> {
    fn drop(&mut self) {
        for (wish, &bytes) in self.wishes.iter().zip(&self.bytes).filter(|(_, bytes)| **bytes > 0) {
            held(&self.inner.cells).holdings.end_promise(&wish.namespace.0, bytes);
        }
    }
}

impl Inner {
    /// Promises wish `index` its cell of `wanted_bytes`, if its namespace has a quota; or why it gets none. Blocks of the namespace are
    /// evicted for it if need be.
    pub(super) fn promise(&self, promised: &mut Promised<'_>, index: usize, wanted_bytes: u64) -> Result<Option<Reserved>> {
        let wish = &promised.wishes[index];
        let Some(&quota) = self.config.quotas.get(&wish.namespace) else { return Ok(None) };
        let (fits, excess) = {
            let mut own = held(&self.cells);
            (own.holdings.promise(&wish.namespace.0, wanted_bytes, quota), own.holdings.excess(&wish.namespace.0, quota))
        };
        if fits {
            promised.note(index, wanted_bytes);
            if excess.bytes == 0 {
                return Ok(None);
            }
        }
        let refused = match self.look_up(wish.namespace, wish.key)? {
            Some(_) => Reserved::Exists,
            None if fits && self.make_quota(wish, quota)? => return Ok(None),
            None => Reserved::OverQuota,
        };
        held(&self.cells).holdings.end_promise(&wish.namespace.0, promised.hand_over(index));
        Ok(Some(refused))
    }

    /// Evicts blocks of a wish's namespace until it is within its quota with what was promised; false where they are in use.
    fn make_quota(&self, wish: &Wish, quota: u64) -> Result<bool> {
        let excess = || held(&self.cells).holdings.excess(&wish.namespace.0, quota);
        let mut before = excess();
        for _ in 0..ROUNDS {
            if before.bytes == 0 {
                return Ok(true);
            }
            self.evict_of(wish.namespace, before.bytes)?;
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
