// SPDX-License-Identifier: Apache-2.0
//! Damage to payload and descriptors: a miss for the reader that meets it, and no harm to others.

use crate::bench::*;
use cxl_pool::Error;
use cxl_pool::cache::{CacheConfig, PublishRequest, Pulled, Reserved};
use cxl_pool::line::Line;
use cxl_pool::media::{CellClaim, Descriptor, Region};
use cxl_pool::metrics::MissReason;
use std::time::{Duration, Instant};

#[test]
fn a_flipped_bit_is_a_miss_where_checksums_are_on() {
    let bench = Bench::new(&[(4096, 28)]);
    let member = bench.member(1);
    let blind = bench.member_with(2, CacheConfig { checksums: false, ..config() });
    member.publish(0..2, 4000);
    let cell = member.cache.lookup(SPACE, key(0)).unwrap().unwrap().cell;
    let (offset, _) = member.pool.layout().cell(cell).unwrap();
    let memory = blind.pool.lines().memory();
    let mut found = vec![0; 4000];
    for at in [0, 63, 64, 2000, 3999] {
        let flipped = bytes(0, 4000)[at] ^ 0x10;
        memory.copy_in(offset + at as u64, &[flipped]).unwrap();
        memory.fence_stores();
        assert_eq!(member.cache.pull(SPACE, key(0), &mut found).unwrap(), Pulled::Miss(MissReason::Checksum), "byte {at}");
        let pin = member.cache.pin(SPACE, key(0)).unwrap().unwrap();
        assert_eq!(pin.copy_to(&mut found).unwrap(), Some(MissReason::Checksum));
        drop(pin);
        memory.copy_in(offset + at as u64, &bytes(0, 4000)[at..=at]).unwrap();
        memory.fence_stores();
        assert!(member.has(0, 4000));
    }
    assert_eq!(member.cache.metrics().misses_total.of(MissReason::Checksum).get(), 5);
    // A reader that does not look cannot tell.
    memory.copy_in(offset, &[bytes(0, 4000)[0] ^ 1]).unwrap();
    memory.fence_stores();
    assert_eq!(blind.cache.pull(SPACE, key(0), &mut found).unwrap(), Pulled::Hit { len_bytes: 4000 });
    assert!(member.has(1, 4000));
}

#[test]
fn a_block_of_an_unknown_kind_is_a_miss_and_its_cell_is_used_again() {
    // Kind 2 is that of references, which older programs wrote: such a cell holds 64 bytes that say where the block was.
    const REFERENCE: u8 = 2;
    let bench = Bench::new(&[(1024, 28)]);
    let (member, other) = (bench.member(1), bench.member(2));
    let blind = bench.member_with(3, CacheConfig { checksums: false, ..config() });
    member.publish(0..3, 1000);
    let cell = member.cache.lookup(SPACE, key(1)).unwrap().unwrap().cell;
    let pin = other.cache.pin(SPACE, key(1)).unwrap().unwrap();
    let lines = member.pool.lines();
    let line = lines.fetch::<Descriptor>(cell).unwrap();
    lines.publish(cell, Descriptor { kind: REFERENCE, ..line }).unwrap();
    assert!(lines.fetch::<Descriptor>(cell).is_err());
    let mut found = vec![0; 1000];
    assert_eq!(pin.copy_to(&mut found).unwrap(), Some(MissReason::Changed));
    assert!(!pin.is_unchanged().unwrap());
    drop(pin);
    for reader in [&member, &other, &blind] {
        assert_eq!(reader.cache.lookup(SPACE, key(1)).unwrap(), None);
        assert_eq!(reader.cache.list(SPACE, 1000).unwrap().len(), 2);
        assert!(matches!(reader.cache.pull(SPACE, key(1), &mut found).unwrap(), Pulled::Miss(_)));
        assert_eq!(reader.count(0..3, 1000), 2);
    }
    // As after an upgrade: who wrote it is gone, and another process takes its cells over.
    member.leave();
    other.publish(1..2, 1000);
    let is_free = || other.pool.lines().fetch::<Descriptor>(cell).is_ok_and(|line| line.state == Descriptor::FREE);
    other.serve_until("the cell of the one who left is free", is_free);
    let usage = other.cache.usage();
    assert_eq!((other.count(0..3, 1000), usage.ready, usage.quarantined), (3, 3, 0));
}

