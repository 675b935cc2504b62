// SPDX-License-Identifier: Apache-2.0
//! `cxlctl host`: holds this machine's slot, and a seat where it has one, while workers come and go.

use crate::cli::HostArgs;
use crate::output::{Exit, Failure, Out};
use cxl_pool::Result;
use cxl_pool::cache::{Cache, CacheConfig, Upkeep};
use cxl_pool::copy::CopyConfig;
use cxl_pool::host::{Host, HostConfig, machine_name};
use cxl_pool::pool::Pool;
use serde_json::json;
use std::io::Write;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Interval at which this process checks for a signal and for changes.
const LOOK: Duration = Duration::from_millis(100);
/// How long it waits for the end of workers and other hosts on this node before it leaves, in units of `CXL_SUSPECT_MS`: a node that is
/// shut down ends all of them at once.
const PATIENCE: u64 = 4;

pub fn run(pool: Option<&str>, args: &HostArgs, out: &mut Out) -> std::result::Result<Exit, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
        signal_hook::flag::register(signal, stop.clone())
            .map_err(|error| Failure::new(Exit::Failed, format!("listening to signal {signal}: {error}")))?;
    }
    let pool = crate::pool::open(pool, false)?;
    let config = HostConfig { slot: args.slot, join_timeout_ms: args.timeout_ms, ..HostConfig::from_env()? };
    let host = pool.join(config)?;
    let outcome = serve(&pool, &host, args, out, &stop);
    // However it went, the slot is given back where it is still this machine's.
    let left = match host.check_membership() {
        Ok(()) => host.leave(),
        Err(_) => Ok(()),
    };
    outcome?;
    left.map_err(|error| Failure::new(Exit::Failed, format!("leaving the pool: {error}")))?;
    log("left");
    Ok(Exit::Done)
}

/// Serves until a signal asks for the end, or this machine is no member any more.
fn serve(pool: &Pool, host: &Host, args: &HostArgs, out: &mut Out, stop: &AtomicBool) -> std::result::Result<(), Failure> {
    let service = host.serve()?;
    let cache = if pool.layout().geometry().cell_chunks() > 0 { Some(keep_up(host)?) } else { None };
    let (slot, incarnation) = (host.slot(), host.incarnation());
    out.answer(
        || json!({"slot": slot, "incarnation": incarnation, "pid": std::process::id()}),
        || format!("slot {slot}, incarnation {incarnation}: serving\n"),
    )?;
    out.flush()?;
    let _ready = args.ready_file.as_deref().map(Ready::write).transpose()?;
    notify("READY=1")?;
    let outcome = watch(pool, host, stop);
    notify("STOPPING=1")?;
    let outcome = outcome.and_then(|()| host.outlive_others(PATIENCE * host.config().suspect_ms));
    if let Some((cache, upkeep)) = cache {
        drop(upkeep);
        cache.close()?;
    }
    drop(service);
    Ok(outcome?)
}

/// The upkeep of the cache: what dead hosts left is adopted also where no worker runs. This process copies nothing, so it needs no crew.
fn keep_up(host: &Host) -> Result<(Cache, Upkeep)> {
    let cache = Cache::open(host, CacheConfig { copy: Some(CopyConfig::alone()), ..CacheConfig::default() })?;
    let upkeep = cache.serve()?;
    Ok((cache, upkeep))
}

fn watch(pool: &Pool, host: &Host, stop: &AtomicBool) -> Result<()> {
    let mut incarnation = host.incarnation();
    let mut stated = host.stated_ends();
    loop {
        // Read first, so that changes before the signal are logged.
        let is_asked = stop.load(Ordering::Relaxed);
        host.check_membership()?;
        let now = host.incarnation();
        if now != incarnation {
            log(&format!("was fenced, and has joined again: slot {}, incarnation {now}", host.slot()));
            incarnation = now;
        }
        let ends = host.stated_ends();
        for (slot, ended) in ends.iter().filter(|end| !stated.contains(end)) {
            let name = machine_name(pool.lines(), u32::from(*slot), *ended).map(|name| format!(" ({name})")).unwrap_or_default();
            log(&format!("slot {slot}{name}, incarnation {ended}: all its processes have ended, its slot and memory are released"));
        }
        stated = ends;
        if is_asked {
            return Ok(());
        }
        std::thread::sleep(LOOK);
    }
}

/// One line about what happened. Where standard error is closed there is no place for it.
fn log(text: &str) {
    let _ = writeln!(std::io::stderr(), "cxlctl host: {}", text.replace(['\n', '\r'], " "));
}

/// Tells the service manager, where one listens (sd_notify(3)).
fn notify(text: &str) -> std::result::Result<(), Failure> {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(()) };
    let bytes = name.as_encoded_bytes();
    let address = match bytes.strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&name),
    };
    let sent = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(text.as_bytes(), &address));
    sent.map(drop).map_err(|error| Failure::new(Exit::Failed, format!("telling NOTIFY_SOCKET {}: {error}", name.display())))
}

/// The file that is there while this process serves.
struct Ready(PathBuf);

impl Ready {
    fn write(path: &Path) -> std::result::Result<Ready, Failure> {
        let failed = |error| Failure::new(Exit::Failed, format!("writing {}: {error}", path.display()));
        // One that was killed has left its own.
        std::fs::write(path, format!("{}\n", std::process::id())).map_err(failed)?;
        Ok(Ready(path.to_owned()))
    }
}

impl Drop for Ready {
    fn drop(&mut self) {
        // It may be gone already: its name is all that this process has to see to.
        let _ = std::fs::remove_file(&self.0);
    }
}
