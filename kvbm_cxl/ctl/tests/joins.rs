// SPDX-License-Identifier: Apache-2.0
//! `fsck` and joins agree: damage that keeps a machine from joining is an error of `fsck` that names the lines, and a repair makes the
//! pool one that can be joined or says that it cannot.
//!
//! The walk is over the regions that the pool has, so that a new region or line structure is in it without a change here.

mod common;
#[path = "../../pool/tests/common/load.rs"]
mod load;

use common::Bench;
use cxl_pool::device::PoolSpec;
use cxl_pool::host::HostConfig;
use cxl_pool::machine::{Machine, State};
use cxl_pool::media::{Claimant, Identity, Region, Seat, SeatClaim, Splitter};
use cxl_pool::platform::MachineId;
use cxl_pool::pool::{OpenOptions, Pool};
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A machine that was never in the pool.
const NEWCOMER: MachineId = MachineId([9; 16]);
/// Cases that are tried at the same time: nearly all of each is waiting.
const THREADS: usize = 6;

/// Some lines and what is done to them.
#[derive(Clone, Debug)]
struct Case {
    name: String,
    lines: Vec<(Region, u64)>,
    how: How,
}

#[derive(Clone, Copy, Debug)]
enum How {
    Flip,
    Zero,
}

/// A pool that machines lived in: one has left, one was killed with blocks, a lock and a manager seat.
fn lived_in() -> (Bench, MachineId) {
    let bench = Bench::formatted();
    let mut killed = bench.host("machine-a");
    let mut left = bench.host("machine-b");
    for order in [r#""Prepare""#, r#"{"Publish":{"round":1}}"#] {
        killed.order(order);
        let reply = killed.reply();
        assert!(!reply.contains("Failed"), "{reply}");
    }
    left.order(r#"{"Pull":{"round":1}}"#);
    assert!(left.reply().contains("Moved"));
    left.order(r#""Leave""#);
    assert!(left.reply().contains("Left"));
    killed.kill();
    let pool = bench.open();
    let slots = 0..u64::from(pool.layout().geometry().slots);
    let of_killed = slots.filter_map(|slot| pool.lines().fetch::<Identity>(slot).ok()).find(|found| found.state == Identity::LIVE).unwrap();
    (bench, MachineId(of_killed.machine))
}

/// Joins as `machine`, whose state directory is new, and leaves.
fn join(bench: &Bench, machine: MachineId) -> cxl_pool::Result<()> {
    let pool = Pool::open(&PoolSpec::parse(&bench.spec()).unwrap(), &OpenOptions::default())?;
    let state = tempfile::tempdir_in("/dev/shm").unwrap();
    let file = std::fs::File::options().read(true).write(true).open(bench.file()).unwrap();
    let state = State::open(state.path(), pool.superblock().uuid(), machine)?;
    let config = HostConfig {
        seats: pool.superblock().seats(),
        heartbeat_ms: load::ms(5),
        suspect_ms: load::ms(100),
        damage_ms: load::ms(200),
        join_timeout_ms: Some(load::ms(3_000)),
        ..HostConfig::default()
    };
    let machine = Arc::new(Machine::new(machine, state)?.with_file(file, 0)?);
    let host = cxl_pool::pool::join(pool.lines().clone(), machine, config)?;
    let service = host.serve()?;
    drop(host.acquire(pool.layout().geometry().first_user_lock(), load::ms(10_000))?);
    drop(service);
    host.leave()
}

/// Lines of each region: the first two, which all that run here use, one in the middle and the last; then each region, and all.
fn cases(pool: &Pool) -> Vec<Case> {
    let mut cases = Vec::new();
    for span in pool.layout().spans() {
        let mut lines = vec![0, 1, span.lines / 2, span.lines - 1];
        lines.retain(|line| *line < span.lines);
        lines.sort_unstable();
        lines.dedup();
        for line in lines {
            let how = if line % 2 == 0 { How::Flip } else { How::Zero };
            cases.push(Case { name: format!("{:?} {line}", span.region), lines: vec![(span.region, line)], how });
        }
    }
    let of_region = |region| (0..pool.layout().span(region).lines).map(move |line| (region, line));
    for span in pool.layout().spans().iter().filter(|span| span.lines > 0) {
        for how in [How::Flip, How::Zero] {
            let name = format!("every line of {:?} ({how:?})", span.region);
            cases.push(Case { name, lines: of_region(span.region).collect(), how });
        }
    }
    let all = Region::ALL.into_iter().flat_map(of_region).collect();
    cases.push(Case { name: "all metadata".into(), lines: all, how: How::Zero });
    cases
}

fn damage(pool: &Pool, case: &Case) {
    let memory = pool.lines().memory();
    for &(region, index) in &case.lines {
        let offset = pool.layout().line_offset(region, index).unwrap();
        let mut line = pool.lines().fetch_raw(offset).unwrap();
        match case.how {
            How::Flip => line.0[11] ^= 0x20,
            How::Zero => line.0.fill(0),
        }
        memory.write_line(offset, &line).unwrap();
    }
    memory.fence_stores();
}

/// Whether an error of `findings` covers one of the lines and says what to do.
fn is_named(findings: &Value, case: &Case) -> bool {
    findings.as_array().unwrap().iter().any(|found| {
        let (first, count) = (found["line"].as_u64().unwrap(), found["lines"].as_u64().unwrap());
        let covers =
            |&(region, line): &(Region, u64)| found["region"] == format!("{region:?}").as_str() && (first..first + count).contains(&line);
        found["severity"] == "error" && case.lines.iter().any(covers) && !found["repair"].as_str().unwrap().is_empty()
    })
}

/// Tries one case on the pool `before`; says what is wrong.
fn try_case(bench: &Bench, before: &[u8], former: MachineId, case: &Case) -> Result<(), String> {
    let damaged = || {
        std::fs::write(bench.file(), before).unwrap();
        damage(&bench.open(), case);
    };
    damaged();
    let found = bench.json(&["fsck"]).1;
    if let Err(error) = join(bench, NEWCOMER)
        && !is_named(&found["findings"], case)
    {
        return Err(format!("a join fails ({error}), and fsck names no line of it: {}", found["findings"]));
    }
    // The join, and what it left half done, has no part in the repair.
    damaged();
    let (mut code, mut repaired) = bench.json(&["fsck", "--repair", "--watch-ms", "20"]);
    if code != 0 {
        (code, repaired) = bench.json(&["fsck", "--repair", "--accept-loss", "--watch-ms", "20"]);
    }
    if code != 0 {
        return Err(format!("it is not repaired: {}", repaired["left"]));
    }
    for machine in [NEWCOMER, former] {
        join(bench, machine).map_err(|error| format!("repaired, and yet {machine} cannot join: {error}"))?;
    }
    let after = bench.json(&["fsck"]).1;
    match after["counts"]["errors"].as_u64() {
        Some(0) => Ok(()),
        _ => Err(format!("a join to the repaired pool leaves errors: {}", after["findings"])),
    }
}

#[test]
fn what_keeps_a_machine_from_joining_is_an_error_and_a_repair_ends_it() {
    let (bench, former) = lived_in();
    let before = std::fs::read(bench.file()).unwrap();
    let cases = cases(&bench.open());
    let only = std::env::var("CASE").ok();
    let cases: Vec<&Case> = cases.iter().filter(|case| only.as_ref().is_none_or(|only| case.name.contains(only.as_str()))).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let bench = Bench::new();
        let mut wrong = Vec::new();
        while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(why) = try_case(&bench, &before, former, case) {
                wrong.push(format!("{}: {why}", case.name));
            }
        }
        wrong
    };
    let wrong: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert!(wrong.is_empty(), "{} of {} cases:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

/// Every place taken by a machine that came and went before it had a seat.
#[test]
fn places_that_are_used_up_are_an_error_and_a_repair_frees_them() {
    let bench = Bench::formatted();
    let (pool, places) = (bench.open(), bench.open().layout().geometry().places());
    for place in 0..places {
        pool.lines().publish(2 * place + 1, Splitter { closed: 1, ..Splitter::default() }).unwrap();
        // Some died in an attempt, so that no machine has their place.
        let machine = if place % 3 == 0 { [0; 16] } else { [100 + place as u8; 16] };
        pool.lines().publish(place, Claimant { machine, ballot: 0, ..Claimant::default() }).unwrap();
    }
    // The last one had a seat, which it released.
    let (place, session) = (places - 1, [77; 16]);
    let seats = u64::from(pool.layout().geometry().seats);
    let (ballot, machine) = (place as u32 + 1, [100 + place as u8; 16]);
    pool.lines().publish(place, Claimant { machine, ballot, ..Claimant::default() }).unwrap();
    pool.lines().publish(place * seats, SeatClaim { tag: ballot, generation: 3, machine, session, ..SeatClaim::default() }).unwrap();
    let seat = Seat { epoch: 1, beat: u64::MAX, machine, session, generation: 3, state: Seat::RELEASED, ..Seat::default() };
    pool.lines().publish(0, seat).unwrap();
    assert!(join(&bench, NEWCOMER).is_err());
    let (code, found) = bench.json(&["fsck"]);
    assert_eq!(code, 1);
    assert!(found["findings"].as_array().unwrap().iter().any(|found| found["rule"] == "splitter.full" && found["severity"] == "error"));
    assert_eq!(bench.json(&["fsck", "--repair", "--watch-ms", "20"]).0, 1, "a machine that is only paused could come back");
    let (code, repaired) = bench.json(&["fsck", "--repair", "--accept-loss", "--watch-ms", "20"]);
    assert_eq!(code, 0, "{:#}", repaired["left"]);
    let (owner, _) = cxl_pool::lock::claim::standing(pool.lines(), 0).unwrap();
    assert_eq!((owner.generation, owner.session), (3, session), "who had the seat last is still known");
    join(&bench, NEWCOMER).unwrap();
    assert_eq!(bench.json(&["fsck"]).0, 0);
}
