// SPDX-License-Identifier: Apache-2.0
//! A pool is reformatted under working hosts (LOCKS.md 12.16).
//!
//! A patient format makes the superblock void and waits until every host has stopped. A hasty one writes at once, as one does that takes a
//! paused host for dead: lines of the former hosts land on the new pool.
//!
//! Checked: no line of a former host verifies as one of the new format (I7), and none lands there at all when the format waited (I1).

use super::setup::Cluster;
use crate::config::Chances;
use crate::{Env, Failure, POOL_INCARNATION, POOL_UUID, Stats};
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::line::{Line, Lines, empty_line, verify_line};
use cxl_pool::lock::FIRST_USER_LOCK;
use cxl_pool::media::Intent;
use cxl_pool::pool::FormerHosts;
use cxl_pool::{Error, Result};
use std::cell::Cell;
use std::rc::Rc;

/// First line of the superblock before and after the format; hosts read no other field.
const BEFORE: Line = Line([1; 64]);
const BEHIND: Line = Line([2; 64]);
/// Longer than any operation here, and than a thread stands still.
const PATIENCE_NS: u64 = 50_000_000;
/// Attempts of a host to work, some of them after the format.
const MAX_ROUNDS: usize = 2_000;

/// One run.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut sizes = crate::Random::new(seed);
    let (hosts, is_patient) = (sizes.pick(&[1, 2, 3]), sizes.one_in(2));
    let mut cluster = Cluster::new(seed, hosts + 1, hosts, |config, _| config.chances = Chances::default());
    cluster.world.inspector().memory().write_line(0, &BEFORE).map_err(|error| cluster.world.failure(error.to_string()))?;
    let joined = Rc::new(Cell::new(0));
    let machines = cluster.hosts.clone();
    for &machine in &machines[..hosts] {
        let (config, joined) = (cluster.host_config.clone(), Rc::clone(&joined));
        cluster.world.spawn(machine, "work", move |env| work(&env, &config, &joined));
    }
    let wait_ns = sizes.between(0, 3_000_000);
    cluster.world.spawn(machines[hosts], "format", move |env| format(&env, hosts, &joined, wait_ns, is_patient));
    let stats = cluster.world.run()?;
    let seen = cluster.world.inspector();
    let lines = Lines::new(seen.memory().clone(), seen.layout().clone(), &POOL_UUID, POOL_INCARNATION + 1);
    for span in lines.layout().spans() {
        for index in 0..span.lines {
            let found = lines.fetch_raw(span.offset + index * 64).map_err(|error| cluster.world.failure(error.to_string()))?;
            if found == empty_line(&lines, span.region, index) {
                continue;
            }
            let place = format!("line {index} of {:?}", span.region);
            if verify_line(&lines, span.region, index, &found).is_ok() {
                return Err(cluster.world.failure(format!("I7: {place} of a former host passes for one of the new format")));
            }
            if is_patient {
                return Err(cluster.world.failure(format!("I1: {place} was written by a former host after the format had waited")));
            }
        }
    }
    Ok(stats)
}

/// A host that takes locks, and now and then does something that lasts for several heartbeats, until the pool is gone.
fn work(env: &Env, config: &HostConfig, joined: &Cell<usize>) -> Result<()> {
    let host = cxl_pool::pool::join(env.lines(), env.platform(), config.clone())?;
    joined.set(joined.get() + 1);
    let service = host.clone();
    env.spawn_daemon("service", move |env| {
        loop {
            match service.service_round() {
                Ok(rest_ns) => env.platform().sleep_ns(rest_ns),
                Err(Error::Closed) => return Ok(()),
                // As the service thread does, whatever it is.
                Err(_) => env.platform().sleep_ns(1_000_000),
            }
        }
    });
    for _ in 0..MAX_ROUNDS {
        match step(env, &host) {
            Err(Error::Replaced { .. }) => return Ok(()),
            // Lines of the former and of the new pool, met before the host notices.
            Ok(()) | Err(_) => env.platform().sleep_ns(100_000),
        }
    }
    Ok(())
}

fn step(env: &Env, host: &Host) -> Result<()> {
    if env.below(4) > 0 {
        let mut guard = host.acquire(FIRST_USER_LOCK + env.below(2) as u32, 20)?;
        guard.repaired();
        return env.yield_now();
    }
    let op = host.enter()?;
    env.platform().sleep_ns(env.below(6_000_000) as u64);
    let first = u64::from(host.slot()) * cxl_pool::limits::INTENTS as u64;
    host.lines().publish(first, Intent { incarnation: op.incarnation(), ..Intent::default() })
}

fn format(env: &Env, hosts: usize, joined: &Cell<usize>, wait_ns: u64, is_patient: bool) -> Result<()> {
    while joined.get() < hosts {
        env.platform().sleep_ns(100_000);
    }
    env.platform().sleep_ns(wait_ns);
    let (lines, memory, now_ns) = (env.lines(), env.memory(), || env.platform().now_ns());
    let mut former = FormerHosts::new(lines.clone(), PATIENCE_NS, now_ns())?;
    memory.write_line(0, &Line::ZERO)?;
    memory.fence_stores();
    while is_patient && !former.look(now_ns())? {
        env.platform().sleep_ns(200_000);
    }
    crate::format::format(&Lines::new(memory.clone(), lines.layout().clone(), &POOL_UUID, POOL_INCARNATION + 1));
    memory.fence_stores();
    memory.write_line(0, &BEHIND)?;
    memory.fence_stores();
    // Whatever is still to come of them comes now.
    env.platform().sleep_ns(20_000_000);
    Ok(())
}
