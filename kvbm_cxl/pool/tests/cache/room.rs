// SPDX-License-Identifier: Apache-2.0
//! Pools that are full.

use crate::bench::*;
use crate::load;
use cxl_pool::Error;
use cxl_pool::cache::{CacheConfig, PublishRequest, Published, Reserved};
use cxl_pool::lock::{FIRST_STRIPE_LOCK, LOCK_CELLS};
use cxl_pool::metrics::RefusalReason;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[test]
fn a_publish_evicts_the_oldest_when_every_cell_is_used() {
    let bench = Bench::new(&[(1024, 56)]);
    let member = bench.member(1);
    member.publish(0..56, 1000);
    assert_eq!(member.cache.usage().free, 0);
    // Used, so that it is not the oldest any more.
    assert!(member.has(0, 1000));
    member.publish(56..60, 1000);
    assert_eq!((1..5).filter(|&number| member.has(number, 1000)).count(), 0, "others went than the oldest");
    assert_eq!(member.count(5..60, 1000) + usize::from(member.has(0, 1000)), 56);
}

#[test]
fn a_pool_full_of_pinned_blocks_says_so_at_once() {
    let bench = Bench::new(&[(1024, 56)]);
    let member = bench.member(1);
    member.publish(0..56, 1000);
    let keys: Vec<_> = (0..56).map(key).collect();
    let pins = member.cache.pin_chain(SPACE, &keys).unwrap();
    assert_eq!(pins.len(), 56);
    let begun = Instant::now();
    match member.cache.publish(SPACE, key(100), None, &bytes(100, 1000)) {
        Err(Error::Full { what, limit, .. }) => assert!(what.contains("cells") && limit == 56, "{what} {limit}"),
        other => panic!("{other:?}"),
    }
    let request = |number| PublishRequest { namespace: SPACE, key: key(number), parent: None, len_bytes: 1000 };
    let answers = member.cache.reserve_all(&[request(100), request(3), request(101)]).unwrap();
    assert!(matches!(answers[..], [Reserved::NoCell, Reserved::Exists, Reserved::NoCell]));
    // Not at a lock's deadline.
    assert!(begun.elapsed() < load::secs(5), "{:?}", begun.elapsed());
    // One pin less is one block more.
    drop(pins.into_iter().next());
    member.publish(100..101, 1000);
}

#[test]
fn threads_that_take_each_others_room_all_get_some() {
    let bench = Bench::new(&[(1024, 112)]);
    let member = bench.member(1);
    member.publish(0..112, 1000);
    let next = AtomicU64::new(1000);
    let number = || next.fetch_add(1, Ordering::Relaxed);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..2000 {
                    let number = number();
                    member.publish(number..number + 1, 1000);
                }
            });
        }
    });
    // Never more than a third of the cells at once.
    let request = |_| PublishRequest { namespace: SPACE, key: key(number()), parent: None, len_bytes: 1000 };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..400 {
                    let answers = member.cache.reserve_all(&(0..8).map(request).collect::<Vec<_>>()).unwrap();
                    assert!(answers.iter().all(|answer| matches!(answer, Reserved::Cell(_))), "refused, and nothing is pinned");
                }
            });
        }
    });
}

#[test]
fn nothing_goes_for_a_block_that_is_there() {
    let bench = Bench::new(&[(1024, 112)]);
    let (one, two) = (bench.member(1), bench.member(2));
    two.publish(1000..1010, 1000);
    let room = one.pool.layout().geometry().cell_count() - two.cache.usage().owned;
    one.publish(0..room, 1000);
    assert_eq!(one.cache.usage().free, 0);
    let evicted = || one.cache.metrics().evictions_total.total();
    // The other host's blocks, of which this one never heard: alone, together, and beside one for which a block has to go.
    assert_eq!(one.cache.publish(SPACE, key(1000), None, &bytes(1000, 1000)).unwrap(), Published::Exists);
    let request = |number| PublishRequest { namespace: SPACE, key: key(number), parent: None, len_bytes: 1000 };
    let answers = one.cache.reserve_all(&(1001..1006).map(request).collect::<Vec<_>>()).unwrap();
    assert!(answers.iter().all(|answer| matches!(answer, Reserved::Exists)));
    assert_eq!((evicted(), one.count(0..room, 1000) as u64), (0, room));
    let answers = one.cache.reserve_all(&[request(1006), request(5000), request(1007)]).unwrap();
    assert!(matches!(answers[..], [Reserved::Exists, Reserved::Cell(_), Reserved::Exists]));
    assert_eq!(evicted(), 1);
}

