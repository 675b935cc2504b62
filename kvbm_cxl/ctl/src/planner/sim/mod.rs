// SPDX-License-Identifier: Apache-2.0
//! Requests that wait, read, compute and publish: a discrete-event simulation of the prefill side of a rack.

pub mod caches;
pub mod device;
mod events;
pub mod outcome;
mod pool;
mod rack;

use crate::planner::error::Planned;
use crate::planner::keys::Rack;
use crate::planner::trace::Trace;
use cxl_pool::cache::policy::PolicyKind;
use outcome::Outcome;

/// Nanoseconds since the first arrival: whole numbers, so that the order of events is the same on every machine.
pub type Ns = u64;

fn ns(seconds: f64) -> Ns {
    (seconds * 1e9).round() as Ns
}

fn seconds(time: Ns) -> f64 {
    time as f64 / 1e9
}

/// Blocks that so much memory holds.
fn gib_blocks(gib: f64, block_bytes: f64) -> usize {
    // A billionth more, so that memory given as a whole number of blocks holds them.
    (gib * f64::from(1 << 30) / block_bytes * (1.0 + 1e-9)) as usize
}

cxl_pool::named_enum! {
    /// Where KV blocks of past requests are, besides the accelerators' own memory.
    System {
        /// In each instance's own DRAM.
        Own = "own",
        /// In one pool for all.
        Pool = "pool",
        /// In each instance's own DRAM, and at the next level in one pool for all.
        PoolL2 = "pool+l2",
    }
}

impl System {
    pub fn has_pool(self) -> bool {
        self != System::Own
    }

    pub fn has_dram(self) -> bool {
        self != System::Pool
    }
}

cxl_pool::named_enum! {
    /// Which instance a request goes to when it arrives.
    Routing {
        /// To one after the other.
        RoundRobin = "round-robin",
        /// To that with the least work, in seconds; among equals to the next in turn.
        LeastLoaded = "least-loaded",
        /// To that which would have done it first, by its work and by what its caches have; the router knows both exactly.
        PrefixAware = "prefix-aware",
    }
}

/// A use of the caches, except the accelerators' memory, by an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// It looks up a request's chain, and reads the blocks found.
    Asks,
    /// The missing blocks of the chain are cached from now on.
    Enters,
}

/// One of these, in the order in which they happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// When, after the first arrival.
    pub at: Ns,
    pub what: What,
    pub request: u32,
    pub instance: u32,
}

#[derive(Clone, Copy)]
pub struct Setup<'a> {
    pub trace: &'a Trace,
    pub rack: &'a Rack,
    pub system: System,
    pub routing: Routing,
    /// What decides about eviction from the pool.
    pub eviction: PolicyKind,
    /// Own DRAM of an instance, if the system has it.
    pub dram_gib: f64,
    /// The pool, if the system has one.
    pub pool_gib: f64,
}

impl Setup<'_> {
    pub fn block_bytes(&self) -> f64 {
        self.rack.kv_kib_per_token * 1024.0 * self.trace.block_tokens as f64
    }

    /// Seconds to compute `new` tokens after `cached` ones.
    pub fn compute_s(&self, cached: u64, new: u64) -> f64 {
        let context = cached as f64 + new as f64 / 2.0;
        let attention = if self.rack.attention_tokens > 0.0 { context / self.rack.attention_tokens } else { 0.0 };
        self.rack.fixed_ms / 1e3 + new as f64 / self.rack.tokens_per_s * (1.0 + attention)
    }

    /// Runs it.
    ///
    /// # Errors
    /// [`PlanError::Unsound`](crate::planner::error::PlanError::Unsound) where its counts do not add up.
    pub fn run(&self) -> Planned<Outcome> {
        self.run_by_steps().map(|(outcome, _)| outcome)
    }

    /// Runs it, and tells what the instances did, for another cache to be asked the same. In the system [`System::PoolL2`] a chain enters
    /// own DRAM and the pool in steps of their own.
    ///
    /// # Errors
    /// As [`Setup::run`].
    pub fn run_by_steps(&self) -> Planned<(Outcome, Vec<Step>)> {
        rack::Run::new(self).run()
    }
}

#[cfg(test)]
mod tests;