#[test]
fn a_damaged_descriptor_is_a_miss_and_the_block_can_be_published_again() {
    let bench = Bench::new(&[(1024, 28)]);
    let (member, other) = (bench.member(1), bench.member(2));
    member.publish(0..3, 1000);
    let cell = member.cache.lookup(SPACE, key(1)).unwrap().unwrap().cell;
    let line = member.pool.layout().line_offset(Region::Descriptor, cell).unwrap();
    let good = member.pool.lines().fetch_raw(line).unwrap();
    let memory = other.pool.lines().memory();
    for bit in (0..512).step_by(7) {
        let mut bad = good;
        bad.0[bit / 8] ^= 1 << (bit % 8);
        memory.write_line(line, &bad).unwrap();
        memory.fence_stores();
        assert!(!member.has(1, 1000) && !other.has(1, 1000), "bit {bit}");
    }
    assert_eq!(other.cache.lookup_chain(SPACE, &[key(0), key(1), key(2)]).unwrap().len(), 1);
    other.publish(1..2, 1000);
    assert_eq!(member.count(0..3, 1000), 3);
    // The owner goes by its own memory: the cell is not lost.
    assert_eq!(member.cache.clear(Some(SPACE)).unwrap(), 3);
    let usage = member.cache.usage();
    assert_eq!(usage.free, usage.owned);
    assert!(other.has(1, 1000));
    memory.write_line(line, &Line::ZERO).unwrap();
    memory.fence_stores();
    member.publish(10..10 + usage.owned, 1000);
    assert_eq!(other.count(10..10 + usage.owned, 1000) as u64, usage.owned);
}

#[test]
fn poisoned_payload_is_a_miss_for_its_readers() {
    // The range marked bad is 2 MiB, so the cells have to be many enough for one that holds nothing else.
    const LEN: usize = 60_000;
    let bench = Bench::new(&[(64 << 10, 112)]);
    let (member, other) = (bench.member(1), bench.member(2));
    let start = (member.pool.layout().cells_offset()).next_multiple_of(2 << 20);
    let (mut bad, mut good) = (None, None);
    for number in 0..100 {
        let request = PublishRequest { namespace: SPACE, key: key(number), parent: None, len_bytes: LEN as u64 };
        let Reserved::Cell(mut reservation) = member.cache.reserve(&request).unwrap() else { panic!("no cell") };
        let range = reservation.offset()..reservation.offset() + LEN as u64;
        if start <= range.start && range.end <= start + (2 << 20) {
            bad = bad.or(Some(number));
        } else if range.end <= start || start + (2 << 20) <= range.start {
            good = Some(number);
        }
        reservation.fill([&bytes(number, LEN)[..]]).unwrap();
        reservation.commit().unwrap();
    }
    let (bad, good) = (bad.unwrap(), good.unwrap());
    other.pool.faults().mark_poisoned(start).unwrap();
    let mut found = vec![0; LEN];
    assert_eq!(other.cache.pull(SPACE, key(bad), &mut found).unwrap(), Pulled::Miss(MissReason::Device));
    assert_eq!(other.cache.pinned(), 0);
    assert!(other.has(good, LEN) && member.has(bad, LEN) && member.has(good, LEN));
    assert_eq!(other.cache.metrics().misses_total.of(MissReason::Device).get(), 1);
}

#[test]
fn cells_in_poisoned_memory_are_not_used_again() {
    const LEN: usize = 60_000;
    const CELLS: u64 = 112;
    let bench = Bench::new(&[(64 << 10, CELLS)]);
    let (member, other) = (bench.member(1), bench.member(2));
    member.publish(0..CELLS, LEN);
    let granule = 2u64 << 20;
    let bad = member.pool.layout().cells_offset().next_multiple_of(granule);
    let is_bad = |number| {
        let cell = other.cache.lookup(SPACE, key(number)).unwrap()?.cell;
        let (start, len_bytes) = other.pool.layout().cell(cell).unwrap();
        Some(start < bad + granule && bad < start + len_bytes)
    };
    let lost = (0..CELLS).filter(|&number| is_bad(number) == Some(true)).count() as u64;
    assert!((1..CELLS / 2).contains(&lost));
    member.pool.faults().mark_poisoned(bad).unwrap();
    // Every cell is used, so each of these takes one that was used; twice round, so that all have had their turn.
    for number in CELLS..3 * CELLS {
        member.publish(number..number + 1, LEN);
        assert_eq!(is_bad(number), Some(false), "block {number}");
        assert!(other.has(number, LEN));
    }
    // Which ones stay is left open: the uses by the other host count from their tick on.
    assert_eq!(member.count(0..3 * CELLS, LEN) as u64, CELLS - lost);
    let usage = member.cache.usage();
    assert_eq!((usage.owned, usage.free, usage.ready, usage.quarantined), (CELLS, 0, CELLS - lost, 0));
    // Another process has not met the damage, and may have better luck with the memory.
    member.leave();
    other.serve_until("the blocks of who left are taken over", || other.cache.usage().ready == CELLS - lost);
    other.publish(3 * CELLS..4 * CELLS, LEN);
    assert_eq!(other.cache.usage().ready, CELLS);
}

