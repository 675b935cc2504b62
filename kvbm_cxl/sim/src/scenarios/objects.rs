// SPDX-License-Identifier: Apache-2.0
//! Hosts bind, look up, list and unbind a few names in a table of few cells, and allocate and free the few locks of the lock table, while
//! hosts are fenced, crash and restart.
//!
//! Every binding has an offset of its own. Checked: for each name, and for the lock table as a whole, some order of the operations
//! explains every answer ([`super::linear`]); so a name has one binding, a bound name is found until it is unbound, no lock is allocated
//! twice, and none is lost but those whose allocation had an unknown end. When all is quiet every bound name lies in one cell that its
//! lookup reaches.

use super::linear::{Effect, Operations, Outcome};
use super::setup::{Cluster, join};
use crate::{Env, Failure, Fault, Planned, Stats, When, WritePath};
use cxl_pool::host::{Host, HostConfig};
use cxl_pool::lock::{FIRST_USER_LOCK, LockId};
use cxl_pool::lock_table::{allocate_lock, free_lock, is_allocated};
use cxl_pool::objects::{Object, Objects};
use cxl_pool::{Error, Result};
use std::cell::RefCell;
use std::rc::Rc;

/// Operations that each start of a process wants to get through.
const OPERATIONS: usize = 12;
/// The hosts run until then, so that a zombie that wakes up meets live hosts.
const UNTIL_NS: u64 = 60_000_000;
/// Names in use; with as few cells as there are, their probes collide.
const NAMES: [&[u8]; 5] = [b"a", b"b", b"c", b"d", b"e"];
/// Locks that can be allocated.
const LOCKS: u32 = 3;
/// Longer than any run.
const LONG_MS: u64 = 500_000;

/// What happens to a name; its state is the offset that it is bound to, or 0.
#[derive(Clone, Copy, Debug)]
enum Bind {
    Put(u64),
    Replace(u64),
    Destroy,
    Shows(u64),
    /// A put found it bound.
    Exists,
}

impl Effect for Bind {
    fn after(&self, state: u64) -> Vec<u64> {
        let (is_possible, after) = match *self {
            Bind::Put(offset) => (state == 0, offset),
            Bind::Replace(offset) => (true, offset),
            Bind::Destroy => (state != 0, 0),
            Bind::Shows(offset) => (state == offset, state),
            Bind::Exists => (state != 0, state),
        };
        is_possible.then_some(after).into_iter().collect()
    }
}

/// What happens to the lock table; its state has a bit for each allocated lock.
#[derive(Clone, Copy, Debug)]
enum Hand {
    /// Any lock that is free.
    Allocate,
    Got(LockId),
    Free(LockId),
    Shows(LockId, bool),
    Full,
}

impl Effect for Hand {
    fn after(&self, state: u64) -> Vec<u64> {
        let bit = |lock: LockId| 1 << (lock - FIRST_USER_LOCK);
        let all = (0..LOCKS).map(|lock| bit(FIRST_USER_LOCK + lock));
        let when = |is_possible: bool, after| is_possible.then_some(after).into_iter().collect();
        match *self {
            Hand::Allocate => all.filter(|bit| state & bit == 0).map(|bit| state | bit).collect(),
            Hand::Got(lock) => when(state & bit(lock) == 0, state | bit(lock)),
            Hand::Free(lock) => when(state & bit(lock) != 0, state & !bit(lock)),
            Hand::Shows(lock, is_set) => when((state & bit(lock) != 0) == is_set, state),
            Hand::Full => when(state == all.sum(), state),
        }
    }
}

#[derive(Default)]
struct History {
    names: Operations<Bind>,
    locks: Operations<Hand>,
    /// Locks that a host got and none began to free.
    held: Vec<LockId>,
    bindings: u64,
}

type Shared = Rc<RefCell<History>>;

/// One run.
pub fn run(seed: u64) -> std::result::Result<Stats, Failure> {
    run_with(seed, None)
}