#[test]
fn the_background_evictor_keeps_cells_free() {
    let bench = Bench::new(&[(1024, 112)]);
    let member = bench.member_with(1, CacheConfig { low_water_percent: 25, high_water_percent: 50, ..config() });
    let cells = member.pool.layout().geometry().cell_count();
    member.publish(0..cells, 1000);
    member.cache.service_round().unwrap();
    // There might be more chunks to claim, so nothing goes before the first publish finds that there are none.
    assert_eq!(member.cache.usage().ready, cells);
    member.publish(cells..cells + 1, 1000);
    member.cache.service_round().unwrap();
    assert_eq!(member.cache.usage().free, cells / 2);
    let evicted = member.cache.metrics().evictions_total.total();
    // Above the low mark it does nothing.
    member.publish(cells + 1..cells + cells / 4, 1000);
    member.cache.service_round().unwrap();
    assert_eq!(member.cache.metrics().evictions_total.total(), evicted);
    member.publish(cells + cells / 4..cells + cells / 3, 1000);
    member.cache.service_round().unwrap();
    assert!(member.cache.usage().free >= cells / 2);
}

#[test]
fn a_long_fill_of_a_small_pool_is_refused_nothing() {
    // As many hints as a table has that is half full, in windows that are often crowded.
    let bench = Bench::new(&[(64, 256)]);
    let member = bench.member(1);
    let publishes: u64 = 300_000;
    for number in 0..publishes {
        let published = member.cache.publish(SPACE, key(number), None, &number.to_le_bytes());
        assert!(matches!(published, Ok(Published::Stored)), "block {number} of {publishes}: {published:?}");
    }
    let refused = member.cache.metrics().publish_refused_total.of(RefusalReason::TableFull).get();
    assert_eq!((refused, member.cache.usage().ready <= 256), (0, true));
}

/// Publishes a block as soon as there is room for it.
fn publish_with_room(member: &Member, number: u64, others: &[&Member]) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match member.cache.publish(SPACE, key(number), None, &bytes(number, 1000)) {
            Ok(Published::Stored) => return,
            Err(Error::Full { .. }) => {}
            other => panic!("{other:?}"),
        }
        assert!(Instant::now() < deadline, "no host makes room: {:?}", member.cache.usage());
        others.iter().for_each(|other| other.cache.service_round().unwrap());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_host_without_cells_gets_a_chunk_of_one_that_has_all() {
    let bench = Bench::new(&[(1024, 56)]);
    let (rich, poor) = (bench.member(1), bench.member(2));
    rich.publish(0..56, 1000);
    publish_with_room(&poor, 100, &[&rich]);
    let per_chunk = u64::from(rich.pool.layout().geometry().cells_per_chunk);
    assert_eq!((rich.cache.usage().owned, poor.cache.usage().owned), (56 - per_chunk, per_chunk));
    // No more than had to go is gone.
    assert_eq!(rich.count(0..56, 1000) as u64, 56 - per_chunk);
    // In the end each has its half, and none less.
    for number in 101..160 {
        publish_with_room(&poor, number, &[&rich]);
    }
    assert!(rich.cache.usage().owned >= 28, "{:?}", rich.cache.usage());
    assert!(poor.has(159, 1000) && rich.has(159, 1000));
}

#[test]
fn a_second_process_of_a_host_gets_a_chunk_of_the_first() {
    let bench = Bench::new(&[(1024, 56)]);
    // Two hosts with exactly the share of a host each.
    let (first, other) = (bench.member(1), bench.member(2));
    first.publish(0..28, 1000);
    other.publish(28..56, 1000);
    let second = bench.member(1);
    assert_eq!(second.host.slot(), first.host.slot());
    publish_with_room(&second, 100, &[&first, &other]);
    assert_eq!(other.cache.usage().owned, 28, "a host with its share gave a chunk up");
    assert_eq!(first.cache.usage().owned + second.cache.usage().owned, 28);
    assert!(other.has(100, 1000));
}

#[test]
fn chunks_that_a_host_gave_back_are_found() {
    let bench = Bench::new(&[(1024, 56)]);
    let (one, other) = (bench.member(1), bench.member(2));
    one.publish(0..49, 1000);
    other.publish(49..56, 1000);
    // It evicts its own, and knows that there are no more chunks.
    other.publish(56..60, 1000);
    assert_eq!(other.cache.usage().owned, 7);
    one.cache.clear(Some(SPACE)).unwrap();
    one.leave();
    other.cache.service_round().unwrap();
    other.publish(100..156, 1000);
    assert_eq!((other.cache.usage().owned, other.count(100..156, 1000)), (56, 56));
}

#[test]
fn eviction_does_not_wait_for_every_lock_that_cannot_be_had() {
    let bench = Bench::new(&[(1024, 112)]);
    let lock_timeout_ms = load::ms(300);
    let member = bench.member_with(1, CacheConfig { lock_timeout_ms: Some(lock_timeout_ms), ..config() });
    member.publish(0..100, 1000);
    let (_pool, other) = bench.join(2);
    let _service = other.serve().unwrap();
    let stripes = member.pool.layout().geometry().stripes;
    let _held: Vec<_> = (0..stripes).map(|stripe| other.acquire(FIRST_STRIPE_LOCK + stripe, 10_000).unwrap()).collect();
    let begun = Instant::now();
    assert_eq!(member.cache.clear(Some(SPACE)).unwrap(), 100);
    // One deadline for each batch of blocks, not one for each of the 16 locks.
    assert!(begun.elapsed() < Duration::from_millis(10 * lock_timeout_ms), "{:?}", begun.elapsed());
    assert_eq!(member.count(0..100, 1000), 0);
    assert!(matches!(member.cache.publish(SPACE, key(1), None, &[1; 9]), Err(Error::Timeout { .. })));
    drop(_held);
    // Stale hints do not keep any host from publishing the same blocks again.
    member.publish(0..100, 1000);
    assert_eq!(member.count(0..100, 1000), 100);
}

