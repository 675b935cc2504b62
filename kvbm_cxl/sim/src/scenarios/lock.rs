// SPDX-License-Identifier: Apache-2.0
//! Hosts contend for locks of both modes while hosts crash, restart, and pause for longer than their leases.
//!
//! Checked: V1 and V2 at every entry; under the mode S lock a line that is handed over with the lock, so that a stale read, a lost update
//! or a second holder shows in its value; V9 by the run's end.

use super::history::{History, Shared};
use super::setup::{Cluster, join, no_line_half_done};
use crate::{Env, Failure, Stats};
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::lock::{FIRST_USER_LOCK, LOCK_TABLE, LockMode, mode_of};
use cxl_pool::media::ChunkHead;
use cxl_pool::{Error, Result};
use std::rc::Rc;

/// Sections that each worker wants to get through.
const SECTIONS: u32 = 3;

/// One run.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut sizes = crate::Random::new(seed);
    let hosts = sizes.pick(&[2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 5, 6, 8, 16]);
    run_with(seed, hosts)
}

/// One run with so many hosts.
pub fn run_with(seed: u64, hosts: usize) -> std::result::Result<Stats, Failure> {
    let mut cluster = Cluster::new(seed, hosts, hosts.max(2), |config, _| no_line_half_done(config, seed));
    let history = History::shared();
    let workers = cluster.random.pick(&[1, 1, 2]);
    for host in cluster.hosts.clone() {
        let (history, config) = (Rc::clone(&history), cluster.host_config.clone());
        cluster.world.start(host, move |env| {
            let (history, config) = (Rc::clone(&history), config.clone());
            env.spawn("main", move |env| main(&env, &history, &config, workers));
        });
    }
    let stats = cluster.world.run()?;
    let entered = history.borrow().entered;
    if entered < u64::from(SECTIONS) {
        return Err(cluster.world.failure(format!("only {entered} critical sections were entered: nothing was tested")));
    }
    Ok(stats)
}

fn main(env: &Env, history: &Shared, config: &HostConfig, workers: usize) -> Result<()> {
    let host = join(env, config)?;
    history.borrow_mut().joined(env, host.slot(), host.incarnation(), host.nonce());
    for worker in 0..workers {
        let (host, history) = (host.clone(), Rc::clone(history));
        env.spawn(&format!("worker {worker}"), move |env| work(&env, &host, &history));
    }
    Ok(())
}

fn work(env: &Env, host: &Host, history: &Shared) -> Result<()> {
    let mut done = 0;
    let mut rounds = 0;
    while done < SECTIONS {
        rounds += 1;
        let lock = if env.below(2) == 0 { LOCK_TABLE } else { FIRST_USER_LOCK };
        // Once in a while a waiter gives up, so that grants arrive for requests that are void.
        let timeout_ms = if env.below(4) == 0 && rounds < 20 { 0 } else { 500_000 };
        match section(env, host, history, lock, timeout_ms) {
            Ok(()) => done += 1,
            Err(Error::Timeout { .. }) if timeout_ms == 0 => history.borrow_mut().timeouts += 1,
            Err(Error::Fenced { .. }) if rounds < 100 => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn section(env: &Env, host: &Host, history: &Shared, lock: u32, timeout_ms: u64) -> Result<()> {
    let mut guard = host.acquire(lock, timeout_ms)?;
    let strict = mode_of(host.lines().layout().geometry(), lock) == LockMode::Safe;
    let ticket = history.borrow_mut().enter(env, lock, host.slot(), guard.op().incarnation(), guard.grant(), strict);
    if guard.needs_repair() {
        history.borrow_mut().repairs += 1;
        guard.repaired();
    }
    if strict {
        count(env, host, history, lock)?;
    } else {
        for _ in 0..env.below(8) {
            env.yield_now()?;
        }
    }
    history.borrow_mut().exit(ticket);
    drop(guard);
    Ok(())
}

/// Counts a line up that the lock's holder owns.
fn count(env: &Env, host: &Host, history: &Shared, lock: u32) -> Result<()> {
    let lines = host.lines();
    let line: ChunkHead = lines.fetch(0)?;
    history.borrow_mut().read(env, lock, line.run);
    let value = line.run + 1;
    history.borrow_mut().writing(lock, line.run, value);
    lines.publish(0, ChunkHead { run: value, ..line })?;
    // Published is ordered, not arrived: a crash may still lose it, until a full fence.
    lines.memory().fence_all();
    history.borrow_mut().written(lock, value);
    Ok(())
}
