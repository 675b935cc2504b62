// SPDX-License-Identifier: Apache-2.0
//! Processes of several hosts publish, pin, pull, evict and clear blocks of a small prefix cache, while hosts and processes crash, stand
//! still, are fenced wrongly, close and leave, and one machine may be gone for good.
//!
//! Checked, at every few steps and at every answer, are the invariants of protocols/CACHE.md section 8: P1 what a pull accepts, and what a
//! READY cell holds, is one publication of its key, complete; P2 a confirmed pin holds; P3 one writer, and one owner, per cell. At the end,
//! with every death proven: P4 each cell is in exactly one list and no host has a pin; unclaimed cells can be claimed. Without faults:
//! P5 every block is found through its hint, no key is READY twice, and stored blocks stay while no host evicts them.

use super::cache_ledger::{Ledger, Name, Shared};
use super::cache_ops::{Habits, Worker};
use super::setup::{Cluster, join};
use crate::{Chances, Env, Failure, Fault, Planned, Random, SimProcess, Stats, When, WritePath};
use cxl_pool::cache::policy::PolicyKind;
use cxl_pool::cache::{Cache, CacheConfig, PublishRequest, Reserved};
use cxl_pool::copy::CopyConfig;
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::media::CellClass;
use cxl_pool::{Error, Result};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

/// Steps between two looks at every cell, and between two looks at those that are pinned.
const LOOK_STEPS: u64 = 256;
const PIN_LOOK_STEPS: u64 = 16;
/// Rounds of the upkeep of all hosts within which all leftovers are adopted.
const SETTLING_ROUNDS: u64 = 200;
/// Times that a process asks for a cell while there is a chunk for it.
const CLAIMING_ROUNDS: usize = 100;
/// Where zombies are made.
const ZOMBIES: &[&str] = &[
    "cache.adopt_read", "cache.claim_chosen", "cache.claimed", "cache.cold_chosen", "cache.commit", "cache.evict_scanned",
    "cache.evicting", "cache.filled", "cache.hint_chosen", "cache.may_write", "cache.pin_counted", "cache.pinned", "cache.copying",
    "cache.reserve", "cache.restamped", "cache.retiring", "cache.unpin_counted", "cache.writing",
];

/// What a run is made of.
#[derive(Clone)]
struct Plan {
    host: HostConfig,
    cache: CacheConfig,
    habits: Habits,
    /// Operations of each start of a process.
    operations: usize,
    /// Processes close and open their cache, and leave the pool and join it again.
    restless: bool,
    /// Threads of a process that does neither.
    threads: usize,
}

/// One run.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    run_with(seed, None)
}

