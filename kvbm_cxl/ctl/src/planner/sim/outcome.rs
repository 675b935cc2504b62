// SPDX-License-Identifier: Apache-2.0
//! The result of a simulation, and the check that it adds up.

use super::device::Load;
use super::{Ns, seconds};
use crate::planner::error::{PlanError, Planned};
use serde::Serialize;

/// Times of one request, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// Until an instance took it up.
    pub wait: Ns,
    /// Until the blocks found were read.
    pub read: Ns,
    /// Until the rest was computed.
    pub compute: Ns,
    /// Until another instance had the KV of the prompt.
    pub hand_over: Ns,
    /// From arrival to the first token.
    pub ttft: Ns,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Counts {
    pub requests_in: u64,
    pub requests_out: u64,
    /// Tokens of their inputs.
    pub asked_tokens: u64,
    pub hbm_tokens: u64,
    pub dram_tokens: u64,
    pub pool_tokens: u64,
    pub computed_tokens: u64,
    pub dram_read_bytes: f64,
    pub dram_written_bytes: f64,
    pub pool_read_bytes: f64,
    pub pool_written_bytes: f64,
    pub network_bytes: f64,
}

impl Counts {
    pub fn hit_tokens(&self) -> u64 {
        self.hbm_tokens + self.dram_tokens + self.pool_tokens
    }

    /// Bytes moved between tiers and instances.
    pub fn moved_bytes(&self) -> f64 {
        self.dram_read_bytes + self.dram_written_bytes + self.pool_read_bytes + self.pool_written_bytes + self.network_bytes
    }
}

/// Mean and percentiles, in seconds. A percentile is the smallest value that so many per cent of all do not exceed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Times {
    pub mean_s: f64,
    pub p50_s: f64,
    pub p99_s: f64,
}

impl Times {
    pub fn of(mut values: Vec<Ns>) -> Times {
        values.sort_unstable();
        let rank = |percent: usize| (values.len() * percent).div_ceil(100).saturating_sub(1);
        let at = |percent| values.get(rank(percent)).copied().map_or(0.0, seconds);
        let mean_s = values.iter().map(|&value| seconds(value)).sum::<f64>() / values.len().max(1) as f64;
        Times { mean_s, p50_s: at(50), p99_s: at(99) }
    }
}

/// Means over all requests, in seconds: what a time to the first token is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Breakdown {
    pub wait_s: f64,
    pub read_s: f64,
    pub compute_s: f64,
    pub hand_over_s: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// Tokens found, of those asked for.
    pub hit_rate: f64,
    pub ttft: Times,
    pub breakdown: Breakdown,
    pub counts: Counts,
    /// The part of the time that a device of the pool was busy, of all devices on average.
    pub device_load_mean: f64,
    /// Of the busiest one.
    pub device_load_most: f64,
    /// The part of the time that an instance was busy, on average.
    pub instance_load: f64,
    /// Work of the instance with most of it, over the mean.
    pub imbalance: f64,
    /// From the first arrival until everything was done.
    pub span_s: f64,
}

impl Outcome {
    /// Of a run that has ended; `work` is that of each instance.
    pub fn of(served: &[Served], counts: Counts, work: &[Ns], load: Load, span: Ns) -> Planned<Outcome> {
        if counts.requests_in != counts.requests_out {
            return Err(PlanError::Unsound(format!("{} requests came and {} were served", counts.requests_in, counts.requests_out)));
        }
        if counts.hit_tokens() + counts.computed_tokens != counts.asked_tokens {
            let (found, computed) = (counts.hit_tokens(), counts.computed_tokens);
            return Err(PlanError::Unsound(format!("{found} tokens were found and {computed} computed of {}", counts.asked_tokens)));
        }
        let mean = |value: fn(&Served) -> Ns| served.iter().map(|served| seconds(value(served))).sum::<f64>() / served.len().max(1) as f64;
        let mean_work = work.iter().map(|&work| work as f64).sum::<f64>() / work.len().max(1) as f64;
        Ok(Outcome {
            hit_rate: counts.hit_tokens() as f64 / counts.asked_tokens.max(1) as f64,
            ttft: Times::of(served.iter().map(|served| served.ttft).collect()),
            breakdown: Breakdown {
                wait_s: mean(|served| served.wait),
                read_s: mean(|served| served.read),
                compute_s: mean(|served| served.compute),
                hand_over_s: mean(|served| served.hand_over),
            },
            counts,
            device_load_mean: load.mean,
            device_load_most: load.most,
            instance_load: mean_work / span.max(1) as f64,
            imbalance: work.iter().copied().max().unwrap_or(0) as f64 / mean_work.max(1.0),
            span_s: seconds(span),
        })
    }
}
