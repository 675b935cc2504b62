// SPDX-License-Identifier: Apache-2.0
//! `fsck` on planted damage: found, repaired, and never a crash.

mod common;

use common::{Bench, rules};
use cxl_pool::media::*;
use cxl_pool::pool::Pool;

fn flip(pool: &Pool, region: Region, index: u64, byte: usize) {
    let offset = pool.layout().line_offset(region, index).unwrap();
    let mut line = pool.lines().fetch_raw(offset).unwrap();
    line.0[byte] ^= 0x10;
    pool.lines().memory().write_line(offset, &line).unwrap();
    pool.lines().memory().fence_stores();
}

#[test]
fn a_fresh_pool_is_clean() {
    let bench = Bench::formatted();
    let (code, report) = bench.json(&["fsck"]);
    assert_eq!((code, &report["findings"]), (0, &serde_json::json!([])));
    assert_eq!(report["in_use"], false);
    assert!(bench.run(&["fsck"]).out.contains("0 errors"));
}

#[test]
fn damage_in_every_region_is_found_and_repaired() {
    let bench = Bench::formatted();
    let pool = bench.open();
    // What this pool was formatted without has no lines to damage.
    let regions: Vec<Region> = pool.layout().spans().iter().filter(|span| span.lines > 1).map(|span| span.region).collect();
    for &region in &regions {
        flip(&pool, region, 1, 33);
    }
    let (code, report) = bench.json(&["fsck"]);
    assert_eq!(code, 1);
    let found: Vec<_> = report["findings"].as_array().unwrap().iter().filter(|found| found["rule"] == "line.damaged").collect();
    for region in &regions {
        let name = format!("{region:?}");
        assert!(found.iter().any(|found| found["region"] == name.as_str() && found["line"] == 1), "{name}");
    }
    let text = bench.run(&["fsck"]);
    assert!(text.code == 1 && text.out.contains("--repair"), "{}", text.out);

    // Nothing was ever written to these lines, so that all of them can be had back without loss.
    let (code, repaired) = bench.json(&["fsck", "--repair", "--watch-ms", "50"]);
    assert_eq!(code, 0, "{repaired:#}");
    assert_eq!(repaired["lines_written"], regions.len());
    assert_eq!(bench.run(&["fsck"]).code, 0);
}

#[test]
fn a_check_without_repair_writes_nothing() {
    let bench = Bench::formatted();
    flip(&bench.open(), Region::Claim, 0, 20);
    let before = std::fs::read(bench.file()).unwrap();
    assert_eq!(bench.run(&["fsck"]).code, 1);
    assert!(std::fs::read(bench.file()).unwrap() == before);
}

#[test]
fn what_may_hide_a_newer_value_needs_accept_loss() {
    let bench = Bench::formatted_with(&["--advanced", "machine=51515151515151515151515151515151"]);
    let pool = bench.open();
    let seat = pool.superblock().seats()[0].0;
    pool.lines().publish(0, Seat { epoch: 1, beat: 1, machine: seat, ..Seat::default() }).unwrap();
    pool.lines().publish(0, GrantLine { tag: 1, ..GrantLine::default() }).unwrap();
    flip(&pool, Region::Seat, 0, 12);
    let (code, report) = bench.json(&["fsck", "--repair", "--watch-ms", "50"]);
    assert_eq!(code, 1);
    assert_eq!(report["lines_written"], 0);
    assert_eq!(report["left"][0]["remedy"], "loss");
    let (code, report) = bench.json(&["fsck", "--repair", "--accept-loss", "--watch-ms", "50"]);
    assert_eq!(code, 0, "{report:#}");
    let epoch = pool.lines().fetch::<Seat>(0).unwrap().epoch;
    assert!(epoch > 1000 && (epoch - 1).is_multiple_of(2), "{epoch}");
}