/// One run, with one more fault.
pub fn run_with(seed: u64, planned: Option<Planned>) -> std::result::Result<Stats, Failure> {
    let hosts = crate::Random::new(seed).pick(&[2, 2, 3, 3, 4]);
    let mut cluster = Cluster::new(seed, hosts, hosts, |config, random| {
        config.geometry.objects = random.pick(&[3, 4, 4, 5, 6]);
        config.geometry.locks = FIRST_USER_LOCK + LOCKS;
        // A half-written line of a machine without power blocks its record until an operator acts, which ends no run.
        if random.one_in(2) && !matches!(planned, Some(Planned { fault: Fault::CrashMachine { .. }, .. })) {
            config.chances.crash_machine = 0;
        } else {
            config.write_path = WritePath::OneUnit;
        }
    });
    let history = Shared::default();
    for host in cluster.hosts.clone() {
        let (history, config) = (Rc::clone(&history), cluster.host_config.clone());
        cluster.world.start(host, move |env| {
            let (history, config) = (Rc::clone(&history), config.clone());
            env.spawn("main", move |env| main(&env, &history, &config));
        });
    }
    plan_zombies(&mut cluster);
    if let Some(planned) = planned {
        cluster.world.plan(planned);
    }
    let stats = cluster.world.run()?;
    judge(&cluster, &history.borrow()).map_err(|reason| cluster.world.failure(reason))?;
    Ok(stats)
}

/// Makes zombies of hosts that are about to write, or have written some of what they were to write.
fn plan_zombies(cluster: &mut Cluster) {
    // The last is a successor that has read some of what it is about to seal.
    for (point, most) in
        [("record.checked", 12), ("record.checked", 24), ("record.published", 24), ("objects.clearing", 2), ("record.sealing", 3)]
    {
        let visit = cluster.random.between(1, most);
        let for_ns = cluster.random.between(1, 40) * 1_000_000;
        cluster.world.plan(Planned { when: When::Point(point, visit), host: None, fault: Fault::PauseHost { for_ns } });
    }
}

/// What must hold when all hosts are through.
fn judge(cluster: &Cluster, history: &History) -> std::result::Result<(), String> {
    if history.names.confirmed() + history.locks.confirmed() == 0 {
        return Err("nothing was ever confirmed: nothing was tested".into());
    }
    history.names.check().map_err(|reason| format!("names: {reason}"))?;
    history.locks.check().map_err(|reason| format!("locks: {reason}"))?;
    let report = cxl_pool::fsck::check(&cluster.world.inspector(), &[]).map_err(|error| format!("fsck: {error}"))?;
    let rules = ["object.", "lock_table.range", "record.two_writers"];
    match report.findings.iter().find(|finding| rules.iter().any(|rule| finding.rule.starts_with(rule))) {
        Some(finding) => Err(format!("fsck: {finding:?}")),
        None => Ok(()),
    }
}

fn main(env: &Env, history: &Shared, config: &HostConfig) -> Result<()> {
    let host = join(env, config)?;
    let (reader, seen) = (host.clone(), Rc::clone(history));
    env.spawn("reader", move |env| {
        let objects = Objects::new(&reader);
        while env.global_ns() < UNTIL_NS {
            match env.below(6) {
                0..3 => get(&env, &objects, &seen, env.below(NAMES.len()))?,
                3 => list(&env, &objects, &seen)?,
                _ => ask(&env, &reader, &seen)?,
            }
            env.platform().sleep_ns(env.below(1_000_000) as u64);
        }
        Ok(())
    });
    let objects = Objects::new(&host);
    let mut done = 0;
    while done < OPERATIONS || env.global_ns() < UNTIL_NS {
        env.platform().sleep_ns(env.below(3_000_000) as u64);
        match env.below(10) {
            0..3 => put(env, &objects, history)?,
            3 => replace(env, &objects, history)?,
            4..7 => destroy(env, &objects, history)?,
            7 | 8 => allocate(env, &host, history)?,
            _ => free(env, &host, history)?,
        }
        done += 1;
    }
    (0..NAMES.len()).try_for_each(|name| get(env, &objects, history, name))
}

