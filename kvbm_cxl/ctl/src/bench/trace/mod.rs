// SPDX-License-Identifier: Apache-2.0
//! Recorded requests through the real cache: hosts do what the planner's instances do, in the planner's order, and what they find is
//! compared with what the planner says.
//!
//! Each block has bytes of its own, and every block that is pulled is compared. All hosts run in this process, driven by one thread on a
//! clock that follows the recorded time ([`driven`]), so that a replay gives the same counts every time.

mod driven;
mod replay;

use crate::lab::{instructions, wrong};
use crate::report::to_json;
use ctl_common::output::{Exit, Failure, Out};
use ctl_common::planner::arrivals::{self, Arrivals};
use ctl_common::planner::keys::Rack;
use ctl_common::planner::rack;
use ctl_common::planner::sim::{Routing, System};
use ctl_common::planner::trace::Trace;
use cxl_pool::cache::policy::PolicyKind;
use replay::{Case, Outcome};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// Requests come so fast that this part of the hosts' computing is asked for if nothing is found.
const LOAD: f64 = 0.85;

/// Options of `cxl-bench trace`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Files with requests, as for cxl-plan, or folders of *.jsonl
    #[arg(required = true)]
    traces: Vec<PathBuf>,
    /// Number of hosts
    #[arg(long, value_name = "NUMBER,...", value_delimiter = ',', default_value = "4", value_parser = clap::value_parser!(u8).range(1..=8))]
    hosts: Vec<u8>,
    /// Eviction policies
    #[arg(long, value_name = "POLICY,...", value_delimiter = ',', default_value = "lru,leaf-lru")]
    eviction: Vec<PolicyKind>,
    /// Cells of the pool, in percent of the different blocks of the trace
    #[arg(long, value_name = "PERCENT,...", value_delimiter = ',', default_value = "20")]
    pool_percent: Vec<f64>,
    /// Replay caches of each host's own as well, which have the same cells together
    #[arg(long)]
    own: bool,
    /// Requests to read of each trace at most
    #[arg(long, value_name = "NUMBER", default_value_t = usize::MAX, hide_default_value = true)]
    requests: usize,
}

/// The traces of files and folders, each with the name of its file.
fn read(paths: &[PathBuf], most: usize) -> Result<Vec<(String, Trace)>, Failure> {
    let mut files = Vec::new();
    for path in paths {
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let failed = |source: std::io::Error| Failure::new(Exit::Failed, format!("{}: {source}", path.display()));
        let before = files.len();
        for entry in std::fs::read_dir(path).map_err(failed)? {
            files.push(entry.map_err(failed)?.path());
        }
        files.retain(|path| path.extension().is_some_and(|ending| ending == "jsonl"));
        if files.len() == before {
            return Err(Failure::usage(format!("{}: no *.jsonl in it", path.display())));
        }
    }
    files.sort();
    let name = |file: &Path| file.file_stem().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    files.iter().map(|file| Ok((name(file), Trace::read(file, most, None)?))).collect()
}

/// The planner's rack. Accelerators keep nothing, so that all hits are those of the cache.
fn rack_of(hosts: u8) -> Result<Rack, Failure> {
    let mut rack = rack::describe(None, rack::RackFile::default(), Vec::new(), Vec::new())?.rack;
    (rack.instances, rack.hbm_gib) = (hosts.into(), 0.0);
    Ok(rack)
}

