// SPDX-License-Identifier: Apache-2.0
//! Which blocks of a namespace are there, of any publisher, and what changes.

use crate::bench::*;
use cxl_pool::Error;
use cxl_pool::cache::{BlockKey, Changes, Namespace};
use std::collections::BTreeSet;

const SMALL: usize = 200;
const LARGE: usize = 3000;

fn publish(member: &Member, namespace: Namespace, number: u64, len_bytes: usize) {
    let published = member.cache.publish(namespace, key(number), None, &bytes(number, len_bytes));
    assert_eq!(published.unwrap(), cxl_pool::cache::Published::Stored, "block {number}");
}

fn keys(range: std::ops::Range<u64>) -> BTreeSet<BlockKey> {
    range.map(key).collect()
}

fn sorted(mut changes: Changes) -> Changes {
    for list in [&mut changes.added, &mut changes.removed, &mut changes.alone] {
        list.sort_unstable();
    }
    changes
}

fn changes(added: std::ops::Range<u64>, removed: std::ops::Range<u64>, alone: std::ops::Range<u64>) -> Changes {
    let list = |range| keys(range).into_iter().collect();
    Changes { added: list(added), removed: list(removed), alone: list(alone) }
}

#[test]
fn blocks_of_all_hosts_are_listed_by_namespace_and_size() {
    let bench = Bench::new(&[(256, 3000), (4096, 64)]);
    let (member, other) = (bench.member(1), bench.member(2));
    // More than are read at once, of two hosts.
    for number in 0..1500 {
        publish(if number % 3 == 0 { &other } else { &member }, SPACE, number, SMALL);
    }
    for number in 1490..1510 {
        publish(&other, OTHER_SPACE, number, SMALL);
        publish(&member, SPACE, number + 100, LARGE);
    }
    let found = member.cache.list(SPACE, 1).unwrap();
    assert_eq!(found.iter().map(|block| block.key).collect::<BTreeSet<_>>(), keys(0..1500));
    assert_eq!(found.len(), 1500, "a block is listed twice");
    for block in &found {
        let known = other.cache.lookup(SPACE, block.key).unwrap().unwrap();
        assert_eq!((known.cell, known.len_bytes, known.owner), (block.cell, block.len_bytes, block.owner));
    }
    assert_eq!(found.iter().filter(|block| block.owner == other.host.slot()).count(), 500);
    let large = other.cache.list(SPACE, LARGE as u64).unwrap();
    assert_eq!(large.iter().map(|block| block.key).collect::<BTreeSet<_>>(), keys(1590..1610));
    assert_eq!(member.cache.list(SPACE, 4097).unwrap(), [], "no cell holds them");
    let all = member.cache.list(SPACE, None).unwrap();
    assert_eq!(all.iter().map(|block| block.key).collect::<BTreeSet<_>>(), keys(0..1500).union(&keys(1590..1610)).copied().collect());
    assert_eq!(member.cache.watch(SPACE, None, &[]).unwrap().look(&member.cache).unwrap().added.len(), all.len());
    assert!(matches!(member.cache.list(SPACE, 1 << 32), Err(Error::Invalid(_))));
    assert!(matches!(member.cache.watch(SPACE, u64::MAX, &[]), Err(Error::Invalid(_))));
    other.leave();
    assert_eq!(member.cache.list(SPACE, 1).unwrap().len(), 1500, "blocks of a host that left are there until they are evicted");
    member.leave();
}

#[test]
fn a_look_tells_what_came_and_went_since_the_last_one() {
    let bench = Bench::new(&[(256, 256), (4096, 64)]);
    let (member, other) = (bench.member(1), bench.member(2));
    let mut watch = member.cache.watch(SPACE, SMALL as u64, &[]).unwrap();
    assert_eq!(watch.look(&member.cache).unwrap(), Changes::default());
    (0..5).for_each(|number| publish(&other, SPACE, number, SMALL));
    (5..9).for_each(|number| publish(&member, SPACE, number, SMALL));
    assert_eq!(sorted(watch.look(&member.cache).unwrap()), changes(0..9, 0..0, 0..0));
    assert_eq!(watch.look(&member.cache).unwrap(), Changes::default());
    assert!(other.cache.evict(SPACE, key(0)).unwrap() && other.cache.evict(SPACE, key(1)).unwrap());
    publish(&other, SPACE, 9, SMALL);
    assert_eq!(sorted(watch.look(&member.cache).unwrap()), changes(9..10, 0..2, 0..0));
    // A watch that begins later is told everything.
    let mut late = other.cache.watch(SPACE, SMALL as u64, &[]).unwrap();
    assert_eq!(sorted(late.look(&other.cache).unwrap()), changes(2..10, 0..0, 0..0));
}

#[test]
fn a_block_without_its_companions_does_not_count() {
    let bench = Bench::new(&[(256, 256), (4096, 64)]);
    let (member, other) = (bench.member(1), bench.member(2));
    let third = Namespace([0x33; 16]);
    let mut watch = member.cache.watch(OTHER_SPACE, SMALL as u64, &[SPACE, third]).unwrap();
    (0..4).for_each(|number| publish(&member, OTHER_SPACE, number, SMALL));
    publish(&other, OTHER_SPACE, 4, SMALL);
    (0..3).for_each(|number| publish(&other, SPACE, number, LARGE));
    (1..4).for_each(|number| publish(&member, third, number, LARGE));
    assert_eq!(sorted(watch.look(&member.cache).unwrap()), changes(1..3, 0..0, 0..0));
    // 0 and 3 lack one each; 4 lacks both, but is another host's.
    let alone = watch.look(&member.cache).unwrap().alone;
    assert_eq!(BTreeSet::from_iter(alone), BTreeSet::from([key(0), key(3)]));
    publish(&other, SPACE, 3, LARGE);
    assert!(other.cache.evict(SPACE, key(1)).unwrap());
    assert_eq!(sorted(watch.look(&member.cache).unwrap()), changes(3..4, 1..2, 0..1));
}

#[test]
fn blocks_of_a_fenced_host_are_not_listed() {
    let bench = Bench::new(&[(256, 256)]);
    let (member, mut other) = (bench.member(1), bench.member(2));
    publish(&member, SPACE, 1, SMALL);
    publish(&other, SPACE, 2, SMALL);
    let mut watch = member.cache.watch(SPACE, SMALL as u64, &[]).unwrap();
    assert_eq!(sorted(watch.look(&member.cache).unwrap()), changes(1..3, 0..0, 0..0));
    // Without heartbeats the others take it for dead.
    other.service = None;
    let mut gone = Vec::new();
    member.serve_until("the block of a dead host goes", || {
        gone.extend(watch.look(&member.cache).unwrap().removed);
        !gone.is_empty()
    });
    assert_eq!(gone, [key(2)]);
}
