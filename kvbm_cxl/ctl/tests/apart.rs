// SPDX-License-Identifier: Apache-2.0
//! Pools whose metadata lies on a device of its own, as an operator makes, checks, repairs and erases them.

mod common;

use common::{Bench, Ran, ran, rules};
use cxl_pool::device::PoolSpec;
use cxl_pool::media::Region;
use cxl_pool::pool::{OpenOptions, Pool};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

/// The name of a pool in files `NAME` and `NAME.metadata` of the bench's directory.
fn name(bench: &Bench, name: &str) -> (String, String) {
    let path = bench.directory.path().join(name).display().to_string();
    (path.clone(), format!("{path}.metadata"))
}

fn command(bench: &Bench, pool: &str, args: &[&str]) -> Command {
    let mut command = bench.command(bench.machine);
    command.args(["--pool", pool]).args(args);
    command
}

fn run(bench: &Bench, pool: &str, args: &[&str]) -> Ran {
    ran(command(bench, pool, args).output().unwrap())
}

fn json(bench: &Bench, pool: &str, args: &[&str]) -> (i32, serde_json::Value) {
    let ran = run(bench, pool, &[&["--json"], args].concat());
    (ran.code, serde_json::from_str(&ran.out).unwrap_or_else(|error| panic!("{error}: {} {}", ran.out, ran.err)))
}

const FORMAT: [&str; 11] =
    ["format", "--slots", "4", "--advanced", "seats=2", "--advanced", "locks=64", "--cells", "64K:50%", "--advanced", "chunk=64K"];

/// A pool; its device of payload, that of metadata, and its name.
fn formatted() -> (Bench, [String; 3]) {
    let bench = Bench::new();
    let (payload, metadata) = name(&bench, "kv");
    let all = format!("{payload},metadata={metadata}");
    assert_eq!(run(&bench, &format!("{all},size=16M,metadata_size=32M"), &FORMAT).code, 0);
    (bench, [payload, metadata, all])
}

/// A process that does not outlive the test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Changes one bit of each of these lines, wherever it lies.
fn damage(pool: &str, lines: &[(Region, u64)]) {
    let pool = Pool::open(&PoolSpec::parse(pool).unwrap(), &OpenOptions::default()).unwrap();
    for &(region, index) in lines {
        let offset = pool.layout().line_offset(region, index).unwrap();
        let mut line = pool.lines().fetch_raw(offset).unwrap();
        line.0[33] ^= 0x10;
        pool.lines().memory().write_line(offset, &line).unwrap();
    }
    pool.lines().memory().fence_stores();
}

#[test]
fn an_operator_formats_checks_repairs_and_erases_one() {
    let bench = Bench::new();
    let (payload, metadata) = name(&bench, "kv");
    let sized = format!("{payload},size=16M");
    let all = format!("{payload},metadata={metadata}");
    let small = run(&bench, &sized, &[&FORMAT[..], &["--metadata", &format!("{metadata},size=2M")]].concat());
    assert!(small.code == 3 && small.err.contains("the metadata needs") && small.err.contains("metadata_size="), "{}", small.err);
    for wrong in [&["--metadata", &payload][..], &["--metadata", "/a,/b"], &["--metadata", "relative"]] {
        assert_eq!(run(&bench, &sized, &[&FORMAT[..], wrong].concat()).code, 2, "{wrong:?}");
    }
    let both = run(&bench, &all, &[&FORMAT[..], &["--metadata", &metadata]].concat());
    assert!(both.code == 2 && both.err.contains("give one of them"), "{}", both.err);

    let made = run(&bench, &sized, &[&FORMAT[..], &["--metadata", &format!("{metadata},size=32M")]].concat());
    assert!(made.code == 0 && made.out.contains("for the metadata alone") && made.out.contains(&metadata), "{} {}", made.out, made.err);
    let (_, info) = json(&bench, &all, &["info"]);
    let bytes = info["geometry"]["metadata_bytes"].as_u64().unwrap();
    assert_eq!(info["geometry"]["len_bytes"].as_u64().unwrap(), bytes + (16 << 20));
    assert_eq!([&info["devices"][0]["name"], &info["devices"][1]["name"]].map(|name| name.as_str().unwrap_or("")), [&*metadata, &*payload]);
    let alone = run(&bench, &payload, &["info"]);
    assert!(alone.code == 3 && alone.err.contains("it carries the metadata: name it with metadata=PATH"), "{}", alone.err);
    assert_eq!(run(&bench, &metadata, &["info"]).code, 3);
    assert_eq!(run(&bench, &format!("{metadata},metadata={payload}"), &["info"]).code, 0, "the other way round");
    let look = run(&bench, &all, &["doctor", "--look"]);
    assert!(look.code <= 1 && look.out.contains(&metadata), "{}{}", look.out, look.err);

    // A host is killed; what it left is in order, and planted damage is repaired in the metadata's file alone.
    for _ in 0..2 {
        bench.host_on(&all, "machine-a").kill();
    }
    let before = std::fs::read(&payload).unwrap();
    let damaged = [(Region::Descriptor, 1), (Region::Hint, 0), (Region::Seat, 1), (Region::Summary, 2), (Region::KeepMap, 3)];
    damage(&all, &damaged);
    let (code, report) = json(&bench, &all, &["fsck"]);
    let lines = rules(&report["findings"]).iter().filter(|rule| *rule == "line.damaged").count();
    assert!(code == 1 && lines == damaged.len(), "{report:#}");
    let (code, repaired) = json(&bench, &all, &["fsck", "--repair", "--watch-ms", "50"]);
    assert_eq!(code, 0, "{repaired:#}");
    assert_eq!(run(&bench, &all, &["fsck"]).code, 0);
    assert!(std::fs::read(&payload).unwrap() == before, "a repair of metadata wrote to the payload");

    for half in [&payload, &metadata] {
        let refused = run(&bench, half, &["erase", "--force"]);
        assert!(refused.code == 3 && refused.err.contains("is missing"), "{}", refused.err);
    }
    assert_eq!(run(&bench, &all, &["info"]).code, 0);
    assert_eq!(run(&bench, &all, &["erase", "--force"]).code, 0);
    for name in [&all, &payload, &metadata] {
        assert_eq!(run(&bench, name, &["info"]).code, 3);
    }
}

