// SPDX-License-Identifier: Apache-2.0
//! How long a pool is without a manager (V9 with a bound, LOCKS.md 12.21): managers leave or are killed one after the other, alone or with
//! other hosts, until one host is left, and each time another host wants their locks.

use super::directed::{LONG_MS, MS, at};
use super::setup::{Cluster, join};
use crate::{Chances, Env, Failure, Fault, SimHost, Stats, WritePath};
use cxl_pool::Result;
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::lock::{LOCK_CHUNKS, LOCK_OBJECTS, LOCK_TABLE};
use cxl_pool::media::Seat;
use cxl_pool::platform::MachineId;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

const HEARTBEAT_MS: u64 = 2;
/// Time-out of hosts and managers: T.
const SUSPECT_MS: u64 = 16 * HEARTBEAT_MS;
/// Longest wait for the locks of a manager that was killed.
const KILLED_NS: u64 = SUSPECT_MS * MS * 3 / 2;
/// Longest wait for the locks of a manager that left.
const LEFT_NS: u64 = 2 * HEARTBEAT_MS * MS;
/// What the steps of a host may add, which in a world are taken one at a time.
const STEPS_NS: u64 = 3 * MS / 2;
/// Locks that the others want: one that the manager held, one that another host held, and a free one.
const LOCKS: [u32; 3] = [LOCK_TABLE, LOCK_OBJECTS, LOCK_CHUNKS];

/// What a host is to do next.
#[derive(Clone, Copy, Default)]
enum Order {
    #[default]
    None,
    /// Holds a lock; `inside` a section, or no more than its grant.
    Hold {
        lock: u32,
        inside: bool,
    },
    /// Acquires all locks.
    Acquire,
    Leave,
}

/// What the hosts of a run share.
#[derive(Default)]
struct Stage {
    orders: RefCell<BTreeMap<SimHost, Order>>,
    joined: Cell<usize>,
    is_over: Cell<bool>,
    complaints: RefCell<Vec<String>>,
}

/// Machines by the identity that they report.
type Machines = BTreeMap<MachineId, SimHost>;

fn cluster(seed: u64) -> Cluster {
    let hosts = crate::Random::new(seed).pick(&[3, 4, 5, 6]);
    let mut cluster = Cluster::new(seed, hosts, hosts, |config, _| {
        config.write_path = WritePath::OneUnit;
        // Seats of the dead stay theirs here: no machine comes back, and no operator says that it is off.
        config.geometry.seats = hosts as u32;
        config.geometry.locks = 12;
        config.geometry.objects = 1;
        config.chances = Chances::default();
        config.max_time_ns = 20_000 * MS;
        // A bound is of the clocks of those who wait.
        config.skewed_clocks = false;
    });
    let config = &mut cluster.host_config;
    // No host gives a lock back unasked.
    (config.heartbeat_ms, config.suspect_ms, config.idle_release_ms) = (HEARTBEAT_MS, SUSPECT_MS, LONG_MS);
    cluster
}

/// One run.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut cluster = cluster(seed);
    let stage = Rc::new(Stage::default());
    let mut machines = Machines::new();
    for host in cluster.hosts.clone() {
        machines.insert(cluster.world.machine_id(host), host);
        let (config, stage) = (cluster.host_config.clone(), Rc::clone(&stage));
        let joins_after_ns = cluster.random.pick(&[0, 1, 2]) * cluster.random.between(1, SUSPECT_MS * MS);
        cluster.world.spawn(host, "main", move |env| {
            env.platform().sleep_ns(joins_after_ns);
            main(&env, &config, &stage)
        });
    }
    let conductor = cluster.world.add_host();
    let shared = Rc::clone(&stage);
    cluster.world.spawn(conductor, "conductor", move |env| {
        let (stage, mut living) = (shared, machines.values().copied().collect::<Vec<_>>());
        wait(&env, || stage.joined.get() == living.len());
        while living.len() > 1 {
            end_manager(&env, &stage, &machines, &mut living);
        }
        stage.is_over.set(true);
        Ok(())
    });
    let stage = Rc::clone(&stage);
    cluster.run_without("V9", &stage.complaints)
}

fn wait(env: &Env, is_done: impl Fn() -> bool) {
    while !is_done() {
        env.platform().sleep_ns(MS / 20);
    }
}

