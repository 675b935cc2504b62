// SPDX-License-Identifier: Apache-2.0
//! What listeners are told, and what is counted.

use crate::bench::*;
use cxl_pool::cache::events::{Change, Received};
use cxl_pool::cache::{PublishRequest, Published};
use cxl_pool::metrics::{EvictionReason, MissReason, RefusalReason};
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

fn changes(events: &cxl_pool::cache::events::Subscriber) -> Vec<Change> {
    let mut next = None;
    let changes = events.try_iter().map(|received| match received {
        Received::Event(event) => {
            assert!(next.is_none_or(|next| next == event.sequence), "a gap in the numbers");
            next = Some(event.sequence + 1);
            event.change
        }
        Received::Lagged(count) => panic!("{count} events lost"),
    });
    changes.collect()
}

#[test]
fn listeners_are_told_in_order() {
    let bench = Bench::new(&[(1024, 28)]);
    let (member, other) = (bench.member(1), bench.member(2));
    let (events, others) = (member.cache.subscribe(), other.cache.subscribe());
    let parent = Some(key(100));
    assert_eq!(member.cache.publish(SPACE, key(0), parent, &bytes(0, 900)).unwrap(), Published::Stored);
    member.publish(1..3, 1000);
    assert!(member.cache.evict(SPACE, key(1)).unwrap());
    let told = changes(&events);
    let namespace = SPACE;
    match told[..] {
        [
            Change::Stored { key: stored, parent: before, len_bytes: 900, namespace: within, cell },
            Change::Stored { key: second, parent: None, .. },
            Change::Stored { key: third, .. },
            Change::Removed { key: removed, .. },
        ] => {
            assert_eq!((stored, before, within, second, third, removed), (key(0), parent, SPACE, key(1), key(2), key(1)));
            assert_eq!(member.cache.lookup(SPACE, key(0)).unwrap().unwrap().cell, cell);
        }
        ref other => panic!("{other:?}"),
    }
    // What is not stored is not told, nor what other hosts do.
    assert_eq!(member.cache.publish(SPACE, key(0), None, &bytes(0, 900)).unwrap(), Published::Exists);
    drop(member.cache.reserve(&PublishRequest { namespace, key: key(50), parent: None, len_bytes: 9 }).unwrap());
    assert_eq!((changes(&events), changes(&others)), (vec![], vec![]));

    let cells = member.pool.layout().geometry().cell_count();
    member.publish(200..200 + cells - 2, 1000);
    assert!(changes(&events).iter().all(|change| matches!(change, Change::Stored { .. })));
    member.publish(300..301, 1000);
    match changes(&events)[..] {
        // A block makes room before the one that needs it is stored.
        [Change::Evicted { key: evicted, .. }, Change::Stored { key: stored, .. }] => assert_eq!((evicted, stored), (key(0), key(300))),
        ref other => panic!("{other:?}"),
    }
    assert_eq!(member.cache.clear(Some(SPACE)).unwrap() as u64, cells);
    let told = changes(&events);
    let (last, removed) = told.split_last().unwrap();
    assert_eq!(*last, Change::Cleared { namespace });
    assert!(removed.len() as u64 == cells && removed.iter().all(|change| matches!(change, Change::Removed { .. })));
}

#[test]
fn a_pinned_block_keeps_its_namespace_from_being_cleared() {
    let bench = Bench::new(&[(1024, 28)]);
    let (member, other) = (bench.member(1), bench.member(2));
    member.publish(0..3, 1000);
    let pin = other.cache.pin(SPACE, key(1)).unwrap().unwrap();
    let events = member.cache.subscribe();
    assert_eq!(member.cache.clear(Some(SPACE)).unwrap(), 2);
    assert!(changes(&events).iter().all(|change| matches!(change, Change::Removed { .. })), "cleared, with a block in it");
    drop(pin);
    assert_eq!(member.cache.clear(Some(SPACE)).unwrap(), 1);
    assert_eq!(changes(&events).last(), Some(&Change::Cleared { namespace: SPACE }));
}

