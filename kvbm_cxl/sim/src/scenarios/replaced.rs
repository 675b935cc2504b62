// SPDX-License-Identifier: Apache-2.0
//! A rack outlives its nodes: one after the other is replaced under load, until none of the first is left, and the same many times over.
//! A node leaves in order; is killed as a container of a kernel that stays up; is killed and comes back under its identity; or is shut down
//! with its kernel, so that the host that keeps the node's slot is the only one that can prove the end of the others. A few are powered off
//! for good, on kernels of their own, and nothing ever proves that. No operator acts.
//!
//! Checked: V1, V2 and V8 at every entry; no lock takes longer than twice the bound of a failover; V9 by the run's end, which every node
//! has to come to, with every slot free but those of the nodes that work and of those that lost power.

use super::directed::{MS, at};
use super::history::{History, Shared};
use super::setup::{Cluster, join};
use crate::{Env, Failure, Fault, SimHost, Stats, WritePath};
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::lock::LOCK_TABLE;
use cxl_pool::media::{DeathLine, Identity, SLOTS_PER_FENCE, Seat};
use cxl_pool::{Error, Result};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Slots of the pool: those of the nodes that work and of their keepers, of some that come or come back, and of those that nothing proves
/// to be dead.
const SLOTS: usize = 2 * NODES + 3 + LOST;
/// Nodes that work at a time.
const NODES: usize = 3;
/// Nodes that are powered off for good in one run.
const LOST: usize = 2;
/// How long a keeper waits for the end of the others on its node.
const PATIENCE_MS: u64 = 1_000;
/// Sections that a node gets through between two replacements.
const SECTIONS: u32 = 4;

/// How a node ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Leaves,
    Killed,
    ComesBack,
    /// Killed by the signal at which the keeper of its node leaves.
    ShutDown,
    Lost,
}

#[derive(Default)]
struct Rack {
    /// Nodes that ended, or came back.
    replaced: Cell<usize>,
    /// Sections of each node.
    sections: RefCell<Vec<u32>>,
    /// Nodes that lose power for good.
    lost: Cell<usize>,
}

/// One run.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    run_with(seed, 12)
}

/// One run in which a hundred nodes are replaced.
pub fn run_long(seed: u64) -> std::result::Result<Stats, Failure> {
    run_with(seed, 100)
}

fn run_with(seed: u64, replacements: usize) -> std::result::Result<Stats, Failure> {
    let mut cluster = Cluster::new(seed, 1, SLOTS, |config, random| {
        config.geometry.slot_seats = true;
        config.geometry.seats = random.pick(&[1, 2]);
        config.chances = Default::default();
        config.write_path = WritePath::OneUnit;
        (config.skewed_clocks, config.fair_schedule) = (false, true);
        config.max_steps = 6_000_000 + 1_000_000 * replacements as u64;
        config.max_time_ns = config.max_steps * 2_000;
    });
    cluster.host_config.seats.clear();
    let (history, rack) = (History::shared(), Rc::new(Rack::default()));
    // One node of the kernel that certifies deaths lives at any time, as one that keeps a host does on a real node.
    let mut elsewhere = 0;
    let total = NODES + replacements;
    rack.sections.borrow_mut().resize(total, 0);
    for number in 0..total {
        let end = match cluster.random.below(7) {
            _ if number >= replacements => End::Leaves,
            0..3 => End::Killed,
            3 if elsewhere < NODES - 1 => End::ComesBack,
            4 if elsewhere < NODES - 1 => End::ShutDown,
            5 if rack.lost.get() < LOST && elsewhere < NODES - 1 => End::Lost,
            _ => End::Leaves,
        };
        rack.lost.set(rack.lost.get() + usize::from(end == End::Lost));
        elsewhere = if matches!(end, End::ComesBack | End::ShutDown | End::Lost) { elsewhere + 1 } else { 0 };
        let host: SimHost = match end {
            End::Killed | End::Leaves if number == 0 => cluster.hosts[0],
            End::Killed | End::Leaves => cluster.world.add_container(cluster.hosts[0]),
            End::ComesBack | End::ShutDown | End::Lost => cluster.world.add_host(),
        };
        let (rack, history, config) = (Rc::clone(&rack), Rc::clone(&history), cluster.host_config.clone());
        if end == End::ShutDown {
            let keeper = cluster.world.add_container(host);
            let (rack, config) = (Rc::clone(&rack), config.clone());
            cluster.world.spawn(keeper, "keeper", move |env| keep(&env, &rack, &config, number));
        }
        cluster.world.start(host, move |env| {
            let (rack, history, config) = (Rc::clone(&rack), Rc::clone(&history), config.clone());
            env.spawn("main", move |env| node(&env, &rack, &history, &config, number, end));
        });
    }
    let stats = cluster.world.run()?;
    if rack.replaced.get() < replacements {
        return Err(cluster.world.failure(format!("only {} of {replacements} nodes were replaced", rack.replaced.get())));
    }
    Ok(stats)
}

