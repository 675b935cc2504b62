// SPDX-License-Identifier: Apache-2.0
//! The prefix cache: publish, pull and lookup beside bare instructions, two hosts at once, and pulls beside reads of NIXL UCX.
//!
//! One thread does all the work unless it says otherwise; blocks are different in every word and compared after every transfer.

mod lab;
mod lookup;
mod mixed;
mod pieces;
mod transfer;
mod ucx;

use super::Bench;
use cxl_pool::{Error, Result};

/// Options of the benches of the cache.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// A program that reads through NIXL UCX on request (perf/ucx_peer.py says how), to be measured in turn with pulls
    #[arg(long, value_name = "COMMAND")]
    ucx: Option<String>,
}

/// Publish.
pub fn publish(batches: u64) -> Result<Bench> {
    let lab = lab::Lab::for_transfers()?;
    let mut bench = Bench { title: lab.title("publish of cached blocks"), ..Bench::default() };
    transfer::publish(&lab, &mut bench, batches)?;
    lab.end()?;
    Ok(bench)
}

/// Pull.
pub fn pull(args: &Args, batches: u64) -> Result<Bench> {
    let lab = lab::Lab::for_transfers()?;
    let mut bench = Bench { title: lab.title("pull of cached blocks"), ..Bench::default() };
    transfer::pull(&lab, &mut bench, batches)?;
    if let Some(command) = &args.ucx {
        beside_ucx(&lab, &mut bench, command, batches)?;
    }
    lab.end()?;
    Ok(bench)
}

/// Lookup.
pub fn lookup(batches: u64) -> Result<Bench> {
    let mut bench = Bench { title: "lookups in the prefix cache".into(), ..Bench::default() };
    lookup::measure(&mut bench, batches)?;
    Ok(bench)
}

/// Two hosts that publish and pull at once.
pub fn mixed(batches: u64) -> Result<Bench> {
    let mut bench = Bench { title: "two hosts, one thread each, publish and pull at once".into(), ..Bench::default() };
    mixed::measure(&mut bench, batches)?;
    Ok(bench)
}

/// All of it.
pub fn pool(args: &Args, batches: u64) -> Result<Bench> {
    let mut bench = pull(args, batches)?;
    bench.title = bench.title.replace("pull of", "publish, pull and lookup of");
    let lab = lab::Lab::for_transfers()?;
    transfer::publish(&lab, &mut bench, batches)?;
    lab.end()?;
    lookup::measure(&mut bench, batches)?;
    Ok(bench)
}

fn beside_ucx(lab: &lab::Lab, bench: &mut Bench, command: &str, batches: u64) -> Result<()> {
    let mut peer = ucx::Peer::start(command).map_err(|error| Error::Invalid(format!("the UCX peer ({command}): {error}")))?;
    bench.notes.push(format!("peer: {}", peer.description()));
    transfer::pull_beside_ucx(lab, bench, &mut peer, batches)?;
    pieces::beside_ucx(lab, bench, &mut peer, batches)
}
