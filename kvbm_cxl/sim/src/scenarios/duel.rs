// SPDX-License-Identifier: Apache-2.0
//! Few hosts, each with a manager seat, and two locks: managers and holders stand still at the moments where a grant is decided.
//!
//! Checked: V1, V2 and V3 at every entry; V9 by the run's end.

use super::directed::{self, LONG_MS, MS, at};
use super::history::{History, Shared};
use super::setup::{Cluster, join};
use crate::{Env, Failure, Fault, Planned, Stats, WritePath};
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::lock::{FIRST_USER_LOCK, LOCK_TABLE, LockMode, mode_of};
use cxl_pool::{Error, Result};
use std::rc::Rc;

/// Sections that each host wants to get through.
const SECTIONS: u32 = 4;
/// Where managers and holders stand still.
const POINTS: &[&str] = &[
    "duel.inside", "fenced.acknowledged", "lock.accepted", "lock.cancelled", "lock.released", "lock.request_published", "lock.requested",
    "lock.seen", "manager.adopted", "manager.before_claim", "manager.before_grant", "manager.claimed", "manager.collected",
    "manager.fenced", "manager.granted", "manager.passes_on", "manager.suspects",
];

/// One run.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    run_with(seed, None)
}

/// One run, with that fault, if one is given, in place of the scenario's own.
pub fn run_with(seed: u64, planned: Option<Planned>) -> std::result::Result<Stats, Failure> {
    let mut sizes = crate::Random::new(seed);
    let hosts = sizes.pick(&[2, 3, 3]);
    let path = directed::write_path(seed);
    let mut cluster = directed::cluster(seed, hosts, hosts, hosts, path);
    match planned {
        Some(planned) => cluster.plan_beside(planned, "duel.inside"),
        None => order_faults(&mut cluster, path),
    }
    let history = History::shared();
    // One lock for all, so that they are in each other's way.
    let lock = cluster.random.pick(&[LOCK_TABLE, FIRST_USER_LOCK, FIRST_USER_LOCK]);
    for host in cluster.hosts.clone() {
        let (history, config) = (Rc::clone(&history), cluster.host_config.clone());
        cluster.world.start(host, move |env| {
            let (history, config) = (Rc::clone(&history), config.clone());
            env.spawn("main", move |env| main(&env, &history, &config, lock));
        });
    }
    let stats = cluster.world.run()?;
    if history.borrow().entered == 0 {
        return Err(cluster.world.failure("no host ever entered a critical section: nothing was tested"));
    }
    Ok(stats)
}

fn order_faults(cluster: &mut Cluster, path: WritePath) {
    let random = &mut cluster.random;
    let pause = |random: &mut _| Fault::PauseHost { for_ns: directed::pause_ns(random) };
    match random.below(8) {
        // A manager stands still between its decision and its publish, and its own host waits for that very grant.
        0 => {
            let planned = at("manager.before_grant", random.between(1, 8), None, pause(random));
            cluster.world.plan(planned);
        }
        // The manager stands still, and so does the one that takes over, before or after its claim.
        1 => {
            let point = random.pick(&["manager.before_claim", "manager.claimed", "manager.collected"]);
            let stop = Fault::PauseHost { for_ns: random.between(4 * MS, 12 * MS) };
            let planned = [
                at("manager.before_grant", random.between(1, 8), None, stop),
                at(point, random.between(1, 3), None, Fault::PauseHost { for_ns: random.between(MS, 30 * MS) }),
            ];
            planned.into_iter().for_each(|planned| cluster.world.plan(planned));
        }
        // The manager is slow with two grants in a row; meanwhile the one that was to get the first gives up, and asks again.
        2 => {
            let visit = random.between(1, 8);
            for visit in [visit, visit + 1] {
                let slow = Fault::PauseThread { for_ns: random.between(MS / 2, 5 * MS) };
                cluster.world.plan(at("manager.before_grant", visit, None, slow));
            }
        }
        // The manager stands still with a grant that no host will accept; its successor continues from there and stops in turn, so
        // that a third one chooses between the two.
        4 => {
            let planned = [
                at("manager.before_grant", random.between(1, 8), None, Fault::PauseHost { for_ns: random.between(8 * MS, 14 * MS) }),
                at(
                    "manager.granted",
                    random.between(1, 2),
                    Some(cluster.hosts[1]),
                    Fault::PauseHost { for_ns: random.between(8 * MS, 30 * MS) },
                ),
            ];
            planned.into_iter().for_each(|planned| cluster.world.plan(planned));
        }
        // A holder stands still inside, and the manager right after it passed the lock on.
        3 => {
            let point = random.pick(&["manager.granted", "manager.suspects", "manager.fenced", "manager.passes_on"]);
            let planned = [
                at("duel.inside", random.between(1, 6), None, pause(random)),
                at(point, random.between(1, 4), None, Fault::PauseThread { for_ns: random.between(MS / 10, 8 * MS) }),
            ];
            planned.into_iter().for_each(|planned| cluster.world.plan(planned));
        }
        _ => {
            let count = random.between(1, 5);
            cluster.disturb(path, POINTS, count);
        }
    }
}

fn main(env: &Env, history: &Shared, config: &HostConfig, lock: u32) -> Result<()> {
    let host = join(env, config)?;
    history.borrow_mut().joined(env, host.slot(), host.incarnation(), host.nonce());
    let mut done = 0;
    for round in 0.. {
        let timeout_ms = if env.below(3) == 0 && round < 12 { env.below(6) as u64 } else { LONG_MS };
        match section(env, &host, history, lock, timeout_ms) {
            Ok(()) => done += 1,
            // A line looks damaged while its writer stands still in the middle of it.
            Err(Error::Timeout { .. } | Error::BadLine { .. }) if timeout_ms != LONG_MS => {}
            Err(Error::Fenced { .. }) if round < 50 => {}
            Err(error) => return Err(error),
        }
        if done == SECTIONS {
            break;
        }
        directed::rest(env);
    }
    Ok(())
}

fn section(env: &Env, host: &Host, history: &Shared, lock: u32, timeout_ms: u64) -> Result<()> {
    let mut guard = host.acquire(lock, timeout_ms)?;
    let strict = mode_of(host.lines().layout().geometry(), lock) == LockMode::Safe;
    let ticket = history.borrow_mut().enter(env, lock, host.slot(), guard.op().incarnation(), guard.grant(), strict);
    env.point("duel.inside");
    if env.below(4) != 0 {
        guard.repaired();
    }
    for _ in 0..env.below(6) {
        env.yield_now()?;
    }
    history.borrow_mut().exit(ticket);
    Ok(())
}
