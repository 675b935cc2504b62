// SPDX-License-Identifier: Apache-2.0
//! The device loses lines of locks, fences and memberships under hosts that use them: their owners write them again, and what no host knows
//! any more is an error and never a guess.
//!
//! Checked: V1, V2 and V3 at every entry, V8 at every join; if every owner keeps running, V9.

use super::directed::{self, LONG_MS, MS, at};
use super::history::{History, Shared};
use super::setup::{Cluster, join};
use crate::{Env, Failure, Fault, Planned, Random, SimHost, Stats, When};
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::lock::{FIRST_USER_LOCK, LOCK_TABLE, LockMode, mode_of};
use cxl_pool::media::{Geometry, LOCKS_PER_GRANT, Layout, Region};
use cxl_pool::{Error, Result};
use std::cell::Cell;
use std::rc::Rc;

/// Sections that each host wants to get through.
const SECTIONS: u32 = 4;
/// Longest wait for a lock where lines may stay damaged, in milliseconds.
const SHORT_MS: u64 = 60;
/// Rounds after which a host gives up where lines may stay damaged.
const ROUNDS: u32 = 14;

/// Moments at which a line is lost.
const POINTS: &[&str] = &[
    "damage.inside", "lock.accepted", "lock.requested", "manager.adopted", "manager.before_grant", "manager.claimed", "manager.collected",
    "manager.fenced", "manager.granted",
];

/// Faults in addition to the damage.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Beside {
    /// Nothing: every line has a running owner.
    Nothing,
    /// Hosts stand still or start again, so that some lines stay damaged.
    Faults,
    /// A host stands still inside and is fenced; once another is inside, the row with that fence is lost together with the memory of the
    /// machine that wrote it.
    Forgotten,
}

/// State that the hosts of a run share in addition to their history.
#[derive(Clone)]
struct Run {
    history: Shared,
    config: HostConfig,
    lock: u32,
    beside: Beside,
    first: SimHost,
    second: SimHost,
    fence_row: Fault,
    /// The second host is inside.
    is_second_inside: Rc<Cell<bool>>,
    /// The row is lost.
    is_lost: Rc<Cell<bool>>,
}

/// One run.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    run_over(seed, false, None)
}

/// One run in which the superblock names the first seat alone, and the machines claim the others.
pub fn run_with_claimed_seats(seed: u64) -> std::result::Result<Stats, Failure> {
    run_over(seed, true, None)
}

/// As [`run_with_claimed_seats`], with one fault more.
pub fn run_with(seed: u64, planned: Option<Planned>) -> std::result::Result<Stats, Failure> {
    run_over(seed, true, planned)
}

fn run_over(seed: u64, claims: bool, planned: Option<Planned>) -> std::result::Result<Stats, Failure> {
    let mut sizes = Random::new(seed);
    let hosts = sizes.pick(&[2, 3, 3]);
    let path = crate::WritePath::OneUnit;
    let mut cluster = directed::cluster(seed, hosts, hosts, hosts, path);
    cluster.host_config.damage_ms = 5;
    if claims {
        cluster.host_config.seats.truncate(1);
    }
    // Where a line stays damaged, a host may wait in vain in each of its rounds.
    cluster.world.set_max_steps(6_000_000);
    let lock = cluster.random.pick(&[LOCK_TABLE, LOCK_TABLE, FIRST_USER_LOCK]);
    let mut beside = if claims { lose_rows(&mut cluster) } else { order_faults(&mut cluster, lock) };
    if let Some(planned) = planned {
        cluster.world.plan(planned);
        beside = Beside::Faults;
    }
    let run = Run {
        history: History::shared(),
        config: cluster.host_config.clone(),
        lock,
        beside,
        first: cluster.hosts[0],
        second: cluster.hosts[1],
        fence_row: Fault::LoseLine { offset: line_of(cluster.world.layout(), Region::Fence, 0, 0) },
        is_second_inside: Rc::default(),
        is_lost: Rc::default(),
    };
    for host in cluster.hosts.clone() {
        let run = run.clone();
        cluster.world.start(host, move |env| {
            let run = run.clone();
            env.spawn("main", move |env| main(&env, &run));
        });
    }
    let stats = cluster.world.run()?;
    if beside == Beside::Nothing && run.history.borrow().entered < u64::from(SECTIONS) {
        return Err(cluster.world.failure("hosts did not get through although every line has an owner that runs"));
    }
    Ok(stats)
}

