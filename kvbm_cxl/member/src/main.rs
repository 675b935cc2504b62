// SPDX-License-Identifier: Apache-2.0
//! `cxl-member`: one process a host that ties its slot in a pool to a lease of etcd.
//!
//! Where a cluster has etcd (Dynamo's does), operators want to see there which host has which slot, and want a host that is gone to be
//! fenced when its lease runs out instead of when the pool's own patience ends. The keeper leases a slot, joins the pool with it, keeps the
//! lease and watches the others': an expired one is a suspicion, which makes the pool's manager fence that incarnation. Every other process
//! of the host joins as ever; they share the slot with the keeper.
//!
//! etcd decides nothing about data. While it is away nothing changes; what it says wrongly costs a host a new incarnation.

mod error;
mod etcd;
mod holder;
mod keeper;
mod security;
mod watcher;

use clap::Parser;
use cxl_pool::Pool;
use cxl_pool::device::PoolSpec;
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::machine::Machine;
use cxl_pool::pool::OpenOptions;
use error::{Error, Result};
use etcd::Etcd;
use keeper::Keeper;
use security::Security;
use std::process::{ExitCode, ExitStatus};
use std::sync::Arc;
use std::time::Duration;
use tokio::process::{Child, Command};
use tokio::signal::unix::{Signal, SignalKind, signal};
use watcher::Watcher;

/// Keeps this machine's slot of a CXL pool in etcd, with a lease. Prints one line of JSON when it has joined.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The pool's devices. Default: CXL_POOL.
    #[arg(long)]
    pool: Option<String>,
    /// Endpoints of etcd, separated by commas.
    #[arg(long, env = "ETCD_ENDPOINTS", value_delimiter = ',', default_value = "http://127.0.0.1:2379")]
    endpoints: Vec<String>,
    #[command(flatten)]
    security: Security,
    /// Prefix of the keys.
    #[arg(long, default_value = "kvbm-cxl")]
    prefix: String,
    /// Lease time: seconds of silence until this host is fenced.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(i64).range(2..=3600))]
    ttl_s: i64,
    /// Longest wait for an answer of etcd, in milliseconds.
    #[arg(long, default_value_t = 5000)]
    timeout_ms: u64,
    /// A program to run as long as the slot is held; the keeper ends when it ends, with its exit code.
    #[arg(trailing_var_arg = true)]
    command: Vec<String>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    // One thread more than this one: joining and leaving the pool may block, the connection must not wait for them.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let outcome = match runtime {
        Ok(runtime) => runtime.block_on(run(&arguments)),
        Err(source) => Err(Error::Os { what: "starting the event loop".into(), source }),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("cxl-member: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(arguments: &Arguments) -> Result<ExitCode> {
    let spec = match &arguments.pool {
        Some(text) => PoolSpec::parse(text),
        None => PoolSpec::from_env(),
    }?;
    let config = HostConfig::from_env()?;
    let pool = Pool::open(&spec, &OpenOptions::default())?;
    let platform = Arc::new(Machine::for_pool(pool.superblock().uuid(), pool.faults().clone())?);
    let etcd = Etcd::connect(&arguments.endpoints, &arguments.security, arguments.timeout_ms).await?;
    let mut stop = Stop::new()?;
    let mut keeper = Keeper::take(etcd.clone(), &pool, platform, &arguments.prefix, arguments.ttl_s).await?;
    let host = match keeper.join(&pool, config).await {
        Ok(host) => host,
        Err(error) => return Err(keeper.give_up(error).await),
    };
    let kept = serve(arguments, etcd, &mut keeper, &host, &mut stop).await;
    // The pool first: a slot that was left in good order is not fenced when its lease goes.
    let left = host.leave();
    let returned = keeper.leave().await;
    let code = kept?;
    left?;
    returned?;
    Ok(code)
}

