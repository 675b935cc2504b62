// SPDX-License-Identifier: Apache-2.0
//! The pool is told the parent of every block, across the calls in which an offload comes.

use crate::bench::*;
use cxl_pool::cache::events::{Change, Received};
use cxl_tier::keys::key_of;

#[test]
fn every_block_but_the_first_has_its_parent() {
    let bench = Bench::new(512);
    let member = bench.member(1);
    let blocks = member.blocks();
    let listener = member.cache.subscribe();
    let keys = chain(280, 4);
    // In calls of several sizes, the last of them backwards; 280 positions take two widths.
    put(&blocks, &keys[..1], 1);
    put(&blocks, &keys[1..130], 2);
    let mut last = keys[130..].to_vec();
    last.reverse();
    put(&blocks, &last, 3);
    let mut stored = 0;
    for received in listener.try_iter() {
        let Received::Event(event) = received else { panic!("events were lost") };
        let Change::Stored { key, parent, .. } = event.change else { continue };
        let place = keys.iter().position(|&hash| key_of(hash) == Some(key)).unwrap();
        assert_eq!(parent, place.checked_sub(1).and_then(|before| key_of(keys[before])), "block {place}");
        stored += 1;
    }
    assert_eq!(stored, 280);
}
