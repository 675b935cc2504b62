// SPDX-License-Identifier: Apache-2.0
//! A rack outlives its nodes: one after the other is replaced under load, until none of the first is left, and the same many times over.
//! A node leaves in order, is killed as a container of a kernel that certifies it, or is killed and comes back under its identity; a few
//! are powered off for good, on kernels of their own, and nothing ever proves that. No operator acts.
//!
//! Checked: V1, V2 and V8 at every entry; no lock takes longer than [`LONGEST_WAITS`] times the silence after which a host is fenced; V9
//! by the run's end, which every node has to come to.

use super::directed::{MS, at};
use super::history::{History, Shared};
use super::setup::{Cluster, join};
use crate::{Env, Failure, Fault, SimHost, Stats, WritePath};
use cxl_pool::Result;
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::lock::LOCK_TABLE;
use cxl_pool::media::Seat;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Slots of the pool: those of the nodes that work, of some that come or come back, and of those that nothing proves to be dead.
const SLOTS: usize = NODES + 3 + LOST;
/// Nodes that work at a time.
const NODES: usize = 3;
/// Nodes that are powered off for good in one run.
const LOST: usize = 2;
/// Longest wait for a lock, in silences of [`HostConfig::suspect_ms`]: the manager's failover, then the fence of a dead holder, and the
/// same once more for a failover of the next manager. The usual is one failover and one fence.
const LONGEST_WAITS: u64 = 2 * 4;
/// Sections that a node gets through between two replacements.
const SECTIONS: u32 = 4;

/// How a node ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Leaves,
    Killed,
    ComesBack,
    Lost,
}

#[derive(Default)]
struct Rack {
    /// Nodes that ended, or came back.
    replaced: Cell<usize>,
    /// Sections of each node.
    sections: RefCell<Vec<u32>>,
    longest_wait_ns: Cell<u64>,
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
    let (mut lost, mut elsewhere) = (0, 0);
    let total = NODES + replacements;
    rack.sections.borrow_mut().resize(total, 0);
    for number in 0..total {
        let end = match cluster.random.below(6) {
            _ if number >= replacements => End::Leaves,
            0..3 => End::Killed,
            3 if elsewhere < NODES - 1 => End::ComesBack,
            4 if lost < LOST && elsewhere < NODES - 1 => End::Lost,
            _ => End::Leaves,
        };
        lost += usize::from(end == End::Lost);
        elsewhere = if matches!(end, End::ComesBack | End::Lost) { elsewhere + 1 } else { 0 };
        let host: SimHost = match end {
            _ if number == 0 => cluster.hosts[0],
            End::Killed | End::Leaves => cluster.world.add_container(cluster.hosts[0]),
            End::ComesBack | End::Lost => cluster.world.add_host(),
        };
        let (rack, history, config) = (Rc::clone(&rack), Rc::clone(&history), cluster.host_config.clone());
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
    while rack.replaced.get() + NODES < number {
        env.platform().sleep_ns(5_000_000);
    }
    let host = join(env, config)?;
    history.borrow_mut().joined(env, host.slot(), host.incarnation(), host.nonce());
    let has_worked = |number: usize| rack.sections.borrow()[number] >= SECTIONS;
    let is_replaced = || rack.replaced.get() == number && has_worked(number + NODES);
    let is_last = number + NODES >= total;
    for done in 0.. {
        let is_over = match (has_come_back, is_last) {
            (true, _) => done == SECTIONS,
            (false, true) => rack.replaced.get() + NODES >= total && (total - NODES..total).all(has_worked),
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
        End::Killed | End::Lost => env.exit(),
    }
}

fn section(env: &Env, rack: &Rack, history: &Shared, config: &HostConfig, host: &Host) -> Result<()> {
    let begun_ns = env.global_ns();
    // A lock of the pool: those of users wait for proof, and of a node that was lost there is none.
    let guard = host.acquire(LOCK_TABLE, 500_000);
    let waited_ns = env.global_ns() - begun_ns;
    rack.longest_wait_ns.set(rack.longest_wait_ns.get().max(waited_ns));
    if waited_ns > LONGEST_WAITS * config.suspect_ms * 1_000_000 {
        env.fail(format!("a lock took {} us, with hosts fenced after {} ms", waited_ns / 1_000, config.suspect_ms));
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
