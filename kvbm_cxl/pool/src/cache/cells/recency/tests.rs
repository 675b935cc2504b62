// SPDX-License-Identifier: Apache-2.0
//! Ticks are stepped by hand here: no thread runs the service that beats.

use super::*;
use crate::cache::{BlockKey, Cache, CacheConfig, Namespace, Published, Pulled, chain};
use crate::coherence::CoherenceOptions;
use crate::device::PoolSpec;
use crate::host::HostConfig;
use crate::machine::{Machine, State};
use crate::platform::MachineId;
use crate::pool::{CellArea, FormatOptions, OpenOptions, Pool, Share};
use std::sync::Arc;

const SPACE: Namespace = Namespace([3; 16]);

/// A pool with `cells` cells of 64 bytes, used by machines 1 and 2 through caches of their own.
struct Pair {
    one: Cache,
    two: Cache,
    pool: Pool,
    _directory: tempfile::TempDir,
}

fn key(number: u64) -> BlockKey {
    chain(None, &[number as u32], b"ticks")
}

impl Pair {
    /// Does `work` while the hosts' services run, and ends these.
    fn new(cells: u64, work: impl FnOnce(&Cache, &Cache)) -> Pair {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let memory = Some(CoherenceOptions::default());
        let options = FormatOptions {
            slots: 4,
            locks: 64,
            objects: 16,
            chunk_bytes: 256 << 10,
            cells: vec![CellArea { cell_bytes: 64, share: Share::Bytes(cells * 64) }],
            machine: Some(MachineId([1; 16])),
            memory,
            ..FormatOptions::default()
        };
        let spec = PoolSpec::new(vec![directory.path().join("pool")], Some(8 << 20)).unwrap();
        let pool = Pool::format(&spec, &options).unwrap();
        let join = |number: u8| {
            let id = MachineId([number; 16]);
            let mapped = Pool::open(&spec, &OpenOptions { memory, ..OpenOptions::default() }).unwrap();
            let machine = Machine::new(id, State::open(directory.path(), pool.superblock().uuid(), id).unwrap()).unwrap();
            let config = HostConfig { seats: pool.superblock().seats(), ..HostConfig::default() };
            let host = crate::pool::join(mapped.lines().clone(), Arc::new(machine), config).unwrap();
            let service = host.serve().unwrap();
            (Cache::open(&host, CacheConfig { lock_timeout_ms: Some(60_000), ..CacheConfig::default() }).unwrap(), service)
        };
        let (one, first) = join(1);
        let (two, second) = join(2);
        work(&one, &two);
        drop((first, second));
        let pair = Pair { one, two, pool, _directory: directory };
        pair.go_to(0);
        pair
    }

    /// The pool is at this tick from now on. Hosts follow when they next look.
    fn go_to(&self, tick: u64) {
        let seat = self.pool.lines().fetch::<Seat>(0).unwrap();
        self.pool.lines().publish(0, Seat { beat: tick * BEATS_PER_TICK, ..seat }).unwrap();
    }

    /// As [`Pair::go_to`], and both hosts follow.
    fn follow_to(&self, tick: u64) {
        self.go_to(tick);
        [&self.one, &self.two].iter().for_each(|cache| cache.inner.follow_ticks().unwrap());
    }

    /// What the evictor of the first host learns about a block of it.
    fn ticks(&self, number: u64) -> u8 {
        let cell = self.one.lookup(SPACE, key(number)).unwrap().unwrap().cell;
        self.one.inner.store.uses(&[cell]).unwrap()[0].ticks
    }
}

fn publish(cache: &Cache, numbers: std::ops::Range<u64>) {
    for number in numbers {
        assert_eq!(cache.publish(SPACE, key(number), None, &[number as u8; 60]).unwrap(), Published::Stored, "block {number}");
    }
}

fn pull(cache: &Cache, numbers: std::ops::Range<u64>) {
    for number in numbers {
        assert_eq!(cache.pull(SPACE, key(number), &mut [0; 60]).unwrap(), Pulled::Hit { len_bytes: 60 });
    }
}

#[test]
fn a_quota_takes_first_what_no_host_has_used_for_longest() {
    let pair = Pair::new(112, |one, _| publish(one, 0..3));
    pair.follow_to(3);
    pull(&pair.two, 0..2);
    pair.follow_to(4);
    pull(&pair.two, 0..1);
    let left_after_one = || {
        pair.one.inner.evict_of(SPACE, 64).unwrap();
        (0..3).filter(|&number| pair.one.lookup(SPACE, key(number)).unwrap().is_some()).collect::<Vec<u64>>()
    };
    assert_eq!([left_after_one(), left_after_one()], [vec![0, 1], vec![0]]);
}

#[test]
fn a_number_is_gone_before_it_comes_round() {
    let pair = Pair::new(112, |one, _| publish(one, 0..3));
    pair.follow_to(3);
    pull(&pair.two, 0..1);
    let pin = pair.two.pin(SPACE, key(1)).unwrap().unwrap();
    for tick in 3..9 {
        assert_eq!(pair.ticks(0), 1 << number(3), "tick {tick}");
        pair.follow_to(tick);
    }
    // Six ticks later it is the oldest there is, and no host pins anything in its line.
    pair.follow_to(9);
    assert_eq!(pair.ticks(0), 0);
    // The last use of a block that is pinned all the while is the end of its pin.
    drop(pin);
    assert_eq!(pair.ticks(1), 1 << number(9));
}

