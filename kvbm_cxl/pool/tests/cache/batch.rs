// SPDX-License-Identifier: Apache-2.0
//! Several blocks at once: each answer is of its own key, whatever becomes of its neighbours.

use crate::bench::*;
use cxl_pool::Error;
use cxl_pool::cache::{BlockKey, Pinned, PublishRequest, Pulled, Reservation, Reserved};
use cxl_pool::copy::{LocalPlace, LocalRange};
use cxl_pool::metrics::MissReason;
use std::ptr::NonNull;

const LEN: usize = 1000;

/// A block in two pieces.
fn halves(block: &mut [u8]) -> [LocalRange; 2] {
    let (first, second) = block.split_at_mut(block.len() / 3);
    [first, second].map(|half| LocalRange { address: NonNull::from(&mut *half).cast(), len_bytes: half.len() })
}

fn pull(member: &Member, keys: &[BlockKey], blocks: &mut [Vec<u8>]) -> cxl_pool::Result<Vec<Pulled>> {
    // SAFETY: every block is a vector of its own, and no other thread uses them.
    unsafe { member.cache.pull_all_raw(SPACE, keys, LocalPlace::Host, |place, _| halves(&mut blocks[place])) }
}

fn publish(member: &Member, numbers: std::ops::Range<u64>, len_bytes: usize) {
    let request = |number| PublishRequest { namespace: SPACE, key: key(number), parent: None, len_bytes: len_bytes as u64 };
    let reserved = member.cache.reserve_all(&numbers.clone().map(request).collect::<Vec<_>>()).unwrap();
    let cell = |reserved| match reserved {
        Reserved::Cell(reservation) => reservation,
        _ => panic!("a block was not reserved"),
    };
    let mut reservations: Vec<Reservation> = reserved.into_iter().map(cell).collect();
    let mut blocks: Vec<Vec<u8>> = numbers.map(|number| bytes(number, len_bytes)).collect();
    // SAFETY: no thread writes to the blocks before the call returns.
    unsafe { Reservation::fill_all_raw(&mut reservations, LocalPlace::Host, |place| halves(&mut blocks[place])) }.unwrap();
    member.cache.commit_all(reservations).unwrap();
}

#[test]
fn hits_and_misses_keep_their_places() {
    let bench = Bench::new(&[(1024, 600)]);
    let (member, other) = (bench.member(1), bench.member(2));
    publish(&other, 0..200, LEN);
    publish(&other, 200..210, LEN - 1);
    member.publish(210..220, LEN);
    assert!(matches!(member.cache.evict(SPACE, key(215)), Ok(true)));
    // Of three groups, in no order, some of them twice, some of them nowhere.
    let numbers: Vec<u64> = (0..180).map(|place| place * 67 % 230).chain([3, 3, 219]).collect();
    let keys: Vec<BlockKey> = numbers.iter().map(|&number| key(number)).collect();
    let expected = |number: u64| match number {
        200..210 => Pulled::Miss(MissReason::Length),
        215 | 220.. => Pulled::Miss(MissReason::Absent),
        _ => Pulled::Hit { len_bytes: LEN as u64 },
    };
    let mut blocks = vec![vec![0xee; LEN]; numbers.len()];
    let pulled = pull(&member, &keys, &mut blocks).unwrap();
    for ((&number, block), found) in numbers.iter().zip(&blocks).zip(&pulled) {
        assert_eq!(*found, expected(number), "block {number}");
        match found {
            Pulled::Hit { .. } => assert!(*block == bytes(number, LEN), "block {number} has wrong bytes"),
            Pulled::Miss(_) => assert!(block.iter().all(|&byte| byte == 0xee), "a miss that was known before the copy wrote"),
        }
    }
    let hits = pulled.iter().filter(|found| matches!(found, Pulled::Hit { .. })).count() as u64;
    let misses = &member.cache.metrics().misses_total;
    let counted = [MissReason::Length, MissReason::Absent].map(|reason| misses.of(reason).get());
    assert_eq!(member.cache.metrics().pull_total.get(), hits);
    assert_eq!(counted.iter().sum::<u64>(), numbers.len() as u64 - hits);
    assert_eq!(member.cache.pinned(), 0, "nothing stays pinned");
    let found = member.cache.lookup_all(SPACE, &keys).unwrap();
    for (&number, found) in numbers.iter().zip(found) {
        assert_eq!(found.is_some(), number < 220 && number != 215, "block {number}");
    }
    other.leave();
    member.leave();
}

