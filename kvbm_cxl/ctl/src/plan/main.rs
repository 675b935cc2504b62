// SPDX-License-Identifier: Apache-2.0
//! `cxl-plan`: what a pool is worth for recorded requests, before there is one: hit rates, times to the first token, bytes moved and
//! load of the devices, by system, by routing and by size. Simulated; every answer says what it assumes.

mod measured;
mod report;

use clap::{CommandFactory, Parser};
use ctl_common::manual;
use ctl_common::output::{self, Exit, Failure, Out};
use ctl_common::planner::arrivals::{self, Arrivals};
use ctl_common::planner::error::{Origin, PlanError, Planned};
use ctl_common::planner::rack::{self, Described};
use ctl_common::planner::sim::{Routing, Setup, System};
use ctl_common::planner::trace::Trace;
use ctl_common::planner::{keys, presets};
use ctl_common::text::table;
use cxl_pool::cache::policy::PolicyKind;
use report::{Plan, Row};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};

const AFTER_HELP: &str = "\
How much pool do I need:
  cxl-plan rack --preset beluga > rack.toml    # then change what differs in your rack
  cxl-plan run trace.jsonl --rack rack.toml    # own caches, one pool, both; three routings
  cxl-plan run trace.jsonl --rack rack.toml --pool-gib 64,256,1024,4096

Exit codes:
  0  done
  1  a file cannot be read or written
  2  wrong usage, or a trace or rack that says what cannot be; the message names file and line";

/// Simulate recorded requests on a rack with and without a pool: hit rates, times to the first token, bytes, load of the devices
#[derive(Parser, Debug)]
#[command(name = "cxl-plan", version, after_help = AFTER_HELP, disable_help_subcommand = true)]
struct Cli {
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand, Debug)]
enum What {
    /// List the presets, with their sources
    Presets,
    /// Print a rack as a file for --rack, with the meaning of every number and where it is from
    Rack(RackArgs),
    /// Simulate a trace
    Run(Box<RunArgs>),
    /// Write the manual pages
    #[command(hide = true)]
    Man {
        /// Write to this directory
        directory: PathBuf,
    },
}

#[derive(clap::Args, Debug)]
struct RackArgs {
    /// Start from these costs; `cxl-plan presets` lists them [default: those of the file, else beluga]
    #[arg(long, value_name = "NAME")]
    preset: Option<String>,
    /// Read what differs from the preset from this file; `cxl-plan rack` prints one
    #[arg(long, value_name = "FILE")]
    rack: Option<PathBuf>,
    /// Take measured costs from a record of perf/records or the output of cxl-bench --json; may be given several times
    #[arg(long, value_name = "FILE")]
    measured: Vec<PathBuf>,
    /// Set one number of the rack, as device.latency_ns=640; overrides all else; may be given several times
    #[arg(long, value_name = "KEY=NUMBER")]
    set: Vec<String>,
}

#[derive(clap::Args, Debug)]
struct RunArgs {
    /// Requests, one JSON object a line: timestamp (ms), input_length (tokens), hash_ids (one for each block of the input)
    trace: PathBuf,
    #[command(flatten)]
    rack: RackArgs,
    /// Simulate these systems: own (own DRAM of each instance), pool (one for all), pool+l2 (own DRAM and a pool)
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    system: Vec<String>,
    /// Simulate these routings: round-robin, least-loaded, prefix-aware
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    routing: Vec<String>,
    /// Evict from the pool by this policy: lru or leaf-lru
    #[arg(long, value_name = "POLICY", default_value = "lru")]
    eviction: String,
    /// Try these sizes of the pool, in GiB; the system own divides each among the instances [default: that of the rack]
    #[arg(long, value_name = "GIB,...", value_delimiter = ',')]
    pool_gib: Vec<f64>,
    /// Read at most so many requests
    #[arg(long, value_name = "NUMBER", default_value_t = usize::MAX, hide_default_value = true)]
    requests: usize,
    /// Take blocks of the trace to have so many tokens [default: derived]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    block_tokens: Option<u64>,
    /// Let requests arrive so many times as fast as recorded
    #[arg(long, value_name = "TIMES", group = "arrivals")]
    faster: Option<f64>,
    /// Let requests arrive so fast that they need this part of the instances' computing if nothing is found
    #[arg(long, value_name = "PART", group = "arrivals")]
    load: Option<f64>,
    /// Let requests arrive at random, so many a second, in the order of the trace
    #[arg(long, value_name = "PER_SECOND", group = "arrivals")]
    poisson: Option<f64>,
    /// Use this seed for arrivals at random; a seed gives the same plan everywhere
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl RackArgs {
    fn describe(&self) -> Planned<Described> {
        let file = self.rack.as_deref().map(rack::read).transpose()?.unwrap_or_default();
        let measured: Vec<_> = self.measured.iter().map(|path| measured::read(path)).collect::<Planned<Vec<_>>>()?.concat();
        let options = self.set.iter().map(|text| rack::option(text)).collect::<Planned<_>>()?;
        rack::describe(self.preset.as_deref(), file, measured, options)
    }
}

/// The things of these names; all of them where none is named.
fn by_name<T: Copy>(given: &[String], all: &[T], name: fn(T) -> &'static str, option: &str, what: &'static str) -> Planned<Vec<T>> {
    if given.is_empty() {
        return Ok(all.to_vec());
    }
    let find = |given: &String| {
        all.iter().copied().find(|&one| name(one) == given).ok_or_else(|| PlanError::Unknown {
            origin: Origin::Option(option.into()),
            what,
            given: given.clone(),
            known: all.iter().map(|&one| name(one)).collect(),
        })
    };
    given.iter().map(find).collect()
}

fn above_zero(value: f64, option: &str, most: f64, unit: &'static str) -> Planned<f64> {
    let out = || PlanError::OutOfRange {
        origin: Origin::Option(option.into()),
        name: "it".into(),
        given: value.to_string(),
        least: 1e-6,
        most,
        unit,
    };
    Some(value).filter(|value| (1e-6..=most).contains(value)).ok_or_else(out)
}

impl RunArgs {
    fn arrivals(&self, trace: &Trace, described: &Described) -> Planned<(Arrivals, String)> {
        if let Some(times) = self.faster {
            let times = above_zero(times, "--faster", 1e6, "a number")?;
            return Ok((Arrivals::Faster(times), format!("as recorded, {times} times as fast")));
        }
        if let Some(per_s) = self.poisson {
            let per_s = above_zero(per_s, "--poisson", 1e6, "requests a second")?;
            return Ok((Arrivals::Poisson(per_s), format!("at random, {per_s} a second, seed {}", self.seed)));
        }
        let Some(load) = self.load else { return Ok((Arrivals::Recorded, "as recorded".into())) };
        let load = above_zero(load, "--load", 1000.0, "a part")?;
        let arrivals = Arrivals::for_load(trace, &described.rack, load)?;
        let Arrivals::Faster(times) = arrivals else { return Ok((arrivals, "as recorded".into())) };
        Ok((arrivals, format!("as recorded, {times:.4} times as fast, for a load of {load} if nothing is found")))
    }