/// One run, with one more fault.
pub fn run_with(seed: u64, planned: Option<Planned>) -> std::result::Result<Stats, Failure> {
    let mut sizes = Random::new(seed ^ 0x00ca_c4e0);
    let hosts = sizes.pick(&[2, 2, 2, 2, 2, 3, 3, 3, 4, 4, 6]);
    let hosts = if sizes.one_in(100) { 16 } else { hosts };
    // Two keys come and go in two cells, by several threads of each process, and nothing fails.
    let tight = planned.is_none() && sizes.one_in(8);
    let hosts = if tight { 2 } else { hosts };
    let processes: Vec<usize> = (0..hosts).map(|_| if tight { 1 } else { sizes.pick(&[1, 1, 2]) }).collect();
    let all: usize = processes.iter().sum();
    let roomy = !tight && sizes.one_in(4);
    let mut habits = Habits {
        keys: sizes.pick(&[3, 6, 6, 12]),
        namespaces: sizes.pick(&[1, 2]),
        most_bytes: 0,
        roomy,
        tight,
        abort_one_in: sizes.pick(&[0, 3, 8]),
        batch: sizes.pick(&[1, 2, 4]),
        half_written: false,
        longest_wait_us: sizes.pick(&[50, 1000, 8000]),
    };
    if tight {
        (habits.keys, habits.namespaces, habits.abort_one_in, habits.batch, habits.longest_wait_us) = (2, 1, 0, 1, 20);
    } else if !roomy && sizes.one_in(6) {
        // Windows fill up with hints of blocks that were given up.
        (habits.keys, habits.namespaces, habits.abort_one_in, habits.batch) = (60, 1, 2, 8);
    }
    let mut may_crash = true;
    let mut calm = false;
    let mut cluster = Cluster::new(seed, hosts, hosts + 1, |config, random| {
        let names = u64::from(habits.keys) * u64::from(habits.namespaces);
        config.geometry.cells_per_chunk = if tight { 1 } else { random.pick(&[1, 2, 4]) };
        config.geometry.stripes = random.pick(&[1, 1, 2]);
        let classes = if tight { 1 } else { random.pick(&[1, 1, 2]) };
        for (class, cell_bytes) in [128, 256].into_iter().enumerate().take(classes) {
            let most = if roomy { 2 * all as u64 * names.div_ceil(config.geometry.cells_per_chunk.into()) } else { 3 + all as u64 };
            let least = if roomy { most } else { 1 };
            let chunks = if tight { 2 } else { random.between(least, most) };
            config.geometry.cells[class] = CellClass { cell_bytes, chunks };
            habits.most_bytes = cell_bytes as usize;
        }
        calm = tight || (planned.is_none() && random.one_in(3));
        if calm {
            config.chances = Chances::default();
        }
        // A machine that loses power while it writes a line in eight stores can leave it half done for ever, which blocks what it is part
        // of until an operator acts.
        may_crash = !calm && (random.one_in(2) || matches!(planned, Some(Planned { fault: Fault::CrashMachine { .. }, .. })));
        config.write_path = if may_crash || random.one_in(2) { WritePath::OneUnit } else { WritePath::StoresAndFlush };
        if !may_crash {
            config.chances.crash_machine = 0;
        }
        habits.half_written = config.write_path == WritePath::StoresAndFlush;
    });
    let random = &mut cluster.random;
    let plan = Plan {
        host: HostConfig { suspect_ms: if hosts > 4 { 30 } else { cluster.host_config.suspect_ms }, ..cluster.host_config.clone() },
        cache: CacheConfig {
            policy: random.pick(&PolicyKind::ALL),
            checksums: random.one_in(2),
            low_water_percent: if roomy { 0 } else { random.pick(&[5, 40]) },
            high_water_percent: random.pick(&[40, 60]),
            lock_timeout_ms: Some(500_000),
            service_ms: 1,
            upkeep_ms: random.pick(&[1, 3]),
            remembered_keys: 64,
            copy: Some(CopyConfig::alone()),
            ..CacheConfig::default()
        },
        habits,
        operations: random.pick(&[15, 30, 60]).min(240 / all),
        restless: !tight && random.one_in(3),
        threads: if tight { 3 } else { random.pick(&[1, 1, 2]) },
    };
    let ledger = Shared::default();
    start(&mut cluster, &ledger, &plan, &processes);
    if let Some(planned) = planned {
        cluster.world.plan(planned);
    }
    if tight {
        // Too short for a suspicion: another thread of the process comes in between.
        for visit in (1..40).step_by(3) {
            let fault = Fault::PauseThread { for_ns: 400_000 };
            cluster.world.plan(Planned { when: When::Point("cache.evicted", visit), host: None, fault });
        }
    }
    if !calm {
        // Who leaves may leave the only seat to the machine that is gone for good soon after, and no host could join again.
        plan_faults(&mut cluster, &ledger, may_crash && !plan.restless);
    }
    // A publisher that meets a line half written for longer than a suspicion takes the hint on it for stale.
    let whole = calm || !plan.habits.half_written;
    watch(&mut cluster, &ledger, whole);
    let stats = cluster.world.run().map_err(|failure| explained(failure, &ledger))?;
    judge(&cluster, &ledger.borrow())?;
    Ok(stats)
}

fn start(cluster: &mut Cluster, ledger: &Shared, plan: &Plan, processes: &[usize]) {
    let mut number = 0;
    for (host, &count) in cluster.hosts.clone().into_iter().zip(processes) {
        for _ in 0..count {
            let (ledger, plan, index) = (Rc::clone(ledger), plan.clone(), number);
            number += 1;
            ledger.borrow_mut().done.insert(index, (host, false));
            cluster.world.start(host, move |env| {
                let (ledger, plan) = (Rc::clone(&ledger), plan.clone());
                {
                    let mut ledger = ledger.borrow_mut();
                    ledger.restarted |= env.generation() > 0;
                    ledger.done.insert(index, (host, false));
                    ledger.starts.insert(index, env.process());
                }
                env.spawn("main", move |env| main(&env, &ledger, &plan, index));
            });
        }
    }
}

/// Zombies at the points of the cache, and a machine that is gone for good.
fn plan_faults(cluster: &mut Cluster, ledger: &Shared, may_lose: bool) {
    let random = &mut cluster.random;
    for _ in 0..random.pick(&[0, 1, 2, 4]) {
        let when = When::Point(random.pick(ZOMBIES), random.between(1, 20));
        let for_ns = random.between(2, 40) * 1_000_000;
        let fault = if random.one_in(4) { Fault::PauseThread { for_ns } } else { Fault::PauseHost { for_ns } };
        cluster.world.plan(Planned { when, host: None, fault });
    }
    if cluster.hosts.len() > 1 && may_lose && cluster.random.one_in(4) {
        let at = cluster.random.between(2_000, 100_000);
        let fault = Fault::CrashMachine { restart_after_ns: None };
        ledger.borrow_mut().victim = cluster.hosts.last().copied();
        cluster.world.plan(Planned { when: When::Step(at), host: cluster.hosts.last().copied(), fault });
    }
}

