// SPDX-License-Identifier: Apache-2.0
//! Pools with hosts on them: who is there, who is dead, and when a repair is refused. Real processes, killed like a power cut.

mod common;

use common::{Bench, rules};
use std::time::Duration;

#[test]
fn hosts_come_and_go_and_are_seen() {
    let bench = Bench::formatted();
    let mut a = bench.host("machine-a");
    let (code, hosts) = bench.json(&["hosts", "--watch-ms", "500"]);
    assert_eq!(code, 0);
    assert_eq!((&hosts["slots"][0]["state"], &hosts["slots"][0]["moving"]), (&"live".into(), &true.into()), "{hosts:#}");
    let manager = hosts["seats"].as_array().unwrap().iter().find(|seat| seat["role"] == "manager");
    assert_eq!(manager.unwrap()["fixed"], false, "{hosts:#}");
    assert_eq!((&hosts["slots"][0]["name"], &manager.unwrap()["name"]), (&"machine-a".into(), &"machine-a".into()), "{hosts:#}");
    let shown = bench.run(&["hosts"]).out;
    assert!(shown.contains("moving") && shown.contains("machine-a"), "{shown}");
    let (code, report) = bench.json(&["fsck"]);
    assert_eq!((code, &report["in_use"]), (0, &true.into()), "{report:#}");
    a.kill();
    let (_, hosts) = bench.json(&["hosts", "--watch-ms", "200"]);
    assert_eq!((&hosts["slots"][0]["state"], &hosts["slots"][0]["moving"]), (&"live".into(), &false.into()));
    assert_eq!(bench.run(&["fsck"]).code, 0);
}

#[test]
fn a_repair_is_refused_while_hosts_use_the_pool() {
    let bench = Bench::formatted();
    let mut a = bench.host("machine-a");
    let here = bench.run(&["fsck", "--repair", "--watch-ms", "300"]);
    assert_eq!(here.code, 4);
    assert!(here.err.contains("processes of this machine"), "{}", here.err);
    let elsewhere = common::ran(bench.command("machine-b").args(["fsck", "--repair", "--watch-ms", "500"]).output().unwrap());
    assert_eq!(elsewhere.code, 4);
    assert!(elsewhere.err.contains("slots 0"), "{}", elsewhere.err);
    a.kill();
    assert_eq!(bench.run(&["fsck", "--repair", "--watch-ms", "300"]).code, 0);
}

#[test]
fn only_a_machine_that_is_off_is_declared_dead() {
    let bench = Bench::formatted();
    let _a = bench.host("machine-a");
    let mut b = bench.host("machine-b");
    let declare =
        |incarnation: &str, more: &[&str]| bench.run(&[&["hosts", "declare-dead", "1", "--incarnation", incarnation], more].concat());
    let sure = "--i-know-it-is-gone";

    let unsure = declare("1", &[]);
    assert_eq!(unsure.code, 4);
    let machine = bench.json(&["hosts"]).1["slots"][1]["machine"].as_str().unwrap().to_owned();
    let named = format!("slot 1 of machine machine-b ({machine})");
    assert!(unsure.err.contains(sure) && unsure.err.contains(&named), "{}", unsure.err);
    let alive = declare("1", &[sure]);
    assert_eq!(alive.code, 4);
    assert!(alive.err.contains(&format!("{named} is not dead: its heartbeat moves")), "{}", alive.err);
    b.kill();
    assert_eq!(declare("7", &[sure]).code, 2, "an incarnation that never was");
    assert_eq!(bench.run(&["hosts", "declare-dead", "9", "--incarnation", "1", sure]).code, 2, "a slot that is not");
    let dead = declare("1", &[sure]);
    assert_eq!(dead.code, 0, "{}", dead.err);
    let (_, hosts) = bench.json(&["hosts"]);
    assert_eq!((&hosts["slots"][1]["dead"], &hosts["slots"][1]["standing"]), (&1.into(), &"declared dead".into()), "{hosts:#}");
    let (code, report) = bench.json(&["fsck", "--notes"]);
    assert_eq!(code, 0, "{report:#}");
}

