// SPDX-License-Identifier: Apache-2.0
//! More machines than slots come and go: they join, hold a lock for a moment, leave, crash, are fenced, restart, on pools left dirty by
//! others.
//!
//! Checked: V8 at every join and re-join, V1 and V2 at every entry, V9 by the run's end.

use super::history::{History, Shared};
use super::setup::{Cluster, join, no_line_half_done};
use crate::{Env, Failure, Stats};
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::lock::{FIRST_USER_LOCK, LockMode, mode_of};
use cxl_pool::{Error, Result};
use std::rc::Rc;

/// One run.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut sizes = crate::Random::new(seed);
    let hosts = sizes.pick(&[2, 3, 3, 4, 5, 8]);
    // Machine 0 never leaves, so that a manager can bind the others.
    let slots = sizes.between(2, hosts as u64) as usize;
    let mut cluster = Cluster::new(seed, hosts, slots, |config, _| no_line_half_done(config, seed));
    let history = History::shared();
    let processes = cluster.random.pick(&[1, 1, 2]);
    for (index, host) in cluster.hosts.clone().into_iter().enumerate() {
        for _ in 0..processes {
            let (history, config) = (Rc::clone(&history), cluster.host_config.clone());
            let stays = index == 0;
            cluster.world.start(host, move |env| {
                let (history, config) = (Rc::clone(&history), config.clone());
                env.spawn("main", move |env| visit(&env, &history, &config, stays));
            });
        }
    }
    let stats = cluster.world.run()?;
    if history.borrow().entered == 0 {
        return Err(cluster.world.failure("no host ever entered a critical section: nothing was tested"));
    }
    Ok(stats)
}

fn visit(env: &Env, history: &Shared, config: &HostConfig, stays: bool) -> Result<()> {
    let visits = if stays { 1 } else { 2 };
    for _ in 0..visits {
        let host = match join(env, config) {
            Ok(host) => host,
            // All slots are taken by machines that live, or are down for a while.
            Err(Error::Full { .. } | Error::SlotInUse { .. }) => continue,
            Err(error) => return Err(error),
        };
        history.borrow_mut().joined(env, host.slot(), host.incarnation(), host.nonce());
        use_lock(env, &host, history)?;
        if stays {
            // Its service continues as a daemon.
            return Ok(());
        }
        history.borrow_mut().left(env.process());
        match host.leave() {
            Ok(()) => {}
            // A fenced host has nothing to leave with; its next visit joins again.
            Err(Error::Timeout { .. } | Error::Fenced { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn use_lock(env: &Env, host: &Host, history: &Shared) -> Result<()> {
    for round in 0.. {
        let lock = FIRST_USER_LOCK + env.below(2) as u32;
        match host.acquire(lock, 500_000) {
            Ok(mut guard) => {
                let strict = mode_of(host.lines().layout().geometry(), lock) == LockMode::Safe;
                let incarnation = guard.op().incarnation();
                history.borrow_mut().joined(env, host.slot(), incarnation, host.nonce());
                let ticket = history.borrow_mut().enter(env, lock, host.slot(), incarnation, guard.grant(), strict);
                guard.repaired();
                env.yield_now()?;
                history.borrow_mut().exit(ticket);
                return Ok(());
            }
            Err(Error::Fenced { .. }) if round < 50 => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
