// SPDX-License-Identifier: Apache-2.0
//! A child process: it serves or calls until it is told to stop, and says in a log what it lives through.

use crate::lab::{PATIENCE_MS, host_config, message};
use crate::load;
use cxl_pool::alloc::{AllocConfig, Allocator, LocalArea};
use cxl_pool::device::PoolSpec;
use cxl_pool::pool::{OpenOptions, Pool};
use cxl_pool::ring::rpc::{Client, Server};
use cxl_pool::ring::{Connection, RingConfig, Rings};
use cxl_pool::{Error, Result};
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Names the pool; only set for children.
pub const POOL: &str = "RING_POOL";
/// `serve` or `call`.
pub const ROLE: &str = "RING_ROLE";
/// Path of the child's log.
pub const LOG: &str = "RING_LOG";
/// Path of a file that tells the children to end once it exists.
pub const STOP: &str = "RING_STOP";
/// Number that makes this child's messages its own.
pub const NUMBER: &str = "RING_NUMBER";

/// Time after which a process that was not seen alive counts as gone, in milliseconds: longer than a live one waits for a core.
pub fn peer_timeout_ms() -> u64 {
    load::ms(1_500)
}
const NAME: &[u8] = b"service";
/// Calls under way at a time.
const DEPTH: usize = 8;

fn log(file: &mut File, line: &str) {
    file.write_all(format!("{line}\n").as_bytes()).unwrap();
}

/// What the server makes of a request.
fn response_to(request: &[u8]) -> Vec<u8> {
    request.iter().rev().map(|byte| byte.wrapping_add(1)).collect()
}

/// Runs the child if this process is one; the result is its exit status.
pub fn run_if_child() -> Option<i32> {
    let spec = std::env::var(POOL).ok()?;
    let mut file = File::options().create(true).append(true).open(std::env::var(LOG).ok()?).ok()?;
    match run(&spec, &mut file) {
        Ok(()) => Some(0),
        Err(error) => {
            log(&mut file, &format!("failed {error}"));
            Some(1)
        }
    }
}

fn is_over() -> bool {
    std::env::var(STOP).is_ok_and(|path| Path::new(&path).exists())
}

fn run(spec: &str, file: &mut File) -> Result<()> {
    let pool = Pool::open(&PoolSpec::parse(spec)?, &OpenOptions::default())?;
    let host = pool.join(cxl_pool::host::HostConfig { suspect_ms: 1_200, ..host_config(&pool) })?;
    let service = host.serve()?;
    let allocator = Arc::new(again(|| Allocator::attach(&host, LocalArea::of(&host)?, AllocConfig::default()))?);
    let config = RingConfig { ring_bytes: 8192, beat_ms: 20, peer_timeout_ms: peer_timeout_ms(), ..RingConfig::default() };
    let rings = again(|| Rings::new(&host, allocator.clone(), config.clone()))?;
    match std::env::var(ROLE).as_deref() {
        Ok("serve") => serve(&rings, file)?,
        _ => call(&rings, file)?,
    }
    drop(rings);
    let leftover = allocator.usage().scratch_bytes;
    if leftover != 0 {
        log(file, &format!("failed {leftover} bytes were not given back"));
    }
    host.leave()?;
    drop(service);
    Ok(())
}

/// Repeats what a fence interrupted.
fn again<T>(mut work: impl FnMut() -> Result<T>) -> Result<T> {
    loop {
        match work() {
            Err(Error::Fenced { .. } | Error::Timeout { .. }) => std::thread::sleep(Duration::from_millis(2)),
            other => return other,
        }
    }
}

fn kind(error: &Error) -> Option<&'static str> {
    Some(match error {
        Error::PeerGone { .. } => "gone",
        Error::PeerClosed { .. } => "closed",
        Error::Timeout { .. } => "timeout",
        Error::Fenced { .. } => "fenced",
        Error::NotFound(_) => "absent",
        _ => return None,
    })
}

/// Answers one caller after the other.
fn serve(rings: &Rings, file: &mut File) -> Result<()> {
    let mut listener = again(|| rings.listen(NAME))?;
    log(file, "listening");
    while !is_over() {
        match listener.accept(50) {
            Ok(connection) => answer(connection, file)?,
            Err(Error::Timeout { .. } | Error::Fenced { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    again(|| rings.listen(b"other name")?.close())?;
    match listener.close() {
        Err(Error::Fenced { .. } | Error::Timeout { .. }) => Ok(()),
        other => other,
    }
}

fn answer(connection: Connection, file: &mut File) -> Result<()> {
    let mut server = Server::new(connection);
    let mut heard = Instant::now();
    loop {
        let served = server.serve(64, PATIENCE_MS, |request, response| {
            response.extend(response_to(request));
            request.len() as u32
        });
        match served {
            Ok(0) if is_over() => return Ok(()),
            Ok(0) => std::thread::yield_now(),
            Ok(_) => heard = Instant::now(),
            Err(error) => {
                let kind = kind(&error).ok_or(error)?;
                log(file, &format!("{kind} {}", heard.elapsed().as_millis()));
                return Ok(());
            }
        }
    }
}

/// Calls, and connects again whenever the other end is gone.
fn call(rings: &Rings, file: &mut File) -> Result<()> {
    let number: u64 = std::env::var(NUMBER).ok().and_then(|number| number.parse().ok()).unwrap_or(1);
    let mut calls = 0;
    while !is_over() {
        match rings.connect(NAME, 1_000) {
            Ok(connection) => {
                log(file, "connected");
                let mut client = Client::new(connection, DEPTH)?;
                let mut heard = Instant::now();
                if let Err(error) = talk(&mut client, file, number, &mut calls, &mut heard) {
                    let kind = kind(&error).ok_or(error)?;
                    log(file, &format!("{kind} {}", heard.elapsed().as_millis()));
                }
            }
            Err(error) if kind(&error).is_some() => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn talk(client: &mut Client, file: &mut File, number: u64, calls: &mut u64, heard: &mut Instant) -> Result<()> {
    let mut under_way = std::collections::HashMap::new();
    let mut response = Vec::new();
    while !is_over() {
        while under_way.len() < DEPTH {
            let request = message(number, *calls, 300);
            under_way.insert(client.submit(&request, PATIENCE_MS)?, request);
            *calls += 1;
        }
        client.flush();
        let Some(completion) = client.poll(&mut response)? else {
            std::thread::yield_now();
            continue;
        };
        *heard = Instant::now();
        let request = under_way.remove(&completion.call);
        let is_right = request.as_ref().is_some_and(|request| response == response_to(request));
        if !is_right || completion.status? as usize != response.len() {
            log(file, &format!("failed wrong response to {:?}", completion.call));
        }
        if calls.is_multiple_of(64) {
            log(file, &format!("calls {calls}"));
        }
    }
    Ok(())
}
