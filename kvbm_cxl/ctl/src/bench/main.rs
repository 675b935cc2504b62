// SPDX-License-Identifier: Apache-2.0
//! `cxl-bench`: the cost of lines, locks, copies, calls and the prefix cache, each compared with a baseline of this machine in the same
//! run.
//!
//! All bytes are read back and compared: a wrong byte or a lost increment ends the command with an error instead of a figure.

mod cache;
mod copy;
mod lab;
mod line;
mod lock;
mod report;
mod rpc;
mod ssd;
mod trace;
mod ucx;

use clap::{CommandFactory, Parser};
use ctl_common::manual;
use ctl_common::output::{self, Exit, Failure, Out};
use report::to_json;
use std::path::PathBuf;
use std::process::ExitCode;

/// Text below the help.
const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  a wrong byte, or a failure
  2  wrong usage";

/// Measure the pool's operations, each compared with a baseline of this machine in the same run; every byte is verified
///
/// Pools are made in /dev/shm and removed. No other memory is used.
#[derive(Parser, Debug)]
#[command(name = "cxl-bench", version, after_help = EXIT_CODES, disable_help_subcommand = true)]
struct Cli {
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
    /// Print a last line `RATIOS {json}`
    #[arg(long, global = true)]
    ratios: bool,
    /// Batches of each measurement: more for less noise
    #[arg(long, global = true, default_value_t = 401, value_parser = clap::value_parser!(u64).range(1..1_000_000))]
    batches: u64,
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand, Debug)]
enum What {
    /// Measure publish and fetch of a metadata line
    Line,
    /// Measure locks: sticky, first acquired, handed over between two processes
    Lock,
    /// Measure calls between two processes by the number under way
    Rpc {
        /// Compare with active messages of UCX, made by this command: target/ucx-calls
        #[arg(long, value_name = "COMMAND")]
        ucx: Option<String>,
    },
    /// Measure copies of payload: publish, pull, gather, sparse reads
    Copy,
    /// Measure the publish of blocks into the prefix cache
    Publish,
    /// Measure the pull of blocks that another host published
    Pull,
    /// Measure lookups of one block and of whole chains
    Lookup,
    /// Measure publish, pull and lookup together
    Pool {
        /// Compare with reads of NIXL UCX, made by this command: perf/ucx_peer.py
        #[arg(long, value_name = "COMMAND")]
        ucx: Option<String>,
    },
    /// Measure pulls from a modelled CXL-SSD by its prefetcher and by read-ahead; one pass for each 100 batches
    Ssd,
    /// Replay recorded requests on the real cache and compare the hits with those of cxl-plan
    Trace(trace::Args),
    /// Write the manual pages
    #[command(hide = true)]
    Man {
        /// Write to this directory
        directory: PathBuf,
    },
    /// Run the second process of a measurement
    #[command(hide = true)]
    Peer {
        /// `lock` or `rpc`
        of: String,
        pool: PathBuf,
        state: PathBuf,
    },
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let mut out = Out::stdout(cli.json);
    output::end("cxl-bench", run(&cli, &mut out).and_then(|exit| out.flush().map(|()| exit)))
}

fn run(cli: &Cli, out: &mut Out) -> Result<Exit, Failure> {
    let batches = cli.batches;
    let bench = match &cli.what {
        What::Line => line::run(batches)?,
        What::Lock => lock::run(batches)?,
        What::Rpc { ucx } => rpc::run(batches, ucx.as_deref())?,
        What::Copy => copy::run(batches)?,
        What::Publish => cache::publish::run(batches)?,
        What::Pull => cache::pull::run(batches)?,
        What::Lookup => cache::lookup::run(batches)?,
        What::Pool { ucx } => cache::run(batches, ucx.as_deref())?,
        What::Ssd => ssd::run(batches.div_ceil(100) as usize)?,
        What::Trace(args) => return trace::run(args, cli.ratios, out),
        What::Man { directory } => return manual::write(Cli::command(), directory, out),
        What::Peer { of, pool, state } => {
            let answer = match of.as_str() {
                "lock" => lock::peer(pool, state, batches)?,
                _ => to_json(&rpc::peer(pool, state)?)?,
            };
            out.line(answer.to_string())?;
            return Ok(Exit::Done);
        }
    };
    let json = to_json(&bench)?;
    out.answer(|| json, || bench.text())?;
    if cli.ratios && !out.is_json() {
        out.line(bench.ratios_line())?;
    }
    Ok(Exit::Done)
}
