// SPDX-License-Identifier: Apache-2.0
//! Publish, pull and lookup in one run, and pulls beside reads of NIXL UCX.

use super::{beside, list_of_one, lookup, publish, pull};
use crate::Bench;
use cxl_pool::Result;

/// Options of `bench pool`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// A program that reads through NIXL UCX on request, to be measured in turn with pulls: perf/ucx_peer.py
    #[arg(long, value_name = "COMMAND")]
    ucx: Option<String>,
}

/// Measures.
pub fn run(args: &Args, batches: u64) -> Result<Bench> {
    let mut parts = vec![publish::run(batches)?, pull::run(batches)?, lookup::run(batches)?, list_of_one::run(batches)?];
    if let Some(command) = &args.ucx {
        parts.push(beside::run(command, batches)?);
    }
    let mut all = Bench { title: "the prefix cache, pool in /dev/shm, one thread".into(), ..Bench::default() };
    for part in parts {
        all.notes.push(part.title);
        all.figures.extend(part.figures);
        all.ratios.extend(part.ratios);
        all.targets.extend(part.targets);
        all.grids.extend(part.grids);
        all.notes.extend(part.notes);
    }
    Ok(all)
}
