// SPDX-License-Identifier: Apache-2.0
//! Odd lists and lengths.

use crate::bench::*;
use cxl_pool::Error;
use cxl_pool::cache::{PublishRequest, Published, Pulled, Reservation, Reserved};
use cxl_pool::copy::{LocalPlace, LocalRange, ReadList};
use cxl_pool::metrics::MissReason;
use std::ptr::NonNull;

#[test]
fn a_block_may_be_read_in_another_order_than_it_lies() {
    let bench = Bench::new(&[(1024, 56)]);
    let member = bench.member(1);
    member.publish(0..1, 1000);
    let pin = member.cache.pin(SPACE, key(0)).unwrap().unwrap_or_else(|reason| panic!("{}", reason.text()));
    let (mut front, mut back) = ([0; 400], [0; 600]);
    let mut list = ReadList::new();
    list.push(pin.offset() + 400, &mut back);
    list.push(pin.offset(), &mut front);
    assert_eq!(pin.copy(&mut list).unwrap(), None, "its checksum is of the order in which it lies");
    drop(list);
    assert_eq!([&front[..], &back[..]].concat(), bytes(0, 1000));
}

fn request(number: u64, len_bytes: u64) -> PublishRequest {
    PublishRequest { namespace: SPACE, key: key(number), parent: None, len_bytes }
}

fn reserved(member: &Member, number: u64, len_bytes: u64) -> Reservation {
    match member.cache.reserve(&request(number, len_bytes)).unwrap() {
        Reserved::Cell(reservation) => reservation,
        _ => panic!("no cell for block {number}"),
    }
}

fn range(bytes: &mut [u8]) -> LocalRange {
    LocalRange { address: NonNull::from(&mut *bytes).cast(), len_bytes: bytes.len() }
}

#[test]
fn a_chain_of_ten_thousand_blocks() {
    const BLOCKS: u64 = 10_000;
    let bench = Bench::new(&[(64, 11_000)]);
    let (member, other) = (bench.member(1), bench.member(2));
    let keys: Vec<_> = (0..BLOCKS + 1).map(key).collect();
    for first in (0..BLOCKS).step_by(1000) {
        let requests: Vec<PublishRequest> = (first..first + 1000).map(|number| request(number, 64)).collect();
        let mut filled = Vec::new();
        for (number, answer) in (first..).zip(member.cache.reserve_all(&requests).unwrap()) {
            let Reserved::Cell(mut reservation) = answer else { panic!("no cell for block {number}") };
            reservation.fill([&bytes(number, 64)[..]]).unwrap();
            filled.push(reservation);
        }
        member.cache.commit_all(filled).unwrap();
    }
    let found = other.cache.lookup_chain(SPACE, &keys).unwrap();
    assert_eq!(found.len() as u64, BLOCKS);
    assert!(found.iter().all(|block| (block.len_bytes, block.owner) == (64, member.host.slot())));
    let pins = other.cache.pin_chain(SPACE, &keys).unwrap();
    assert_eq!((pins.len() as u64, other.cache.pinned() as u64), (BLOCKS, BLOCKS));
    let mut block = [0; 64];
    for (number, pin) in (0..).zip(&pins) {
        assert_eq!(pin.copy_to(&mut block).unwrap(), None);
        assert_eq!(block[..], bytes(number, 64));
    }
    assert!(!member.cache.evict(SPACE, key(7_000)).unwrap(), "a pinned block went");
    drop(pins);
    assert_eq!(other.cache.pinned(), 0);
    assert!(member.cache.evict(SPACE, key(7_000)).unwrap());
    assert_eq!(other.cache.lookup_chain(SPACE, &keys).unwrap().len(), 7_000);
    assert_eq!(other.cache.lookup_chain(SPACE, &[]).unwrap(), []);
    assert_eq!(other.cache.lookup_chain(SPACE, &keys[7_000..]).unwrap(), []);
}

