// SPDX-License-Identifier: Apache-2.0
//! `cxlctl bench`: what lines, locks and blocks cost, each beside a primitive of this machine measured in turn with it in the same run.
//!
//! A target is missed only where the 95 % confidence interval of the median lies beyond it. What was written is read back and compared:
//! a wrong byte, a doubled block or a lost increment ends the command with an error instead of a figure.

mod alloc;
mod counting;
mod handover;
mod hosts;
mod line;
mod lock;
mod scaling;

use crate::stats::{Estimate, table, time_text};
use cxl_pool::device::parse_size;
use cxl_pool::{Error, Result};
use serde::Serialize;
use std::path::PathBuf;
use std::process::ExitCode;

/// Measures lines, locks and the allocator.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// Publish and fetch of a metadata line, beside the bare instructions.
    Line {
        #[command(flatten)]
        common: Common,
        /// A file or devdax device to measure on; default: a scratch file in /dev/shm. See `cxlctl doctor` for what is written where.
        #[arg(long)]
        device: Option<PathBuf>,
        /// Measures on the device itself from here, which you state to be free.
        #[arg(long, value_parser = parse_size, value_name = "SIZE", requires = "device")]
        scratch_offset: Option<u64>,
    },
    /// Locks: sticky, first acquired, handed over between two processes, and by number of hosts.
    Lock {
        #[command(flatten)]
        common: Common,
        /// The second process of the hand-over test.
        #[arg(long, hide = true, num_args = 2, value_names = ["POOL", "STATE"])]
        peer: Option<Vec<PathBuf>>,
    },
    /// The allocator: blocks, kept blocks, chunks.
    Alloc {
        #[command(flatten)]
        common: Common,
    },
}

#[derive(clap::Args)]
struct Common {
    /// One JSON document instead of text.
    #[arg(long, conflicts_with = "ratios")]
    json: bool,
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

    fn text(&self) -> String {
        let mut text = format!("{}\n", self.title);
        let figure = |figure: &Figure| match figure.unit {
            "ns" => vec![figure.name.clone(), time_text(figure.value)],
            unit => vec![figure.name.clone(), format!("{:.2} {unit}", figure.value)],
        };
        text.push_str(&table(&self.figures.iter().map(figure).collect::<Vec<_>>()));
        for grid in &self.grids {
            text.push_str(&format!("\n{}\n{}", grid.title, table(&grid.rows)));
        }
        if !self.ratios.is_empty() {
            text.push_str("\nRatios (95 % interval)\n");
            let ratio = |Ratio { name, value }: &Ratio| {
                vec![name.to_string(), format!("{:.3}", value.median), format!("{:.3} to {:.3}", value.low, value.high)]
            };
            text.push_str(&table(&self.ratios.iter().map(ratio).collect::<Vec<_>>()));
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

    fn ratios_line(&self) -> Result<String> {
        let ratios: serde_json::Map<_, _> = self.ratios.iter().map(|ratio| (ratio.name.into(), ratio.value.median.into())).collect();
        Ok(format!("RATIOS {}", json(&ratios, false)?))
    }
}

fn json(value: &impl Serialize, pretty: bool) -> Result<String> {
    let text = if pretty { serde_json::to_string_pretty(value) } else { serde_json::to_string(value) };
    text.map_err(|error| Error::Invalid(format!("writing JSON: {error}")))
}

fn wrong(what: impl Into<String>) -> Error {
    Error::Invalid(format!("{}: the figures mean nothing", what.into()))
}

/// Runs the command.
pub fn run(args: &Args) -> Result<ExitCode> {
    let (bench, common) = match &args.what {
        What::Line { common, device, scratch_offset } => (line::run(device.as_deref(), *scratch_offset, common.batches)?, common),
        What::Lock { peer: Some(peer), common } => {
            println!("{}", json(&handover::peer(peer, common.batches)?, false)?);
            return Ok(ExitCode::SUCCESS);
        }
        What::Lock { common, .. } => (lock::run(common.batches)?, common),
        What::Alloc { common } => (alloc::run(common.batches)?, common),
    };
    if common.json {
        println!("{}", json(&bench, true)?);
        return Ok(ExitCode::SUCCESS);
    }
    print!("{}", bench.text());
    if !common.ratios {
        return Ok(ExitCode::SUCCESS);
    }
    let missed: Vec<&str> = bench.targets.iter().filter(|target| !target.is_met).map(|target| target.text.as_str()).collect();
    missed.iter().for_each(|text| eprintln!("cxlctl: target missed: {text}"));
    println!("{}", bench.ratios_line()?);
    Ok(if missed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
