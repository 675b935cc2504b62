// SPDX-License-Identifier: Apache-2.0
//! Recorded requests through the real cache: hosts in processes of their own do what the planner's instances do, in the planner's order,
//! and what they find stands beside what the planner says.
//!
//! Cells are small, so that a pool of thousands of gigabytes is one of some hundred megabytes; what is found does not depend on their size.
//! Each block has bytes of its own, and every block that is pulled is compared. The clock of the hosts jumps with the recorded time, so
//! that ticks of recency pass as they would ([`clock`]). With `--ahead` hosts do not wait for one another at every step, and times are
//! those of hosts that work at once. The planner is asked for as many cells as the hosts fill: some are kept free for the next publish.

mod case;
mod clock;
mod host;
mod table;
mod turns;
mod work;

use super::cache::refuse_emulated;
use crate::output::{Exit, Failure, Out};
use crate::{to_json, wrong};
use case::{Case, Result as Replayed};
use ctl_common::planner::arrivals::{self, Arrivals};
use ctl_common::planner::keys::Rack;
use ctl_common::planner::rack;
use ctl_common::planner::sim::{Routing, System};
use ctl_common::planner::trace::Trace;
use cxl_pool::cache::CacheConfig;
use cxl_pool::cache::policy::PolicyKind;
use cxl_pool::device::parse_size;
use std::path::{Path, PathBuf};

/// Options of `bench trace`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Files with requests, as for cxl-plan, or folders of *.jsonl
    #[arg(required_unless_present = "peer")]
    traces: Vec<PathBuf>,
    /// Hosts, each a process
    #[arg(long, value_name = "NUMBER,...", value_delimiter = ',', default_value = "4", value_parser = clap::value_parser!(u8).range(1..=8))]
    hosts: Vec<u8>,
    /// Eviction policies
    #[arg(long, value_name = "POLICY,...", value_delimiter = ',', default_value = "lru,leaf-lru")]
    eviction: Vec<PolicyKind>,
    /// Cells of the pool, in per cent of the different blocks of the trace
    #[arg(long, value_name = "PERCENT,...", value_delimiter = ',', default_value = "5,10,20,50")]
    pool_percent: Vec<f64>,
    /// round-robin, least-loaded or prefix-aware
    #[arg(long, value_name = "ROUTING", default_value = "least-loaded", value_parser = parse_routing)]
    routing: Routing,
    /// Low and high water mark of the cells that each host keeps free, in per cent [default: those of the cache]
    #[arg(long, value_name = "LOW,HIGH", value_delimiter = ',', num_args = 2)]
    water_percent: Vec<u32>,
    /// Replays own caches as well: a pool for each host, which has its part of the cells
    #[arg(long)]
    own: bool,
    /// Requests come so fast that this part of the hosts' computing is asked for if nothing is found
    #[arg(long, value_name = "PART", default_value_t = 0.85)]
    load: f64,
    /// Requests to read of each trace at most
    #[arg(long, value_name = "NUMBER", default_value_t = usize::MAX, hide_default_value = true)]
    requests: usize,
    /// Size of a cell, and of a block in it
    #[arg(long, value_parser = parse_size, value_name = "SIZE", default_value = "1K")]
    cell: u64,
    /// Steps of all hosts that a host may be ahead of another; 0: they take turns in the planner's order
    #[arg(long, value_name = "STEPS", default_value_t = 0)]
    ahead: u64,
    /// Hosts record what they do there, for `cxlctl record`: of one trace, size and policy
    #[arg(long, value_name = "DIRECTORY")]
    record: Option<PathBuf>,
    /// Writes trace.csv there
    #[arg(long, value_name = "DIRECTORY")]
    write: Option<PathBuf>,
    /// Ends with a line `RATIOS {json}`
    #[arg(long)]
    ratios: bool,
    /// A process of the replay
    #[arg(long, hide = true, value_name = "JSON")]
    peer: Option<String>,
}

impl Args {
    fn water(&self) -> (u32, u32) {
        match self.water_percent.as_slice() {
            &[low, high] => (low, high),
            _ => {
                let config = CacheConfig::default();
                (config.low_water_percent, config.high_water_percent)
            }
        }
    }
}