/// A line of the lock layer, of this owner.
fn line_of(layout: &Layout, region: Region, owner: u64, line: u64) -> u64 {
    let geometry = *layout.geometry();
    let per_owner = match region {
        Region::Seat | Region::Identity => 1,
        Region::Grant => geometry.grant_lines(),
        Region::Binding => geometry.bindings(),
        Region::Fence | Region::Death => geometry.fence_lines(),
        Region::Summary => geometry.summary_lines(),
        _ => geometry.request_lines(),
    };
    layout.line_offset(region, owner * per_owner + line % per_owner).unwrap_or_default()
}

/// Rows of the seats that machines claim: what a fence row said is not told by a death row.
fn lose_rows(cluster: &mut Cluster) -> Beside {
    let layout = std::sync::Arc::clone(cluster.world.layout());
    let (seats, first) = (layout.geometry().all_seats(), u64::from(!layout.geometry().slot_seats));
    let random = &mut cluster.random;
    // Two machines that have no seat line can see no epoch by which they could claim again.
    let together = random.one_in(3).then(|| (random.pick(POINTS), random.between(2, 8)));
    for (seat, region) in (first..seats).flat_map(|seat| [Region::Fence, Region::Death, Region::Seat].map(|region| (seat, region))) {
        let fault = Fault::LoseLine { offset: line_of(&layout, region, seat, 0) };
        let (point, visit) = match together {
            Some(moment) if region == Region::Seat => moment,
            _ => (random.pick(POINTS), random.between(1, 8)),
        };
        cluster.world.plan(at(point, visit, None, fault));
    }
    Beside::Nothing
}

fn order_faults(cluster: &mut Cluster, lock: u32) -> Beside {
    let layout = std::sync::Arc::clone(cluster.world.layout());
    let Geometry { slots, .. } = *layout.geometry();
    let (first, second) = (cluster.hosts[0], cluster.hosts[1]);
    let random = &mut cluster.random;
    let grant_line = u64::from(lock) / LOCKS_PER_GRANT as u64;
    let lose = |region, owner, line| Fault::LoseLine { offset: line_of(&layout, region, owner, line) };
    let restart = |random: &mut Random| Some(random.spread(10_000, 20 * MS));
    let planned: Vec<Planned> = match random.below(6) {
        // The manager's copy of a grant is lost, and so is the manager for a while: only that copy tells of the grant.
        0 => {
            let visit = random.between(1, 6);
            let stop = Fault::PauseHost { for_ns: random.between(4 * MS, 30 * MS) };
            let mut planned = vec![at("manager.granted", visit, Some(first), lose(Region::Grant, 0, grant_line))];
            // And so is its line, which bounds what that copy can have said, once the next one collects.
            if random.one_in(2) {
                planned.push(at("manager.claimed", 1, Some(second), lose(Region::Seat, 0, 0)));
            }
            planned.push(at("manager.granted", visit, Some(first), stop));
            planned
        }
        1 => {
            let stop = Fault::PauseHost { for_ns: random.between(20 * MS, 90 * MS) };
            cluster.world.plan(at("damage.inside", random.between(1, 3), Some(second), stop));
            return Beside::Forgotten;
        }
        // One seat claims again and again, its line is lost, and two claim at once.
        2 => {
            let mut planned: Vec<Planned> = (2..random.between(3, 5))
                .map(|visit| {
                    at("manager.adopted", visit, Some(first), Fault::CrashProcess { restart_after_ns: Some(random.spread(10_000, MS)) })
                })
                .collect();
            let last = 2 + planned.len() as u64;
            planned.push(at("manager.granted", 1, Some(first), Fault::CrashProcess { restart_after_ns: Some(random.spread(10_000, MS)) }));
            planned.push(at("manager.adopted", last, Some(first), lose(Region::Seat, 0, 0)));
            planned.push(at("manager.adopted", last, Some(first), Fault::CrashMachine { restart_after_ns: restart(random) }));
            let point = random.pick(&["manager.claimed", "manager.collected"]);
            planned.push(at(point, last + 1, Some(first), Fault::CrashProcess { restart_after_ns: restart(random) }));
            planned
        }
        choice => {
            let regions = [
                Region::Seat,
                Region::Grant,
                Region::Binding,
                Region::Fence,
                Region::Death,
                Region::Identity,
                Region::Summary,
                Region::Request,
            ];
            // Where all have to get through no owner loses two lines: the second may have held the content of the first.
            let count = if choice == 3 { random.between(1, u64::from(slots)) } else { random.between(1, 6) };
            let mut planned: Vec<Planned> = (0..count)
                .map(|number| {
                    let owner = if choice == 3 { number } else { random.below(slots as usize) as u64 };
                    let line = if random.one_in(2) { grant_line } else { random.below(8) as u64 };
                    at(random.pick(POINTS), random.between(1, 8), None, lose(random.pick(&regions), owner, line))
                })
                .collect();
            if choice == 3 {
                planned.into_iter().for_each(|planned| cluster.world.plan(planned));
                return Beside::Nothing;
            }
            for _ in 0..random.between(1, 3) {
                let fault = match random.below(3) {
                    0 => directed::crash(random, crate::WritePath::OneUnit),
                    _ => Fault::PauseHost { for_ns: directed::pause_ns(random) },
                };
                planned.push(Planned { when: When::Point(random.pick(POINTS), random.between(1, 8)), host: None, fault });
            }
            planned
        }
    };
    planned.into_iter().for_each(|planned| cluster.world.plan(planned));
    Beside::Faults
}

