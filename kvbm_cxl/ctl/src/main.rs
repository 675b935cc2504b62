// SPDX-License-Identifier: Apache-2.0
//! `cxlctl`: the pool's command line.
//!
//! Exit codes: 0 done, nothing wrong; 1 findings, or the operation failed; 2 wrong usage; 3 the pool cannot be opened; 4 refused because
//! something would be lost or is in use.

mod cache;
mod cli;
mod demo;
mod doctor;
mod erase;
mod exporter;
mod format;
mod free;
mod fsck;
mod host;
mod hosts;
mod info;
mod inspect;
mod logger;
mod model;
mod nixl;
mod pool_view;
mod record;
mod seats;
mod top;
mod wait;

use clap::{CommandFactory, Parser};
use clap_complete::Shell;
use cli::{Cli, Command};
use ctl_common::{manual, output, peer, pool, scratch, stats, text};
use output::{Exit, Failure, Out};
use std::process::ExitCode;

fn main() -> ExitCode {
    logger::install();
    // Clap prints its own errors and help, ends with 2 or 0, and does not mind a closed pipe.
    let cli = Cli::parse();
    let mut out = Out::stdout(cli.json);
    let outcome = run(cli, &mut out).and_then(|exit| out.flush().map(|()| exit));
    output::end("cxlctl", outcome)
}

fn run(cli: Cli, out: &mut Out) -> Result<Exit, Failure> {
    let pool = cli.pool.as_deref();
    match cli.command {
        Command::Format(args) => format::run(pool, &args, out),
        Command::Cells(args) => model::run(&args, out),
        Command::Erase(args) => erase::run(pool, &args, out),
        Command::Info => info::run(pool, out),
        Command::Host(args) => host::run(pool, &args, out),
        Command::Hosts(args) => hosts::run(pool, &args, out),
        Command::Seats(args) => seats::run(pool, &args, out),
        Command::Inspect(args) => inspect::run(pool, &args, out),
        Command::Free(args) => free::run(pool, &args, out),
        Command::Fsck(args) => fsck::run(pool, &args, out),
        Command::Cache(args) => cache::run(pool, &args, out),
        Command::Why(args) => cache::why(pool, &args, out),
        Command::Demo => demo::run(pool, out),
        Command::DemoReader { blocks } => demo::read(pool, blocks, out),
        Command::Doctor(args) => doctor::run(pool, &args, out),
        Command::Exporter(args) => exporter::run(pool, &args, out),
        Command::Top(args) => top::run(pool, &args, out),
        Command::Nixl => nixl::run(pool, out),
        Command::Record(args) => record::run(&args, out),
        Command::Completions { shell } => completions(shell, out),
        Command::Man { directory } => manual::write(Cli::command(), &directory, out),
    }
}

/// `cxlctl completions`.
fn completions(shell: Shell, out: &mut Out) -> Result<Exit, Failure> {
    // Into memory first: the generator panics where it cannot write.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "cxlctl", &mut script);
    out.bytes(&script)?;
    Ok(Exit::Done)
}
