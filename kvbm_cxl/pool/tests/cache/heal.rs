// SPDX-License-Identifier: Apache-2.0
//! Damaged lines of locks, fences and memberships: their owner writes them again while hosts work, and what stays damaged costs the calls
//! that need it an error at once.

use crate::bench::*;
use cxl_pool::Error;
use cxl_pool::cache::{PublishRequest, Published, Reserved};
use cxl_pool::lock::FIRST_STRIPE_LOCK;
use cxl_pool::media::{Binding, DeathLine, FenceLine, GrantLine, Identity, LOCKS_PER_GRANT, MediaLine, Region, RequestLine, Seat, Summary};
use std::time::{Duration, Instant};

/// The seat that no machine has in a pool of [`Bench`]; seats 0 to 2 belong to machines 1 to 3.
const VACANT_SEAT: u64 = 3;
/// In the place of a seat: the one in charge.
const MANAGER: u64 = u64::MAX;

fn is_whole(member: &Member, region: Region, index: u64) -> bool {
    fn whole<T: MediaLine>(member: &Member, index: u64) -> bool {
        member.pool.lines().fetch::<T>(index).is_ok()
    }
    match region {
        Region::Seat => whole::<Seat>(member, index),
        Region::Grant => whole::<GrantLine>(member, index),
        Region::Binding => whole::<Binding>(member, index),
        Region::Fence => whole::<FenceLine>(member, index),
        Region::Death => whole::<DeathLine>(member, index),
        Region::Identity => whole::<Identity>(member, index),
        Region::Summary => whole::<Summary>(member, index),
        Region::Request => whole::<RequestLine>(member, index),
        other => panic!("{other:?} is not looked at here"),
    }
}