fn main(env: &Env, run: &Run) -> Result<()> {
    let is_whole = run.beside == Beside::Nothing;
    if env.host() == run.second {
        run.is_second_inside.set(false);
    }
    let host = match join_once_whole(env, run, is_whole) {
        // Where it is not known who is bound to what, or who manages.
        Err(Error::BadLine { .. } | Error::Timeout { .. } | Error::SlotInUse { .. } | Error::Full { .. }) if !is_whole => return Ok(()),
        joined => joined?,
    };
    run.history.borrow_mut().joined(env, host.slot(), host.incarnation(), host.nonce());
    let mut done = 0;
    for round in 0.. {
        if !is_whole && round == ROUNDS {
            return Ok(());
        }
        match section(env, &host, run, if is_whole { LONG_MS } else { SHORT_MS }) {
            Ok(()) => done += 1,
            Err(Error::Timeout { .. }) if !is_whole => {}
            Err(Error::BadLine { .. } | Error::Fenced { .. }) if round < 400 => {}
            Err(Error::BadLine { .. }) if is_whole => env.fail("V9: a line is not written again although its owner runs"),
            Err(error) => return Err(error),
        }
        if done == SECTIONS {
            break;
        }
        directed::rest(env);
    }
    Ok(())
}

/// Joins; if every owner keeps running, as soon as a row that was lost is written again.
fn join_once_whole(env: &Env, run: &Run, is_whole: bool) -> Result<Host> {
    for _ in 0..400 {
        match join(env, &run.config) {
            Err(Error::BadLine { .. }) if is_whole => directed::rest(env),
            joined => return joined,
        }
    }
    env.fail("V9: a host cannot join although every owner of a line runs");
    join(env, &run.config)
}

fn section(env: &Env, host: &Host, run: &Run, timeout_ms: u64) -> Result<()> {
    let lock = run.lock;
    let mut guard = host.acquire(lock, timeout_ms)?;
    let strict = mode_of(host.lines().layout().geometry(), lock) == LockMode::Safe;
    let ticket = run.history.borrow_mut().enter(env, lock, host.slot(), guard.op().incarnation(), guard.grant(), strict);
    let is_second = env.host() == run.second;
    if is_second {
        run.is_second_inside.set(true);
    } else if run.beside == Beside::Forgotten && run.is_second_inside.get() && !run.is_lost.replace(true) {
        env.inflict(run.first, run.fence_row);
        let restart_after_ns = Some(10_000 + 1_000 * env.below(500) as u64);
        env.inflict(run.first, Fault::CrashMachine { restart_after_ns });
    }
    env.point("damage.inside");
    guard.repaired();
    for _ in 0..env.below(6) {
        env.yield_now()?;
    }
    run.history.borrow_mut().exit(ticket);
    if is_second {
        run.is_second_inside.set(false);
    }
    Ok(())
}