pub fn run(args: &Args, ratios: bool, out: &mut Out) -> Result<Exit, Failure> {
    instructions()?;
    if let Some(percent) = args.pool_percent.iter().find(|percent| !(0.01..=400.0).contains(*percent)) {
        return Err(Failure::usage(format!("--pool-percent {percent}: give percent from 0.01 to 400")));
    }
    let mut traces = read(&args.traces, args.requests)?;
    let mut outcomes: Vec<Outcome> = Vec::new();
    for &hosts in &args.hosts {
        let rack = rack_of(hosts)?;
        for (name, trace) in &mut traces {
            let arrivals = Arrivals::for_load(trace, &rack, LOAD)?;
            arrivals::set(trace, arrivals, 1);
            for &percent in &args.pool_percent {
                let (routing, system, eviction) = (Routing::LeastLoaded, System::Pool, PolicyKind::Lru);
                let case = Case { trace, name, rack: &rack, hosts, routing, system, eviction, percent };
                for &eviction in &args.eviction {
                    outcomes.push(Case { eviction, ..case.clone() }.run()?);
                }
                for routing in [Routing::LeastLoaded, Routing::PrefixAware].into_iter().filter(|_| args.own) {
                    outcomes.push(Case { system: System::Own, routing, ..case.clone() }.run()?);
                }
            }
        }
    }
    let json = to_json(&outcomes)?;
    out.answer(|| json, || markdown(&outcomes))?;
    if ratios && !out.is_json() {
        let ratios = ratios_of(&outcomes);
        if ratios.is_empty() {
            return Err(wrong("--ratios needs a replay with --eviction lru").into());
        }
        out.line(format!("RATIOS {}", Value::from(ratios)))?;
    }
    Ok(Exit::Done)
}

/// A table for each trace and number of hosts.
fn markdown(outcomes: &[Outcome]) -> String {
    const HEAD: &str = "| cells | system | routing | eviction | found % | planned % | evicted | refused |";
    let mut text = String::from("Part of the tokens found in the cache, replayed and planned\n");
    for group in outcomes.chunk_by(|one, other| (&one.trace, one.hosts) == (&other.trace, other.hosts)) {
        let Some(Outcome { trace, hosts, ceiling, .. }) = group.first() else { continue };
        let pulled: u64 = group.iter().map(|outcome| outcome.all.pulled).sum();
        let rule = "---|".repeat(HEAD.matches('|').count() - 1);
        let ceiling = ceiling * 100.0;
        text += &format!("\n**{trace}**, {hosts} hosts; without limit {ceiling:.1} %; {pulled} blocks compared\n\n{HEAD}\n|{rule}\n");
        for outcome in group {
            let Outcome { cells, pool_percent, system, routing, eviction, .. } = outcome;
            let (found, planned) = (outcome.replayed * 100.0, outcome.planned * 100.0);
            let (evicted, refused) = (outcome.all.evicted, outcome.all.refused);
            text += &format!(
                "| {cells} ({pool_percent} %) | {system} | {routing} | {eviction} | {found:.2} | {planned:.2} | {evicted} | {refused} |\n"
            );
        }
    }
    text
}

/// Ratios of hit rates for each trace: replayed by planned, each policy by LRU, and the pool by each host's own cache.
fn ratios_of(outcomes: &[Outcome]) -> Map<String, Value> {
    let mut ratios = Map::new();
    let sum = |trace: &str, system: &str, eviction: PolicyKind, routing: Option<Routing>| -> (f64, f64) {
        let is_meant = |outcome: &&Outcome| {
            (outcome.trace.as_str(), outcome.system, outcome.eviction) == (trace, system, eviction.name())
                && routing.is_none_or(|routing| outcome.routing == routing.name())
        };
        let meant = outcomes.iter().filter(is_meant);
        meant.fold((0.0, 0.0), |(found, planned), outcome| (found + outcome.replayed, planned + outcome.planned))
    };
    for outcome in outcomes {
        let trace = outcome.trace.as_str();
        let mut add = |name: String, above: f64, below: f64| {
            if (above / below).is_finite() && above > 0.0 {
                ratios.insert(name.replace(['-', ' '], "_").to_lowercase(), (above / below).into());
            }
        };
        let (lru, planned) = sum(trace, "pool", PolicyKind::Lru, None);
        add(format!("found_over_planned_{trace}"), lru, planned);
        for policy in PolicyKind::ALL.into_iter().filter(|&policy| policy != PolicyKind::Lru) {
            add(format!("{policy}_over_lru_{trace}"), sum(trace, "pool", policy, None).0, lru);
        }
        for routing in [Routing::LeastLoaded, Routing::PrefixAware] {
            add(format!("pool_over_own_{}_{trace}", routing.name()), lru, sum(trace, "own", PolicyKind::Lru, Some(routing)).0);
        }
    }
    ratios
}