/// A name is a hint: whatever a host wrote is printable, and without one the id stands for the machine.
#[test]
fn a_name_from_the_pool_is_escaped_and_a_damaged_one_is_none() {
    let bench = Bench::formatted();
    let _a = bench.host_named("machine-a", "rack\u{1b}[2J/\u{202e}é");
    let (_, hosts) = bench.json(&["hosts"]);
    assert_eq!(hosts["slots"][0]["name"], r"rack\x1b[2J/\xe2\x80\xae\xc3\xa9", "{hosts:#}");
    let machine = hosts["slots"][0]["machine"].as_str().unwrap();
    let declare = ["hosts", "declare-dead", "0", "--incarnation", "1"];
    assert!(bench.run(&declare).err.contains(r"rack\x1b[2J"));
    assert!(bench.run(&["seats"]).out.contains(r"rack\x1b[2J"));
    let pool = bench.open();
    let (_, offset) = cxl_pool::host::name_lines(0).next().unwrap();
    let mut line = pool.lines().fetch_raw(offset).unwrap();
    line.0[20] ^= 1;
    pool.lines().memory().write_line(offset, &line).unwrap();
    let (_, hosts) = bench.json(&["hosts"]);
    assert_eq!((&hosts["slots"][0]["name"], &hosts["slots"][0]["machine"]), (&serde_json::Value::Null, &machine.into()), "{hosts:#}");
    assert!(bench.run(&declare).err.contains(&format!("slot 0 of machine {machine} is")));
    let (code, report) = bench.json(&["fsck", "--notes"]);
    assert_eq!(code, 0, "{report:#}");
    assert!(rules(&report["findings"]).contains(&"name.damaged".to_owned()), "{report:#}");
}

/// Damage hides which incarnation a slot has; that is no reason to call one that lives one that never was.
#[test]
fn a_binding_that_cannot_be_read_is_not_one_that_never_was() {
    let bench = Bench::formatted();
    let mut a = bench.host("machine-a");
    let mut b = bench.host("machine-b");
    // The manager as well: it writes its copies anew when it serves again after a stall.
    a.kill();
    b.kill();
    bench.damage_bindings(1);
    let declare = |incarnation: &str| bench.run(&["hosts", "declare-dead", "1", "--incarnation", incarnation, "--i-know-it-is-gone"]);
    let declared = declare("1");
    assert_eq!(declared.code, 1, "{}", declared.err);
    assert!(declared.err.contains("cannot be read") && declared.err.contains("cxlctl fsck"), "{}", declared.err);
    assert!(!declared.err.contains("never"), "{}", declared.err);
    assert_eq!(bench.json(&["hosts"]).1["slots"][1]["dead"], 0);
    let never = declare("0");
    assert!(never.code == 2 && never.err.contains("never had incarnation 0"), "{}", never.err);
}

#[test]
fn a_silent_host_is_fenced_and_the_pool_stays_sound() {
    let bench = Bench::formatted();
    let _a = bench.host("machine-a");
    let mut b = bench.host("machine-b");
    b.kill();
    bench.wait_for_hosts("the dead host is fenced", |hosts| hosts["slots"][1]["fenced"] == 1);
    let (code, report) = bench.json(&["fsck", "--notes"]);
    assert_eq!(code, 0, "{:?}", rules(&report["findings"]));
    // The machine comes back under a higher incarnation.
    let _b = bench.host("machine-b");
    let (_, hosts) = bench.json(&["hosts"]);
    assert_eq!((&hosts["slots"][1]["incarnation"], &hosts["slots"][1]["standing"]), (&2.into(), &"not fenced".into()), "{hosts:#}");
    assert_eq!(bench.run(&["fsck"]).code, 0);
}

/// A host dies at any moment of its work, comes back, and goes on: at no time does the metadata break a rule.
#[test]
fn whatever_a_dying_host_leaves_is_sound() {
    let bench = Bench::formatted();
    // The machine of seat 0 comes first: without it no host can be given a slot.
    let mut first = bench.host("machine-a");
    let mut reader = bench.host("machine-b");
    first.kill();
    for round in 1..=8u64 {
        let mut writer = bench.host("machine-a");
        writer.order(&format!(r#"{{"Publish":{{"round":{round}}}}}"#));
        std::thread::sleep(Duration::from_micros(700 * round * round));
        writer.kill();
        let (_, report) = bench.json(&["fsck", "--notes"]);
        let broken: Vec<_> = report["findings"].as_array().unwrap().iter().filter(|found| found["severity"] != "note").collect();
        assert!(broken.is_empty(), "round {round}: {broken:#?}");

        let mut writer = bench.host("machine-a");
        writer.order(&format!(r#"{{"Publish":{{"round":{}}}}}"#, 100 + round));
        let published = writer.reply();
        assert!(published.contains("Moved"), "round {round}: {published}");
        reader.order(&format!(r#"{{"Pull":{{"round":{}}}}}"#, 100 + round));
        let pulled = reader.reply();
        assert!(pulled.contains("Moved"), "round {round}: {pulled}");
        writer.kill();
    }
    reader.kill();
    let (code, report) = bench.json(&["fsck", "--notes"]);
    assert_eq!(code, 0, "{report:#}");
    assert_eq!(
        bench.json(&["fsck", "--repair", "--accept-loss", "--watch-ms", "200"]).1["lines_written"],
        0,
        "a sound pool needs no repair"
    );
}