#[test]
fn a_block_of_sixteen_thousand_pieces_at_unaligned_addresses() {
    const PIECES: usize = 16 << 10;
    let bench = Bench::new(&[(256 << 10, 8)]);
    let (member, other) = (bench.member(1), bench.member(2));
    // Pieces of 1 to 31 bytes with gaps between them, so that none are neighbours, and none at a round address.
    let lens: Vec<usize> = (0..PIECES).map(|piece| 1 + piece * 7 % 31).collect();
    let total: usize = lens.iter().sum();
    let block = bytes(5, total);
    let mut spread = vec![0xee_u8; total + PIECES + 1];
    let mut places = Vec::new();
    let (mut at, mut from) = (1, 0);
    for &len in &lens {
        spread[at..at + len].copy_from_slice(&block[from..from + len]);
        places.push((at, len));
        (at, from) = (at + len + 1, from + len);
    }
    let pieces = |buffer: &mut [u8]| -> Vec<LocalRange> { places.iter().map(|&(at, len)| range(&mut buffer[at..at + len])).collect() };
    let mut reservation = reserved(&member, 5, total as u64);
    // SAFETY: the ranges lie in `spread`, which no thread writes to meanwhile.
    unsafe { Reservation::fill_all_raw(std::slice::from_mut(&mut reservation), LocalPlace::Host, |_| pieces(&mut spread)) }.unwrap();
    reservation.commit().unwrap();
    let mut found = vec![0xee_u8; spread.len()];
    let list = pieces(&mut found);
    // SAFETY: the ranges lie in `found`, which no other thread uses meanwhile.
    let pulled = unsafe { other.cache.pull_all_raw(SPACE, &[key(5)], LocalPlace::Host, |_, _| list.clone()) }.unwrap();
    assert_eq!(pulled, [Pulled::Hit { len_bytes: total as u64 }]);
    assert!(found == spread, "bytes at the wrong place, or beside the pieces");
    assert!(other.has(5, total));
}

#[test]
fn lengths_that_cannot_be() {
    let bench = Bench::new(&[(256, 28), (4096, 28)]);
    let member = bench.member(1);
    assert!(matches!(member.cache.publish(SPACE, key(0), None, &[]), Err(Error::Invalid(_))));
    match member.cache.publish(SPACE, key(0), None, &[1; 4097]) {
        Err(Error::Invalid(text)) => assert!(text.contains("4097") && text.contains("4096"), "{text}"),
        other => panic!("{other:?}"),
    }
    // One request that cannot be is an error, and the others get nothing.
    assert!(matches!(member.cache.reserve_all(&[request(1, 100), request(2, 0)]), Err(Error::Invalid(_))));
    assert_eq!(member.cache.lookup(SPACE, key(1)).unwrap(), None);
    assert_eq!(member.cache.publish(SPACE, key(0), None, &[7; 4096]).unwrap(), Published::Stored);
    assert!(member.cache.reserve_all(&[]).unwrap().is_empty());
    member.cache.commit_all(Vec::new()).unwrap();

    let mut reservation = reserved(&member, 3, 100);
    assert!(matches!(reservation.fill([&[1; 99][..]]), Err(Error::Invalid(_))));
    assert!(matches!(reservation.fill([&[1; 100][..], &[1]]), Err(Error::Invalid(_))));
    assert!(matches!(reservation.write(90, &[1; 11]), Err(Error::OutOfRange { .. })));
    assert!(matches!(reservation.write(u64::MAX, &[1; 2]), Err(Error::OutOfRange { .. })));
    let block = bytes(3, 100);
    reservation.fill([&[][..], &block[..40], &[], &block[40..], &[]]).unwrap();
    reservation.commit().unwrap();
    assert!(member.has(3, 100));
}

#[test]
fn a_block_takes_the_smallest_cell_that_holds_it() {
    let bench = Bench::new(&[(256, 56), (1024, 28), (4096, 28)]);
    let member = bench.member(1);
    for (number, (len_bytes, cell_bytes)) in
        (0..).zip([(1, 256), (255, 256), (256, 256), (257, 1024), (1024, 1024), (1025, 4096), (4096, 4096)])
    {
        let mut reservation = reserved(&member, number, len_bytes);
        assert_eq!(member.pool.layout().cell(reservation.cell()).unwrap(), (reservation.offset(), cell_bytes), "{len_bytes} bytes");
        assert_eq!((reservation.len_bytes(), reservation.key()), (len_bytes, key(number)));
        reservation.fill([&bytes(number, len_bytes as usize)[..]]).unwrap();
        reservation.commit().unwrap();
        assert!(member.has(number, len_bytes as usize));
    }
}

