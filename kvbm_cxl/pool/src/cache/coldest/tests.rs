// SPDX-License-Identifier: Apache-2.0
//! The only host of a pool, no thread of whose upkeep runs: blocks go when the test says so.

use super::*;
use crate::cache::policy::PolicyKind;
use crate::cache::tests::alone;
use crate::cache::{CacheConfig, Published, chain};
use crate::pool::Pool;
use std::sync::atomic::{AtomicBool, Ordering};

const SPACE: Namespace = Namespace([3; 16]);
const CELLS: u64 = 112;
const LEN: usize = 3000;

struct Bench {
    cache: Cache,
    _service: crate::host::Service,
    _pool: Pool,
    _directory: tempfile::TempDir,
}

fn key(number: u64) -> BlockKey {
    chain(None, &[number as u32], b"cold")
}

/// Bytes that tell which block they are of.
fn bytes(number: u64) -> Vec<u8> {
    (0..LEN as u64 / 8).flat_map(|place| (number << 32 | place).to_le_bytes()).collect()
}

fn bench(policy: PolicyKind) -> Bench {
    let config = CacheConfig { policy, ..CacheConfig::default() };
    let (cache, service, pool, directory) = alone(4096, CELLS, 16 << 20, Vec::new(), config);
    Bench { cache, _service: service, _pool: pool, _directory: directory }
}

impl Bench {
    fn publish(&self, numbers: impl IntoIterator<Item = u64>) {
        for number in numbers {
            let parent = number.checked_sub(1).map(key);
            assert_eq!(self.cache.publish(SPACE, key(number), parent, &bytes(number)).unwrap(), Published::Stored);
        }
    }

    fn coldest(&self, limit: usize) -> Vec<BlockKey> {
        self.cache.coldest(limit).iter().map(ColdBlock::key).collect()
    }

    fn is_there(&self, key: BlockKey) -> bool {
        self.cache.lookup(SPACE, key).unwrap().is_some()
    }
}

#[test]
fn the_coldest_are_those_that_go_next_and_stay_that() {
    for policy in PolicyKind::ALL {
        let bench = bench(policy);
        bench.publish([0]);
        assert!(bench.cache.usage().free > 0 && bench.coldest(8).is_empty(), "{policy}: there is room");
        bench.publish(1..CELLS);
        assert_eq!(bench.coldest(1).len(), 1, "{policy}: the next one wants a cell");
        bench.publish([CELLS]);
        for number in [1, 5, 30] {
            assert!(bench.cache.pin(SPACE, key(number)).unwrap().is_ok());
        }
        let first = bench.coldest(16);
        assert_eq!((first.len(), &bench.coldest(16), &bench.coldest(5)[..]), (16, &first, &first[..5]), "{policy}");
        let blocks = bench.cache.coldest(16);
        let mut copy = vec![0; LEN + 9];
        for block in &blocks {
            let number = (0..CELLS + 1).find(|&number| key(number) == block.key()).unwrap();
            assert_eq!(bench.cache.copy_cold(block, &mut copy).unwrap(), Pulled::Hit { len_bytes: LEN as u64 }, "{policy}");
            assert_eq!((&copy[..LEN], block.parent()), (&bytes(number)[..], number.checked_sub(1).map(key)), "{policy}");
        }
        // Copies were no uses.
        assert_eq!((bench.coldest(16), bench.cache.pinned()), (first.clone(), 0), "{policy}");
        for gone in 1..4 {
            bench.cache.inner.evict(0, 1).unwrap();
            let left: Vec<bool> = first.iter().take(4).map(|&key| bench.is_there(key)).collect();
            assert_eq!(left, (0..4).map(|place| place >= gone).collect::<Vec<_>>(), "{policy}");
        }
    }
}

#[test]
fn what_has_gone_or_came_anew_is_a_miss() {
    let bench = bench(PolicyKind::Lru);
    bench.publish(0..CELLS + 1);
    let block = bench.cache.coldest(1)[0];
    let mut copy = vec![0; LEN];
    assert!(matches!(bench.cache.copy_cold(&block, &mut copy[1..]), Err(Error::Invalid(_))));
    let number = (0..CELLS).find(|&number| key(number) == block.key()).unwrap();
    bench.cache.inner.evict(0, 1).unwrap();
    assert_eq!(bench.cache.copy_cold(&block, &mut copy).unwrap(), Pulled::Miss(MissReason::Absent));
    // Under its key, and into its cell, which is the only free one.
    bench.publish([number]);
    assert_eq!(bench.cache.lookup(SPACE, block.key()).unwrap().map(|found| found.cell), Some(block.cell));
    assert_eq!(bench.cache.copy_cold(&block, &mut copy).unwrap(), Pulled::Miss(MissReason::Absent));
    assert_eq!(copy, vec![0; LEN]);
}

#[test]
fn copies_beside_an_evictor_are_whole_or_misses() {
    let bench = bench(PolicyKind::Lru);
    bench.publish(0..CELLS + 1);
    let ends = AtomicBool::new(false);
    let (mut hits, mut misses) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut number = CELLS + 1;
            while !ends.load(Ordering::Relaxed) {
                bench.publish([number]);
                number += 1;
            }
        });
        let mut copy = vec![0; LEN];
        while hits < 2000 || misses < 20 {
            for block in bench.cache.coldest(2) {
                match bench.cache.copy_cold(&block, &mut copy).unwrap() {
                    Pulled::Hit { .. } => {
                        hits += 1;
                        let number = u64::from_le_bytes(copy[..8].try_into().unwrap()) >> 32;
                        assert_eq!((key(number), &copy), (block.key(), &bytes(number)));
                    }
                    Pulled::Miss(_) => misses += 1,
                }
            }
        }
        ends.store(true, Ordering::Relaxed);
    });
}
