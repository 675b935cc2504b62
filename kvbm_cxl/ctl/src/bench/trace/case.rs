// SPDX-License-Identifier: Apache-2.0
//! One trace at one size under one policy: planned, then replayed.

use super::host::{Order, Side};
use super::turns::Turns;
use super::work::Work;
use crate::cache::Lab;
use crate::output::{Exit, Failure};
use crate::peer::Peer;
use crate::wrong;
use ctl_common::planner::keys::Rack;
use ctl_common::planner::sim::{Routing, Setup, System};
use ctl_common::planner::trace::Trace;
use cxl_pool::Error;
use cxl_pool::cache::policy::PolicyKind;
use serde::Serialize;
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest replay.
const TIMEOUT: Duration = Duration::from_secs(1200);

/// What is replayed.
pub struct Case<'a> {
    pub trace: &'a Trace,
    pub name: String,
    pub rack: &'a Rack,
    pub hosts: u8,
    pub routing: Routing,
    pub system: System,
    pub eviction: PolicyKind,
    /// Cells of all pools, in per cent of the different blocks of the trace.
    pub percent: f64,
    /// Low and high water mark of the cells that are kept free.
    pub water_percent: (u32, u32),
    pub cell_bytes: u64,
    pub ahead: u64,
    pub record: Option<&'a Path>,
}

/// What came of it.
#[derive(Debug, Serialize)]
pub struct Result {
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
    /// Wall-clock time of the replay, with everything.
    pub seconds: f64,
    /// Sums over the hosts.
    pub all: Side,
}

impl Case<'_> {
    /// Plans and replays.
    pub fn run(&self) -> std::result::Result<Result, Failure> {
        let failed = |error: Error| Failure::new(Exit::Failed, error.to_string());
        let is_own = self.system == System::Own;
        let pools = if is_own { usize::from(self.hosts) } else { 1 };
        let wanted = (self.trace.blocks.len() as f64 * self.percent / 100.0 / pools as f64).ceil() as u64;
        let labs = (0..pools)
            .map(|_| Lab::new(self.cell_bytes, wanted.max(1), 2 << 20))
            .collect::<cxl_pool::Result<Vec<Lab>>>()
            .map_err(failed)?;
        let cells: u64 = labs.iter().map(|lab| lab.pool().layout().geometry().cell_count()).sum();
        // Cells as the hosts will have them.
        let mut rack = self.rack.clone();
        let chunk_cells = labs.first().map_or(1, |lab| lab.pool().layout().geometry().cells_per_chunk);
        (rack.owners, rack.chunk_cells) = (1.0, chunk_cells.into());
        (rack.low_water_percent, rack.high_water_percent) = (self.water_percent.0.into(), self.water_percent.1.into());
        let mut setup = Setup {
            trace: self.trace,
            rack: &rack,
            system: self.system,
            routing: self.routing,
            eviction: self.eviction,
            dram_gib: 0.0,
            pool_gib: 0.0,
        };
        let gib = cells as f64 * setup.block_bytes() / f64::from(1 << 30);
        (setup.pool_gib, setup.dram_gib) = if is_own { (0.0, gib / pools as f64) } else { (gib, 0.0) };
        let (outcome, steps) = setup.run_by_steps()?;
        let began = Instant::now();
        let sides = self.replay(&labs, &Work::new(self.trace, &steps, self.hosts, is_own)).map_err(failed)?;
        let mut all = Side::default();
        sides.iter().for_each(|side| all.add(side));
        if all.asked_tokens != self.trace.asked_tokens() {
            return Err(failed(wrong(format!("{} tokens were asked for of {}", all.asked_tokens, self.trace.asked_tokens()))));
        }
        Ok(Result {
            trace: self.name.clone(),
            hosts: self.hosts,
            system: self.system.name(),
            routing: self.routing.name(),
            eviction: self.eviction.name(),
            pool_percent: self.percent,
            cells,
            ceiling: self.trace.ceiling(),
            planned: outcome.hit_rate,
            replayed: all.hit_tokens as f64 / all.asked_tokens.max(1) as f64,
            seconds: began.elapsed().as_secs_f64(),
            all,
        })
    }

    /// All hosts at once.
    fn replay(&self, labs: &[Lab], work: &Work) -> cxl_pool::Result<Vec<Side>> {
        let failed = |source| Error::Os { what: "making a directory in /dev/shm".into(), source };
        let directory = tempfile::Builder::new().prefix(".cxlctl-bench-").tempdir_in("/dev/shm").map_err(failed)?;
        let (path, turns) = (directory.path().join("work"), directory.path().join("turns"));
        work.write(&path)?;
        Turns::open(&turns, self.hosts.into())?;
        let mut peers = Vec::new();
        for host in 0..self.hosts {
            let own = labs.get(usize::from(host)).filter(|_| labs.len() > 1);
            let Some(lab) = own.or(labs.first()) else { break };
            let order = Order {
                work: path.clone(),
                turns: turns.clone(),
                pool: lab.path(),
                state: lab.state(),
                host,
                hosts: self.hosts,
                machine: if own.is_some() { 0 } else { host },
                block_bytes: self.cell_bytes,
                eviction: self.eviction.name().into(),
                water_percent: self.water_percent,
                ahead: self.ahead,
                record: self.record.map(Path::to_path_buf),
            };
            let order = serde_json::to_string(&order).map_err(|error| Error::Invalid(format!("writing JSON: {error}")))?;
            peers.push(Peer::start(&["trace".into(), "--peer".into(), order], &[])?);
        }
        let mut sides = Vec::new();
        for peer in peers {
            let (status, output) = peer.wait(TIMEOUT)?;
            if !status.success() {
                return Err(wrong(format!("a host of the replay ended with {status}")));
            }
            sides.push(serde_json::from_str(&output).map_err(|error| wrong(format!("a host of the replay said {output:?} ({error})")))?);
        }
        Ok(sides)
    }
}