#[test]
fn another_host_clears_and_evicts_by_request() {
    let bench = Bench::new(&[(1024, 28)]);
    let (member, other) = (bench.member(1), bench.member(2));
    let events = member.cache.subscribe();
    member.publish(0..4, 1000);
    assert!(!other.cache.evict(SPACE, key(2)).unwrap());
    member.serve_until("a request to evict", || !member.has(2, 1000));
    assert_eq!(member.count(0..4, 1000), 3);
    assert_eq!(other.cache.clear(Some(OTHER_SPACE)).unwrap(), 0);
    member.cache.service_round().unwrap();
    assert_eq!(member.count(0..4, 1000), 3);
    assert_eq!(other.cache.clear(None).unwrap(), 0);
    member.serve_until("a request to clear", || {
        // It waits for the one before.
        other.cache.service_round().unwrap();
        member.count(0..4, 1000) == 0
    });
    assert_eq!(changes(&events).iter().filter(|change| matches!(change, Change::Removed { .. })).count(), 4);
    assert_eq!(member.cache.metrics().evictions_total.of(EvictionReason::Cleared).get(), 4);
}

#[test]
fn everything_is_counted() {
    let bench = Bench::new(&[(1024, 28)]);
    let (member, other) = (bench.member(1), bench.member(2));
    let cells = member.pool.layout().geometry().cell_count();
    member.publish(0..cells + 3, 1000);
    let counted = member.cache.metrics();
    assert_eq!((counted.publish_total.get(), counted.publish_bytes_total.get()), (cells + 3, 1000 * (cells + 3)));
    assert_eq!(counted.evictions_total.of(EvictionReason::Capacity).get(), 3);
    assert_eq!((counted.publish_seconds.count(), counted.block_bytes.sum()), (cells + 3, 1000 * (cells + 3)));
    assert_eq!(member.cache.publish(SPACE, key(5), None, &bytes(5, 1000)).unwrap(), Published::Exists);
    assert!(member.cache.publish(SPACE, key(900), None, &[1; 1025]).is_err());
    let refused = |reason| counted.publish_refused_total.of(reason).get();
    assert_eq!((refused(RefusalReason::Exists), refused(RefusalReason::TooLong)), (1, 1));

    let counted = other.cache.metrics();
    assert_eq!(other.count(0..8, 1000), 5);
    assert_eq!((counted.pull_total.get(), counted.pull_bytes_total.get(), counted.hits_total.get()), (5, 5000, 5));
    assert_eq!((counted.misses_total.of(MissReason::Absent).get(), counted.misses_total.total()), (3, 3));
    let keys: Vec<_> = (3..8).chain([999]).map(key).collect();
    assert_eq!(other.cache.lookup_chain(SPACE, &keys).unwrap().len(), 5);
    assert_eq!((counted.hits_total.get(), counted.misses_total.of(MissReason::Absent).get()), (10, 4));
    let pins = other.cache.pin_chain(SPACE, &keys).unwrap();
    other.cache.service_round().unwrap();
    assert_eq!((counted.pins.get(), other.cache.pinned()), (5, 5));
    assert_eq!(member.cache.clear(None).unwrap() as u64, cells - 5);
    assert_eq!(member.cache.metrics().evictions_pinned_total.get(), 5);
    drop(pins);
    other.cache.service_round().unwrap();
    assert_eq!(counted.pins.get(), 0);
    let mut text = String::new();
    counted.render(&mut text);
    assert!(text.contains("cxl_cache_pull_total 5\n"), "{text}");
}

