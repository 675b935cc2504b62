// SPDX-License-Identifier: Apache-2.0
//! What the hosts of a replay do, in an order for all of them together: the planner's steps, and the ticks of the pool between them.

use ctl_common::planner::sim::{Ns, Step, What};
use ctl_common::planner::trace::{Trace, key};
use cxl_pool::cache::BlockKey;
use cxl_pool::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Nanoseconds of a tick of recency: 100 heartbeats of 50 ms.
pub const TICK_NS: Ns = 5_000_000_000;
/// Ticks in a row that change anything where nothing happens between them: a cycle, and one more.
const MOST_TICKS: Ns = 8;

/// What a host does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Action {
    /// Looks a request's chain up, pins what is there, pulls it.
    Ask(u32),
    /// Publishes what is missing of a request's chain.
    Publish(u32),
    /// Beats as the manager's seat does in a tick.
    Beat,
    /// Follows a tick: a round of the upkeep.
    Follow,
}

/// Requests and actions.
#[derive(Debug, Serialize, Deserialize)]
pub struct Work {
    /// Tokens of a block.
    pub block_tokens: u64,
    /// Tokens of each request.
    tokens: Vec<u64>,
    /// The end of each request's blocks in `chains`.
    ends: Vec<usize>,
    chains: Vec<u32>,
    /// Host and action, in order.
    pub actions: Vec<(u8, Action)>,
}

impl Work {
    /// Of a run of the planner. Hosts that are alone have a pool each, and beat for it.
    pub fn new(trace: &Trace, steps: &[Step], hosts: u8, are_alone: bool) -> Work {
        let (mut ends, mut chains) = (Vec::new(), Vec::new());
        for request in &trace.requests {
            chains.extend_from_slice(trace.chain(request));
            ends.push(chains.len());
        }
        let mut actions = Vec::new();
        let mut ticks = 0;
        for step in steps {
            let due = step.at / TICK_NS;
            ticks = ticks.max(due.saturating_sub(MOST_TICKS));
            while ticks < due {
                ticks += 1;
                actions.extend((0..hosts).filter(|&host| are_alone || host == 0).map(|host| (host, Action::Beat)));
                actions.extend((0..hosts).map(|host| (host, Action::Follow)));
            }
            let action = match step.what {
                What::Asks => Action::Ask(step.request),
                What::Enters => Action::Publish(step.request),
            };
            actions.push((step.instance as u8, action));
        }
        let tokens = trace.requests.iter().map(|request| request.input_tokens).collect();
        Work { block_tokens: trace.block_tokens, tokens, ends, chains, actions }
    }

    /// Writes it for the hosts' processes.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_vec(self).map_err(|error| Error::Invalid(format!("writing JSON: {error}")))?;
        std::fs::write(path, text).map_err(|source| Error::Os { what: format!("writing {}", path.display()), source })
    }

    /// Reads what was written.
    pub fn read(path: &Path) -> Result<Work> {
        let text = std::fs::read(path).map_err(|source| Error::Os { what: format!("reading {}", path.display()), source })?;
        serde_json::from_slice(&text).map_err(|error| Error::Invalid(format!("{}: {error}", path.display())))
    }

    /// The blocks of a request.
    pub fn chain(&self, request: u32) -> &[u32] {
        let end = |request: usize| self.ends.get(request).copied().unwrap_or_default();
        let start = (request as usize).checked_sub(1).map_or(0, end);
        self.chains.get(start..end(request as usize)).unwrap_or_default()
    }

    /// Tokens of a request, and those of them that so many blocks spare: the last one is always computed.
    pub fn tokens(&self, request: u32, found: usize) -> (u64, u64) {
        let all = self.tokens.get(request as usize).copied().unwrap_or_default();
        (all, (found as u64 * self.block_tokens).min(all.saturating_sub(1)))
    }

    /// The key of a block.
    pub fn key(block: u32) -> BlockKey {
        BlockKey(key(block))
    }
}