fn parse_routing(text: &str) -> std::result::Result<Routing, String> {
    let known = Routing::ALL.map(Routing::name).join(", ");
    Routing::ALL.into_iter().find(|routing| routing.name() == text).ok_or(format!("choose one of {known}"))
}

/// The traces of files and folders, each under the name of its file.
fn read(paths: &[PathBuf], most: usize) -> std::result::Result<Vec<Trace>, Failure> {
    let mut files = Vec::new();
    for path in paths {
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let failed = |source: std::io::Error| Failure::new(Exit::Failed, format!("{}: {source}", path.display()));
        let entries: Vec<PathBuf> = std::fs::read_dir(path)
            .map_err(failed)?
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<std::io::Result<_>>()
            .map_err(failed)?;
        let before = files.len();
        files.extend(entries.into_iter().filter(|path| path.extension().is_some_and(|ending| ending == "jsonl")));
        if files.len() == before {
            return Err(Failure::new(Exit::Usage, format!("{}: no *.jsonl in it", path.display())));
        }
    }
    files.sort();
    files.iter().map(|file| Trace::read(file, most, None).map_err(Failure::from)).collect()
}

fn name(trace: &Trace) -> String {
    Path::new(&trace.file).file_stem().map_or_else(|| trace.file.clone(), |name| name.to_string_lossy().into_owned())
}

fn rack_of(hosts: u8) -> std::result::Result<Rack, Failure> {
    let mut rack = rack::describe(None, rack::RackFile::default(), Vec::new(), Vec::new())?.rack;
    // What is found is found in the pool: accelerators keep nothing.
    (rack.instances, rack.hbm_gib) = (hosts.into(), 0.0);
    Ok(rack)
}

/// Runs the command.
pub fn run(args: &Args, out: &mut Out) -> std::result::Result<Exit, Failure> {
    let failed = |error: cxl_pool::Error| Failure::new(Exit::Failed, error.to_string());
    if let Some(order) = &args.peer {
        out.line(to_json(&host::peer(order).map_err(failed)?)?.to_string())?;
        return Ok(Exit::Done);
    }
    refuse_emulated()?;
    if let Some(wrong) = args.pool_percent.iter().find(|percent| !(0.01..=400.0).contains(*percent)) {
        return Err(Failure::new(Exit::Usage, format!("--pool-percent {wrong}: give per cent from 0.01 to 400")));
    }
    let mut traces = read(&args.traces, args.requests)?;
    let mut results: Vec<Replayed> = Vec::new();
    for &hosts in &args.hosts {
        let rack = rack_of(hosts)?;
        for trace in &mut traces {
            let arrivals = Arrivals::for_load(trace, &rack, args.load)?;
            arrivals::set(trace, arrivals, 1);
        }
        for trace in &traces {
            for &percent in &args.pool_percent {
                let mut case = Case {
                    trace,
                    name: name(trace),
                    rack: &rack,
                    hosts,
                    routing: args.routing,
                    system: System::Pool,
                    eviction: PolicyKind::Lru,
                    percent,
                    cell_bytes: args.cell,
                    water_percent: args.water(),
                    ahead: args.ahead,
                    record: args.record.as_deref(),
                };
                for &eviction in &args.eviction {
                    case.eviction = eviction;
                    results.push(case.run()?);
                }
                if args.own {
                    for routing in [Routing::LeastLoaded, Routing::PrefixAware] {
                        (case.system, case.eviction, case.routing) = (System::Own, PolicyKind::Lru, routing);
                        results.push(case.run()?);
                    }
                }
            }
        }
    }
    if let Some(directory) = &args.write {
        let path = directory.join("trace.csv");
        std::fs::write(&path, table::csv(&results)).map_err(|error| Failure::new(Exit::Failed, format!("{}: {error}", path.display())))?;
    }
    let json = to_json(&results)?;
    out.answer(|| json, || table::markdown(&results))?;
    if args.ratios && !out.is_json() {
        let ratios = table::ratios(&results);
        if ratios.is_empty() {
            return Err(failed(wrong("no policy was replayed beside lru")));
        }
        out.line(format!("RATIOS {}", serde_json::Value::from(ratios)))?;
    }
    Ok(Exit::Done)
}
