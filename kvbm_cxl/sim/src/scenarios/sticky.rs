// SPDX-License-Identifier: Apache-2.0
//! A grant stays with the host that used it until it is unused there for `idle_release_ms`, from its first use on: a host that publishes
//! seldom would otherwise pay the way to the manager and back each time (LOCKS.md section 3, release when idle for long).

use super::directed::{self, LONG_MS, MS};
use super::setup::join;
use crate::{Env, Failure, Stats, WritePath};
use cxl_pool::Result;
use cxl_pool::host::HostConfig;
use cxl_pool::lock::{FIRST_USER_LOCK, LockId};
use std::cell::RefCell;
use std::rc::Rc;

/// How long a grant stays without being used.
const IDLE_MS: u64 = 20;
/// Times that each host does so.
const ROUNDS: usize = 3;

/// One run: every host has a lock that no other host wants.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut cluster = directed::cluster(seed, 2, 2, 2, WritePath::OneUnit);
    cluster.host_config.idle_release_ms = IDLE_MS;
    let complaints = Rc::new(RefCell::new(Vec::new()));
    for (host, lock) in cluster.hosts.clone().into_iter().zip(FIRST_USER_LOCK..) {
        let (config, complaints) = (cluster.host_config.clone(), Rc::clone(&complaints));
        cluster.world.spawn(host, "main", move |env| use_seldom(&env, &config, lock, &complaints));
    }
    cluster.run_without("idle grants", &complaints)
}

fn use_seldom(env: &Env, config: &HostConfig, lock: LockId, complaints: &RefCell<Vec<String>>) -> Result<()> {
    let host = join(env, config)?;
    let used = || host.acquire(lock, LONG_MS).map(|guard| guard.grant());
    for _ in 0..ROUNDS {
        let first = used()?;
        // Rounds of the service, but not as many as make it idle.
        env.platform().sleep_ns(env.below(IDLE_MS as usize / 2) as u64 * MS + MS);
        let second = used()?;
        if first != second {
            complaints.borrow_mut().push(format!("lock {lock}: grant {first} was gone before it had been idle for {IDLE_MS} ms"));
        }
        env.platform().sleep_ns(2 * IDLE_MS * MS);
        if used()? == second {
            complaints.borrow_mut().push(format!("lock {lock}: grant {second} stayed for {} ms without being used", 2 * IDLE_MS));
        }
        env.platform().sleep_ns(2 * IDLE_MS * MS);
    }
    Ok(())
}