/// The invariants that hold at any time.
fn watch(cluster: &mut Cluster, ledger: &Shared, whole: bool) {
    let (ledger, lines) = (Rc::clone(ledger), cluster.world.inspector());
    cluster.world.check_always(move |view| {
        // The process that has it just now records something, and the next look is near.
        let Ok(mut ledger) = ledger.try_borrow_mut() else { return Ok(()) };
        if view.step().is_multiple_of(PIN_LOOK_STEPS) {
            ledger.pins_hold(view, &lines)?;
        }
        if view.step().is_multiple_of(LOOK_STEPS) {
            ledger.ready_is_whole(view, &lines)?;
            ledger.one_owner(view)?;
            if whole {
                ledger.hints_reach(view, &lines)?;
            }
        }
        Ok(())
    });
}

/// A run that does not end says what it waits for.
fn explained(mut failure: Failure, ledger: &Shared) -> Failure {
    failure.reason = failure.reason.trim_start_matches("invariant violated: ").into();
    if let Ok(ledger) = ledger.try_borrow()
        && failure.reason.starts_with("no end")
        && let Some(waits) = &ledger.waits
    {
        failure.reason = format!("{}; {waits}", failure.reason);
    }
    failure
}

/// What must hold when all hosts are through.
fn judge(cluster: &Cluster, ledger: &Ledger) -> std::result::Result<(), Failure> {
    if ledger.counts.0 == 0 && cluster.world.view(|view| ledger.no_host_failed(view)) {
        return Err(cluster.world.failure("no cell was ever written: nothing was tested"));
    }
    Ok(())
}

/// The open cache of a process and its upkeep, which runs concurrently with the working threads.
#[derive(Clone, Default)]
struct Open {
    cache: Rc<RefCell<Option<Cache>>>,
    busy: Rc<Cell<bool>>,
}

impl Open {
    fn get(&self) -> Option<Cache> {
        self.cache.borrow().clone()
    }

    /// Takes the cache away from the upkeep.
    fn close(&self, env: &Env) -> Result<()> {
        let cache = self.cache.take();
        for round in 0.. {
            if !self.busy.get() {
                break;
            }
            env.platform().relax(round);
        }
        match cache.map(Cache::close) {
            Some(Err(error)) if !error.is_fenced() => Err(error),
            _ => Ok(()),
        }
    }
}

fn open(env: &Env, ledger: &Shared, plan: &Plan, host: &Host, open: &Open) -> Result<()> {
    let cache = again(env, plan, || Cache::open(host, plan.cache.clone()))?;
    ledger.borrow_mut().opened(env.process(), cache.look());
    open.cache.replace(Some(cache));
    Ok(())
}

/// Repeats what a fence cut short.
fn again<T>(env: &Env, plan: &Plan, mut work: impl FnMut() -> Result<T>) -> Result<T> {
    for _ in 0..20_000 {
        match work() {
            Err(Error::Fenced { .. }) => env.platform().sleep_ns(500_000),
            Err(Error::BadLine { .. }) if plan.habits.half_written => env.platform().sleep_ns(500_000),
            other => return other,
        }
    }
    work()
}

fn upkeep(env: &Env, ledger: &Shared, plan: &Plan, open: &Open) -> Result<()> {
    loop {
        open.busy.set(true);
        if let Some(cache) = open.get() {
            // Any host may be the one whose machine has a seat, so all of them state the death.
            let gone = env.view(|view| ledger.borrow().gone(view));
            if let Some((slot, incarnation)) = gone {
                cache.host().declare_dead(slot, incarnation)?;
            }
            match cache.service_round() {
                Ok(()) => *ledger.borrow_mut().rounds.entry(env.process()).or_default() += 1,
                Err(Error::Fenced { .. } | Error::Closed) => {}
                Err(Error::BadLine { .. }) if plan.habits.half_written => {}
                Err(error) => return Err(error),
            }
        }
        open.busy.set(false);
        env.platform().sleep_ns(plan.cache.service_ms * 1_000_000);
    }
}