#[test]
fn pins_that_are_given_back_together_are_gone_and_no_others() {
    let bench = Bench::new(&[(1024, 600)]);
    let (owner, reader) = (bench.member(1), bench.member(2));
    // More than a line of pins has.
    owner.publish(0..200, LEN);
    let keys: Vec<BlockKey> = (0..200).map(key).collect();
    let mut pins = reader.cache.pin_chain(SPACE, &keys).unwrap();
    // One that is pinned no second time, and one that is.
    let kept = [pins.remove(77), reader.cache.pin(SPACE, key(5)).unwrap().unwrap()];
    // Some of another cache in between.
    pins.splice(50..50, owner.cache.pin_chain(SPACE, &keys[..3]).unwrap());
    assert_eq!((reader.cache.pinned(), owner.cache.pinned()), (200, 3));
    Pinned::release_all(pins);
    assert_eq!((reader.cache.pinned(), owner.cache.pinned()), (2, 0));
    for number in 0..200 {
        assert_eq!(owner.cache.evict(SPACE, key(number)).unwrap(), ![5, 77].contains(&number), "block {number}");
    }
    drop(kept);
    assert!([5, 77].into_iter().all(|number| owner.cache.evict(SPACE, key(number)).unwrap()));
}

#[test]
fn one_destination_for_two_pieces_is_refused() {
    let bench = Bench::new(&[(1024, 64)]);
    let member = bench.member(1);
    publish(&member, 0..2, LEN);
    let mut block = vec![0; LEN];
    let same = LocalRange { address: NonNull::from(&mut block[..]).cast(), len_bytes: LEN / 2 };
    // SAFETY: the block is this test's alone; that both pieces are the same memory is what the call has to notice before it writes.
    let pulled = unsafe { member.cache.pull_all_raw(SPACE, &[key(0)], LocalPlace::Host, |_, _| [same, same]) };
    assert!(matches!(pulled, Err(Error::Invalid(_))), "{pulled:?}");
    assert_eq!(member.cache.pinned(), 0);
    member.leave();
}

#[test]
fn blocks_that_do_not_fit_their_reservations_are_refused_before_any_is_written() {
    let bench = Bench::new(&[(1024, 64)]);
    let (member, other) = (bench.member(1), bench.member(2));
    let reserve = |member: &Member, number| match member.cache.reserve(&PublishRequest {
        namespace: SPACE,
        key: key(number),
        parent: None,
        len_bytes: 10,
    }) {
        Ok(Reserved::Cell(reservation)) => reservation,
        _ => panic!("a block was not reserved"),
    };
    let mut block = bytes(7, 11);
    let mut range = |len_bytes| LocalRange { address: NonNull::from(&mut block[..]).cast(), len_bytes };
    let (ten, eleven) = ([range(10)], [range(11)]);
    let mut two = [reserve(&member, 0), reserve(&member, 1)];
    // SAFETY: no thread writes to the block.
    let refused = unsafe { Reservation::fill_all_raw(&mut two, LocalPlace::Host, |place| if place == 0 { ten } else { eleven }) };
    assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
    let mut strangers = [reserve(&member, 2), reserve(&other, 3)];
    // SAFETY: as above.
    let refused = unsafe { Reservation::fill_all_raw(&mut strangers, LocalPlace::Host, |_| ten) };
    assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
    drop((two, strangers));
    assert_eq!(member.count(0..4, 10), 0);
    other.leave();
    member.leave();
}
