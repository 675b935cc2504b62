// SPDX-License-Identifier: Apache-2.0
//! Progress: a machine goes away for good, or a host keeps a lock that others want. All others get through all the same (V9).
//!
//! What can stop a lock: the manager is gone, the holder is gone, the holder does not know that others wait. Under a lock of mode S a
//! holder that is gone for good blocks the others until an operator says that it is.

use super::directed::{self, LONG_MS, MS, at};
use super::history::{History, Shared};
use super::setup::join;
use crate::{Env, Failure, Fault, SimHost, Stats, WritePath};
use cxl_pool::Result;
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::lock::{FIRST_USER_LOCK, LOCK_TABLE, LockMode, mode_of};
use cxl_pool::media::Identity;
use cxl_pool::platform::MachineId;
use std::cell::Cell;
use std::rc::Rc;

/// A machine and the identity that it reports.
type Machine = (SimHost, MachineId);

/// One run.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut sizes = crate::Random::new(seed);
    let hosts = sizes.pick(&[2, 3]);
    // A line that its writer left half written for good would block what it is part of, until an operator acts.
    let mut cluster = directed::cluster(seed, hosts, hosts, hosts, WritePath::OneUnit);
    // No host gives a lock back unasked.
    cluster.host_config.idle_release_ms = LONG_MS;
    let gone = Fault::CrashMachine { restart_after_ns: None };
    let point = sizes.pick(&["", "stall.inside", "stall.inside", "manager.granted", "manager.before_grant", "manager.claimed"]);
    if !point.is_empty() {
        cluster.world.plan(at(point, sizes.between(1, 3), None, gone));
    }
    let history = History::shared();
    let through = Rc::new(Cell::new(0));
    let lock = sizes.pick(&[LOCK_TABLE, FIRST_USER_LOCK]);
    let all: Vec<Machine> = cluster.hosts.iter().map(|&host| (host, cluster.world.machine_id(host))).collect();
    for host in cluster.hosts.clone() {
        let (history, config, through, all) = (Rc::clone(&history), cluster.host_config.clone(), Rc::clone(&through), all.clone());
        cluster.world.spawn(host, "main", move |env| {
            let host = main(&env, &history, &config, lock, all)?;
            through.set(through.get() + 1);
            drop(host);
            Ok(())
        });
    }
    let stats = cluster.world.run()?;
    if through.get() + (stats.crashes as usize) < hosts {
        return Err(cluster.world.failure("not every live host got through"));
    }
    Ok(stats)
}

fn main(env: &Env, history: &Shared, config: &HostConfig, lock: u32, all: Vec<Machine>) -> Result<Host> {
    let host = join(env, config)?;
    // A lock of mode T has to pass on without any statement.
    if mode_of(host.lines().layout().geometry(), lock) == LockMode::Safe {
        let operator = host.clone();
        env.spawn_daemon("operator", move |env| state_deaths(&env, &operator, &all));
    }
    for _ in 0..2 {
        let guard = host.acquire(lock, LONG_MS)?;
        let strict = mode_of(host.lines().layout().geometry(), lock) == LockMode::Safe;
        let ticket = history.borrow_mut().enter(env, lock, host.slot(), guard.op().incarnation(), guard.grant(), strict);
        env.point("stall.inside");
        history.borrow_mut().exit(ticket);
    }
    Ok(host)
}

/// An operator who sees that a machine is off says so.
fn state_deaths(env: &Env, host: &Host, all: &[Machine]) -> Result<()> {
    loop {
        env.platform().sleep_ns(5 * MS);
        for slot in 0..all.len() as u16 {
            let identity = env.view(|view| view.peek::<Identity>(slot.into()));
            let owner = all.iter().find(|(_, id)| id.0 == identity.machine);
            if owner.is_some_and(|(host, _)| !env.view(|view| view.is_up(*host))) {
                host.declare_dead(slot, identity.incarnation)?;
            }
        }
    }
}