#[test]
fn destinations_that_do_not_fit() {
    let bench = Bench::new(&[(1024, 28)]);
    let member = bench.member(1);
    member.publish(0..1, 1000);
    let mut small = [0; 999];
    match member.cache.pull(SPACE, key(0), &mut small) {
        Err(Error::Invalid(text)) => assert!(text.contains("999") && text.contains("1000"), "{text}"),
        other => panic!("{other:?}"),
    }
    let pin = member.cache.pin(SPACE, key(0)).unwrap().unwrap();
    assert!(matches!(pin.copy_to(&mut small), Err(Error::Invalid(_))));
    let mut halves = [vec![0; 500], vec![0; 499]];
    let list = halves.each_mut().map(|half| range(half));
    // SAFETY: the ranges are the vectors above, which no other thread uses.
    let short = unsafe { member.cache.pull_all_raw(SPACE, &[key(0)], LocalPlace::Host, |_, _| list) }.unwrap();
    assert_eq!(short, [Pulled::Miss(MissReason::Length)]);
    // A longer one keeps what is behind the block.
    let mut long = vec![0xee; 1500];
    assert_eq!(member.cache.pull(SPACE, key(0), &mut long).unwrap(), Pulled::Hit { len_bytes: 1000 });
    assert!(long[..1000] == bytes(0, 1000) && long[1000..].iter().all(|&byte| byte == 0xee));
    // What is refused leaves no pin behind.
    drop(pin);
    assert_eq!(member.cache.pinned(), 0);
    assert!(member.cache.evict(SPACE, key(0)).unwrap());
}

#[test]
fn destinations_that_overlap_are_refused() {
    let bench = Bench::new(&[(1024, 28)]);
    let member = bench.member(1);
    member.publish(0..1, 1000);
    let mut buffer = vec![0xee_u8; 1000];
    let (one, two) = (range(&mut buffer[..600]), range(&mut buffer[500..900]));
    // SAFETY: the ranges lie in `buffer`, which no other thread uses.
    let refused = unsafe { member.cache.pull_all_raw(SPACE, &[key(0)], LocalPlace::Host, |_, _| [one, two]) };
    assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
    assert!(buffer.iter().all(|&byte| byte == 0xee), "something was copied nevertheless");
    assert_eq!(member.cache.pinned(), 0);
}

#[test]
fn another_namespace_is_another_block() {
    let bench = Bench::new(&[(1024, 28)]);
    let (member, other) = (bench.member(1), bench.member(2));
    member.publish(0..1, 1000);
    let mut found = vec![0; 1000];
    assert!(matches!(other.cache.pull(OTHER_SPACE, key(0), &mut found).unwrap(), Pulled::Miss(_)));
    assert_eq!(other.cache.lookup(OTHER_SPACE, key(0)).unwrap(), None);
    assert!(other.cache.pin_chain(OTHER_SPACE, &[key(0)]).unwrap().is_empty());
    // The same key in both, with bytes of their own; clearing one leaves the other.
    let theirs = bytes(77, 500);
    assert_eq!(other.cache.publish(OTHER_SPACE, key(0), None, &theirs).unwrap(), Published::Stored);
    assert_eq!(member.cache.pull(OTHER_SPACE, key(0), &mut found).unwrap(), Pulled::Hit { len_bytes: 500 });
    assert!(found[..500] == theirs && member.has(0, 1000));
    assert_eq!(other.cache.clear(Some(OTHER_SPACE)).unwrap(), 1);
    assert!(other.has(0, 1000) && member.cache.lookup(OTHER_SPACE, key(0)).unwrap().is_none());
}

#[test]
fn what_is_published_behind_a_clear_stays() {
    let bench = Bench::new(&[(1024, 28)]);
    let (member, other) = (bench.member(1), bench.member(2));
    for all in [false, true] {
        member.publish(0..3, 1000);
        other.publish(3..5, 1000);
        assert_eq!(member.cache.clear((!all).then_some(SPACE)).unwrap(), 3);
        // Its own upkeep meets the request as well, when these are there; so does the other's, which has something to do.
        member.publish(0..2, 1000);
        member.cache.service_round().unwrap();
        assert_eq!(member.cache.usage().ready, 2, "cleared once more by who had asked for it");
        other.serve_until("the other process's part", || {
            // A request may have to wait for the one before.
            member.cache.service_round().unwrap();
            other.cache.usage().ready == 0
        });
        assert!(member.has(0, 1000) && member.has(1, 1000) && !member.has(3, 1000) && !member.has(4, 1000));
        assert_eq!(member.cache.clear(None).unwrap(), 2);
        other.cache.service_round().unwrap();
    }
}