#[test]
fn a_chunk_with_the_claim_of_a_host_that_is_gone_goes_round() {
    let bench = Bench::new(&[(1024, 56)]);
    let (rich, gone) = (bench.member(1), bench.member(3));
    gone.publish(0..56, 1000);
    gone.leave();
    rich.serve_until("adoption", || rich.cache.usage().ready == 56);
    // The claims of the host that left still stand, and no host comes to its slot.
    let poor = bench.member(2);
    publish_with_room(&poor, 100, &[&rich]);
    let per_chunk = u64::from(rich.pool.layout().geometry().cells_per_chunk);
    assert_eq!((rich.cache.usage().owned, poor.cache.usage().owned), (56 - per_chunk, per_chunk));
    assert_eq!(rich.count(0..56, 1000) as u64, 56 - per_chunk);
    // And round once more, from the one that came by it.
    poor.leave();
    rich.publish(200..200 + per_chunk, 1000);
    assert_eq!((rich.cache.usage().owned, rich.count(200..200 + per_chunk, 1000) as u64), (56, per_chunk));
}

#[test]
fn a_chunk_that_was_left_empty_is_looked_at_again_once_a_host_was_back() {
    let bench = Bench::new(&[(1024, 56)]);
    let (rich, first) = (bench.member(1), bench.member(3));
    first.publish(0..1, 1000);
    assert!(first.cache.evict(SPACE, key(0)).unwrap());
    // Without a close, which would give the chunk back.
    first.host.leave().unwrap();
    drop(first);
    for _ in 0..20 {
        rich.cache.service_round().unwrap();
        std::thread::sleep(Duration::from_millis(2));
    }
    let back = bench.member(3);
    back.publish(0..56, 1000);
    back.leave();
    rich.serve_until("adoption", || rich.cache.usage().ready == 56);
}

#[test]
fn blocks_do_not_go_for_a_chunk_that_cannot_be_given_back() {
    let bench = Bench::new(&[(1024, 56)]);
    let (rich, mut zombie) = (bench.member(1), bench.member(3));
    zombie.publish(0..56, 1000);
    let (slot, incarnation) = (zombie.host.slot(), zombie.host.incarnation());
    // Its process goes on, and may have late lines for these chunks.
    zombie.service = None;
    await_fence(&rich, slot, incarnation);
    rich.serve_until("adoption", || rich.cache.usage().ready == 56);
    let poor = bench.member(2);
    for _ in 0..20 {
        assert!(matches!(poor.cache.publish(SPACE, key(100), None, &bytes(100, 1000)), Err(Error::Full { .. })));
        rich.cache.service_round().unwrap();
        std::thread::sleep(Duration::from_millis(15));
    }
    assert_eq!(rich.count(0..56, 1000), 56);
}

#[test]
fn a_pinned_block_keeps_its_chunk_and_no_other() {
    let bench = Bench::new(&[(1024, 56)]);
    let (rich, poor) = (bench.member(1), bench.member(2));
    rich.publish(0..56, 1000);
    // One in the chunk that would be the first to go.
    let first = (0..56).min_by_key(|&number| rich.cache.lookup(SPACE, key(number)).unwrap().unwrap().cell).unwrap();
    let pin = poor.cache.pin(SPACE, key(first)).unwrap().unwrap();
    publish_with_room(&poor, 100, &[&rich]);
    let per_chunk = u64::from(rich.pool.layout().geometry().cells_per_chunk);
    assert_eq!(rich.count(0..56, 1000) as u64, 56 - per_chunk, "more went than the blocks of a chunk");
    assert_eq!((rich.cache.usage().owned, pin.is_unchanged().unwrap()), (56 - per_chunk, true));
}

#[test]
fn a_request_that_could_not_be_answered_is_answered_later() {
    let bench = Bench::new(&[(1024, 56)]);
    let (rich, poor) = (bench.member_with(1, CacheConfig { lock_timeout_ms: Some(300), ..config() }), bench.member(2));
    rich.publish(0..56, 1000);
    // Asks, once.
    assert!(matches!(poor.cache.publish(SPACE, key(100), None, &bytes(100, 1000)), Err(Error::Full { .. })));
    let (_pool, third) = bench.join(3);
    let _service = third.serve().unwrap();
    let held = third.acquire(LOCK_CELLS, 10_000).unwrap();
    assert!(matches!(rich.cache.service_round(), Err(Error::Timeout { .. })));
    assert_eq!(rich.cache.usage().owned, 56);
    drop(held);
    rich.serve_until("the answer", || rich.cache.usage().owned < 56);
}
