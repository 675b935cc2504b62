// SPDX-License-Identifier: Apache-2.0

use super::*;
use std::collections::HashMap;

#[test]
fn neighbours_are_spread() {
    let hash_of = |key: u64| {
        let mut hasher = LastWord::default();
        std::hash::Hash::hash(&key, &mut hasher);
        hasher.finish()
    };
    let low: std::collections::HashSet<u64> = (0..1024).map(|key| hash_of(key) % 1024).collect();
    assert!(low.len() > 600, "{} of 1024 places", low.len());
    let mut map: HashMap<[u8; 16], u32, Spread> = HashMap::default();
    map.extend((0..100u8).map(|key| ([key; 16], key.into())));
    assert!((0..100u8).all(|key| map.get(&[key; 16]) == Some(&key.into())) && !map.contains_key(&[100; 16]));
}
