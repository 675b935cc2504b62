// SPDX-License-Identifier: Apache-2.0
//! One trace at one size under one policy: planned, then replayed by hosts that look up, pin, pull and publish in the planner's order.

use super::driven::Driver;
use crate::lab::{Lab, NAMESPACE, alone, fill, host_config, real_machine, wrong};
use ctl_common::output::Failure;
use ctl_common::planner::keys::Rack;
use ctl_common::planner::sim::{Ns, Routing, Setup, Step, System, What};
use ctl_common::planner::trace::{Request, Trace, key};
use cxl_pool::Result;
use cxl_pool::cache::policy::PolicyKind;
use cxl_pool::cache::{BlockKey, Cache, CacheConfig, PublishRequest, Reservation, Reserved};
use cxl_pool::host::Host;
use cxl_pool::metrics::EvictionReason;
use serde::Serialize;
use std::sync::Arc;

/// Size of a cell and of a block, in bytes. Hits do not depend on it.
const CELL_BYTES: u64 = 1024;
/// Tokens that an engine computes in a step, and so publishes together.
const STEP_TOKENS: u64 = 2048;
/// Nanoseconds of a tick of recency: 100 heartbeats of 50 ms.
const TICK_NS: Ns = 5_000_000_000;
/// Ticks that matter where nothing happens between them: a cycle, and one more.
const MOST_TICKS: Ns = 8;

#[derive(Clone)]
pub struct Case<'a> {
    pub trace: &'a Trace,
    pub name: &'a str,
    pub rack: &'a Rack,
    pub hosts: u8,
    pub routing: Routing,
    pub system: System,
    pub eviction: PolicyKind,
    /// Cells of all pools, in percent of the different blocks of the trace.
    pub percent: f64,
}

/// What the hosts of a replay did.
#[derive(Debug, Default, Serialize)]
pub struct Counts {
    /// Tokens of the requests, and those of them that were found.
    pub asked_tokens: u64,
    pub hit_tokens: u64,
    pub lookups: u64,
    pub found: u64,
    pub pulled: u64,
    /// Blocks published, found there by a publish, without a cell, evicted.
    pub stored: u64,
    pub met: u64,
    pub refused: u64,
    pub evicted: u64,
}

#[derive(Debug, Serialize)]
pub struct Outcome {
    pub trace: String,
    pub hosts: u8,
    /// `pool` or `own`.
    pub system: &'static str,
    pub routing: &'static str,
    pub eviction: &'static str,
    pub pool_percent: f64,
    pub cells: u64,
    /// The part of the tokens that a cache without limit would find.
    pub ceiling: f64,
    /// The part of the tokens found, by the planner and by the real cache.
    pub planned: f64,
    pub replayed: f64,
    pub all: Counts,
}

impl Case<'_> {
    pub fn run(&self) -> std::result::Result<Outcome, Failure> {
        let is_own = self.system == System::Own;
        let pools = if is_own { self.hosts } else { 1 };
        let wanted = (self.trace.blocks.len() as f64 * self.percent / 100.0 / f64::from(pools)).ceil() as u64;
        let labs = (0..pools).map(|_| Lab::new(CELL_BYTES, wanted.max(1), 2 << 20)).collect::<Result<Vec<Lab>>>()?;
        let cells: u64 = labs.iter().map(|lab| lab.pool.layout().geometry().cell_count()).sum();
        // The planner gets the cells that the hosts have.
        let (mut rack, config) = (self.rack.clone(), CacheConfig::default());
        rack.owners = 1.0;
        rack.chunk_cells = labs.first().map_or(1, |lab| lab.pool.layout().geometry().cells_per_chunk).into();
        (rack.low_water_percent, rack.high_water_percent) = (config.low_water_percent.into(), config.high_water_percent.into());
        let Case { trace, system, routing, eviction, .. } = *self;
        let mut setup = Setup { trace, rack: &rack, system, routing, eviction, dram_gib: 0.0, pool_gib: 0.0 };
        let gib = cells as f64 * setup.block_bytes() / f64::from(1 << 30);
        (setup.pool_gib, setup.dram_gib) = if is_own { (0.0, gib / f64::from(pools)) } else { (gib, 0.0) };
        let (outcome, steps) = setup.run_by_steps()?;
        let all = self.replay(labs, &steps)?;
        if all.asked_tokens != trace.asked_tokens() {
            return Err(wrong(format!("{} tokens were asked for of {}", all.asked_tokens, trace.asked_tokens())).into());
        }
        Ok(Outcome {
            trace: self.name.into(),
            hosts: self.hosts,
            system: system.name(),
            routing: routing.name(),
            eviction: eviction.name(),
            pool_percent: self.percent,
            cells,
            ceiling: trace.ceiling(),
            planned: outcome.hit_rate,
            replayed: all.hit_tokens as f64 / all.asked_tokens.max(1) as f64,
            all,
        })
    }

    fn replay(&self, labs: Vec<Lab>, steps: &[Step]) -> Result<Counts> {
        let drivers: Vec<Arc<Driver>> = labs.iter().map(|_| Driver::new()).collect();
        let mut workers = Vec::new();
        for number in 0..self.hosts {
            // Hosts with a pool of their own are its first machine.
            let (pool, machine) = if labs.len() > 1 { (usize::from(number), 0) } else { (0, number) };
            workers.push(Worker::join(&labs[pool], &drivers[pool], machine, self.eviction)?);
        }
        let mut counts = Counts::default();
        let mut ticks = 0;
        for step in steps {
            let due = step.at / TICK_NS;
            ticks = ticks.max(due.saturating_sub(MOST_TICKS));
            while ticks < due {
                ticks += 1;
                let heartbeat_ns = workers[0].host.config().heartbeat_ms * 1_000_000;
                (0..TICK_NS / heartbeat_ns.max(1)).for_each(|_| drivers.iter().for_each(|driver| driver.pass(heartbeat_ns)));
                workers.iter().try_for_each(|worker| worker.cache.service_round())?;
            }
            let (worker, request) = (&workers[step.instance as usize], &self.trace.requests[step.request as usize]);
            match step.what {
                What::Asks => worker.ask(self.trace, request, &mut counts)?,
                What::Enters => worker.publish(self.trace, request, &mut counts)?,
            }
        }
        for worker in &workers {
            let evictions = &worker.cache.metrics().evictions_total;
            counts.evicted += EvictionReason::ALL.into_iter().map(|reason| evictions.of(reason).get()).sum::<u64>();
        }
        // The pool ends with the replay, so that no host has to leave it.
        drivers.iter().for_each(|driver| driver.release());
        Ok(counts)
    }
}

