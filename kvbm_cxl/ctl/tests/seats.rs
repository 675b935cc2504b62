// SPDX-License-Identifier: Apache-2.0
//! Which machine can serve a pool: any that comes, whichever machine formatted it; and what an operator does where all seats belong to
//! machines that are gone. Real processes, killed like a power cut.

mod common;

use common::{Bench, ran};
use serde_json::Value;
use std::time::{Duration, Instant};

const SURE: &str = "--i-know-it-is-gone";

/// The seats as `cxlctl seats` tells them.
fn seats(bench: &Bench) -> Value {
    let (code, seats) = bench.json(&["seats"]);
    assert_eq!(code, 0);
    seats
}

/// Waits until the seats are as `is_done` wants them.
fn wait_for(bench: &Bench, what: &str, is_done: impl Fn(&Value) -> bool) -> Value {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let seats = seats(bench);
        if is_done(&seats) {
            return seats;
        }
        assert!(Instant::now() < deadline, "{what}: {seats:#}");
    }
}

fn owned(seats: &Value) -> usize {
    seats["seats"].as_array().unwrap().iter().filter(|seat| seat["claim"] == "owned").count()
}

#[test]
fn the_first_machine_that_comes_serves_a_pool_that_another_formatted() {
    let mut bench = Bench::formatted_before_slot_seats();
    bench.machine = "machine-b";
    let fresh = seats(&bench);
    assert_eq!((&fresh["managed"], &fresh["claimable"], owned(&fresh)), (&false.into(), &true.into(), 0), "{fresh:#}");
    let mut b = bench.host("machine-b");
    let _c = bench.host("machine-c");
    // The one seat that is left goes to the other machine by itself.
    let both = wait_for(&bench, "both seats owned", |seats| owned(seats) == 2);
    assert_eq!((&both["managed"], &both["seats"][0]["role"]), (&true.into(), &"manager".into()), "{both:#}");
    assert_ne!(both["seats"][0]["machine"], both["seats"][1]["machine"]);
    // A machine that leaves gives its seat up, and the next one that comes has it.
    b.order(r#""Leave""#);
    assert!(b.reply().contains("Left"));
    let gone = wait_for(&bench, "a released seat", |seats| seats["seats"][0]["claim"] == "released");
    assert_eq!(gone["seats"][0]["generation"], 1);
    let _d = bench.host("machine-d");
    let again = wait_for(&bench, "both seats owned again", |seats| owned(seats) == 2);
    assert_eq!(again["seats"][0]["generation"], 2, "{again:#}");
    let (code, report) = bench.json(&["fsck"]);
    assert_eq!(code, 0, "{report:#}");
}

#[test]
fn seats_of_machines_that_died_are_released_by_an_operator_without_a_manager() {
    let mut bench = Bench::formatted_before_slot_seats();
    let (mut a, mut b) = (bench.host("machine-a"), bench.host("machine-b"));
    let both = wait_for(&bench, "both seats owned", |seats| owned(seats) == 2);
    let machine = |seat: usize| both["seats"][seat]["machine"].as_str().unwrap().to_owned();
    bench.machine = "machine-c";
    let unsure = bench.run(&["seats", "release", "--seat", "0"]);
    assert_eq!(unsure.code, 4);
    assert!(unsure.err.contains(SURE) && unsure.err.contains(&machine(0)), "{}", unsure.err);
    let alive = bench.run(&["seats", "release", "--seat", "0", SURE]);
    assert_eq!(alive.code, 4);
    assert!(alive.err.contains("is not gone"), "{}", alive.err);
    a.kill();
    b.kill();
    // No machine with a seat runs, and only a person can know that none will go on. The error says which, and what to type.
    let declare = ["hosts", "declare-dead", "0", "--incarnation", "1", SURE, "--timeout-ms", "4000"];
    let stuck = bench.run(&declare);
    assert_eq!(stuck.code, 1, "{}", stuck.err);
    for seat in 0..2 {
        let name = both["seats"][seat]["name"].as_str().unwrap();
        assert!(
            name.starts_with("machine-") && stuck.err.contains(&format!("seat {seat} belongs to machine {name} ({})", machine(seat))),
            "{}",
            stuck.err
        );
    }
    assert!(stuck.err.contains("cxlctl seats release --seat 0"), "{}", stuck.err);
    assert!(bench.run(&["seats"]).out.contains("cxlctl seats release"));
    let (code, told) = bench.json(&["seats", "release", "--machine", &machine(1), SURE]);
    assert_eq!((code, &told["released"]), (0, &serde_json::json!([1])));
    assert_eq!(bench.run(&["seats", "release", "--seat", "1", SURE]).code, 2, "released already");
    assert_eq!(bench.run(&["seats", "release", "--seat", "7", SURE]).code, 2, "a seat that is not");
    assert_eq!(bench.run(&["seats", "release"]).code, 2, "which one");
    let after = seats(&bench);
    assert_eq!((&after["managed"], &after["claimable"]), (&false.into(), &true.into()), "{after:#}");
    let _c = bench.host("machine-c");
    let served = wait_for(&bench, "a manager", |seats| seats["managed"] == true);
    assert_eq!((&served["seats"][1]["generation"], &served["seats"][1]["role"]), (&2.into(), &"manager".into()), "{served:#}");
    // The machine of the other seat comes back: it is another session, and takes its seat over from itself.
    let _a = bench.host("machine-a");
    wait_for(&bench, "the seat of the machine that came back", |seats| seats["seats"][0]["generation"] == 2);
    let (code, report) = bench.json(&["fsck"]);
    assert_eq!(code, 0, "{report:#}");
}

#[test]
fn the_death_of_a_host_is_the_death_of_its_seat() {
    let bench = Bench::formatted_before_slot_seats();
    let (_a, mut b) = (bench.host("machine-a"), bench.host("machine-b"));
    wait_for(&bench, "both seats owned", |seats| owned(seats) == 2);
    // They fill the pool, so that a fifth machine gets the slot of the dead one and writes the line that told of its seat.
    let _more = (bench.host("machine-c"), bench.host("machine-d"));
    b.kill();
    let dead = ["hosts", "declare-dead", "1", "--incarnation", "1", SURE];
    let stated = ran(bench.command("machine-a").args(dead).output().unwrap());
    assert_eq!(stated.code, 0, "{}", stated.err);
    let _e = bench.host("machine-e");
    assert_ne!(seats(&bench)["seats"][1]["claim"], "free");
    let given = wait_for(&bench, "the seat of the dead machine", |seats| seats["seats"][1]["generation"] == 2);
    assert_eq!(owned(&given), 2);
}

/// The seat that serves.
fn serving(seats: &Value) -> Option<&Value> {
    seats["seats"].as_array().unwrap().iter().find(|seat| seat["role"] == "manager")
}

#[test]
fn every_host_has_the_seat_of_its_slot_and_gives_the_claimed_one_back() {
    let bench = Bench::formatted();
    assert!(bench.run(&["seats"]).out.contains("the next machine that joins claims a seat"));
    let mut b = bench.host("machine-b");
    let alone = wait_for(&bench, "a manager", |seats| seats["managed"] == true);
    assert_eq!((&alone["living"], &alone["seats"][0]["claim"]), (&1.into(), &"released".into()), "{alone:#}");
    assert_eq!(serving(&alone).unwrap()["slot"], 0, "{alone:#}");
    assert!(alone["outlook"].as_str().unwrap().contains("no other machine has a seat"), "{alone:#}");
    let mut c = bench.host("machine-c");
    let both = wait_for(&bench, "two living seats", |seats| seats["living"] == 2);
    assert!(both["outlook"].as_str().unwrap().contains("one of 1 other machines with a seat takes over"), "{both:#}");
    b.order(r#""Leave""#);
    assert!(b.reply().contains("Left"));
    let after = wait_for(&bench, "the other machine serves", |seats| serving(seats).is_some_and(|seat| seat["slot"] == 1));
    assert_eq!(after["living"], 1, "{after:#}");
    // The seat of the slot comes with the slot.
    let _d = bench.host("machine-d");
    let again = wait_for(&bench, "two living seats again", |seats| seats["living"] == 2);
    let of_slots = again["seats"].as_array().unwrap().iter().filter(|seat| seat["living"] == true);
    assert!(of_slots.clone().count() == 2 && of_slots.into_iter().all(|seat| seat["slot"] != serde_json::Value::Null), "{again:#}");
    let release = bench.run(&["seats", "release", "--seat", "2", SURE]);
    assert_eq!(release.code, 2, "{}", release.err);
    assert!(release.err.contains("declare-dead"), "{}", release.err);
    c.kill();
    let (code, report) = bench.json(&["fsck"]);
    assert_eq!(code, 0, "{report:#}");
}

#[test]
fn the_host_that_lives_serves_when_all_before_it_were_killed() {
    let bench = Bench::formatted();
    // Each host serves before it is killed, and the last one lives on. In the end no host lives, and the next one joins all the same.
    let mut hosts: Vec<_> = ["machine-a", "machine-b", "machine-c", "machine-d"].map(|name| bench.host(name)).into();
    while hosts.len() > 1 {
        let served = wait_for(&bench, "a manager", |seats| seats["living"] == hosts.len() && seats["managed"] == true);
        assert!(serving(&served).is_some_and(|seat| seat["slot"].is_u64()), "{served:#}");
        hosts.remove(0).kill();
    }
    for name in ["machine-e", "machine-f", "machine-g"] {
        hosts.push(bench.host(name));
        hosts.remove(0).kill();
    }
    let served = wait_for(&bench, "the last one serves", |seats| seats["living"] == 1 && seats["managed"] == true);
    assert!(serving(&served).is_some(), "{served:#}");
    let (code, report) = bench.json(&["fsck"]);
    assert_eq!(code, 0, "{report:#}");
}

#[test]
fn machines_that_die_alone_use_nothing_up() {
    let bench = Bench::formatted();
    // More than there are slots, and than there are places for machines that claim a seat.
    for life in 0..40 {
        bench.host(&format!("machine-{life}")).kill();
    }
    let (_, taken) = bench.json(&["inspect", "claimant", "all"]);
    let taken = taken.as_array().unwrap().iter().filter(|line| line["fields"]["machine"] != "00000000000000000000000000000000").count();
    assert!(taken <= 1, "{taken} places");
    let (code, report) = bench.json(&["fsck"]);
    assert_eq!(code, 0, "{report:#}");
}

#[test]
fn a_seat_that_the_format_reserved_stays_with_its_machine() {
    let reserved = "51515151515151515151515151515151";
    let bench = Bench::formatted_with(&["--advanced", &format!("machine={reserved}")]);
    let listed = seats(&bench);
    assert_eq!((&listed["seats"][0]["claim"], &listed["seats"][0]["machine"]), (&"reserved by the format".into(), &reserved.into()));
    let refused = bench.run(&["seats", "release", "--seat", "0", SURE]);
    assert_eq!(refused.code, 4);
    assert!(refused.err.contains("reserved"), "{}", refused.err);
    // Other machines use the seats that are not.
    let _b = bench.host("machine-b");
    let served = wait_for(&bench, "a manager", |seats| seats["managed"] == true);
    assert_eq!((&served["seats"][1]["claim"], &served["living"]), (&"released".into(), &1.into()), "{served:#}");
}