#[test]
fn a_mirror_has_what_is_there_when_others_come_in_between() {
    const KEYS: u64 = 200;
    let bench = Bench::new(&[(64, 112)]);
    let member = bench.member(1);
    let events = member.cache.events().subscribe_with(1 << 18);
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let publish = |thread: u64| {
            for number in 0..4_000 {
                // Whether there is a cell for it does not matter here.
                let _ = member.cache.publish(SPACE, key(thread * KEYS + number % KEYS), None, &bytes(number, 60));
            }
        };
        let publishers = [0, 1, 2].map(|thread| scope.spawn(move || publish(thread)));
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                member.cache.clear(Some(SPACE)).unwrap();
            }
        });
        publishers.into_iter().for_each(|thread| thread.join().unwrap());
        is_done.store(true, Ordering::Relaxed);
    });
    // Blocks on their way out when their namespace was empty are told one by one as well.
    let (mut mirror, mut cleared) = (HashSet::new(), HashSet::new());
    for change in changes(&events) {
        match change {
            Change::Stored { key, .. } => assert!(mirror.insert(key), "stored twice, and not gone in between"),
            Change::Removed { key, .. } | Change::Evicted { key, .. } => {
                assert!(mirror.remove(&key) || cleared.remove(&key), "gone before it was stored");
            }
            Change::Cleared { .. } => cleared.extend(mirror.drain()),
        }
    }
    let there: HashSet<_> = (0..3 * KEYS).map(key).filter(|&key| member.cache.lookup(SPACE, key).unwrap().is_some()).collect();
    assert_eq!(mirror, there);
}

#[test]
fn a_re_join_tells_what_is_lost_and_an_adoption_what_is_won() {
    let bench = Bench::new(&[(1024, 56)]);
    let (other, member) = (bench.member(1), bench.member(2));
    let (events, others) = (member.cache.subscribe(), other.cache.subscribe());
    member.publish(0..7, 1000);
    let all: HashSet<_> = (0..7).map(key).collect();
    assert_eq!(changes(&events).len(), 7);
    let suspect = || {
        let incarnation = member.host.incarnation();
        [&other, &member].iter().for_each(|who| who.host.suspect(member.host.slot(), incarnation).unwrap());
        incarnation
    };
    // No host adopts them: they are where they were.
    member.serve_until_rejoined(suspect());
    assert_eq!((member.cache.usage().ready, changes(&events), changes(&others)), (7, vec![], vec![]));
    // The host cannot join again before its operations have ended, so there is time to adopt.
    let request = PublishRequest { namespace: SPACE, key: key(50), parent: None, len_bytes: 9 };
    let reservation = member.cache.reserve(&request).unwrap();
    let incarnation = suspect();
    let deadline = Instant::now() + PATIENCE;
    while other.cache.usage().ready < 7 {
        // One that is taken for dead as well on a busy machine joins again, and goes on.
        let _ = other.cache.service_round();
        assert!(Instant::now() < deadline, "no host adopts: {:?}", other.cache.usage());
        std::thread::sleep(Duration::from_millis(2));
    }
    let won = changes(&others).into_iter().map(|change| match change {
        Change::Stored { key, namespace: SPACE, parent: None, len_bytes: 1000, .. } => key,
        other => panic!("{other:?}"),
    });
    assert_eq!(won.collect::<HashSet<_>>(), all);
    drop(reservation);
    member.serve_until_rejoined(incarnation);
    assert_eq!(member.cache.usage().ready, 0);
    let lost = changes(&events).into_iter().map(|change| match change {
        Change::Removed { key, namespace: SPACE, .. } => key,
        other => panic!("{other:?}"),
    });
    assert_eq!(lost.collect::<HashSet<_>>(), all);
}

#[test]
fn requests_of_one_host_are_all_answered() {
    let bench = Bench::new(&[(1024, 56)]);
    let (member, other) = (bench.member(1), bench.member(2));
    member.publish(0..8, 1000);
    for number in 0..4 {
        member.cache.publish(OTHER_SPACE, key(number), None, &bytes(number, 1000)).unwrap();
    }
    // All at once, and a thing twice: what was asked before must not be lost to the owner, who has seen none of it yet.
    for number in [0, 1, 2, 1] {
        assert!(!other.cache.evict(SPACE, key(number)).unwrap());
    }
    other.cache.clear(Some(OTHER_SPACE)).unwrap();
    other.cache.evict(SPACE, key(3)).unwrap();
    member.serve_until("five requests", || {
        other.cache.service_round().unwrap();
        member.cache.usage().ready == 4
    });
    assert_eq!((4..8).filter(|&number| member.has(number, 1000)).count(), 4);
}