#[test]
fn a_wrong_pair_opens_nothing_and_changes_nothing() {
    let bench = Bench::new();
    let names = ["a", "b"].map(|pool| name(&bench, pool));
    for (payload, metadata) in &names {
        let made = run(&bench, &format!("{payload},size=16M,metadata={metadata},metadata_size=32M"), &FORMAT);
        assert_eq!(made.code, 0, "{}", made.err);
    }
    let [(a, of_a), (b, of_b)] = &names;
    let sums = || [a, of_a, b, of_b].map(|path| crc32c::crc32c(&std::fs::read(path).unwrap()));
    let before = sums();
    for wrong in [format!("{a},metadata={of_b}"), format!("{b},metadata={of_a}"), format!("{a},metadata={b}")] {
        for args in [&["info"][..], &["fsck", "--repair"], &["format"], &["erase", "--force"], &["cache", "stat"]] {
            let refused = run(&bench, &wrong, args);
            assert!([3, 4].contains(&refused.code) && !refused.err.is_empty(), "{wrong} {args:?}: {} {}", refused.code, refused.err);
        }
        let reason = run(&bench, &wrong, &["info"]).err;
        assert!(reason.contains("foreign: it belongs to pool"), "{reason}");
    }
    assert_eq!(sums(), before);
}

#[test]
fn a_damaged_superblock_of_either_device_is_named() {
    let (bench, [payload, metadata, all]) = formatted();
    for half in [&payload, &metadata] {
        let good = std::fs::read(half).unwrap();
        for byte in [0usize, 100, 3144] {
            let mut bad = good.clone();
            bad[byte] ^= 1;
            std::fs::write(half, &bad).unwrap();
            for args in [&["fsck"][..], &["fsck", "--repair"], &["info"]] {
                let refused = run(&bench, &all, args);
                assert!(refused.code == 3 && refused.err.contains(&**half), "{half} {byte} {args:?}: {}", refused.err);
            }
            assert!(std::fs::read(half).unwrap() == bad, "a pool that cannot be opened was written to");
        }
        std::fs::write(half, &good).unwrap();
        assert_eq!(run(&bench, &all, &["fsck"]).code, 0);
    }
}

#[test]
fn a_format_over_either_device_alone_spares_hosts() {
    let (bench, [payload, metadata, all]) = formatted();
    let mut host = Killed(command(&bench, &all, &["host"]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(host.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert!(!line.is_empty(), "the host did not join");
    for half in [&payload, &metadata] {
        let forced = run(&bench, half, &["format", "--force"]);
        assert!(forced.code == 4 && forced.err.contains("hosts use this pool"), "{half}: {}", forced.err);
    }
    let moved = format!("{metadata}.moved");
    std::fs::rename(&metadata, &moved).unwrap();
    let blind = run(&bench, &payload, &["format", "--force"]);
    assert!(blind.code == 4 && blind.err.contains("hosts cannot be seen") && blind.err.contains(&metadata), "{}", blind.err);
    std::fs::rename(&moved, &metadata).unwrap();
    assert_eq!(run(&bench, &all, &["info"]).code, 0);
    assert_eq!(run(&bench, &payload, &["format", "--evict-hosts"]).code, 0);
    drop(host);
    assert_eq!(run(&bench, &payload, &["fsck"]).code, 0);
}