async fn serve(arguments: &Arguments, etcd: Etcd, keeper: &mut Keeper, host: &Host, stop: &mut Stop) -> Result<ExitCode> {
    let service = host.serve()?;
    let watcher = Watcher::start(etcd, keeper.keys().clone()).await?;
    println!("{{\"slot\": {}, \"incarnation\": {}, \"lease\": \"{:x}\"}}", host.slot(), host.incarnation(), keeper.lease());
    let mut child = start(&arguments.command)?;
    let outcome = keep(arguments, keeper, watcher, host, &mut child, stop).await;
    if let Some(child) = &mut child {
        end(child).await;
    }
    drop(service);
    outcome
}

/// Until the program ends, or this one is asked to end.
async fn keep(
    arguments: &Arguments,
    keeper: &mut Keeper,
    mut watcher: Watcher,
    host: &Host,
    child: &mut Option<Child>,
    stop: &mut Stop,
) -> Result<ExitCode> {
    let period = Duration::from_millis(arguments.ttl_s as u64 * 1000 / 3);
    let mut beat = tokio::time::interval(period);
    beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut watching = true;
    loop {
        let gone = tokio::select! {
            () = stop.asked() => return Ok(ExitCode::SUCCESS),
            status = ended(child) => return Ok(code_of(status?)),
            told = watcher.gone(), if watching => match told {
                Ok(Some(gone)) => gone,
                // Told again by the next beat that reaches etcd.
                Ok(None) | Err(_) => {
                    watching = false;
                    continue;
                }
            },
            _ = beat.tick() => {
                match keeper.renew(host).await {
                    Ok(()) => {}
                    Err(error @ (Error::Foreign { .. } | Error::KeptAlready { .. })) => return Err(error),
                    // etcd is away: it expires no lease meanwhile, or will say so when it is back. Or it refuses what this host shows.
                    Err(error) => {
                        eprintln!("cxl-member: {error}; trying again");
                        match keeper.reconnect().await {
                            Ok(etcd) => {
                                watcher.follow(etcd);
                                watching = false;
                            }
                            Err(error) => eprintln!("cxl-member: {error}"),
                        }
                    }
                }
                if watching {
                    continue;
                }
                match watcher.resume().await {
                    Ok(gone) => {
                        watching = true;
                        gone
                    }
                    Err(error) => {
                        eprintln!("cxl-member: {error}; trying again");
                        continue;
                    }
                }
            }
        };
        for (slot, holder) in gone {
            if slot == keeper.slot() || holder.incarnation == 0 {
                continue;
            }
            eprintln!(
                "cxl-member: the lease of slot {slot} (machine {}) ended: incarnation {} is suspected",
                holder.machine, holder.incarnation
            );
            host.suspect(slot, holder.incarnation)?;
        }
    }
}

/// The signals that end this program.
struct Stop {
    signals: [Signal; 3],
}

impl Stop {
    fn new() -> Result<Stop> {
        let listen = |kind| signal(kind).map_err(|source| Error::Os { what: "listening to signals".into(), source });
        Ok(Stop { signals: [listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?, listen(SignalKind::hangup())?] })
    }

    async fn asked(&mut self) {
        let [terminate, interrupt, hangup] = &mut self.signals;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}

fn start(command: &[String]) -> Result<Option<Child>> {
    let Some((program, rest)) = command.split_first() else { return Ok(None) };
    let started = Command::new(program).args(rest).kill_on_drop(true).spawn();
    started.map(Some).map_err(|source| Error::Os { what: format!("running {program}"), source })
}

/// The end of the program; never, if there is none.
async fn ended(child: &mut Option<Child>) -> Result<ExitStatus> {
    match child {
        Some(child) => child.wait().await.map_err(|source| Error::Os { what: "waiting for the program".into(), source }),
        None => std::future::pending().await,
    }
}

/// Asks the program to end, and kills it where that takes longer than ten seconds.
async fn end(child: &mut Child) {
    let Some(pid) = child.id() else { return };
    // SAFETY: no memory is involved; the process is our child and was not waited for, so the pid is still its own.
    unsafe { libc::kill(pid as libc::pid_t, libc::SIGTERM) };
    if tokio::time::timeout(Duration::from_secs(10), child.wait()).await.is_err() {
        // It may have ended in between, which is as good.
        let _ = child.kill().await;
    }
}

fn code_of(status: ExitStatus) -> ExitCode {
    ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}
