// SPDX-License-Identifier: Apache-2.0
//! Hosts that are taken for dead.

use crate::bench::*;
use cxl_pool::Error;
use cxl_pool::cache::{CacheConfig, PublishRequest, Published, Reserved};
use cxl_pool::lock::FIRST_STRIPE_LOCK;
use std::time::{Duration, Instant};

#[test]
fn a_publish_that_waits_for_a_lock_gives_way_to_the_re_join() {
    let bench = Bench::new(&[(1024, 56)]);
    let mut member = bench.member_with(2, CacheConfig { lock_timeout_ms: Some(20 * PATIENCE.as_millis() as u64), ..config() });
    let other = bench.member(1);
    member.publish(0..8, 1000);
    let stripes = member.pool.layout().geometry().stripes;
    let held: Vec<_> = (0..stripes).map(|stripe| other.host.acquire(FIRST_STRIPE_LOCK + stripe, 10_000).unwrap()).collect();
    let cache = member.cache.clone();
    let waiting = std::thread::spawn(move || cache.publish(SPACE, key(100), None, &bytes(100, 1000)));
    let incarnation = member.host.incarnation();
    // Its heart stops for longer than a lease.
    drop(member.service.take());
    await_fence(&other, member.host.slot(), incarnation);
    member.service = Some(member.host.serve().unwrap());
    let begun = Instant::now();
    match waiting.join().unwrap() {
        Err(Error::Fenced { incarnation: fenced, .. }) => assert_eq!(fenced, incarnation),
        other => panic!("{other:?}"),
    }
    // Not at the lock's deadline.
    assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
    while member.host.enter().is_err() {
        assert!(begun.elapsed() < PATIENCE, "the host did not join again");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(held);
    // Under its new incarnation it has what it had, or what no other host took meanwhile.
    member.publish(200..201, 1000);
    assert_eq!(member.cache.metrics().rejoins_total.get(), 1);
    assert_eq!(other.count(0..8, 1000), 8);
    assert!(!other.has(100, 1000) && other.has(200, 1000));
}

#[test]
fn blocks_of_a_fenced_host_are_misses_until_they_are_adopted() {
    let bench = Bench::new(&[(1024, 56)]);
    let mut member = bench.member(2);
    let other = bench.member(1);
    member.publish(0..8, 1000);
    let request = PublishRequest { namespace: SPACE, key: key(50), parent: None, len_bytes: 1000 };
    let Reserved::Cell(mut reservation) = member.cache.reserve(&request).unwrap() else { panic!("no cell") };
    let (slot, incarnation) = (member.host.slot(), member.host.incarnation());
    drop(member.service.take());
    await_fence(&other, slot, incarnation);
    assert_eq!(other.count(0..8, 1000), 0, "the word of a fenced host counts");
    other.serve_until("adoption", || other.count(0..8, 1000) == 8);
    // What it was writing stays apart, for it may still write; its key is free.
    assert_eq!(other.cache.usage().quarantined, 1);
    assert_eq!(other.cache.publish(SPACE, key(50), None, &bytes(50, 1000)).unwrap(), Published::Stored);
    // The zombie goes on: it fills its cell and finds at the commit that it is fenced.
    reservation.fill([&bytes(51, 1000)[..]]).unwrap();
    assert!(matches!(reservation.commit(), Err(Error::Fenced { .. })));
    assert!(other.has(50, 1000) && other.count(0..8, 1000) == 8);
    // Its re-join proves that it has ended.
    member.service = Some(member.host.serve().unwrap());
    other.serve_until("the end of the quarantine", || other.cache.usage().quarantined == 0);
    // Others know of it before its own process does.
    member.serve_until_rejoined(incarnation);
    assert_eq!(member.count(0..8, 1000), 8);
}

/// A host with two processes, of which the second does not know yet that the host was fenced, that its chunk was another host's meanwhile,
/// and that the first process claimed it since.
fn with_a_process_behind(has_blocks: bool) -> (Bench, Member, Member) {
    let bench = Bench::new(&[(1024, 56)]);
    let (mut first, mut second) = (bench.member(2), bench.member(2));
    let other = bench.member(1);
    second.publish(0..7, 1000);
    if !has_blocks {
        assert_eq!(second.cache.clear(Some(SPACE)).unwrap(), 7);
    }
    let (slot, incarnation) = (first.host.slot(), first.host.incarnation());
    drop((first.service.take(), second.service.take()));
    await_fence(&other, slot, incarnation);
    other.serve_until("adoption", || other.cache.usage().owned == 7);
    (first.service, second.service) = (Some(first.host.serve().unwrap()), Some(second.host.serve().unwrap()));
    first.serve_until_rejoined(incarnation);
    other.cache.clear(None).unwrap();
    other.leave();
    first.publish(100..156, 1000);
    assert_eq!(first.cache.usage().owned, 56);
    (bench, first, second)
}

#[test]
fn a_process_that_is_behind_leaves_the_chunks_of_others_alone() {
    let (_bench, first, second) = with_a_process_behind(true);
    let _ = second.cache.publish(SPACE, key(200), None, &bytes(200, 1000));
    assert_eq!((first.cache.usage().owned, second.cache.usage().owned), (56, 0), "two processes with one chunk");
    assert_eq!(first.count(100..156, 1000), 56);
}

#[test]
fn a_process_that_closes_behind_the_others_takes_nothing_from_them() {
    let (bench, first, second) = with_a_process_behind(false);
    second.cache.close().unwrap();
    let third = bench.member(2);
    assert_eq!((first.cache.usage().owned, third.cache.usage().owned), (56, 0), "two processes with one chunk");
    assert_eq!((first.count(100..156, 1000), third.count(100..156, 1000)), (56, 56));
}

#[test]
fn a_suspected_host_that_still_beats_is_fenced_and_joins_again() {
    let bench = Bench::new(&[(1024, 56)]);
    let manager = bench.member(1);
    let suspect = bench.member(2);
    suspect.publish(0..4, 1000);
    let (slot, incarnation) = (suspect.host.slot(), suspect.host.incarnation());
    // Of an incarnation that is over, or that never was: no effect, or an error.
    manager.host.suspect(slot, incarnation - 1).unwrap();
    assert!(matches!(manager.host.suspect(4, 1), Err(Error::Invalid(_))));
    assert!(matches!(manager.host.suspect(slot, u32::MAX), Err(Error::Invalid(_))));
    manager.host.suspect(slot, incarnation).unwrap();
    await_fence(&manager, slot, incarnation);
    let deadline = Instant::now() + PATIENCE;
    while suspect.host.incarnation() == incarnation || suspect.host.enter().is_err() {
        assert!(Instant::now() < deadline, "the host did not join again");
        std::thread::sleep(Duration::from_millis(5));
    }
    // The new incarnation is not the one that was suspected: it keeps its slot and is heard.
    assert_eq!(suspect.host.slot(), slot);
    suspect.publish(10..14, 1000);
    assert_eq!(manager.count(10..14, 1000), 4);
}
