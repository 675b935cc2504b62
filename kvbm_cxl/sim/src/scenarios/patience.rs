// SPDX-License-Identifier: Apache-2.0
//! Suspicion is as quick as its time-out says and no hastier (V9): no host is suspected for a time in which none was there to hear it, and
//! who dies again and again is given up as soon as the first time.

use super::directed::{self, LONG_MS, MS, SUSPECT_MS, at};
use super::setup::join;
use crate::{Env, Failure, Fault, Random, SimHost, Stats, WritePath};
use cxl_pool::Result;
use cxl_pool::host::HostConfig;
use cxl_pool::lock::LOCK_TABLE;
use cxl_pool::media::Seat;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Lives of the host that dies.
const LIVES: u32 = 5;
/// Longest wait for the lock of a dead holder: its silence, a fence, and rounds of services that take turns.
const WAIT_NS: u64 = (2 * SUSPECT_MS + 2) * MS;

/// One run.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    if Random::new(seed).one_in(2) { all_stand_still(seed) } else { one_dies_again(seed) }
}

/// All hosts are suspended and resume, as virtual machines of one server do: each is still who it was.
fn all_stand_still(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut cluster = directed::cluster(seed, 3, 2, 3, WritePath::OneUnit);
    let for_ns = cluster.random.between(2 * SUSPECT_MS, 20 * SUSPECT_MS) * MS;
    for &host in &cluster.hosts {
        cluster.world.plan(at("patience.together", 1, Some(host), Fault::PauseHost { for_ns }));
    }
    let (joined, changes) = (Rc::new(Cell::new(0)), Rc::new(RefCell::new(Vec::new())));
    for host in cluster.hosts.clone() {
        let (config, joined, changes) = (cluster.host_config.clone(), Rc::clone(&joined), Rc::clone(&changes));
        cluster.world.spawn(host, "main", move |env| {
            let host = join(&env, &config)?;
            joined.set(joined.get() + 1);
            while joined.get() < 3 {
                env.platform().sleep_ns(MS / 10);
            }
            // For all hosts to be heard by the manager.
            env.platform().sleep_ns(SUSPECT_MS * MS / 2);
            let before = (host.incarnation(), epoch(&env));
            env.point("patience.together");
            env.platform().sleep_ns(2 * SUSPECT_MS * MS);
            let after = (host.incarnation(), epoch(&env));
            if before != after {
                changes.borrow_mut().push(format!("slot {}: incarnation and epoch {before:?} became {after:?}", host.slot()));
            }
            Ok(())
        });
    }
    cluster.run_without("V9", &changes)
}

/// Of the manager in charge.
fn epoch(env: &Env) -> u32 {
    env.view(|view| (0..2).map(|seat| view.peek::<Seat>(seat).epoch).max().unwrap_or(0))
}

/// One host dies while it holds a lock, is fenced, and comes back to die once more.
fn one_dies_again(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut cluster = directed::cluster(seed, 2, 2, 2, WritePath::OneUnit);
    // No host gives a lock back unasked.
    cluster.host_config.idle_release_ms = LONG_MS;
    let (died_ns, complaints) = (Rc::new(Cell::new(None)), Rc::new(RefCell::new(Vec::new())));
    let [heir, mortal]: [SimHost; 2] = [cluster.hosts[0], cluster.hosts[1]];
    let (config, died, told) = (cluster.host_config.clone(), Rc::clone(&died_ns), Rc::clone(&complaints));
    cluster.world.spawn(heir, "main", move |env| inherit(&env, &config, &died, &mut told.borrow_mut()));
    let config = cluster.host_config.clone();
    cluster.world.start(mortal, move |env| {
        let (config, died_ns) = (config.clone(), Rc::clone(&died_ns));
        env.spawn("main", move |env| live(&env, &config, &died_ns));
    });
    cluster.run_without("V9", &complaints)
}

fn live(env: &Env, config: &HostConfig, died_ns: &Cell<Option<u64>>) -> Result<()> {
    let host = join(env, config)?;
    if env.generation() >= LIVES {
        return Ok(());
    }
    let guard = host.acquire(LOCK_TABLE, LONG_MS)?;
    // For its heart to be heard.
    env.platform().sleep_ns(2 * MS);
    died_ns.set(Some(env.global_ns()));
    // Away for longer than any patience that its deaths could have added up to.
    env.inflict(env.host(), Fault::CrashProcess { restart_after_ns: Some((SUSPECT_MS * MS) << LIVES) });
    env.yield_now()?;
    drop(guard);
    Ok(())
}

fn inherit(env: &Env, config: &HostConfig, died_ns: &Cell<Option<u64>>, complaints: &mut Vec<String>) -> Result<()> {
    let host = join(env, config)?;
    for life in 1..=LIVES {
        let died_ns = loop {
            match died_ns.take() {
                Some(died_ns) => break died_ns,
                None => env.platform().sleep_ns(MS / 10),
            }
        };
        drop(host.acquire(LOCK_TABLE, LONG_MS)?);
        let waited_ns = env.global_ns() - died_ns;
        if waited_ns > WAIT_NS {
            complaints.push(format!("death {life} was believed after {} us only", waited_ns / 1_000));
        }
    }
    Ok(())
}