/// Waits for its turn, works until the node that replaces it works, and ends. The last ones leave together.
fn node(env: &Env, rack: &Rack, history: &Shared, config: &HostConfig, number: usize, end: End) -> Result<()> {
    let total = rack.sections.borrow().len();
    let has_come_back = env.generation() > 0;
    let host = join_in_turn(env, rack, config, number)?;
    history.borrow_mut().joined(env, host.slot(), host.incarnation(), host.nonce());
    let has_worked = |number: usize| rack.sections.borrow()[number] >= SECTIONS;
    let is_replaced = || rack.replaced.get() == number && has_worked(number + NODES);
    let is_last = number + NODES >= total;
    for done in 0.. {
        let is_over = match (has_come_back, is_last) {
            (true, _) => done == SECTIONS,
            (false, true) => {
                rack.replaced.get() + NODES >= total && (total - NODES..total).all(has_worked) && members(env) <= NODES + rack.lost.get()
            }
            (false, false) => is_replaced(),
        };
        if is_over {
            break;
        }
        section(env, rack, history, config, &host)?;
        rack.sections.borrow_mut()[number] += 1;
    }
    env.point("replaced.ends");
    if !is_last && !has_come_back {
        rack.replaced.set(number + 1);
    }
    history.borrow_mut().left(env.process());
    match end {
        End::Leaves => host.leave(),
        End::ComesBack if !has_come_back => {
            env.inflict(env.host(), Fault::CrashProcess { restart_after_ns: Some(1_000_000) });
            env.yield_now()
        }
        End::ComesBack => host.leave(),
        End::Killed | End::ShutDown | End::Lost => env.exit(),
    }
}

/// Keeps the slot of a node that is shut down.
fn keep(env: &Env, rack: &Rack, config: &HostConfig, number: usize) -> Result<()> {
    let host = join_in_turn(env, rack, config, number)?;
    while rack.replaced.get() <= number {
        env.platform().sleep_ns(MS);
    }
    host.outlive_others(PATIENCE_MS)?;
    host.leave()
}

fn join_in_turn(env: &Env, rack: &Rack, config: &HostConfig, number: usize) -> Result<Host> {
    while rack.replaced.get() + NODES < number {
        env.platform().sleep_ns(5 * MS);
    }
    let host = join(env, config)?;
    let witness = host.clone();
    env.spawn_daemon("witness", move |env| look_for_the_ended(&env, &witness));
    Ok(host)
}

/// Slots whose hosts are neither proven dead nor gone.
fn members(env: &Env) -> usize {
    let geometry = *env.lines().layout().geometry();
    env.view(|view| {
        let is_dead = |slot: usize, incarnation: u32| {
            let rows = (0..geometry.all_seats()).map(|seat| seat * geometry.fence_lines() + (slot / SLOTS_PER_FENCE) as u64);
            rows.map(|row| view.peek::<DeathLine>(row).dead[slot % SLOTS_PER_FENCE]).any(|dead| dead >= incarnation)
        };
        let identities = (0..SLOTS).map(|slot| (slot, view.peek::<Identity>(slot as u64)));
        identities.filter(|(slot, found)| found.state == Identity::LIVE && !is_dead(*slot, found.incarnation)).count()
    })
}

