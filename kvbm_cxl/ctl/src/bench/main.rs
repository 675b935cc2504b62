// SPDX-License-Identifier: Apache-2.0
//! `cxl-bench`: what lines, locks, blocks and calls cost, each beside a primitive of this machine measured in turn with it in the same
//! run.
//!
//! A target is missed only where the 95 % confidence interval of the median lies beyond it. What was written is read back and compared:
//! a wrong byte, a doubled block or a lost increment ends the command with an error instead of a figure.

mod alloc;
mod cache;
mod copy;
mod counting;
mod handover;
mod hosts;
mod line;
mod lock;
mod rpc;
mod scaling;
mod ssd;
mod trace;
mod ucx;

use clap::Parser;
use ctl_common::{output, peer, pool, scratch, stats};
use cxl_pool::device::parse_size;
use cxl_pool::{Error, Result};
use output::{Exit, Failure, Out};
use serde::Serialize;
use stats::{Estimate, columns, time_text};
use std::path::PathBuf;
use std::process::ExitCode;

/// What is printed below the help.
const EXIT_CODES: &str = "\
Exit codes:
  0  done; with --ratios: every target that counts is met
  1  a wrong byte, a failure, or, with --ratios, a missed target
  2  wrong usage";

/// Measures the pool's operations, each beside a primitive of this machine in the same run; every byte is verified.
///
/// Pools are made in /dev/shm and removed; no pool of yours is touched, but by `line --scratch-offset`.
#[derive(Parser, Debug)]
#[command(name = "cxl-bench", version, after_help = EXIT_CODES, disable_help_subcommand = true)]
struct Cli {
    /// The pool whose device `line --scratch-offset` measures, as cxlctl takes it [env: CXL_POOL]
    #[arg(long, global = true, value_name = "SPEC")]
    pool: Option<String>,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand, Debug)]
enum What {
    /// Publish and fetch of a metadata line, beside the bare instructions; on a scratch file, see `cxlctl doctor`
    Line {
        #[command(flatten)]
        common: Common,
        /// Measures on the device of --pool itself from here, which you state to be free
        #[arg(long, value_parser = parse_size, value_name = "SIZE")]
        scratch_offset: Option<u64>,
    },
    /// Locks: sticky, first acquired, handed over between two processes, and by number of hosts
    Lock {
        #[command(flatten)]
        common: Common,
        /// The second process of the hand-over test.
        #[arg(long, hide = true, num_args = 2, value_names = ["POOL", "STATE"])]
        peer: Option<Vec<PathBuf>>,
    },
    /// Calls between two processes: latency and rate by calls under way, beside the hand-over of a bare line
    Rpc {
        #[command(flatten)]
        common: Common,
        /// The second process.
        #[arg(long, hide = true, num_args = 2, value_names = ["POOL", "STATE"])]
        peer: Option<Vec<PathBuf>>,
        /// A program that makes calls by active messages of UCX on request, to be measured in turn: target/ucx-calls
        #[arg(long, value_name = "COMMAND")]
        ucx: Option<String>,
    },
    /// Copies of payload: publish, pull, gather, sparse reads, beside the bare instructions
    Copy {
        #[command(flatten)]
        common: Common,
    },
    /// The allocator: blocks, kept blocks, chunks
    Alloc {
        #[command(flatten)]
        common: Common,
    },
    /// Publish of blocks of the prefix cache, beside a bare copy
    Publish {
        #[command(flatten)]
        common: Common,
    },
    /// Pull of blocks that another host has published, beside the fastest bare loop that is safe
    Pull {
        #[command(flatten)]
        common: Common,
    },
    /// Publish and pull of one block by the calls for one, beside those for a list that holds one
    One {
        #[command(flatten)]
        common: Common,
    },
    /// Lookups of one block and of whole chains, by how full the cache is, beside one bare fetch
    Lookup {
        #[command(flatten)]
        common: Common,
    },
    /// Hosts in processes of their own that look up, pull and publish blocks of a skewed set, every byte verified
    Mixed {
        #[command(flatten)]
        common: Common,
        #[command(flatten)]
        load: cache::mixed::Load,
    },
    /// Pulls from a modelled CXL-SSD: by the degree of its prefetcher, and told of the next blocks; a pass for each 100 batches
    Ssd {
        #[command(flatten)]
        common: Common,
    },
    /// Publish, pull and lookup together, and pulls beside reads of NIXL UCX
    Pool {
        #[command(flatten)]
        common: Common,
        #[command(flatten)]
        args: cache::pool::Args,
    },
    /// Recorded requests through the real cache, hosts in processes of their own: what they find beside what cxl-plan says
    Trace(trace::Args),
}

