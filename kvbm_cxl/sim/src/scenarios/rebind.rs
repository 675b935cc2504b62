// SPDX-License-Identifier: Apache-2.0
//! More machines than slots come and go, while managers stand still before they bind, claimants before they accept, and old join boxes lie
//! about that former lives of the machines have written.
//!
//! Checked: V8 at every join, re-join and use of an incarnation, V1 to V3 at every entry, V9 by the run's end.

use super::directed::{self, LONG_MS, MS, at};
use super::history::{History, Shared};
use super::setup::{Cluster, join};
use crate::{Env, Failure, Fault, Planned, Stats, WritePath};
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::limits::JOINBOXES;
use cxl_pool::lock::{FIRST_USER_LOCK, LockMode, mode_of};
use cxl_pool::media::{Binding, JoinBox, MediaLine};
use cxl_pool::platform::MachineId;
use cxl_pool::{Error, Result};
use std::rc::Rc;

/// Where managers and claimants stand still.
const POINTS: &[&str] = &[
    "fenced.acknowledged", "fenced.quiet", "join.accepted", "join.asked", "join.live", "join.local", "join.seen", "leave.released",
    "lock.accepted", "manager.adopted", "manager.before_bind", "manager.before_claim", "manager.bound", "manager.claimed",
    "manager.collected", "rebind.inside",
];

/// One run.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    run_with(seed, None)
}

/// One run, with that fault, if one is given, in place of the scenario's own.
pub fn run_with(seed: u64, planned: Option<Planned>) -> std::result::Result<Stats, Failure> {
    let mut sizes = crate::Random::new(seed);
    let hosts = sizes.pick(&[2, 3, 3]);
    let slots = sizes.between(2, hosts as u64) as usize;
    let path = directed::write_path(seed);
    let mut cluster = directed::cluster(seed, hosts, 2, slots, path);
    match planned {
        Some(planned) => cluster.plan_beside(planned, "rebind.inside"),
        None => order_faults(&mut cluster, path),
    }
    match cluster.random.below(6) {
        // The other seat is claimed while the pool runs.
        0 | 1 => cluster.host_config.seats.truncate(1),
        // As a pool that is formatted for no machine: the first that comes claims a seat.
        2 => cluster.host_config.seats.clear(),
        _ => {}
    }
    let history = History::shared();
    history.borrow_mut().one_process = true;
    let first = cluster.world.machine_id(cluster.hosts[0]);
    for (index, host) in cluster.hosts.clone().into_iter().enumerate() {
        let (history, config) = (Rc::clone(&history), cluster.host_config.clone());
        // Machine 0 never leaves, so that a manager can bind the others; with room for one more, nor does the other machine with a seat.
        let stays = index == 0 || (index == 1 && slots > 2);
        cluster.world.start(host, move |env| {
            let (history, config) = (Rc::clone(&history), config.clone());
            env.spawn("main", move |env| visit(&env, &history, &config, stays, first));
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
    let crash = directed::crash(random, path);
    let planned = match random.below(5) {
        // A manager stands still between its decision and its publish.
        0 | 1 => {
            let pause = Fault::PauseHost { for_ns: random.between(5 * MS, 30 * MS) };
            vec![at("manager.before_bind", random.between(1, 4), None, pause)]
        }
        // A host that has a slot goes away and comes back, or only seems to go away.
        2 => {
            let point = random.pick(&["rebind.inside", "join.live", "join.accepted", "leave.released"]);
            vec![at(point, random.between(1, 4), None, crash)]
        }
        3 => {
            let pause = Fault::PauseHost { for_ns: random.between(5 * MS, 40 * MS) };
            vec![at(random.pick(&["rebind.inside", "join.live"]), random.between(1, 4), None, pause)]
        }
        _ => {
            let count = random.between(1, 5);
            return cluster.disturb(path, POINTS, count);
        }
    };
    planned.into_iter().for_each(|planned| cluster.world.plan(planned));
}

fn visit(env: &Env, history: &Shared, config: &HostConfig, stays: bool, first: MachineId) -> Result<()> {
    env.spawn_daemon("rumour", move |env| spread_rumours(&env, first));
    for _ in 0..if stays { 1 } else { 2 } {
        let host = match join(env, config) {
            Ok(host) => host,
            Err(Error::Full { .. } | Error::SlotInUse { .. }) => continue,
            Err(error) => return Err(error),
        };
        history.borrow_mut().joined(env, host.slot(), host.incarnation(), host.nonce());
        let watched = Rc::clone(history);
        env.spawn_daemon("watch", move |env| watch(&env, &watched));
        use_lock(env, &host, history)?;
        if stays {
            return Ok(());
        }
        history.borrow_mut().left(env.process());
        match host.leave() {
            Ok(()) | Err(Error::Timeout { .. } | Error::Fenced { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Looks after this process's own binding.
fn watch(env: &Env, history: &Shared) -> Result<()> {
    loop {
        history.borrow().stays_bound(env);
        env.platform().sleep_ns(MS / 4);
    }
}

fn use_lock(env: &Env, host: &Host, history: &Shared) -> Result<()> {
    for round in 0.. {
        match host.acquire(FIRST_USER_LOCK, LONG_MS) {
            Ok(mut guard) => {
                let incarnation = guard.op().incarnation();
                history.borrow_mut().joined(env, host.slot(), incarnation, host.nonce());
                let strict = mode_of(host.lines().layout().geometry(), FIRST_USER_LOCK) == LockMode::Safe;
                let ticket = history.borrow_mut().enter(env, FIRST_USER_LOCK, host.slot(), incarnation, guard.grant(), strict);
                env.point("rebind.inside");
                guard.repaired();
                history.borrow_mut().exit(ticket);
                return Ok(());
            }
            Err(Error::Fenced { .. }) if round < 50 => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The copy of a slot's binding that counts and, if there is one, another that names another machine and counts no more. `None` while one
/// of them is being written.
fn bindings_of(env: &Env, slot: u64) -> Option<(Binding, Option<Binding>)> {
    let lines = env.lines();
    env.view(|view| {
        let geometry = *view.layout().geometry();
        let copies = (0..geometry.all_seats()).map(|seat| {
            let index = seat * geometry.bindings() + slot;
            let offset = view.layout().line_offset(Binding::REGION, index)?;
            lines.open::<Binding>(index, &view.line(offset))
        });
        let copies = copies.collect::<Result<Vec<Binding>>>().ok()?;
        let counts = *copies.iter().max_by_key(|copy| copy.tag)?;
        let outvoted = |copy: &&Binding| copy.tag != counts.tag && copy.incarnation != 0 && copy.machine != counts.machine;
        Some((counts, copies.iter().find(outvoted).copied()))
    })
}

/// Leaves boxes as a former life of machine `first` may have, one that read the binding of a manager without followers.
///
/// That machine never leaves its slot for good, so what such a box names as the previous owner will never be the owner, and the box must
/// stay without effect for ever.
fn spread_rumours(env: &Env, first: MachineId) -> Result<()> {
    let lines = env.lines();
    let slots = u64::from(lines.layout().geometry().slots);
    loop {
        for slot in 0..slots {
            let Some((counts, Some(stale))) = bindings_of(env, slot) else { continue };
            if counts.machine == first.0 {
                let nonce = u128::from(env.platform().random() | 1).to_le_bytes();
                let rumour = JoinBox { slot: slot as u32, machine: first.0, nonce, previous: stale.nonce, ..JoinBox::default() };
                lines.publish(env.below(JOINBOXES) as u64, rumour)?;
            }
        }
        env.platform().sleep_ns(MS);
    }
}
