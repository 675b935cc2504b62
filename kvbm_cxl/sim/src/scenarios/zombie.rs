// SPDX-License-Identifier: Apache-2.0
//! Hosts commit one class A record under a lock of mode T and stand still in the middle of it, for longer than the time-out.
//!
//! Checked: V4 to V6 over everything that a holder read, a commit confirmed or a reader without the lock accepted; V9 by the run's end.

use super::directed::{self, LONG_MS, MS, at};
use super::ledger::{Known, Shared};
use super::setup::{Cluster, join};
use crate::{Env, Failure, Fault, Planned, SimHost, Stats, WritePath};
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::media::RECORD_BYTES;
use cxl_pool::record::{Best, Locked, Reading, Structure, read};
use cxl_pool::{Error, Result};
use std::rc::Rc;

/// Sections that each host wants to get through.
const SECTIONS: u32 = 6;
/// The record.
const RECORD: u64 = 0;
/// Where holders and managers stand still.
const POINTS: &[&str] = &[
    "lock.accepted", "lock.cancelled", "lock.requested", "manager.before_grant", "manager.fenced", "manager.granted", "manager.passes_on",
    "record.checked", "record.confirmed", "record.intent", "record.intent_emptied", "record.published", "record.repaired", "record.sealed",
    "zombie.read",
];

/// What the hosts of a run do.
#[derive(Clone, Copy)]
struct Habits {
    /// The only host that commits, if not all do.
    writer: Option<SimHost>,
    /// One in so many acquisitions has a short time-out.
    hasty_one_in: usize,
}

/// One run.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    run_with(seed, None)
}

/// One run, with that fault, if one is given, in place of the scenario's own.
pub fn run_with(seed: u64, planned: Option<Planned>) -> std::result::Result<Stats, Failure> {
    let mut sizes = crate::Random::new(seed);
    let hosts = sizes.pick(&[2, 3, 3]);
    let path = directed::write_path(seed);
    let mut cluster = directed::cluster(seed, hosts, hosts.min(2), hosts, path);
    let mut habits = Habits { writer: None, hasty_one_in: 3 };
    match planned {
        Some(planned) => cluster.plan_beside(planned, "record.checked"),
        None => order_faults(&mut cluster, path, &mut habits),
    }
    let ledger = Shared::default();
    for host in cluster.hosts.clone() {
        let (ledger, config) = (Rc::clone(&ledger), cluster.host_config.clone());
        cluster.world.start(host, move |env| {
            let (ledger, config) = (Rc::clone(&ledger), config.clone());
            env.spawn("main", move |env| main(&env, &ledger, &config, habits));
        });
    }
    let stats = cluster.world.run()?;
    if ledger.borrow().known() == 0 {
        return Err(cluster.world.failure("nothing was ever read or committed: nothing was tested"));
    }
    Ok(stats)
}

