// SPDX-License-Identifier: Apache-2.0
//! What a publisher is told, and what becomes of what it gives up.

use crate::bench::*;
use cxl_pool::Error;
use cxl_pool::cache::{Cache, PublishRequest, Published, Reservation, Reserved};
use cxl_pool::media::Descriptor;
use cxl_pool::metrics::RefusalReason;

fn request(number: u64) -> PublishRequest {
    PublishRequest { namespace: SPACE, key: key(number), parent: None, len_bytes: 1000 }
}

fn reserved(member: &Member, number: u64) -> Reservation {
    match member.cache.reserve(&request(number)).unwrap() {
        Reserved::Cell(reservation) => reservation,
        _ => panic!("no cell for block {number}"),
    }
}

#[test]
fn a_block_that_is_there_or_being_written_exists() {
    let bench = Bench::new(&[(1024, 28)]);
    let (one, two) = (bench.member(1), bench.member(2));
    let mut reservation = reserved(&one, 0);
    let publish = |member: &Member| member.cache.publish(SPACE, key(0), None, &bytes(0, 1000)).unwrap();
    // No reader waits for a writer, and none sees what it writes.
    assert_eq!((publish(&two), publish(&one)), (Published::Exists, Published::Exists));
    assert!(!two.has(0, 1000));
    reservation.fill([&bytes(0, 1000)[..]]).unwrap();
    assert!(!two.has(0, 1000));
    reservation.commit().unwrap();
    assert_eq!((publish(&two), publish(&one)), (Published::Exists, Published::Exists));
    assert!(two.has(0, 1000));
    assert_eq!(two.cache.metrics().publish_refused_total.of(RefusalReason::Exists).get(), 2);
    // What was refused took nothing.
    let usage = two.cache.usage();
    assert_eq!(usage.free, usage.owned);
}

#[test]
fn a_block_that_is_about_to_go_is_busy() {
    let bench = Bench::new(&[(1024, 28)]);
    let (one, two) = (bench.member(1), bench.member(2));
    one.publish(0..1, 1000);
    let cell = two.cache.lookup(SPACE, key(0)).unwrap().unwrap().cell;
    // The moment between the two steps of an eviction.
    let ready: Descriptor = one.pool.lines().fetch(cell).unwrap();
    one.pool.lines().publish(cell, Descriptor { state: Descriptor::EVICTING, ..ready }).unwrap();
    assert_eq!(two.cache.publish(SPACE, key(0), None, &bytes(0, 1000)).unwrap(), Published::Busy);
    assert!(!two.has(0, 1000));
    one.pool.lines().publish(cell, ready).unwrap();
    assert_eq!(two.cache.publish(SPACE, key(0), None, &bytes(0, 1000)).unwrap(), Published::Exists);
    assert!(two.has(0, 1000));
}

#[test]
fn a_key_twice_in_a_batch_gets_one_cell() {
    let bench = Bench::new(&[(1024, 28)]);
    let member = bench.member(1);
    let mut answers = member.cache.reserve_all(&[request(0), request(1), request(0), request(1), request(0)]).unwrap();
    use Reserved::{Cell, Exists};
    assert!(matches!(answers[..], [Cell(_), Cell(_), Exists, Exists, Exists]));
    let filled: Vec<Reservation> = (0..2u64)
        .map(|number| {
            let Cell(mut reservation) = std::mem::replace(&mut answers[number as usize], Exists) else { panic!() };
            reservation.fill([&bytes(number, 1000)[..]]).unwrap();
            reservation
        })
        .collect();
    member.cache.commit_all(filled).unwrap();
    assert_eq!(member.count(0..2, 1000), 2);
    let usage = member.cache.usage();
    assert_eq!((usage.ready, usage.free), (2, usage.owned - 2));
}

#[test]
fn what_is_given_up_comes_back() {
    let bench = Bench::new(&[(1024, 28)]);
    let (one, two) = (bench.member(1), bench.member(2));
    one.publish(200..201, 1000);
    let before = one.cache.usage();
    for number in 0..100 {
        let mut reservation = reserved(&one, number);
        if number % 2 == 0 {
            reservation.fill([&bytes(number, 1000)[..]]).unwrap();
        }
        if number % 3 == 0 {
            reservation.abort().unwrap()
        } else {
            drop(reservation)
        }
        assert!(!one.has(number, 1000), "an aborted block can be had");
        assert_eq!(one.cache.usage(), before);
    }
    assert_eq!(one.cache.metrics().publish_aborted_total.get(), 100);
    // The key is free for others, and all cells can be had at once.
    two.publish(0..1, 1000);
    assert!(one.has(0, 1000));
}

#[test]
fn a_block_that_is_there_is_not_reserved_again() {
    let bench = Bench::new(&[(1024, 28)]);
    let member = bench.member(1);
    member.publish(0..1, 1000);
    assert!(matches!(member.cache.reserve(&request(0)).unwrap(), Reserved::Exists));
    assert_eq!(member.cache.metrics().publish_aborted_total.get(), 0);
}

#[test]
fn a_reservation_of_another_cache_is_not_committed() {
    let (bench, other_bench) = (Bench::new(&[(1024, 28)]), Bench::new(&[(1024, 28)]));
    let (member, stranger) = (bench.member(1), other_bench.member(1));
    member.publish(1..2, 1000);
    let mut foreign = reserved(&stranger, 100);
    assert_eq!(member.cache.lookup(SPACE, key(1)).unwrap().unwrap().cell, foreign.cell(), "cells of two pools, and not of one number");
    foreign.fill([&bytes(100, 1000)[..]]).unwrap();
    let mut own = reserved(&member, 2);
    own.fill([&bytes(2, 1000)[..]]).unwrap();
    assert!(matches!(member.cache.commit_all(vec![own, foreign]), Err(Error::Invalid(_))));
    assert_eq!((member.has(1, 1000), member.count(2..3, 1000), member.count(100..101, 1000)), (true, 0, 0));
    assert_eq!((member.cache.usage().ready, stranger.cache.usage().ready), (1, 0));
    // Nothing is left of either.
    member.publish(2..3, 1000);
    stranger.publish(100..101, 1000);
    // One host's reservations are no more another's.
    let other = bench.member(2);
    let mut theirs = reserved(&other, 3);
    theirs.fill([&bytes(3, 1000)[..]]).unwrap();
    assert!(matches!(member.cache.commit_all(vec![theirs]), Err(Error::Invalid(_))));
    assert!(!other.has(3, 1000));
}

#[test]
fn a_process_has_one_cache() {
    let bench = Bench::new(&[(1024, 28)]);
    let member = bench.member(1);
    member.publish(0..1, 1000);
    assert!(matches!(Cache::open(&member.host, config()), Err(Error::Exists(_))));
    assert!(matches!(Cache::open(&member.host.clone(), config()), Err(Error::Exists(_))));
    // The one that is open is none the worse.
    assert!(member.has(0, 1000));
    let clone = member.cache.clone();
    assert!(matches!(member.cache.close(), Err(Error::Invalid(_))), "closed under a clone");
    clone.close().unwrap();
    let again = Cache::open(&member.host, config()).unwrap();
    assert_eq!(again.usage().ready, 1);
    again.close().unwrap();
    let bare = Bench::new(&[]);
    let (_pool, host) = bare.join(1);
    assert!(matches!(Cache::open(&host, config()), Err(Error::Invalid(_))), "a cache without cells");
}