/// How long an operation waits for its lock: for as long as it takes, or not quite.
fn any_timeout_ms(env: &Env) -> u64 {
    if env.below(8) == 0 { env.below(8) as u64 } else { LONG_MS }
}

/// What an operation that failed leaves; errors that no fault explains are handed on.
fn failed(error: Error) -> Result<Outcome> {
    match error {
        Error::Fenced { slot, incarnation } => Ok(Outcome::Unknown(Some((slot, incarnation)))),
        // A line may look damaged while its writer is stopped in the middle of it.
        Error::Timeout { .. } | Error::BadLine { .. } => Ok(Outcome::Unknown(None)),
        error => Err(error),
    }
}

/// The same for a read.
fn missed(error: Error) -> Result<Outcome> {
    failed(error).map(|_| Outcome::Nothing)
}

/// An offset that was never bound, inside the chunks; the length follows from it.
fn new_binding(env: &Env, history: &Shared) -> (u64, u64) {
    let mut history = history.borrow_mut();
    history.bindings += 1;
    (env.lines().layout().data_offset() + history.bindings, history.bindings)
}

fn put(env: &Env, objects: &Objects, history: &Shared) -> Result<()> {
    let name = env.below(NAMES.len());
    let (offset, len_bytes) = new_binding(env, history);
    let operation = history.borrow_mut().names.begin(env, name as u64, Bind::Put(offset));
    let (effect, outcome) = match objects.put(NAMES[name], offset, len_bytes, any_timeout_ms(env)) {
        Ok(()) => (Bind::Put(offset), Outcome::Confirmed),
        Err(Error::Exists(_)) => (Bind::Exists, Outcome::Confirmed),
        Err(Error::Full { .. }) => (Bind::Shows(0), Outcome::Confirmed),
        Err(error) => (Bind::Put(offset), failed(error)?),
    };
    history.borrow_mut().names.end(operation, effect, outcome);
    Ok(())
}

fn replace(env: &Env, objects: &Objects, history: &Shared) -> Result<()> {
    let name = env.below(NAMES.len());
    let (offset, len_bytes) = new_binding(env, history);
    let operation = history.borrow_mut().names.begin(env, name as u64, Bind::Replace(offset));
    let (effect, outcome) = match objects.replace(NAMES[name], offset, len_bytes, any_timeout_ms(env)) {
        Ok(()) => (Bind::Replace(offset), Outcome::Confirmed),
        Err(Error::Full { .. }) => (Bind::Shows(0), Outcome::Confirmed),
        Err(error) => (Bind::Replace(offset), failed(error)?),
    };
    history.borrow_mut().names.end(operation, effect, outcome);
    Ok(())
}

fn destroy(env: &Env, objects: &Objects, history: &Shared) -> Result<()> {
    let name = env.below(NAMES.len());
    let operation = history.borrow_mut().names.begin(env, name as u64, Bind::Destroy);
    let (effect, outcome) = match objects.destroy(NAMES[name], any_timeout_ms(env)) {
        Ok(()) => (Bind::Destroy, Outcome::Confirmed),
        Err(Error::NotFound(_)) => (Bind::Shows(0), Outcome::Confirmed),
        Err(error) => (Bind::Destroy, failed(error)?),
    };
    history.borrow_mut().names.end(operation, effect, outcome);
    Ok(())
}

/// The effect of having seen `object`, which must be one that a host bound.
fn shown(env: &Env, object: &Object) -> Bind {
    if object.offset != env.lines().layout().data_offset() + object.len_bytes {
        env.fail(format!("no host ever bound {object:?}"));
    }
    Bind::Shows(object.offset)
}