#[test]
fn a_cell_that_is_given_up_in_poisoned_memory_does_not_keep_its_key() {
    const LEN: usize = 60_000;
    const GRANULE: u64 = 2 << 20;
    let bench = Bench::new(&[(64 << 10, 112)]);
    let (member, other) = (bench.member(1), bench.member(2));
    let bad = member.pool.layout().cells_offset().next_multiple_of(GRANULE);
    let mut in_bad = Vec::new();
    let mut elsewhere = Vec::new();
    for number in 0..60 {
        let request = PublishRequest { namespace: SPACE, key: key(number), parent: None, len_bytes: LEN as u64 };
        let Reserved::Cell(reservation) = member.cache.reserve(&request).unwrap() else { panic!("no cell") };
        let range = reservation.offset()..reservation.offset() + LEN as u64;
        let is_bad = bad < range.end && range.start < bad + GRANULE;
        // As a caller that fills it in place does.
        assert!(reservation.address().is_some());
        if is_bad { in_bad.push((number, reservation)) } else { elsewhere.push((number, reservation)) }
    }
    assert!(in_bad.len() >= 3 && elsewhere.len() >= 2);
    member.pool.faults().mark_poisoned(bad).unwrap();
    let numbers: Vec<u64> = in_bad.iter().map(|(number, _)| *number).collect();
    let (_, aborted) = in_bad.pop().unwrap();
    aborted.abort().unwrap();
    // One such block fails the batch it is in, and nothing of that is there.
    let (with, mut good) = elsewhere.pop().unwrap();
    good.fill([&bytes(with, LEN)[..]]).unwrap();
    let committed = member.cache.commit_all(vec![good, in_bad.pop().unwrap().1]);
    assert!(matches!(committed, Err(Error::Poisoned { .. })), "{committed:?}");
    assert!(!other.has(with, LEN));
    drop((in_bad, elsewhere));
    for (place, &number) in numbers.iter().chain([&with]).enumerate() {
        let publisher = if place % 2 == 0 { &other } else { &member };
        publisher.publish(number..number + 1, LEN);
        assert!(other.has(number, LEN));
    }
    // No cell is lost but those that are bad.
    let usage = member.cache.usage();
    assert!(usage.owned - usage.free - usage.ready <= GRANULE / (64 << 10) + 1, "{usage:?}");
}

#[test]
fn a_batch_that_fails_takes_no_cells() {
    const LEN: usize = 60_000;
    const GRANULE: u64 = 2 << 20;
    let bench = Bench::new(&[(64 << 10, 112)]);
    let member = bench.member(1);
    member.publish(0..112, LEN);
    let layout = member.pool.layout();
    let bad = layout.line_offset(Region::Hint, 0).unwrap() / GRANULE * GRANULE;
    let is_bad = |number| {
        let cell = member.cache.lookup(SPACE, key(number)).unwrap().unwrap().cell;
        layout.cell(cell).unwrap().0 < bad + GRANULE
    };
    // Used last, so that none of them is evicted.
    assert!((0..112).filter(|&number| is_bad(number)).all(|number| member.has(number, LEN)));
    let freed: Vec<u64> = (0..112).filter(|&number| !is_bad(number)).take(3).collect();
    assert!(freed.iter().all(|&number| member.cache.evict(SPACE, key(number)).unwrap()));
    // Finds out that there is no chunk left to claim, as long as that can be read.
    let request = |number| PublishRequest { namespace: SPACE, key: key(number), parent: None, len_bytes: LEN as u64 };
    drop(member.cache.reserve_all(&(200..204).map(request).collect::<Vec<_>>()).unwrap());
    let before = member.cache.usage();
    assert!(before.free >= 3);
    // More than are free: the others are looked up before anything goes for them, in memory that is bad.
    member.pool.faults().mark_poisoned(bad).unwrap();
    let requests: Vec<PublishRequest> = (300..301 + before.free).map(request).collect();
    assert!(matches!(member.cache.reserve_all(&requests), Err(Error::Poisoned { .. })));
    assert_eq!(member.cache.usage(), before);
}

