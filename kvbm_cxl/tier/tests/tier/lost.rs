// SPDX-License-Identifier: Apache-2.0
//! Hosts that are fenced, and pools that are gone.

use crate::bench::*;
use cxl_tier::Outcome;
use cxl_tier::counts::Operation;
use std::time::Instant;

#[test]
fn a_fenced_host_is_told_so_and_serves_again_after_its_re_join() {
    let bench = Bench::new(256);
    let mut prefill = bench.member(2);
    let decode = bench.member(1);
    let blocks = prefill.blocks();
    let (before, during, after) = (chain(10, 1), chain(10, 2), chain(10, 3));
    assert_eq!(put(&blocks, &before, 1), all(Outcome::Done, 10));
    let (slot, incarnation) = (prefill.host.slot(), prefill.host.incarnation());
    // Its heart stops for longer than a lease.
    drop(prefill.service.take());
    let deadline = Instant::now() + PATIENCE;
    while !decode.host.is_fenced(slot, incarnation).unwrap() {
        assert!(Instant::now() < deadline, "a silent host was not fenced");
        std::thread::yield_now();
    }
    assert_eq!(put(&blocks, &during, 2), all(Outcome::Fenced, 10));
    assert_eq!(blocks.counts().of(Operation::Put, Outcome::Fenced), 10);
    assert_eq!(decode.blocks().has(&during), all(Outcome::Absent, 10));
    assert!(get(&decode.blocks(), &during, 2).iter().all(|outcome| !outcome.is_ok()));
    // The fenced host does not believe what it reads, or it is right.
    get(&blocks, &before, 1);
    prefill.service = Some(prefill.host.serve().unwrap());
    prefill.serve_until("a re-join", || prefill.host.enter().is_ok());
    assert_eq!(put(&blocks, &after, 3), all(Outcome::Done, 10));
    assert_eq!(get(&decode.blocks(), &after, 3), all(Outcome::Done, 10));
    get(&decode.blocks(), &before, 1);
    decode.assert_clean();
}

#[test]
fn a_pool_that_goes_away_is_an_error_for_each_block() {
    let bench = Bench::new(128);
    let member = bench.member(1);
    let blocks = member.blocks();
    let keys = chain(70, 1);
    assert_eq!(put(&blocks, &keys, 1), all(Outcome::Done, 70));
    let device = bench.spec.devices().next().unwrap();
    std::fs::OpenOptions::new().write(true).open(device).unwrap().set_len(0).unwrap();
    assert_eq!(put(&blocks, &chain(70, 2), 2), all(Outcome::Device, 70));
    assert!(get(&blocks, &keys, 1).iter().all(|outcome| !outcome.is_ok()));
    assert!(blocks.has(&keys).iter().all(|outcome| !outcome.is_ok()));
    assert_eq!(blocks.counts().of(Operation::Put, Outcome::Device), 70);
}
