// SPDX-License-Identifier: Apache-2.0
//! Machines that know nothing of each other claim one manager seat, all at once, while some pause or die in the middle, release the seat,
//! come back as another session, and an operator states which sessions are over.
//!
//! Checked: V8 of the seat (one live session has it, and no two sessions were its owner of one number), V9 by the run's end.

use super::directed::{self, MS, at};
use crate::{Env, Failure, Fault, Planned, SimProcess, Stats, WritePath};
use cxl_pool::Result;
use cxl_pool::lock::claim::{Claimed, Claimer};
use cxl_pool::media::Seat;
use cxl_pool::platform::{MachineLock, MachineLockGuard};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// The seat that all of them want.
const SEAT: u64 = 0;
/// Where machines pause and die.
const POINTS: &[&str] = &[
    "claim.accepted", "claim.announced", "claim.before_ballot", "claim.closed", "claim.collected", "claim.named", "claim.placed",
    "claim.published", "seats.owned",
];

type Session = [u8; 16];

/// What the machines of a run share: the truth that no protocol knows.
#[derive(Default)]
struct Truth {
    /// The process of each session.
    processes: BTreeMap<Session, SimProcess>,
    /// Sessions that have the seat and have not released it.
    owners: Vec<Session>,
    /// Who was the n-th owner.
    generations: BTreeMap<u32, Session>,
}

type Shared = Rc<RefCell<Truth>>;

impl Truth {
    fn is_alive(&self, env: &Env, session: &Session) -> bool {
        self.processes.get(session).is_some_and(|process| env.view(|view| view.is_alive(*process)))
    }

    /// `session` owns the seat from here on. Checks V8.
    fn owns(&mut self, env: &Env, session: Session, generation: u32) {
        let alive: Vec<Session> = self.owners.iter().copied().filter(|other| self.is_alive(env, other)).collect();
        if let Some(other) = alive.iter().find(|other| **other != session) {
            env.fail(format!("V8: seat {SEAT} belongs to session {session:x?} of {:?} while {other:x?} has it", env.process()));
        }
        let first = *self.generations.entry(generation).or_insert(session);
        if first != session {
            env.fail(format!("V8: owner {generation} of seat {SEAT} is {first:x?} and {session:x?}"));
        }
        self.owners = alive;
        self.owners.push(session);
    }
}

/// One run.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    run_with(seed, None)
}

/// One run, with that fault, if one is given, in place of the scenario's own.
pub fn run_with(seed: u64, planned: Option<Planned>) -> std::result::Result<Stats, Failure> {
    // Half-written lines block claims until an operator acts.
    let path = WritePath::OneUnit;
    let mut sizes = crate::Random::new(seed);
    let hosts = sizes.pick(&[2, 2, 3, 4]);
    let mut cluster = directed::cluster(seed, hosts, 1, hosts, path);
    match planned {
        Some(planned) => cluster.world.plan(planned),
        None => {
            for _ in 0..cluster.random.between(1, 4) {
                let random = &mut cluster.random;
                let fault = match random.below(8) {
                    0..3 => directed::crash(random, path),
                    3..6 => Fault::PauseHost { for_ns: random.between(MS / 20, 4 * MS) },
                    _ => Fault::PauseThread { for_ns: random.between(1_000, MS) },
                };
                let (point, visit) = (random.pick(POINTS), random.between(1, 5));
                cluster.world.plan(at(point, visit, None, fault));
            }
        }
    }
    let truth = Shared::default();
    for host in cluster.hosts.clone() {
        let truth = Rc::clone(&truth);
        cluster.world.start(host, move |env| {
            let truth = Rc::clone(&truth);
            env.spawn("main", move |env| live(&env, &truth));
        });
    }
    let stats = cluster.world.run()?;
    if truth.borrow().generations.is_empty() {
        return Err(cluster.world.failure("no machine ever had the seat: nothing was tested"));
    }
    Ok(stats)
}

fn locked(env: &Env, lock: MachineLock) -> Result<MachineLockGuard> {
    loop {
        match env.platform().try_lock(lock, true)? {
            Some(guard) => return Ok(guard),
            None => env.platform().sleep_ns(10_000),
        }
    }
}

/// One process of a machine: a session, or two one after the other.
fn live(env: &Env, truth: &Shared) -> Result<()> {
    let (_manager, _claim) = (locked(env, MachineLock::Manager)?, locked(env, MachineLock::Claim)?);
    let (lines, platform) = (env.lines(), env.platform());
    let claimer = Claimer { lines: &lines, platform: &*platform };
    for _ in 0..2 {
        let mut session: Session = [0; 16];
        session[..8].copy_from_slice(&(platform.random() | 1).to_le_bytes());
        truth.borrow_mut().processes.insert(session, env.process());
        let Some(generation) = get(env, truth, &claimer, &session)? else { return Ok(()) };
        truth.borrow_mut().owns(env, session, generation);
        env.point("seats.owned");
        // The owner writes its line, as a manager does with every beat.
        for beat in 1..=4 {
            let line = Seat { beat, machine: platform.machine().0, session, generation, ..Seat::default() };
            lines.publish(SEAT, line)?;
            platform.sleep_ns(env.below(50) as u64 * 1_000 + 1);
        }
        if env.below(3) == 0 {
            // Keeps it until the process ends; another machine then needs a statement.
            return Ok(());
        }
        truth.borrow_mut().owners.retain(|owner| *owner != session);
        let line = Seat { machine: platform.machine().0, session, generation, state: Seat::RELEASED, ..Seat::default() };
        lines.publish(SEAT, line)?;
    }
    Ok(())
}

/// Claims until the seat is had; `None` when it is another's, who lives and keeps it.
fn get(env: &Env, truth: &Shared, claimer: &Claimer<'_>, session: &Session) -> Result<Option<u32>> {
    for attempt in 0..200u64 {
        match claimer.claim(SEAT, session)? {
            Claimed::Owned { generation } => return Ok(Some(generation)),
            Claimed::Taken(found) => {
                // An operator who looks: a session whose process is gone is over.
                if !truth.borrow().is_alive(env, &found.session) {
                    claimer.state_ended(SEAT, &found.session)?;
                } else if attempt > 20 {
                    return Ok(None);
                }
            }
            Claimed::Superseded => {}
        }
        claimer.platform.sleep_ns(env.below(20_000 << attempt.min(6)) as u64 + 1);
    }
    env.fail("V9: the seat was not claimed in 200 attempts");
    Ok(None)
}