#[test]
fn a_block_is_committed_or_given_up_where_a_fence_cannot_be_told() {
    let bench = Bench::new(&[(1024, 28)]);
    let member = bench.member(1);
    let reserve = |number| {
        let request = PublishRequest { namespace: SPACE, key: key(number), parent: None, len_bytes: 1000 };
        let Reserved::Cell(mut reservation) = member.cache.reserve(&request).unwrap() else { panic!("no cell") };
        reservation.fill([&bytes(number, 1000)[..]]).unwrap();
        reservation
    };
    let (committed, aborted, dropped) = (reserve(0), reserve(1), reserve(2));
    // Of this age a commit looks at the fences once more.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(2) {
        std::thread::yield_now();
    }
    // The row of a seat whose machine is not there to write it again.
    let whole = tear(&member, Region::Fence, 2);
    assert!(matches!(committed.commit(), Err(Error::BadLine { region: "Fence", .. })));
    aborted.abort().unwrap();
    drop(dropped);
    mend(&member, Region::Fence, 2, &whole);
    // What was made visible is the process's like any other, and nothing else is left.
    assert!(member.has(0, 1000));
    assert_eq!((member.cache.usage().ready, member.cache.usage().free), (1, member.cache.usage().owned - 1));
    assert!(member.cache.evict(SPACE, key(0)).unwrap());
    member.publish(0..3, 1000);
}

/// The line with a host's claims.
fn claims_of(member: &Member) -> u64 {
    u64::from(member.host.slot()) * member.pool.layout().geometry().cell_claim_lines()
}

/// Leaves the claims of a host as a writer does that stops in the middle of the line.
fn tear_claims(member: &Member) {
    tear(member, Region::CellClaim, claims_of(member));
}

#[test]
fn chunks_of_a_host_that_stopped_in_the_middle_of_its_claims_are_taken_over_once_it_is_fenced() {
    let bench = Bench::new(&[(1024, 56)]);
    let mut member = bench.member(2);
    let other = bench.member(1);
    member.publish(0..8, 1000);
    other.publish(100..107, 1000);
    tear_claims(&member);
    // While it may be there, all that no other host has is its own.
    for _ in 0..20 {
        other.cache.service_round().unwrap();
    }
    assert_eq!((other.cache.usage().owned, other.count(0..8, 1000)), (7, 8));
    let (slot, incarnation) = (member.host.slot(), member.host.incarnation());
    drop(member.service.take());
    await_fence(&other, slot, incarnation);
    other.serve_until("adoption", || other.cache.usage().owned == 56);
    // Of which incarnation the claims are cannot be told, so no cell is trusted.
    assert_eq!((other.cache.usage().quarantined, other.count(0..8, 1000), other.count(100..107, 1000)), (49, 0, 7));
    // Its re-join proves that it has ended, once its claims can be read again.
    member.service = Some(member.host.serve().unwrap());
    member.serve_until_rejoined(incarnation);
    other.serve_until("the end of the quarantine", || other.cache.usage().quarantined == 0);
    other.publish(200..249, 1000);
    assert_eq!((other.count(200..249, 1000), member.count(200..249, 1000)), (49, 49));
    let claims = member.pool.lines().fetch::<CellClaim>(claims_of(&member)).unwrap();
    assert!(!(0..8).any(|chunk| claims.has(chunk)), "two hosts that are there claim one chunk");
}

#[test]
fn a_host_writes_its_own_claims_anew_when_a_process_of_it_stopped_in_the_middle() {
    let bench = Bench::new(&[(1024, 56)]);
    let (member, other) = (bench.member(2), bench.member(1));
    member.publish(0..8, 1000);
    other.publish(100..107, 1000);
    tear_claims(&member);
    member.serve_until("claims of everything that may have been its own", || member.cache.usage().owned == 49);
    let claims = member.pool.lines().fetch::<CellClaim>(claims_of(&member)).unwrap();
    assert_eq!((0..8).filter(|&chunk| claims.has(chunk)).count(), 7);
    assert_eq!((member.cache.usage().quarantined, other.cache.usage().owned), (0, 7));
    assert_eq!((other.count(0..8, 1000), member.count(100..107, 1000)), (8, 7));
    member.publish(200..241, 1000);
    assert_eq!(other.count(200..241, 1000), 41);
}