fn await_whole(member: &Member, region: Region, index: u64) {
    let deadline = Instant::now() + PATIENCE;
    while !is_whole(member, region, index) {
        assert!(Instant::now() < deadline, "{region:?} {index} was not written again");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Lines per seat and per slot of a region.
fn lines_each(member: &Member, region: Region) -> u64 {
    let geometry = *member.pool.layout().geometry();
    let owners = match region {
        Region::Identity | Region::Summary | Region::Request => geometry.slots.into(),
        _ => geometry.all_seats(),
    };
    member.pool.layout().span(region).lines / owners
}

fn publish_until_stored(member: &Member, number: u64) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match member.cache.publish(SPACE, key(number), None, &bytes(number, 1000)) {
            Ok(published) => return assert_eq!(published, Published::Stored),
            Err(error) => assert!(Instant::now() < deadline, "block {number}: {error}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn owners_that_run_write_their_damaged_lines_again() {
    let bench = Bench::new(&[(1024, 112)]);
    let (first, second) = (bench.member(1), bench.member(2));
    publish_until_stored(&first, 1);
    publish_until_stored(&second, 2);
    let mut number = 10;
    // Machine 1 has seat 0 and is in charge first; machine 2 has seat 1, and takes the role when its seat line is lost.
    let of_seats = [(Region::Seat, 0), (Region::Seat, 1), (Region::Fence, 0), (Region::Fence, 1), (Region::Death, 0), (Region::Death, 1)];
    let of_manager = [(Region::Grant, MANAGER), (Region::Binding, MANAGER)];
    let of_slots = [Region::Identity, Region::Request, Region::Summary];
    let slots = [u64::from(first.host.slot()), u64::from(second.host.slot())];
    let of_slots = of_slots.into_iter().flat_map(|region| slots.map(|slot| (region, slot)));
    for (region, owner) in of_seats.into_iter().chain(of_manager).chain(of_slots) {
        let each = lines_each(&first, region);
        let owner = if owner == MANAGER { u64::from(second.host.manager_seat()) } else { owner };
        for index in owner * each..(owner + 1) * each {
            tear(&first, region, index);
        }
        (owner * each..(owner + 1) * each).for_each(|index| await_whole(&second, region, index));
        publish_until_stored(&first, number);
        publish_until_stored(&second, number + 1);
        number += 2;
    }
    assert!(first.host.damage_counts().healed_lines + second.host.damage_counts().healed_lines > 20);
    // No block is lost for it.
    let third = bench.member(3);
    assert_eq!(third.count(10..number, 1000), number as usize - 10);
    third.leave();
    second.leave();
    first.leave();
}

#[test]
fn lines_of_a_seat_that_no_machine_has_keep_no_host_waiting() {
    let bench = Bench::new(&[(1024, 56)]);
    let first = bench.member(1);
    for region in [Region::Seat, Region::Grant, Region::Binding, Region::Fence, Region::Death] {
        let each = lines_each(&first, region);
        (VACANT_SEAT * each..(VACANT_SEAT + 1) * each).for_each(|index| {
            tear(&first, region, index);
        });
    }
    first.publish(0..4, 1000);
    let second = bench.member(2);
    second.publish(4..8, 1000);
    assert_eq!((first.count(0..8, 1000), second.count(0..8, 1000)), (8, 8));
    // The next manager has to collect from that seat as well.
    first.leave();
    publish_until_stored(&second, 8);
    assert_eq!(second.host.damage_counts().failed_calls, 0);
    second.leave();
}

#[test]
fn a_fence_row_whose_owner_is_away_costs_an_error_at_once_until_it_is_back() {
    let bench = Bench::new(&[(1024, 56)]);
    let third = bench.member(3);
    let first = bench.member(1);
    first.publish(0..2, 1000);
    third.leave();
    let row = 2 * lines_each(&first, Region::Fence);
    tear(&first, Region::Fence, row);
    let publish = |number| {
        let start = Instant::now();
        let failed = first.cache.publish(SPACE, key(number), None, &bytes(number, 1000)).unwrap_err();
        assert!(matches!(failed, Error::BadLine { region: "Fence", index, .. } if index == row), "{failed}");
        start.elapsed()
    };
    // The first ones wait for a writer that may only be stopped in the middle of the line.
    publish(100);
    let many: Duration = (101..121).map(publish).sum();
    // Each by itself would wait for as long as the first.
    assert!(many < Duration::from_millis(first.host.config().damage_ms) * 10, "20 calls took {many:?}");
    assert!(first.host.damage_counts().failed_calls >= 20);
    // A new session does not know what the row said: every incarnation is fenced, and each host joins again above that.
    let incarnation = first.host.incarnation();
    let third = bench.member(3);
    await_whole(&first, Region::Fence, row);
    first.serve_until_rejoined(incarnation);
    publish_until_stored(&first, 200);
    publish_until_stored(&third, 201);
}

#[test]
fn a_grant_copy_that_hides_the_truth_costs_its_locks_only() {
    let bench = Bench::new(&[(1024, 56)]);
    let (mut first, second) = (bench.member(1), bench.member(2));
    first.publish(0..4, 1000);
    let lock = second.host.lines().layout().geometry().first_user_lock() + 1;
    drop(second.host.acquire(lock, 20_000).unwrap());
    // The manager stops, and its copy of these locks' grants is the only one that tells who has them.
    let line = u64::from(lock) / 4;
    drop(first.service.take());
    tear(&first, Region::Grant, line);
    let deadline = Instant::now() + PATIENCE;
    let acquire = |lock| {
        let start = Instant::now();
        second.host.acquire(lock, 20_000).map(drop).map_err(|error| (error, start.elapsed()))
    };
    // A lock of another line is had from the next manager.
    acquire(lock + 4).unwrap();
    while second.pool.lines().fetch::<Seat>(1).unwrap().epoch == 0 {
        assert!(Instant::now() < deadline, "seat 1 did not take the role over");
        std::thread::sleep(Duration::from_millis(5));
    }
    let other = (line as u32 * 4..line as u32 * 4 + 4).find(|other| *other != lock).unwrap();
    let (error, _) = acquire(other).unwrap_err();
    assert!(matches!(error, Error::BadLine { region: "Grant", index, .. } if index == line), "{error}");
    let (_, took) = acquire(other).unwrap_err();
    // Not the 20 seconds that it was ready to wait.
    assert!(took < Duration::from_secs(5), "{took:?}");
    acquire(lock + 8).unwrap();
}

#[test]
fn a_stripe_that_is_blocked_costs_the_blocks_of_a_batch_that_belong_there() {
    let bench = Bench::new(&[(1024, 112)]);
    let (mut first, second) = (bench.member(1), bench.member(2));
    let request = |number| PublishRequest { namespace: SPACE, key: key(number), parent: None, len_bytes: 1000 };
    // Blocks of the second host in every stripe: none of them is to go for those that are refused.
    second.publish(0..32, 1000);
    // The first host is the manager, and takes the locks of all stripes; what it said of one line of them is lost with it.
    first.publish(100..140, 1000);
    let line = u64::from(FIRST_STRIPE_LOCK) / LOCKS_PER_GRANT as u64;
    drop(first.service.take());
    tear(&first, Region::Grant, line);
    let deadline = Instant::now() + PATIENCE;
    while second.pool.lines().fetch::<Seat>(1).unwrap().epoch == 0 {
        assert!(Instant::now() < deadline, "seat 1 did not take the role over");
        std::thread::sleep(Duration::from_millis(5));
    }
    let usage = second.cache.usage();
    let (mut refused, mut stored) = (Vec::new(), Vec::new());
    for batch in 0..3u64 {
        let numbers: Vec<u64> = (1000 + 12 * batch..1012 + 12 * batch).collect();
        let begun = Instant::now();
        let answers = second.cache.reserve_all(&numbers.iter().copied().map(request).collect::<Vec<_>>()).unwrap();
        let mut filled = Vec::new();
        for (answer, &number) in answers.into_iter().zip(&numbers) {
            match answer {
                Reserved::Cell(mut reservation) => {
                    reservation.fill([&bytes(number, 1000)[..]]).unwrap();
                    filled.push(reservation);
                    stored.push(number);
                }
                Reserved::NoHint => refused.push(number),
                _ => panic!("block {number} has another answer"),
            }
        }
        second.cache.commit_all(filled).unwrap();
        // The first one waits for a writer that may only be stopped in the middle of the line.
        assert!(batch == 0 || begun.elapsed() < Duration::from_millis(10 * second.host.config().damage_ms), "{:?}", begun.elapsed());
    }
    assert!(!refused.is_empty() && stored.len() > refused.len(), "{refused:?} were refused, {stored:?} were not");
    assert!(stored.iter().all(|&number| second.has(number, 1000)) && second.count(0..32, 1000) == 32);
    for &number in &refused {
        let alone = second.cache.publish(SPACE, key(number), None, &bytes(number, 1000)).unwrap_err();
        assert!(matches!(alone, Error::BadLine { region: "Grant", index, .. } if index == line), "{alone}");
    }
    // No cell is lost to a refused block.
    let after = second.cache.usage();
    assert_eq!(after.ready, usage.ready + stored.len() as u64);
    assert_eq!(after.free + after.ready, after.owned);
}

#[test]
fn every_line_that_is_written_again_and_every_call_that_failed_is_counted_once() {
    let bench = Bench::new(&[(1024, 56)]);
    let third = bench.member(3);
    let (first, second) = (bench.member(1), bench.member(2));
    publish_until_stored(&first, 1);
    publish_until_stored(&second, 2);
    third.leave();
    let counts = || [&first, &second].map(|member| member.host.damage_counts());
    let healed = || counts().iter().map(|counts| counts.healed_lines).sum::<u64>();
    assert_eq!((healed(), counts().map(|counts| counts.failed_calls)), (0, [0, 0]));
    let slots = [u64::from(first.host.slot()), u64::from(second.host.slot())];
    let seats = [(Region::Fence, 0), (Region::Fence, 1), (Region::Death, 0), (Region::Death, 1)];
    let mut torn = 0;
    for (region, owner) in [(Region::Identity, slots[0]), (Region::Identity, slots[1])].into_iter().chain(seats) {
        let each = lines_each(&first, region);
        let lines = owner * each..(owner + 1) * each;
        for index in lines.clone() {
            tear(&first, region, index);
        }
        torn += each;
        lines.for_each(|index| await_whole(&second, region, index));
    }
    // Counted right behind the write; none is counted again later.
    let deadline = Instant::now() + PATIENCE;
    while healed() < torn {
        assert!(Instant::now() < deadline, "{} of {torn} were counted", healed());
        std::thread::sleep(Duration::from_millis(1));
    }
    let before = first.host.damage_counts().failed_calls;
    // A row that no host can write again fails each call that needs it.
    let row = 2 * lines_each(&first, Region::Fence);
    let whole = tear(&first, Region::Fence, row);
    for _ in 0..10 {
        let op = first.host.enter().unwrap();
        let failed = first.host.check_fences(&op).unwrap_err();
        assert!(matches!(failed, Error::BadLine { region: "Fence", index, .. } if index == row), "{failed}");
    }
    mend(&first, Region::Fence, row, &whole);
    let failed_calls = first.host.damage_counts().failed_calls;
    assert_eq!((failed_calls - before, healed()), (10, torn));
    // What an operator reads is the same.
    first.cache.service_round().unwrap();
    let metrics = first.cache.metrics();
    let shown = (metrics.lock_damaged_total.get(), metrics.healed_lines_total.get());
    assert_eq!(shown, (failed_calls, first.host.damage_counts().healed_lines));
    publish_until_stored(&first, 200);
}