/// The host in charge.
fn manager(env: &Env, machines: &Machines) -> SimHost {
    let seats = env.lines().layout().geometry().seats;
    let newest = env.view(|view| (0..seats.into()).map(|seat| view.peek::<Seat>(seat)).max_by_key(|seat| seat.epoch));
    machines[&MachineId(newest.map_or([0; 16], |seat| seat.machine))]
}

fn pick(env: &Env, hosts: &[SimHost]) -> SimHost {
    hosts[env.below(hosts.len())]
}

/// Ends the manager in charge, perhaps with other hosts, and has one that lives acquire their locks.
fn end_manager(env: &Env, stage: &Stage, machines: &Machines, living: &mut Vec<SimHost>) {
    // At any moment, be it while hosts claim seats.
    env.platform().sleep_ns(env.below((2 * SUSPECT_MS * MS) as usize) as u64);
    let is_killed = env.below(2) == 0;
    let mut ending = vec![manager(env, machines)];
    living.retain(|host| *host != ending[0]);
    while is_killed && living.len() > 1 && env.below(3) == 0 {
        let other = pick(env, living);
        living.retain(|host| *host != other);
        ending.push(other);
    }
    for (lock, host) in LOCKS.into_iter().zip([ending[0], ending[ending.len() - 1]]) {
        stage.give(env, host, Order::Hold { lock, inside: is_killed && env.below(2) == 0 });
    }
    // The role may have moved meanwhile, but not for a reason.
    let (heir, began_ns) = (pick(env, living), env.global_ns());
    env.note(format!("{} {ending:?}, {heir:?} wants their locks", if is_killed { "kills" } else { "sends away" }));
    if is_killed {
        ending.iter().for_each(|host| env.inflict(*host, Fault::CrashMachine { restart_after_ns: None }));
        stage.give(env, heir, Order::Acquire);
    } else {
        stage.orders.borrow_mut().insert(ending[0], Order::Leave);
        stage.give(env, heir, Order::Acquire);
    }
    let (waited_ns, most_ns) = (env.global_ns() - began_ns, if is_killed { KILLED_NS } else { LEFT_NS });
    if waited_ns > most_ns + STEPS_NS * machines.len() as u64 {
        let (waited_us, most_us) = (waited_ns / 1_000, most_ns / 1_000);
        let complaint = format!("killed: {is_killed}, {ending:?} ended, {heir:?} waited {waited_us} us, and not {most_us}");
        stage.complaints.borrow_mut().push(complaint);
    }
}

impl Stage {
    /// Has a host do something, and waits until it is done.
    fn give(&self, env: &Env, host: SimHost, order: Order) {
        self.orders.borrow_mut().insert(host, order);
        wait(env, || !self.orders.borrow().contains_key(&host));
    }
}

fn main(env: &Env, config: &HostConfig, stage: &Stage) -> Result<()> {
    let host = join(env, config)?;
    stage.joined.set(stage.joined.get() + 1);
    while !stage.is_over.get() {
        let order = stage.orders.borrow().get(&env.host()).copied().unwrap_or_default();
        match order {
            Order::None => {
                env.platform().sleep_ns(MS / 20);
                continue;
            }
            Order::Hold { lock, inside } => hold(env, &host, lock, inside)?,
            Order::Acquire => LOCKS.into_iter().try_for_each(|lock| host.acquire(lock, LONG_MS).map(drop))?,
            Order::Leave => {
                host.leave()?;
                return Ok(());
            }
        }
        stage.orders.borrow_mut().remove(&env.host());
    }
    Ok(())
}

fn hold(env: &Env, host: &Host, lock: u32, inside: bool) -> Result<()> {
    if !inside {
        return host.acquire(lock, LONG_MS).map(drop);
    }
    let (holder, holds) = (host.clone(), Rc::new(Cell::new(false)));
    let held = Rc::clone(&holds);
    env.spawn("holder", move |env| {
        let _guard = holder.acquire(lock, LONG_MS)?;
        held.set(true);
        // Its machine is killed.
        env.sleep_until(u64::MAX)
    });
    wait(env, || holds.get());
    Ok(())
}

