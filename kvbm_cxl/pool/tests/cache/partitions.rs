// SPDX-License-Identifier: Apache-2.0
//! Pools side by side on one file: a host that dies in one is none of the other's concern, and what one holds is never seen in the other.

use crate::bench::*;
use crate::processes::Process;
use cxl_pool::cache::{Published, Pulled};
use std::sync::atomic::{AtomicBool, Ordering};

const LEN: usize = 3000;
const GAP: u64 = 2 << 20;

/// What block `number` holds in pool `pool`: the same keys, other bytes.
fn content(pool: u64, number: u64) -> Vec<u8> {
    bytes(pool << 32 | number, LEN)
}

/// Pulls a block; it has the bytes of this pool or is missed.
fn has(member: &Member, pool: u64, number: u64) -> bool {
    let mut found = vec![0; LEN];
    let pulled = member.cache.pull(SPACE, key(number), &mut found).unwrap();
    assert!(!matches!(pulled, Pulled::Hit { .. }) || found == content(pool, number), "block {number} of pool {pool} has other bytes");
    matches!(pulled, Pulled::Hit { .. })
}

fn sum(bench: &Bench, range: std::ops::Range<u64>) -> u32 {
    let all = std::fs::read(bench.directory.path().join("pool")).unwrap();
    crc32c::crc32c(&all[range.start as usize..range.end as usize])
}

#[test]
fn a_host_dies_and_comes_back_in_one_pool_while_the_other_serves() {
    let benches = Bench::side_by_side(3, GAP, &[(4096, 56)]);
    let begins = |index: usize| benches[index].spec.offset_bytes();
    let size = benches[0].spec.size_bytes().unwrap();
    // The third pool has no hosts: it and the gaps have to stay as they are.
    let still = [0..GAP, begins(0) + size..begins(1), begins(1) + size..begins(2) + size + GAP];
    let before = still.clone().map(|range| sum(&benches[0], range));
    let (one, other) = (benches[0].member(1), benches[1].member(1));
    for (pool, member) in [(1, &one), (2, &other)] {
        for number in 0..20 {
            assert_eq!(member.cache.publish(SPACE, key(number), None, &content(pool, number)).unwrap(), Published::Stored);
        }
    }
    // Blocks that only one of them has.
    assert_eq!(one.cache.publish(SPACE, key(100), None, &content(1, 100)).unwrap(), Published::Stored);
    assert!(has(&one, 1, 100) && !has(&other, 2, 100));

    let (is_over, incarnation) = (AtomicBool::new(false), other.host.incarnation());
    let rounds = std::thread::scope(|scope| {
        let serving = scope.spawn(|| {
            let mut rounds = 0;
            while !is_over.load(Ordering::Acquire) {
                (0..20).for_each(|number| assert!(has(&other, 2, number), "round {rounds}: block {number}"));
                other.cache.service_round().unwrap();
                rounds += 1;
            }
            rounds
        });
        // The same machine in the other pool, so that marks and locks of one could be taken for those of the other.
        let beside = Process::start(&benches[1], 3, "publish 300 2");
        for life in 0..2 {
            let first = 200 + 10 * life;
            let process = Process::start(&benches[0], 3, &format!("publish {first} 4"));
            process.kill();
            // It left a block half written, and what it published stays.
            assert_eq!((first..first + 4).filter(|&number| one.has(number, 1000)).count(), 4, "life {life}");
        }
        is_over.store(true, Ordering::Release);
        let rounds = serving.join().unwrap();
        assert!(other.has(300, 1000) && other.has(301, 1000) && !one.has(300, 1000));
        beside.kill();
        rounds
    });
    assert!(rounds > 0 && other.host.incarnation() == incarnation, "the other pool's host was fenced");
    (0..20).for_each(|number| assert!(has(&one, 1, number) && has(&other, 2, number), "block {number}"));
    assert!(!has(&other, 2, 100) && !other.has(200, 1000));
    one.leave();
    other.leave();
    assert_eq!(still.map(|range| sum(&benches[0], range)), before, "bytes beside the pools, or of the one without hosts, changed");
}