#[test]
fn contradictions_between_sound_lines_are_found() {
    let bench = Bench::formatted();
    let pool = bench.open();
    pool.lines().publish(1, Seat { epoch: 1, machine: [3; 16], ..Seat::default() }).unwrap();
    pool.lines().publish(2, Identity { incarnation: 4, state: Identity::LIVE, machine: [3; 16], ..Identity::default() }).unwrap();
    pool.lines().publish(3, ChunkHead { state: ChunkHead::BLOCKS, block_bytes: 100, ..ChunkHead::default() }).unwrap();
    let (code, report) = bench.json(&["fsck"]);
    assert_eq!(code, 1);
    let found = rules(&report["findings"]);
    for rule in ["seat.epoch", "seat.machine", "identity.unbound", "chunk.form"] {
        assert!(found.iter().any(|found| found == rule), "{rule} in {found:?}");
    }
}

#[test]
fn metadata_overwritten_with_rubbish_is_survived_by_every_command() {
    let bench = Bench::formatted();
    let whole = std::fs::read(bench.file()).unwrap();
    let layout = bench.open().layout().clone();
    let (start, end) = (layout.span(Region::Seat).offset as usize, layout.data_offset() as usize);
    for seed in 1..=3u64 {
        let mut rubbish = whole.clone();
        let mut state = seed;
        for byte in &mut rubbish[start..end] {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *byte = (state >> 56) as u8;
        }
        std::fs::write(bench.file(), &rubbish).unwrap();
        assert_eq!(bench.run(&["info"]).code, 0);
        assert_eq!(bench.run(&["hosts", "--watch-ms", "30"]).code, 0);
        for view in [
            "locks", "objects", "blocks", "seat", "record", "chunk-head", "keep-map", "claim", "stats", "descriptor", "hint", "pin",
            "cell-claim", "ask",
        ] {
            let ran = bench.run(&["inspect", view, "all"]);
            assert!(matches!(ran.code, 0 | 1), "{view}: {} {}", ran.code, ran.err);
        }
        for command in [&["cache", "stat", "--hints"][..], &["cache", "ls"], &["why", "000102030405060708090a0b0c0d0e0f"]] {
            let ran = bench.run(command);
            assert!(matches!(ran.code, 0 | 1), "{command:?}: {} {}", ran.code, ran.err);
        }
        assert_eq!(bench.json(&["fsck"]).0, 1);
        let (code, repaired) = bench.json(&["fsck", "--repair", "--accept-loss", "--watch-ms", "30"]);
        assert_eq!(code, 0, "{:#}", repaired["left"]);
        assert_eq!(bench.run(&["fsck"]).code, 0);
    }
}

#[test]
fn an_online_check_tells_what_heals_by_itself() {
    let bench = Bench::formatted_with(&["--advanced", "machine=51515151515151515151515151515151"]);
    let pool = bench.open();
    // Of seat 0 the machine is known and does not run; seat 1 was never given to one.
    flip(&pool, Region::Fence, 0, 20);
    flip(&pool, Region::Death, 1, 20);
    flip(&pool, Region::Grant, 3, 20);
    let (code, report) = bench.json(&["fsck", "--online", "--watch-ms", "50"]);
    assert_eq!(code, 1);
    let of = |region: &str| report["damaged"].as_array().unwrap().iter().find(|line| line["region"] == region).unwrap().clone();
    assert_eq!((&of("Fence")["healing"], &of("Fence")["owner_runs"]), (&"when-owner-runs".into(), &false.into()), "{report:#}");
    assert_eq!(of("Death")["healing"], "not-needed");
    // No seat ever claimed an epoch, so no copy can have a tag.
    assert_eq!(of("Grant")["healing"], "not-needed");
    let text = bench.run(&["fsck", "--online", "--watch-ms", "50"]);
    assert!(text.out.contains("to do: start a host on the owner's machine"), "{}", text.out);
    // Nothing was written.
    assert_eq!(bench.json(&["fsck", "--online", "--watch-ms", "50"]).1["damaged"].as_array().unwrap().len(), 3);
}