    /// Sizes that rows stand for, and of each the own DRAM of an instance in the system own, and the pool.
    fn sizes(&self, described: &Described) -> Planned<Vec<(f64, f64, f64)>> {
        let rack = &described.rack;
        if self.pool_gib.is_empty() {
            let pool = if rack.pool_gib > 0.0 { rack.pool_gib } else { rack.dram_gib * rack.instances };
            return Ok(vec![(pool.max(1e-6), rack.dram_gib, pool)]);
        }
        let one = |&gib: &f64| above_zero(gib, "--pool-gib", 1e9, "GiB").map(|gib| (gib, gib / rack.instances, gib));
        self.pool_gib.iter().map(one).collect()
    }

    fn plan(&self) -> Planned<Plan> {
        let described = self.rack.describe()?;
        let systems = by_name(&self.system, &System::ALL, System::name, "--system", "system")?;
        let routings = by_name(&self.routing, &Routing::ALL, Routing::name, "--routing", "routing")?;
        let eviction = *by_name(std::slice::from_ref(&self.eviction), &PolicyKind::ALL, PolicyKind::name, "--eviction", "eviction policy")?
            .first()
            .unwrap_or(&PolicyKind::Lru);
        let sizes = self.sizes(&described)?;
        let mut trace = Trace::read(&self.trace, self.requests, self.block_tokens)?;
        let (arrivals, words) = self.arrivals(&trace, &described)?;
        arrivals::set(&mut trace, arrivals, self.seed);
        let mut jobs = Vec::new();
        for &(size_gib, own_gib, pool_gib) in &sizes {
            for &system in &systems {
                let dram_gib = if system == System::Own { own_gib } else { described.rack.dram_gib };
                for &routing in &routings {
                    let setup = Setup { trace: &trace, rack: &described.rack, system, routing, eviction, dram_gib, pool_gib };
                    jobs.push((size_gib, setup));
                }
            }
        }
        let rows = run_all(&jobs)?;
        Ok(Plan { trace, described, arrivals: words, seed: self.seed, eviction: eviction.name().into(), rows })
    }
}

/// Runs side by side: runs share nothing, so the order in which they end changes no figure.
fn run_all(jobs: &[(f64, Setup)]) -> Planned<Vec<Row>> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        let take = || {
            let index = next.fetch_add(1, Ordering::Relaxed);
            jobs.get(index).map(|job| (index, job))
        };
        while let Some((index, (size_gib, setup))) = take() {
            let row = setup.run().map(|outcome| Row {
                system: setup.system,
                routing: setup.routing,
                dram_gib: if setup.system.has_dram() { setup.dram_gib } else { 0.0 },
                pool_gib: if setup.system.has_pool() { setup.pool_gib } else { 0.0 },
                size_gib: *size_gib,
                outcome,
            });
            done.push((index, row));
        }
        done
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(jobs.len());
    let mut done = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let mut done = Vec::new();
        for thread in running {
            done.extend(thread.join().map_err(|_| PlanError::Unsound("a run ended in a panic".into()))?);
        }
        Ok::<_, PlanError>(done)
    })?;
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, row)| row).collect()
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let mut out = Out::stdout(cli.json);
    output::end("cxl-plan", run(&cli, &mut out).and_then(|exit| out.flush().map(|()| exit)))
}

fn run(cli: &Cli, out: &mut Out) -> Result<Exit, Failure> {
    match &cli.what {
        What::Presets => {
            let list = presets::PRESETS.iter().map(|preset| json!({"name": preset.name, "source": preset.source})).collect();
            let rows: Vec<Vec<String>> =
                presets::PRESETS.iter().map(|preset| vec![preset.name.to_string(), preset.source.to_string()]).collect();
            out.answer(|| list, || table(&rows))?;
        }
        What::Rack(args) => {
            let described = args.describe()?;
            let numbers = keys::KEYS.iter().zip(described.rack.values()).map(|(key, value)| (key.name.to_string(), value.into()));
            out.answer(|| serde_json::Value::Object(numbers.collect()), || described.toml())?;
        }
        What::Run(args) => {
            let plan = args.plan()?;
            let json = plan.json().map_err(|error| PlanError::Unsound(format!("writing JSON: {error}")))?;
            out.answer(|| json, || plan.text())?;
        }
        What::Man { directory } => return manual::write(Cli::command(), directory, out),
    }
    Ok(Exit::Done)
}
