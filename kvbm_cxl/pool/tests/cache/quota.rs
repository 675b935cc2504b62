// SPDX-License-Identifier: Apache-2.0
//! Namespaces with quotas.

use crate::bench::*;
use cxl_pool::Error;
use cxl_pool::cache::{CacheConfig, Namespace, PublishRequest, Published, Reserved, Share};
use cxl_pool::metrics::{EvictionReason, RefusalReason};
use std::sync::atomic::{AtomicU64, Ordering};

fn with_quota(cell_bytes: u64) -> CacheConfig {
    CacheConfig { quotas: [(SPACE, cell_bytes)].into(), ..config() }
}

fn publish(member: &Member, namespace: Namespace, number: u64, len_bytes: usize) -> cxl_pool::Result<Published> {
    member.cache.publish(namespace, key(number), None, &bytes(number, len_bytes))
}

fn has(member: &Member, namespace: Namespace, number: u64) -> bool {
    member.cache.lookup(namespace, key(number)).unwrap().is_some()
}

#[test]
fn a_namespace_at_its_quota_evicts_its_own_blocks_and_no_others() {
    let bench = Bench::new(&[(1024, 56)]);
    let member = bench.member_with(1, with_quota(4 << 10));
    (0..20).for_each(|number| assert_eq!(publish(&member, OTHER_SPACE, number, 1000).unwrap(), Published::Stored));
    for number in 0..10 {
        assert_eq!(publish(&member, SPACE, number, 1000).unwrap(), Published::Stored);
    }
    assert_eq!((0..10).filter(|&number| has(&member, SPACE, number)).collect::<Vec<_>>(), [6, 7, 8, 9]);
    assert!((0..20).all(|number| has(&member, OTHER_SPACE, number)));
    assert_eq!(member.cache.metrics().evictions_total.of(EvictionReason::Quota).get(), 6);
    let shares = member.cache.shares();
    let share = shares.iter().find(|(namespace, _)| *namespace == SPACE).unwrap().1;
    assert_eq!((share.blocks, share.cell_bytes), (4, 4 << 10));
}