/// Managers that are slower than the time-out: each stands still right after its claim, so that the next one takes it for dead. Hosts grow
/// patient after a few, and all get through.
pub fn storm(seed: u64) -> std::result::Result<Stats, Failure> {
    const CLAIMS: u64 = 24;
    let mut cluster = cluster(seed);
    for visit in 1..=CLAIMS {
        let for_ns = cluster.random.between(3 * SUSPECT_MS / 2, 4 * SUSPECT_MS) * MS;
        cluster.world.plan(at("manager.claimed", visit, None, Fault::PauseHost { for_ns }));
    }
    let (stage, hosts) = (Rc::new(Stage::default()), cluster.hosts.len());
    for host in cluster.hosts.clone() {
        let (config, stage) = (cluster.host_config.clone(), Rc::clone(&stage));
        cluster.world.spawn(host, "main", move |env| {
            let host = join(&env, &config)?;
            for lock in LOCKS {
                drop(host.acquire(lock, LONG_MS)?);
            }
            stage.joined.set(stage.joined.get() + 1);
            wait(&env, || stage.joined.get() == hosts);
            let claims = env.view(|view| view.visits("manager.claimed"));
            if claims >= CLAIMS {
                stage.complaints.borrow_mut().push(format!("the role moved {claims} times: no host is patient with the slow"));
            }
            Ok(())
        });
    }
    cluster.run_without("V9", &stage.complaints)
}

/// A host comes back after a death, and the manager dies before the host was heard in its new life: its successor, which heard nothing of
/// the host for long, does not take that for the silence of the new life.
pub fn rejoined(seed: u64) -> std::result::Result<Stats, Failure> {
    let mut cluster = cluster(seed);
    let [manages, observes, returns]: [SimHost; 3] = [cluster.hosts[0], cluster.hosts[1], cluster.hosts[2]];
    cluster.world.plan(at("join.accepted", 2, Some(returns), Fault::PauseHost { for_ns: u64::MAX }));
    let stage = Rc::new(Stage::default());
    for host in [manages, observes, returns] {
        let (config, stage) = (cluster.host_config.clone(), Rc::clone(&stage));
        cluster.world.start(host, move |env| {
            let (config, stage) = (config.clone(), Rc::clone(&stage));
            env.spawn("main", move |env| live(&env, &config, &stage, manages));
        });
    }
    let (conductor, shared) = (cluster.world.add_host(), Rc::clone(&stage));
    cluster.world.spawn(conductor, "conductor", move |env| {
        wait(&env, || shared.joined.get() == 3);
        env.platform().sleep_ns(SUSPECT_MS * MS);
        env.inflict(returns, Fault::CrashProcess { restart_after_ns: Some(3 * SUSPECT_MS * MS) });
        wait(&env, || env.view(|view| view.visits_by(returns, "join.accepted")) == 2);
        let (epoch, claims) = (epoch(&env), env.view(|view| view.visits_by(observes, "manager.adopted")));
        env.inflict(manages, Fault::CrashMachine { restart_after_ns: None });
        wait(&env, || epoch_is_served(&env, epoch, observes, claims));
        env.resume(returns);
        Ok(())
    });
    cluster.run_without("V9", &stage.complaints)
}

fn epoch(env: &Env) -> u32 {
    let seats = env.lines().layout().geometry().seats;
    env.view(|view| (0..seats.into()).map(|seat| view.peek::<Seat>(seat).epoch).max().unwrap_or(0))
}

fn epoch_is_served(env: &Env, after: u32, by: SimHost, claims: u64) -> bool {
    epoch(env) > after && env.view(|view| view.visits_by(by, "manager.adopted")) > claims
}

fn live(env: &Env, config: &HostConfig, stage: &Stage, first: SimHost) -> Result<()> {
    // Who comes first manages.
    wait(env, || env.host() == first || stage.joined.get() > 0);
    let host = join(env, config)?;
    stage.joined.set(stage.joined.get() + 1);
    if env.generation() == 0 {
        // Until the one that came back has had its time.
        wait(env, || stage.is_over.get());
        return Ok(());
    }
    let incarnation = host.incarnation();
    env.platform().sleep_ns(SUSPECT_MS * MS / 2);
    if host.incarnation() != incarnation {
        stage.complaints.borrow_mut().push("a host was fenced for the silence of its former life".into());
    }
    stage.is_over.set(true);
    Ok(())
}
