// SPDX-License-Identifier: Apache-2.0
//! Pins of a pull that fails: none of them stays.

#[path = "../../pool/tests/cache/bench.rs"]
#[allow(dead_code)] // The tests of the pool use the rest.
mod bench;
#[path = "../../pool/tests/common/load.rs"]
mod load;

use bench::{Bench, Member, SPACE, bytes, key};
use cxl_pool::cache::{BlockKey, Pinned, PublishRequest, Reserved};
use cxl_pool::fault::{drop_rule, on_point};
use cxl_pool::media::{CELLS_PER_PIN, Region};
use cxl_sim::names;
use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;

/// Bytes of a block.
const LEN_BYTES: usize = 40;
/// Blocks that one call publishes.
const BATCH: u64 = 512;

/// A host with `count` blocks.
fn with_blocks(count: u64) -> (Bench, Member) {
    let bench = Bench::new(&[(64, count.max(4096))]);
    let member = bench.member(1);
    for start in (0..count).step_by(BATCH as usize) {
        let numbers: Vec<u64> = (start..count.min(start + BATCH)).collect();
        let request = |&number: &u64| PublishRequest { namespace: SPACE, key: key(number), parent: None, len_bytes: LEN_BYTES as u64 };
        let mut reservations = Vec::new();
        for (answer, number) in member.cache.reserve_all(&numbers.iter().map(request).collect::<Vec<_>>()).unwrap().into_iter().zip(numbers)
        {
            let Reserved::Cell(mut reservation) = answer else { panic!("block {number} was refused") };
            reservation.fill([&bytes(number, LEN_BYTES)[..]]).unwrap();
            reservations.push(reservation);
        }
        member.cache.commit_all(reservations).unwrap();
    }
    (bench, member)
}

fn keys(numbers: Range<u64>) -> Vec<BlockKey> {
    numbers.map(key).collect()
}

/// Pins that stay where their line cannot be published, since its memory is lost.
fn left_unpublished(rule: Option<&'static str>) -> usize {
    let (_bench, member) = with_blocks(3);
    let cell = member.cache.pin(SPACE, key(1)).unwrap().map_or_else(|reason| panic!("{}", reason.text()), |pin| pin.cell());
    let line = u64::from(member.host.slot()) * member.pool.layout().geometry().pin_lines() + cell / CELLS_PER_PIN as u64;
    member.pool.faults().mark_poisoned(member.pool.layout().line_offset(Region::Pin, line).unwrap()).unwrap();
    drop_rule(rule);
    let refused = member.cache.pin(SPACE, key(1)).is_err();
    drop_rule(None);
    assert!(refused, "the line was published");
    member.cache.pinned()
}

/// Pins that stay where the memory of the lines is lost between that of one block and that of another.
fn left_of_earlier_rows(rule: Option<&'static str>) -> usize {
    let count = 2 * CELLS_PER_PIN as u64;
    let (_bench, member) = with_blocks(count);
    let line = u64::from(member.host.slot()) * member.pool.layout().geometry().pin_lines();
    let (offset, faults) = (member.pool.layout().line_offset(Region::Pin, line).unwrap(), member.pool.faults().clone());
    let rows = Rc::new(Cell::new(0));
    on_point(Some(Rc::new(move |name| {
        if name == "cache.pin_counted" && rows.replace(rows.get() + 1) == 1 {
            faults.mark_poisoned(offset).unwrap();
        }
    })));
    drop_rule(rule);
    let refused = member.cache.pin_chain(SPACE, &keys(0..count)).is_err();
    drop_rule(None);
    on_point(None);
    assert!(refused, "all lines were published");
    member.cache.pinned()
}

/// Pins that stay of blocks that went between the lookup and the pin, of a chain of three.
fn left_of_what_went(rule: Option<&'static str>) -> usize {
    let (_bench, member) = with_blocks(3);
    let (cache, is_done) = (member.cache.clone(), Rc::new(Cell::new(false)));
    on_point(Some(Rc::new(move |name| {
        if name == "cache.pin" && !is_done.replace(true) {
            assert!(cache.evict(SPACE, key(1)).unwrap());
        }
    })));
    drop_rule(rule);
    let pins = member.cache.pin_chain(SPACE, &keys(0..3)).unwrap();
    drop_rule(None);
    on_point(None);
    assert_eq!(pins.len(), 1, "the chain ends where a block is gone");
    Pinned::release_all(pins);
    member.cache.pinned()
}

#[test]
fn nothing_of_a_failed_pin_stays() {
    assert_eq!((left_unpublished(None), left_of_what_went(None), left_of_earlier_rows(None)), (0, 0, 0));
    assert!(left_of_earlier_rows(Some("pins.earlier_rows_stay")) > 0);
    assert!(left_unpublished(Some("pins.unpublished_row_stays")) > 0);
    assert!(left_of_what_went(Some("pins.misses_stay")) > 0);
}

#[test]
fn every_rule_of_pins_is_tried_here() {
    let tried = ["pins.earlier_rows_stay", "pins.misses_stay", "pins.unpublished_row_stays"];
    let mut found = names::of_pool().expect("the pool's sources").mutants;
    found.retain(|name| name.starts_with("pins."));
    assert_eq!(found, tried);
}