#[derive(clap::Args, Debug)]
struct Common {
    /// Ends with a line `RATIOS {json}`, and with status 1 where a target is missed.
    #[arg(long)]
    ratios: bool,
    /// Batches of each measurement: more for less noise.
    #[arg(long, default_value_t = 401, value_parser = clap::value_parser!(u64).range(1..1_000_000))]
    batches: u64,
}

/// Something measured.
#[derive(Debug, Serialize)]
struct Figure {
    name: String,
    value: f64,
    unit: &'static str,
}

/// A ratio to a primitive of this machine, measured in turn with it.
#[derive(Debug, Serialize)]
struct Ratio {
    name: &'static str,
    #[serde(flatten)]
    value: Estimate,
}

/// What was promised, and whether it is so.
#[derive(Debug, Serialize)]
struct Target {
    text: String,
    is_met: bool,
}

/// Figures by number of hosts or the like.
#[derive(Debug, Serialize)]
struct Grid {
    title: String,
    rows: Vec<Vec<String>>,
}

/// The result of one bench.
#[derive(Debug, Default, Serialize)]
struct Bench {
    title: String,
    figures: Vec<Figure>,
    ratios: Vec<Ratio>,
    targets: Vec<Target>,
    grids: Vec<Grid>,
    notes: Vec<String>,
}

impl Bench {
    fn figure(&mut self, name: impl Into<String>, value: f64, unit: &'static str) {
        self.figures.push(Figure { name: name.into(), value, unit });
    }

    fn ratio(&mut self, name: &'static str, value: Estimate) {
        self.ratios.push(Ratio { name, value });
    }

    fn target(&mut self, text: impl Into<String>, is_met: bool) {
        self.targets.push(Target { text: text.into(), is_met });
    }

    /// Demands that an estimate does not exceed `limit` beyond noise.
    fn at_most(&mut self, what: &str, value: &Estimate, limit: f64, unit: &str) {
        let text = format!("{what}: {:.2}{unit} ({:.2} to {:.2}), at most {limit}{unit}", value.median, value.low, value.high);
        self.target(text, !value.exceeds(limit));
    }

    /// Demands that an estimate does not fall below `limit` beyond noise.
    fn at_least(&mut self, what: &str, value: &Estimate, limit: f64) {
        let text = format!("{what}: {:.2} ({:.2} to {:.2}), at least {limit:.2}", value.median, value.low, value.high);
        self.target(text, !value.falls_short(limit));
    }

    fn text(&self) -> String {
        let mut text = format!("{}\n", self.title);
        let figure = |figure: &Figure| match figure.unit {
            "ns" => vec![figure.name.clone(), time_text(figure.value)],
            unit => vec![figure.name.clone(), format!("{:.2} {unit}", figure.value)],
        };
        text.push_str(&columns(&self.figures.iter().map(figure).collect::<Vec<_>>()));
        for grid in &self.grids {
            text.push_str(&format!("\n{}\n{}", grid.title, columns(&grid.rows)));
        }
        if !self.ratios.is_empty() {
            text.push_str("\nRatios (95 % interval)\n");
            let ratio = |Ratio { name, value }: &Ratio| {
                vec![name.to_string(), format!("{:.3}", value.median), format!("{:.3} to {:.3}", value.low, value.high)]
            };
            text.push_str(&columns(&self.ratios.iter().map(ratio).collect::<Vec<_>>()));
        }
        if !self.targets.is_empty() {
            text.push_str("\nTargets\n");
            self.targets
                .iter()
                .for_each(|target| text.push_str(&format!("  {} {}\n", if target.is_met { "met   " } else { "MISSED" }, target.text)));
        }
        self.notes.iter().for_each(|note| text.push_str(&format!("\n{note}\n")));
        text
    }

