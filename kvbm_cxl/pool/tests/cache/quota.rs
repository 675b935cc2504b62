// SPDX-License-Identifier: Apache-2.0
//! Namespaces with quotas.

use crate::bench::*;
use cxl_pool::Error;
use cxl_pool::cache::{CacheConfig, Namespace, Published, Reserved, Wish};
use cxl_pool::metrics::{EvictionReason, RefusalReason};

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
    let wish = |number| Wish { namespace: SPACE, key: key(number), parent: None, len_bytes: 1000 };
    let answers = member.cache.reserve_all(&[wish(11), wish(12), wish(2), wish(13)]).unwrap();
    assert!(matches!(answers[..], [Reserved::Exists, Reserved::Exists, Reserved::Cell(_), Reserved::Exists]));
    assert_eq!(member.cache.metrics().evictions_total.of(EvictionReason::Quota).get(), 1);
}

#[test]
fn blocks_of_others_in_a_batch_do_not_count() {
    let bench = Bench::new(&[(1024, 56)]);
    let member = bench.member_with(1, with_quota(2 << 10));
    let wish = |namespace, number| Wish { namespace, key: key(number), parent: None, len_bytes: 1000 };
    let wishes: Vec<Wish> = (0..8).map(|number| wish(if number < 6 { OTHER_SPACE } else { SPACE }, number)).collect();
    let answers = member.cache.reserve_all(&wishes).unwrap();
    assert!(answers.iter().all(|answer| matches!(answer, Reserved::Cell(_))), "six blocks of another namespace took the quota");
    drop(answers);
    // A batch of more than the quota gets the quota.
    let wishes: Vec<Wish> = (10..14).map(|number| wish(SPACE, number)).collect();
    let answers = member.cache.reserve_all(&wishes).unwrap();
    assert!(matches!(answers[..], [Reserved::Cell(_), Reserved::Cell(_), Reserved::OverQuota, Reserved::OverQuota]));
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