#[test]
fn a_service_that_stood_still_clears_what_it_missed() {
    let pair = Pair::new(112, |one, _| publish(one, 0..8));
    for tick in 0..5 {
        pair.follow_to(tick);
        pull(&pair.two, tick..tick + 1);
    }
    // Those of ticks 0 to 3 are a cycle old or about to be, that of tick 4 is not.
    pair.follow_to(9);
    assert_eq!((0..5).map(|number| pair.ticks(number)).collect::<Vec<_>>(), [0, 0, 0, 0, 1 << number(4)]);
    // A new manager starts its own count: by its numbers five ticks have gone by.
    pull(&pair.two, 5..6);
    pair.follow_to(0);
    assert_eq!((pair.ticks(4), pair.ticks(5)), (0, 1 << number(9)));
    // A full cycle and more.
    pair.follow_to(700);
    assert_eq!(pair.ticks(5), 0);
}

#[test]
fn a_host_goes_on_once_all_its_lines_are_clear() {
    let pair = Pair::new(5 * CELLS_PER_PIN as u64, |one, _| publish(one, 0..4 * CELLS_PER_PIN as u64));
    pair.follow_to(1);
    pull(&pair.two, 0..4 * CELLS_PER_PIN as u64);
    let (inner, known) = (&pair.two.inner, 1 + u64::from(CYCLE_TICKS));
    let clear = || inner.pins.clear_numbers(known, known + 6, 1).unwrap();
    let rounds = (1..).find(|_| clear()).unwrap();
    assert!((4..=6).contains(&rounds), "{rounds} rounds for four or five lines of blocks");
    assert!((0..4 * CELLS_PER_PIN as u64).all(|number| pair.ticks(number) == 0));
    // Another process that comes later finds nothing to do, and takes nothing away where the host has gone on.
    assert!(clear());
    pair.follow_to(7);
    pull(&pair.two, 0..1);
    *held(&inner.pins.clearing) = Clearing::default();
    assert!(clear());
    assert_eq!(pair.ticks(0), 1 << number(7));
}

#[test]
fn ticks_of_hosts_that_are_gone_tell_nothing() {
    let pair = Pair::new(112, |one, _| publish(one, 0..2));
    pair.follow_to(1);
    pull(&pair.two, 0..1);
    assert_eq!(pair.ticks(0), 1 << number(1));
    pair.two.host().clone().leave().unwrap();
    // Known from the next tick on.
    pair.go_to(2);
    pair.one.inner.follow_ticks().unwrap();
    assert_eq!(pair.ticks(0), 0);
}

#[test]
fn no_publish_is_refused_because_other_hosts_used_many_blocks() {
    let cells = crate::cache::cells::evict::YOUNGER_AT as u64 + 700;
    let pair = Pair::new(cells, |one, _| {
        let all = one.inner.geometry().cell_count();
        publish(one, 0..all);
    });
    let all = pair.one.inner.geometry().cell_count();
    pair.follow_to(1);
    pull(&pair.two, 0..all);
    pair.follow_to(2);
    publish(&pair.one, all..all + 40);
    let evicted = pair.one.metrics().evictions_total.total();
    assert_eq!(evicted, 40, "more went than had to");
}

#[test]
fn a_use_by_another_host_counts_after_its_number_is_gone() {
    // Of blocks 0 to 9, published in this order, another host uses the first five. Three cycles later none of its numbers is left.
    let evicted = |learns: bool| {
        let pair = Pair::new(112, |one, _| publish(one, 0..10));
        pair.follow_to(1);
        pull(&pair.two, 0..5);
        for tick in 2..22 {
            if learns {
                pair.one.inner.store.learn_uses(CHUNKS_LEARNT_PER_ROUND).unwrap();
            }
            pair.follow_to(tick);
        }
        assert_eq!(pair.ticks(0), 0);
        pair.one.inner.evict(0, 5).unwrap();
        (0..10).filter(|&number| pair.one.lookup(SPACE, key(number)).unwrap().is_none()).collect::<Vec<_>>()
    };
    assert_eq!(evicted(true), [5, 6, 7, 8, 9]);
    assert_eq!(evicted(false), [0, 1, 2, 3, 4], "without looking, those that are used go first");
}

#[test]
fn uses_are_learnt_in_turn() {
    let pair = Pair::new(5 * CELLS_PER_PIN as u64, |one, _| publish(one, 0..4 * CELLS_PER_PIN as u64));
    pair.follow_to(1);
    pull(&pair.two, 0..4 * CELLS_PER_PIN as u64);
    let chunks = pair.one.inner.store.cells().chunks().count();
    assert!(chunks > 2);
    let learnt = &pair.one.inner.store.recency.learnt;
    for round in 0..=chunks {
        assert_eq!(learnt.load(Ordering::Relaxed) == 0, round == 0, "round {round} of {chunks}");
        pair.one.inner.store.learn_uses(1).unwrap();
    }
    assert_eq!(learnt.load(Ordering::Relaxed), 0, "and starts over");
}