/// A host of a replay.
struct Worker {
    cache: Cache,
    host: Host,
}

impl Worker {
    fn join(lab: &Lab, driver: &Arc<Driver>, machine: u8, policy: PolicyKind) -> Result<Worker> {
        let platform = driver.platform(real_machine(&lab.pool, &lab.state(), machine)?);
        let host = cxl_pool::pool::join(lab.pool.lines().clone(), platform, host_config(&lab.pool))?;
        driver.add(host.clone());
        Ok(Worker { cache: Cache::open(&host, CacheConfig { checksums: true, policy, ..alone() })?, host })
    }

    /// Looks up the chain of a request, pins the blocks found, pulls and compares them.
    fn ask(&self, trace: &Trace, request: &Request, counts: &mut Counts) -> Result<()> {
        let chain = trace.chain(request);
        let keys: Vec<BlockKey> = chain.iter().map(|&block| BlockKey(key(block))).collect();
        let pinned = self.cache.pin_chain(NAMESPACE, &keys)?;
        counts.lookups += 1;
        counts.found += pinned.len() as u64;
        let (mut expected, mut bytes) = ([0; CELL_BYTES as usize], [0; CELL_BYTES as usize]);
        for (pin, &block) in pinned.iter().zip(chain) {
            fill(&mut expected, block.into());
            bytes.fill(0);
            if let Some(reason) = pin.copy_to(&mut bytes)? {
                return Err(wrong(format!("block {block} was pinned and not pulled: {reason}")));
            }
            if bytes != expected {
                return Err(wrong(format!("block {block} was pulled with other bytes than were published")));
            }
            counts.pulled += 1;
        }
        counts.asked_tokens += request.input_tokens;
        // The last token is always computed.
        counts.hit_tokens += (pinned.len() as u64 * trace.block_tokens).min(request.input_tokens.saturating_sub(1));
        Ok(())
    }

    /// Publishes the whole chain step by step, as a connector does; blocks that are there are not written.
    fn publish(&self, trace: &Trace, request: &Request, counts: &mut Counts) -> Result<()> {
        let mut parent = None;
        let mut bytes = [0; CELL_BYTES as usize];
        for blocks in trace.chain(request).chunks(((STEP_TOKENS / trace.block_tokens.max(1)) as usize).max(1)) {
            let request = |&block: &u32| {
                let key = BlockKey(key(block));
                PublishRequest { namespace: NAMESPACE, key, parent: parent.replace(key), len_bytes: CELL_BYTES }
            };
            let requests: Vec<PublishRequest> = blocks.iter().map(request).collect();
            let mut cells: Vec<Reservation> = Vec::with_capacity(blocks.len());
            for (reserved, &block) in self.cache.reserve_all(&requests)?.into_iter().zip(blocks) {
                match reserved {
                    Reserved::Cell(mut cell) => {
                        fill(&mut bytes, block.into());
                        cell.fill([&bytes[..]])?;
                        cells.push(cell);
                    }
                    Reserved::Exists | Reserved::Busy => counts.met += 1,
                    Reserved::NoCell | Reserved::NoHint | Reserved::OverQuota => counts.refused += 1,
                }
            }
            counts.stored += cells.len() as u64;
            self.cache.commit_all(cells)?;
        }
        // A round of the upkeep, which keeps some cells free, comes between two publishes.
        self.cache.service_round()
    }
}
