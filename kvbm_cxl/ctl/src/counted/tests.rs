// SPDX-License-Identifier: Apache-2.0
//! Tests of `counted`.
use super::*;

fn key(block: u32) -> [u8; 16] {
    [block as u8; 16]
}

#[test]
fn the_policy_decides_and_the_evicted_is_named() {
    let mut cache = CountedCache::new(PolicyKind::Lru, 2, 5);
    assert!(cache.is_empty());
    assert_eq!(cache.insert(3, key(3), None, 7).unwrap(), None);
    assert_eq!(cache.insert(1, key(1), None, 7).unwrap(), None);
    cache.touch(3, 7);
    cache.touch(4, 7);
    assert_eq!(cache.insert(2, key(2), None, 7).unwrap(), Some(1));
    assert_eq!((cache.cell(3), cache.cell(2), cache.has(1), cache.len()), (Some(0), Some(1), false, 2));
    assert!(cache.insert(5, key(5), None, 7).is_err(), "the trace has five blocks");
}

#[test]
fn no_room_keeps_nothing_and_room_for_all_evicts_nothing() {
    for kind in PolicyKind::ALL {
        let mut none = CountedCache::new(kind, 0, 4);
        let mut all = CountedCache::new(kind, usize::MAX, 4);
        for block in 0..4 {
            assert_eq!(none.insert(block, key(block), None, 7).unwrap(), None);
            assert_eq!(all.insert(block, key(block), None, 7).unwrap(), None);
        }
        assert_eq!((none.len(), all.len(), none.has(3), all.has(0)), (0, 4, false, true), "{kind}");
    }
}
