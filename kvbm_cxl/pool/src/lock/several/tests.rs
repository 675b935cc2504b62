// SPDX-License-Identifier: Apache-2.0

use super::*;
use crate::coherence::CoherenceOptions;
use crate::device::PoolSpec;
use crate::error::Error;
use crate::host::{HostConfig, Service};
use crate::machine::{Machine, State};
use crate::platform::MachineId;
use crate::pool::{FormatOptions, Pool};
use std::collections::BTreeSet;
use std::sync::Arc;

const LOCKS: [LockId; 5] = [20, 21, 30, 41, 22];
const TIMEOUT_MS: u64 = 20_000;

struct Member {
    host: Host,
    _service: Service,
}

/// Two hosts of a pool.
fn members(directory: &std::path::Path) -> [Member; 2] {
    let ids = [MachineId([1; 16]), MachineId([2; 16])];
    let options = FormatOptions {
        slots: 4,
        locks: 64,
        objects: 16,
        chunk_bytes: 256 << 10,
        machine: Some(ids[0]),
        memory: Some(CoherenceOptions::default()),
        ..FormatOptions::default()
    };
    let pool = Pool::format(&PoolSpec::new(vec![directory.join("pool")], Some(8 << 20)).unwrap(), &options).unwrap();
    ids.map(|id| {
        let state = directory.join(format!("{}", id.0[0]));
        std::fs::create_dir(&state).unwrap();
        let machine = Machine::new(id, State::open(&state, pool.superblock().uuid(), id).unwrap()).unwrap();
        let config = HostConfig { seats: pool.superblock().seats(), ..HostConfig::default() };
        let host = crate::pool::join(pool.lines().clone(), Arc::new(machine), config).unwrap();
        Member { _service: host.serve().unwrap(), host }
    })
}

fn each(member: &Member, locks: &[LockId]) -> BTreeSet<LockId> {
    let mut had = BTreeSet::new();
    member.host.acquire_each(locks, TIMEOUT_MS, |guard| once(&mut had, &guard)).unwrap();
    had
}

fn once(had: &mut BTreeSet<LockId>, guard: &LockGuard<'_>) -> Result<()> {
    assert!(had.insert(guard.lock()), "lock {} came twice", guard.lock());
    Ok(())
}

#[test]
fn each_of_several_locks_comes_once_wherever_it_was() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let [here, there] = members(directory.path());
    drop(there.host.acquire(LOCKS[0], TIMEOUT_MS).unwrap());
    drop(here.host.acquire(LOCKS[1], TIMEOUT_MS).unwrap());
    // A thread of this host has one of them, until all others have come.
    let held = here.host.acquire(LOCKS[2], TIMEOUT_MS).unwrap();
    let (mut held, mut order) = (Some(held), Vec::new());
    let work = |guard: LockGuard<'_>| {
        order.push(guard.lock());
        if order.len() == LOCKS.len() - 1 {
            drop(held.take());
        }
        Ok(())
    };
    here.host.acquire_each(&LOCKS, TIMEOUT_MS, work).unwrap();
    assert_eq!((order.len(), order.last()), (LOCKS.len(), Some(&LOCKS[2])));
    assert_eq!(order.iter().copied().collect::<BTreeSet<_>>(), LOCKS.into());
    // They stay here, and go where they are wanted.
    assert!(LOCKS.iter().all(|&lock| here.host.acquire_if_here(lock).unwrap().is_some()));
    assert!(LOCKS.iter().all(|&lock| there.host.acquire_if_here(lock).unwrap().is_none()));
    assert_eq!(each(&there, &LOCKS), LOCKS.into());
    assert!(there.host.acquire_each(&[20, 64], TIMEOUT_MS, |_| Ok(())).is_err_and(|error| matches!(error, Error::Invalid(_))));
}

#[test]
fn a_failure_at_one_lock_leaves_all_of_them_free() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let [here, there] = members(directory.path());
    for done in 0..LOCKS.len() {
        let mut left = done;
        let failed = here.host.acquire_each(&LOCKS, TIMEOUT_MS, |_| {
            left = left.checked_sub(1).ok_or(Error::Closed)?;
            Ok(())
        });
        assert!(matches!(failed, Err(Error::Closed)), "{failed:?}");
        // None is asked for any more, and no thread here holds one.
        assert_eq!(each(&there, &LOCKS), LOCKS.into());
        assert_eq!(each(&here, &LOCKS), LOCKS.into());
        assert_eq!(each(&there, &LOCKS), LOCKS.into());
    }
}

#[test]
fn a_lock_that_a_host_in_silence_has_keeps_none_of_the_others() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let [here, there] = members(directory.path());
    let held = there.host.acquire(LOCKS[0], TIMEOUT_MS).unwrap();
    let mut had = BTreeSet::new();
    let failed = here.host.acquire_each(&LOCKS, 200, |guard| once(&mut had, &guard));
    assert!(matches!(failed, Err(Error::Timeout { .. })), "{failed:?}");
    assert_eq!(had, LOCKS[1..].iter().copied().collect());
    drop(held);
    assert_eq!(each(&here, &LOCKS), LOCKS.into());
}