    fn ratios_line(&self) -> String {
        let ratios: serde_json::Map<_, _> = self.ratios.iter().map(|ratio| (ratio.name.into(), ratio.value.median.into())).collect();
        format!("RATIOS {}", serde_json::Value::from(ratios))
    }
}

fn to_json(value: &impl Serialize) -> Result<serde_json::Value> {
    serde_json::to_value(value).map_err(|error| Error::Invalid(format!("writing JSON: {error}")))
}

/// Bytes of which no word is like any other word, nor like any of another `number`.
fn fill(bytes: &mut [u8], number: u64) {
    for (index, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&((index as u64 + 1).wrapping_mul(2 * number + 0x9e37_79b9_7f4a_7c15)).to_le_bytes());
    }
}

fn wrong(what: impl Into<String>) -> Error {
    Error::Invalid(format!("{}: the figures mean nothing", what.into()))
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let mut out = Out::stdout(cli.json);
    output::end("cxl-bench", run(&cli, &mut out).and_then(|exit| out.flush().map(|()| exit)))
}

fn run(cli: &Cli, out: &mut Out) -> std::result::Result<Exit, Failure> {
    // A wrong byte is an error of the pool, not of the caller.
    let failed = |error: Error| Failure::new(Exit::Failed, error.to_string());
    let (bench, common) = match &cli.what {
        What::Line { common, scratch_offset } => (Ok(line::run(cli.pool.as_deref(), *scratch_offset, common.batches)?), common),
        What::Lock { peer: Some(peer), common } => {
            out.line(to_json(&handover::peer(peer, common.batches).map_err(failed)?)?.to_string())?;
            return Ok(Exit::Done);
        }
        What::Lock { common, .. } => (lock::run(common.batches), common),
        What::Rpc { peer: Some(peer), .. } => {
            rpc::peer(peer).map_err(failed)?;
            return Ok(Exit::Done);
        }
        What::Rpc { common, ucx, .. } => (rpc::run(common.batches, ucx.as_deref()), common),
        What::Copy { common } => (copy::run(common.batches), common),
        What::Alloc { common } => (alloc::run(common.batches), common),
        What::Publish { common } => (cache::publish::run(common.batches), common),
        What::Pull { common } => (cache::pull::run(common.batches), common),
        What::One { common } => (cache::list_of_one::run(common.batches), common),
        What::Lookup { common } => (cache::lookup::run(common.batches), common),
        What::Mixed { load, .. } if load.is_peer() => {
            out.line(to_json(&cache::mixed::peer(load).map_err(failed)?)?.to_string())?;
            return Ok(Exit::Done);
        }
        What::Mixed { common, load } => (cache::mixed::run(load, common.batches), common),
        What::Ssd { common } => (ssd::run(common.batches.div_ceil(100) as usize), common),
        What::Pool { common, args } => (cache::pool::run(args, common.batches), common),
        What::Trace(args) => return trace::run(args, out),
    };
    let bench = bench.map_err(failed)?;
    let json = to_json(&bench)?;
    out.answer(|| json, || bench.text())?;
    if !common.ratios {
        return Ok(Exit::Done);
    }
    // Targets of the cache are stated beside what was reached; one that is missed is no failure of the measurement.
    let is_stated = matches!(
        cli.what,
        What::Publish { .. } | What::Pull { .. } | What::One { .. } | What::Lookup { .. } | What::Mixed { .. } | What::Pool { .. }
    );
    let missed: Vec<&Target> = bench.targets.iter().filter(|target| !target.is_met && !is_stated).collect();
    if !out.is_json() {
        out.line(bench.ratios_line())?;
    }
    Ok(if missed.is_empty() { Exit::Done } else { Exit::Failed })
}