#[test]
fn a_quota_in_use_is_over() {
    let bench = Bench::new(&[(1024, 56)]);
    let member = bench.member_with(1, with_quota(2 << 10));
    member.publish(0..2, 1000);
    let pins = member.cache.pin_chain(SPACE, &[key(0), key(1)]).unwrap();
    match publish(&member, SPACE, 2, 1000) {
        Err(Error::Full { what, limit, .. }) => assert!(what.contains("quota") && limit == 2 << 10, "{what} {limit}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(member.cache.metrics().publish_refused_total.of(RefusalReason::Quota).get(), 1);
    assert_eq!(publish(&member, OTHER_SPACE, 2, 1000).unwrap(), Published::Stored);
    assert_eq!(member.count(0..2, 1000), 2);
    drop(pins);
    assert_eq!(publish(&member, SPACE, 2, 1000).unwrap(), Published::Stored);
}

#[test]
fn nothing_goes_for_a_block_that_another_host_has() {
    let bench = Bench::new(&[(1024, 112)]);
    let (member, other) = (bench.member_with(1, with_quota(2 << 10)), bench.member(2));
    other.publish(10..14, 1000);
    member.publish(0..2, 1000);
    assert_eq!(publish(&member, SPACE, 10, 1000).unwrap(), Published::Exists);
    let request = |number| PublishRequest { namespace: SPACE, key: key(number), parent: None, len_bytes: 1000 };
    let answers = member.cache.reserve_all(&[request(11), request(12), request(2), request(13)]).unwrap();
    assert!(matches!(answers[..], [Reserved::Exists, Reserved::Exists, Reserved::Cell(_), Reserved::Exists]));
    assert_eq!(member.cache.metrics().evictions_total.of(EvictionReason::Quota).get(), 1);
}

#[test]
fn blocks_of_others_in_a_batch_do_not_count() {
    let bench = Bench::new(&[(1024, 56)]);
    let member = bench.member_with(1, with_quota(2 << 10));
    let request = |namespace, number| PublishRequest { namespace, key: key(number), parent: None, len_bytes: 1000 };
    let requests: Vec<PublishRequest> = (0..8).map(|number| request(if number < 6 { OTHER_SPACE } else { SPACE }, number)).collect();
    let answers = member.cache.reserve_all(&requests).unwrap();
    assert!(answers.iter().all(|answer| matches!(answer, Reserved::Cell(_))), "six blocks of another namespace took the quota");
    drop(answers);
    // A batch of more than the quota gets the quota.
    let requests: Vec<PublishRequest> = (10..14).map(|number| request(SPACE, number)).collect();
    let answers = member.cache.reserve_all(&requests).unwrap();
    assert!(matches!(answers[..], [Reserved::Cell(_), Reserved::Cell(_), Reserved::OverQuota, Reserved::OverQuota]));
}

fn reserve(member: &Member, namespace: Namespace, number: u64) -> Reserved {
    member.cache.reserve(&PublishRequest { namespace, key: key(number), parent: None, len_bytes: 1000 }).unwrap()
}

#[test]
fn open_reservations_count() {
    let bench = Bench::new(&[(1024, 56)]);
    let member = bench.member_with(1, with_quota(3 << 10));
    member.publish(0..1, 1000);
    let mut open = Vec::new();
    for number in 10..13 {
        let Reserved::Cell(mut reservation) = reserve(&member, SPACE, number) else { panic!("block {number} has room") };
        reservation.fill([&bytes(number, 1000)[..]]).unwrap();
        open.push(reservation);
    }
    // The third took the place of the block that was there, and nothing can go for a fourth.
    assert!(!has(&member, SPACE, 0));
    assert!(matches!(reserve(&member, SPACE, 13), Reserved::OverQuota));
    assert!(matches!(reserve(&member, OTHER_SPACE, 13), Reserved::Cell(_)));
    let request = |number| PublishRequest { namespace: SPACE, key: key(number), parent: None, len_bytes: 1000 };
    let answers = member.cache.reserve_all(&[request(14), request(15)]).unwrap();
    assert!(matches!(answers[..], [Reserved::OverQuota, Reserved::OverQuota]));
    // What is given up is room again, and what is committed counts once.
    drop(open.pop());
    let Reserved::Cell(again) = reserve(&member, SPACE, 16) else { panic!("one was given up") };
    again.abort().unwrap();
    member.cache.commit_all(open).unwrap();
    member.publish(20..21, 1000);
    assert_eq!(member.cache.shares(), [(SPACE, Share { blocks: 3, cell_bytes: 3 << 10 })]);
    assert_eq!(member.count(10..12, 1000), 2);
    // Requests that got no cell leave nothing behind.
    let answers = member.cache.reserve_all(&[request(10), request(11), request(20)]).unwrap();
    assert!(answers.iter().all(|answer| matches!(answer, Reserved::Exists)));
    let answers = member.cache.reserve_all(&[request(30), request(31), request(32)]).unwrap();
    assert!(answers.iter().all(|answer| matches!(answer, Reserved::Cell(_))));
}

#[test]
fn threads_that_publish_together_stay_within_the_quota() {
    let bench = Bench::new(&[(1024, 112)]);
    let member = bench.member_with(1, with_quota(8 << 10));
    let most = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (member, most) = (&member, &most);
            scope.spawn(move || {
                for round in 0..200 {
                    let request = |number: u64| PublishRequest {
                        namespace: SPACE,
                        key: key(thread << 32 | round << 8 | number),
                        parent: None,
                        len_bytes: 1000,
                    };
                    // Two of each of four threads are what there is room for, and nothing is pinned.
                    for answer in member.cache.reserve_all(&[request(0), request(1)]).unwrap() {
                        let Reserved::Cell(mut reservation) = answer else { panic!("refused, and nothing is pinned") };
                        reservation.fill([&bytes(round, 1000)[..]]).unwrap();
                        reservation.commit().unwrap();
                    }
                    let share = member.cache.shares().iter().find(|(of, _)| *of == SPACE).map_or(0, |(_, share)| share.cell_bytes);
                    most.fetch_max(share, Ordering::Relaxed);
                }
            });
        }
    });
    assert!(most.load(Ordering::Relaxed) <= 8 << 10, "{most:?} bytes of a quota of 8 KiB");
}

#[test]
fn own_blocks_are_found_behind_many_of_others() {
    let bench = Bench::new(&[(64, 1120)]);
    let member = bench.member_with(1, with_quota(2 * 64));
    (0..600).for_each(|number| assert_eq!(publish(&member, OTHER_SPACE, number, 60).unwrap(), Published::Stored));
    for number in 0..6 {
        assert_eq!(publish(&member, SPACE, number, 60).unwrap(), Published::Stored, "block {number}");
    }
    assert!(has(&member, SPACE, 5) && has(&member, SPACE, 4) && !has(&member, SPACE, 3));
    assert!((0..600).all(|number| has(&member, OTHER_SPACE, number)));
}

#[test]
fn a_quota_is_of_all_cell_sizes_together() {
    let bench = Bench::new(&[(1024, 56), (4096, 56)]);
    let member = bench.member_with(1, with_quota(8 << 10));
    (0..2).for_each(|number| assert_eq!(publish(&member, SPACE, number, 4000).unwrap(), Published::Stored));
    // Full with large blocks: one of them has to go for a small one.
    assert_eq!(publish(&member, SPACE, 2, 1000).unwrap(), Published::Stored);
    assert!(!has(&member, SPACE, 0) && has(&member, SPACE, 1) && has(&member, SPACE, 2));
}