fn order_faults(cluster: &mut Cluster, path: WritePath, habits: &mut Habits) {
    let random = &mut cluster.random;
    // The zombie: it stands still somewhere between the check and the confirmation.
    let place = random.pick(&["record.checked", "record.checked", "record.published", "record.intent", "zombie.read"]);
    let zombie = at(place, random.between(1, 6), None, Fault::PauseHost { for_ns: random.between(5 * MS, 30 * MS) });
    let planned = match random.below(8) {
        0 => vec![zombie],
        // Who fenced it stands still as well, so that another manager passes the lock on.
        1 => vec![zombie, at("manager.fenced", 1, None, Fault::PauseHost { for_ns: random.between(10 * MS, 60 * MS) })],
        // The next holder stands still in the middle of its repair.
        2 | 3 => {
            let point = random.pick(&["record.intent", "record.checked", "record.sealed", "record.repaired"]);
            let next = Fault::PauseThread { for_ns: random.between(MS, 30 * MS) };
            vec![zombie, at(point, random.between(2, 8), None, next)]
        }
        // The next holder is late, and has given up when the grant comes. The others only read, so that nothing outvotes the zombie.
        4 | 5 => {
            let writer = random.pick(&cluster.hosts);
            *habits = Habits { writer: Some(writer), hasty_one_in: 2 };
            let zombie = Fault::PauseHost { for_ns: random.between(15 * MS, 30 * MS) };
            let late = Fault::PauseThread { for_ns: random.between(4 * MS, 12 * MS) };
            vec![
                at("record.checked", random.between(1, 3), Some(writer), zombie),
                at("lock.requested", random.between(2, 10), None, late),
                at("lock.requested", random.between(2, 10), None, late),
            ]
        }
        // It stands still anywhere, between two points too.
        6 => {
            let when = crate::When::Step(random.between(500, 8_000));
            let host = Some(random.pick(&cluster.hosts));
            vec![Planned { when, host, fault: Fault::PauseHost { for_ns: random.between(5 * MS, 30 * MS) } }]
        }
        _ => {
            let count = random.between(1, 5);
            return cluster.disturb(path, POINTS, count);
        }
    };
    planned.into_iter().for_each(|planned| cluster.world.plan(planned));
}

fn main(env: &Env, ledger: &Shared, config: &HostConfig, habits: Habits) -> Result<()> {
    let host = join(env, config)?;
    let (reader, seen) = (host.clone(), Rc::clone(ledger));
    env.spawn_daemon("reader", move |env| look(&env, &reader, &seen));
    let mut done = 0;
    for round in 0.. {
        let timeout_ms = if env.below(habits.hasty_one_in) == 0 && round < 12 { 1 + env.below(4) as u64 } else { LONG_MS };
        let writes = habits.writer.map_or(env.below(2) == 0, |writer| writer == env.host());
        match section(env, &host, ledger, writes, timeout_ms) {
            Ok(()) => done += 1,
            Err(Error::Timeout { .. }) if timeout_ms != LONG_MS => {}
            Err(Error::Fenced { .. }) if round < 50 => {}
            // A line looks damaged while its writer stands still in the middle of it.
            Err(Error::BadLine { .. }) if round < 400 => env.platform().sleep_ns(MS / 2),
            Err(error) => return Err(error),
        }
        if done == SECTIONS {
            break;
        }
        directed::rest(env);
    }
    Ok(())
}

fn section(env: &Env, host: &Host, ledger: &Shared, writes: bool, timeout_ms: u64) -> Result<()> {
    let mut locked = Locked::acquire(host, Structure::LockTable, timeout_ms)?;
    let best = locked.read(RECORD)?;
    env.point("zombie.read");
    if !writes {
        locked.confirm()?;
        ledger.borrow_mut().is_final(env, locked.grant(), value_of(&best), Known::Read);
        return Ok(());
    }
    let value = ledger.borrow_mut().begin(value_of(&best), locked.grant());
    let mut data = [0; RECORD_BYTES];
    data[..8].copy_from_slice(&value.to_le_bytes());
    match locked.commit(&[(best, data)]) {
        Ok(()) => ledger.borrow_mut().committed(env, locked.grant(), best.copy.version + 1, value),
        Err(error) => {
            ledger.borrow_mut().unknown += 1;
            return Err(error);
        }
    }
    Ok(())
}

/// Reads without the lock, again and again.
fn look(env: &Env, host: &Host, ledger: &Shared) -> Result<()> {
    loop {
        match read(host, RECORD) {
            Ok(Reading::Final(best)) if best.copy.grant != 0 => {
                ledger.borrow_mut().is_final(env, best.copy.grant, value_of(&best), Known::Accepted);
            }
            // A line may look damaged while its writer stands still in the middle of it.
            Ok(_) | Err(Error::BadLine { .. }) => {}
            Err(error) => return Err(error),
        }
        env.platform().sleep_ns(300_000);
    }
}

fn value_of(best: &Best) -> u64 {
    best.copy.data[..8].iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}