fn get(env: &Env, objects: &Objects, history: &Shared, name: usize) -> Result<()> {
    let operation = history.borrow_mut().names.begin(env, name as u64, Bind::Shows(0));
    let (effect, outcome) = match objects.get(NAMES[name], any_timeout_ms(env)) {
        Ok(object) => (shown(env, &object), Outcome::Seen),
        Err(Error::NotFound(_)) => (Bind::Shows(0), Outcome::Seen),
        Err(error) => (Bind::Shows(0), missed(error)?),
    };
    history.borrow_mut().names.end(operation, effect, outcome);
    Ok(())
}

fn list(env: &Env, objects: &Objects, history: &Shared) -> Result<()> {
    let operation = history.borrow_mut().names.begin(env, NAMES.len() as u64, Bind::Shows(0));
    let listed = match objects.list(any_timeout_ms(env)) {
        Ok(listed) => listed,
        Err(error) => {
            let outcome = missed(error)?;
            history.borrow_mut().names.end(operation, Bind::Shows(0), outcome);
            return Ok(());
        }
    };
    let mut history = history.borrow_mut();
    history.names.end(operation, Bind::Shows(0), Outcome::Seen);
    for (number, name) in NAMES.iter().enumerate() {
        // A name that was rebound meanwhile may be there twice.
        let mut found = listed.iter().filter(|object| object.name == *name).peekable();
        if found.peek().is_none() {
            history.names.also(operation, number as u64, Bind::Shows(0));
        }
        found.for_each(|object| history.names.also(operation, number as u64, shown(env, object)));
    }
    if let Some(object) = listed.iter().find(|object| !NAMES.contains(&object.name.as_slice())) {
        env.fail(format!("no host ever bound {object:?}"));
    }
    Ok(())
}

/// A lock: mostly one that is allocated, else any.
fn any_lock(env: &Env, held: &[LockId]) -> LockId {
    match held.len() {
        len if len > 0 && env.below(4) != 0 => held[env.below(len)],
        _ => FIRST_USER_LOCK + env.below(LOCKS as usize) as LockId,
    }
}

fn allocate(env: &Env, host: &Host, history: &Shared) -> Result<()> {
    let operation = history.borrow_mut().locks.begin(env, 0, Hand::Allocate);
    let (effect, outcome) = match allocate_lock(host, any_timeout_ms(env)) {
        Ok(lock) => {
            history.borrow_mut().held.push(lock);
            (Hand::Got(lock), Outcome::Confirmed)
        }
        Err(Error::Full { .. }) => (Hand::Full, Outcome::Confirmed),
        Err(error) => (Hand::Allocate, failed(error)?),
    };
    history.borrow_mut().locks.end(operation, effect, outcome);
    Ok(())
}

fn free(env: &Env, host: &Host, history: &Shared) -> Result<()> {
    let (lock, operation) = {
        let mut history = history.borrow_mut();
        let lock = any_lock(env, &history.held);
        history.held.retain(|&held| held != lock);
        (lock, history.locks.begin(env, 0, Hand::Free(lock)))
    };
    let (effect, outcome) = match free_lock(host, lock, any_timeout_ms(env)) {
        Ok(()) => (Hand::Free(lock), Outcome::Confirmed),
        Err(Error::NotFound(_)) => (Hand::Shows(lock, false), Outcome::Confirmed),
        Err(error) => (Hand::Free(lock), failed(error)?),
    };
    history.borrow_mut().locks.end(operation, effect, outcome);
    Ok(())
}

fn ask(env: &Env, host: &Host, history: &Shared) -> Result<()> {
    let lock = any_lock(env, &history.borrow().held);
    let operation = history.borrow_mut().locks.begin(env, 0, Hand::Shows(lock, false));
    let (effect, outcome) = match is_allocated(host, lock, any_timeout_ms(env)) {
        Ok(is_set) => (Hand::Shows(lock, is_set), Outcome::Seen),
        Err(error) => (Hand::Shows(lock, false), missed(error)?),
    };
    history.borrow_mut().locks.end(operation, effect, outcome);
    Ok(())
}
