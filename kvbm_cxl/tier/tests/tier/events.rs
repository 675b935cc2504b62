// SPDX-License-Identifier: Apache-2.0
//! What came to the pool and went, as another host sees it.

use crate::bench::*;
use cxl_tier::events::PoolEvents;
use cxl_tier::keys::key_of;
use cxl_tier::{Outcome, Ranks};
use kvbm_engine::SequenceHash;
use kvbm_logical::events::KvCacheEvent;

fn created(keys: &[SequenceHash]) -> Vec<KvCacheEvent> {
    keys.iter().copied().map(KvCacheEvent::Create).collect()
}

#[test]
fn another_host_is_told_of_blocks_that_come_and_go() {
    let bench = Bench::new(512);
    let (prefill, router) = (bench.member(1), bench.member_over(2, EMULATED));
    let mut events = PoolEvents::new(&router.blocks()).unwrap();
    assert_eq!(events.look().unwrap(), []);
    // 300 positions take two widths of the key.
    let keys = chain(300, 31);
    assert_eq!(put(&prefill.blocks(), &keys, 31), all(Outcome::Done, 300));
    assert_eq!(events.look().unwrap(), created(&keys));
    assert_eq!(events.look().unwrap(), []);
    let namespace = prefill.blocks().namespace();
    for &at in &[3, 280] {
        assert!(prefill.cache.evict(namespace, key_of(keys[at]).unwrap()).unwrap());
    }
    let more = chain(1, 32);
    put(&prefill.blocks(), &more, 32);
    let wanted = [KvCacheEvent::Remove(keys[280]), KvCacheEvent::Remove(keys[3]), KvCacheEvent::Create(more[0])];
    assert_eq!(events.look().unwrap(), wanted);
}

#[test]
fn a_block_counts_while_every_rank_has_it() {
    let bench = Bench::new(512);
    let (prefill, router) = (bench.member(1), bench.member(2));
    let rank = |rank| Ranks::new(rank, 2).unwrap();
    let mut events = PoolEvents::new(&router.rank(rank(1))).unwrap();
    let keys = chain(6, 41);
    put(&prefill.rank(rank(0)), &keys, 41);
    assert_eq!(events.look().unwrap(), []);
    put(&prefill.rank(rank(1)), &keys[..4], 42);
    assert_eq!(events.look().unwrap(), created(&keys[..4]));
    assert!(prefill.cache.evict(prefill.rank(rank(0)).namespace(), key_of(keys[1]).unwrap()).unwrap());
    assert_eq!(events.look().unwrap(), [KvCacheEvent::Remove(keys[1])]);
}