/// The second thread of a host's service: asks the kernel for the end of other hosts.
fn look_for_the_ended(env: &Env, host: &Host) -> Result<()> {
    loop {
        match host.witness_round() {
            Ok(rest_ns) => env.platform().sleep_ns(rest_ns),
            Err(Error::Closed) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

fn section(env: &Env, rack: &Rack, history: &Shared, config: &HostConfig, host: &Host) -> Result<()> {
    let begun_ns = env.global_ns();
    // A lock of the pool: those of users wait for proof, and of a node that was lost there is none.
    let guard = host.acquire(LOCK_TABLE, 500_000);
    let waited_ns = env.global_ns() - begun_ns;
    // A manager was killed with the lock.
    let usual_ns = (config.suspect_ms * 5 / 4 + 3 * config.heartbeat_ms) * MS;
    if waited_ns > 2 * usual_ns {
        env.fail(format!("V9: a lock took {} us, and the longest usual wait is {}", waited_ns / 1_000, usual_ns / 1_000));
    }
    let mut guard = match guard {
        Ok(guard) => guard,
        Err(error) if error.is_fenced() => return Ok(()),
        Err(error) => return Err(error),
    };
    let ticket = history.borrow_mut().enter(env, LOCK_TABLE, host.slot(), guard.op().incarnation(), guard.grant(), false);
    if guard.needs_repair() {
        guard.repaired();
    }
    env.yield_now()?;
    history.borrow_mut().exit(ticket);
    drop(guard);
    env.platform().sleep_ns(200_000);
    Ok(())
}

/// What the processes of [`left_together`] share.
#[derive(Default)]
struct Departure {
    joined: Cell<u32>,
    left: Cell<u32>,
}

/// Both processes of a node leave at once, and the one that manages stands still on its way. When it resumes, another node has the slot
/// and its seat: it writes there no more.
pub fn left_together(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut cluster = Cluster::new(seed, 2, 1, |config, random| {
        config.geometry.slot_seats = true;
        config.geometry.seats = random.pick(&[1, 2]);
        config.chances = Default::default();
        config.write_path = WritePath::OneUnit;
    });
    cluster.host_config.seats.clear();
    let for_ns = cluster.random.between(4, 20) * cluster.host_config.suspect_ms * MS;
    let [leaves, comes]: [SimHost; 2] = [cluster.hosts[0], cluster.hosts[1]];
    cluster.world.plan(at("leave.detached", 1, Some(leaves), Fault::PauseThread { for_ns }));
    let (mut epochs, seats) = (vec![0; cluster.world.geometry().all_seats() as usize], cluster.world.geometry().all_seats());
    cluster.world.check_always(move |view| {
        for seat in 0..seats {
            let (epoch, before) = (view.peek::<Seat>(seat).epoch, epochs[seat as usize]);
            if epoch < before {
                return Err(format!("V8: the epoch of seat {seat} went back from {before} to {epoch}: two machines write there"));
            }
            epochs[seat as usize] = epoch;
        }
        Ok(())
    });
    let scene = Rc::new(Departure::default());
    for number in 0..3 {
        let (scene, config) = (Rc::clone(&scene), cluster.host_config.clone());
        cluster.world.spawn(if number < 2 { leaves } else { comes }, "main", move |env| {
            let until = |is_so: &dyn Fn() -> bool| {
                while !is_so() {
                    env.platform().sleep_ns(MS / 20);
                }
            };
            until(&|| scene.joined.get() == number);
            let host = join(&env, &config)?;
            scene.joined.set(number + 1);
            match number {
                0 => until(&|| scene.joined.get() == 2),
                1 => until(&|| env.view(|view| view.visits_by(leaves, "leave.detached")) == 1),
                _ => until(&|| scene.left.get() == 2),
            }
            host.leave()?;
            scene.left.set(scene.left.get() + 1);
            Ok(())
        });
    }
    cluster.world.run()
}