fn main(env: &Env, ledger: &Shared, plan: &Plan, index: usize) -> Result<()> {
    let mut host = join(env, &plan.host)?;
    ledger.borrow_mut().slots.insert(env.host(), host.slot());
    let opened = Open::default();
    open(env, ledger, plan, &host, &opened)?;
    let (seen, of, kept) = (Rc::clone(ledger), plan.clone(), opened.clone());
    env.spawn_daemon("upkeep", move |env| upkeep(&env, &seen, &of, &kept));
    let helpers = Rc::new(Cell::new(0));
    if !plan.restless {
        for _ in 1..plan.threads {
            let (shared, host, cache, plan, helpers) = (Rc::clone(ledger), host.clone(), opened.get(), plan.clone(), helpers.clone());
            helpers.set(helpers.get() + 1);
            env.spawn("helper", move |env| {
                let Some(cache) = cache else { return Ok(()) };
                work(&env, &shared, &plan, &host, &cache, plan.operations)?;
                drop(cache);
                helpers.set(helpers.get() - 1);
                Ok(())
            });
        }
    }
    let mut left = plan.operations;
    while left > 0 {
        let count = if plan.restless { left.min(1 + env.below(20)) } else { left };
        left -= count;
        if let Some(cache) = opened.get() {
            work(env, ledger, plan, &host, &cache, count)?;
        }
        if plan.restless && env.below(2) == 0 {
            ledger.borrow_mut().moved = true;
            opened.close(env)?;
            if env.below(2) == 0 {
                host = leave_and_join(env, ledger, plan, host)?;
            }
            open(env, ledger, plan, &host, &opened)?;
        }
    }
    while helpers.get() > 0 {
        env.platform().sleep_ns(500_000);
    }
    ledger.borrow_mut().done.insert(index, (env.host(), true));
    settle(env, ledger)?;
    claim_what_is_left(env, ledger, plan, &opened)
}

fn work(env: &Env, shared: &Shared, plan: &Plan, host: &Host, cache: &Cache, count: usize) -> Result<()> {
    let mut worker = Worker { env, shared, habits: plan.habits, host, pins: Vec::new() };
    for _ in 0..count {
        worker.operate(cache)?;
    }
    worker.unpin_all()
}

fn leave_and_join(env: &Env, ledger: &Shared, plan: &Plan, host: Host) -> Result<Host> {
    match host.leave() {
        Ok(()) | Err(Error::Timeout { .. } | Error::Fenced { .. }) => {}
        Err(error) => return Err(error),
    }
    drop(host);
    env.platform().sleep_ns(1 + env.below(3_000_000) as u64);
    let host = join(env, &plan.host)?;
    ledger.borrow_mut().slots.insert(env.host(), host.slot());
    Ok(host)
}

/// Waits until all hosts are through and all leftovers are adopted. Checks P4.
fn settle(env: &Env, ledger: &Shared) -> Result<()> {
    let lines = env.lines();
    let mut since: Option<BTreeMap<SimProcess, u64>> = None;
    loop {
        env.platform().sleep_ns(1_000_000);
        if ledger.borrow().settled {
            return Ok(());
        }
        let (done, waits, rounds) = env.view(|view| {
            let ledger = ledger.borrow();
            (ledger.all_done(view), ledger.unsettled(view, &lines), ledger.rounds_of_living(view))
        });
        let Some(waits) = waits.filter(|_| done) else {
            since = None;
            ledger.borrow_mut().settled = done;
            continue;
        };
        if since.as_ref().is_none_or(|since| !since.keys().eq(rounds.keys())) {
            since = Some(rounds.clone());
        }
        let since = since.iter().flatten();
        if rounds.values().zip(since).all(|(now, (_, then))| now - then >= SETTLING_ROUNDS) {
            env.fail(format!("P4: after {SETTLING_ROUNDS} rounds of all hosts: {waits}"));
        }
        ledger.borrow_mut().waits = Some(waits);
    }
}

/// A host that needs unclaimed cells can claim them.
fn claim_what_is_left(env: &Env, ledger: &Shared, plan: &Plan, open: &Open) -> Result<()> {
    let (lines, Some(cache)) = (env.lines(), open.get()) else { return Ok(()) };
    let geometry = *lines.layout().geometry();
    for (class, cells) in geometry.cells.iter().enumerate().filter(|(_, class)| class.chunks > 0) {
        let unclaimed = env.view(|view| ledger.borrow().unclaimed(view, class));
        let Some(chunk) = unclaimed else { continue };
        let name = Name(200, 1000 + class as u16);
        let request = PublishRequest { namespace: name.namespace(), key: name.key(), parent: None, len_bytes: cells.cell_bytes };
        let mut rounds = 0;
        while matches!(again(env, plan, || cache.reserve(&request))?, Reserved::NoCell) {
            let still = env.view(|view| ledger.borrow().unclaimed(view, class)) == Some(chunk);
            if !still {
                break;
            }
            if rounds == CLAIMING_ROUNDS {
                env.fail(format!("P4: chunk {chunk} has no owner, and {:?} has no cell", env.process()));
            }
            rounds += 1;
            env.platform().sleep_ns(2_000_000);
        }
    }
    Ok(())
}
