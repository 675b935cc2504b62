// SPDX-License-Identifier: Apache-2.0
//! `cxlctl`: the pool's command line.

mod bench;
mod doctor;
mod peer;
mod scratch;
mod stats;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Command line of the CXL pool.
#[derive(Parser)]
#[command(name = "cxlctl", version, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Doctor(doctor::Args),
    Bench(bench::Args),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Doctor(args) => doctor::run(&args),
        Command::Bench(args) => bench::run(&args),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("cxlctl: {error}");
        ExitCode::FAILURE
    })
}
