// SPDX-License-Identifier: Apache-2.0
//! `cxlctl cache` and `cxlctl why`, as an operator runs them beside a host that uses the cache.

mod common;

use common::Bench;
use cxl_pool::cache::{BlockKey, Cache, CacheConfig, Namespace, Upkeep};
use cxl_pool::host::{Host, HostConfig, Service};
use cxl_pool::machine::{Machine, State};
use cxl_pool::media::{Descriptor, Region};
use cxl_pool::platform::MachineId;
use std::sync::Arc;

const ONE: Namespace = Namespace([0x11; 16]);
const TWO: Namespace = Namespace([0x22; 16]);

fn key(number: u8) -> BlockKey {
    BlockKey([number; 16])
}

fn block(number: u8) -> Vec<u8> {
    (0..1000 + 500 * usize::from(number)).map(|at| (at * 7 + usize::from(number) * 31) as u8).collect()
}

/// A host of this test on a machine of its own; the program's runs are on another.
struct Member {
    _upkeep: Upkeep,
    _service: Service,
    cache: Cache,
    host: Host,
}

fn member(bench: &Bench) -> Member {
    let pool = bench.open();
    let id = MachineId([0x51; 16]);
    let state = State::open(&bench.directory.path().join(bench.machine), pool.superblock().uuid(), id).unwrap();
    let config = HostConfig { seats: pool.superblock().seats(), ..HostConfig::default() };
    let host = cxl_pool::pool::join(pool.lines().clone(), Arc::new(Machine::new(id, state).unwrap()), config).unwrap();
    let service = host.serve().unwrap();
    let cache = Cache::open(&host, CacheConfig { checksums: true, ..CacheConfig::default() }).unwrap();
    Member { _upkeep: cache.serve().unwrap(), _service: service, cache, host }
}

/// A pool with ten blocks of one namespace and two of another, of which one key is in both.
fn in_use() -> (Bench, Member) {
    let mut bench = Bench::formatted();
    let member = member(&bench);
    bench.machine = "machine-b";
    for number in 0..10 {
        member.cache.publish(ONE, key(number), None, &block(number)).unwrap();
    }
    for number in [9, 10] {
        member.cache.publish(TWO, key(number), None, &block(number + 1)).unwrap();
    }
    (bench, member)
}

#[test]
fn stat_and_ls_tell_what_is_there() {
    let (bench, member) = in_use();
    let pin = member.cache.pin(ONE, key(4)).unwrap().unwrap();
    let (code, stat) = bench.json(&["cache", "stat", "--hints"]);
    assert_eq!(code, 0);
    assert_eq!((&stat["served"], &stat["pinned"], &stat["hints"]["unreachable_blocks"]), (&12.into(), &1.into(), &0.into()));
    assert_eq!(stat["namespaces"].as_array().unwrap().len(), 2);
    assert_eq!(stat["owners"][0]["slot"], member.host.slot());
    assert_eq!(stat["owners"][0]["standing"], "live");
    let text = bench.run(&["cache", "stat"]).out;
    assert!(text.contains("blocks: 12 available, 1 cells pinned") && text.contains(&ONE.to_string()), "{text}");

    let (code, listed) = bench.json(&["cache", "ls", "--namespace", &ONE.to_string(), "--state", "ready"]);
    let cells = listed["cells"].as_array().unwrap();
    assert_eq!((code, cells.len(), &listed["more"]), (0, 10, &false.into()));
    for cell in cells {
        let number = u8::from_str_radix(&cell["key"].as_str().unwrap()[..2], 16).unwrap();
        assert_eq!((cell["len_bytes"].as_u64().unwrap(), cell["served"].as_bool()), (block(number).len() as u64, Some(true)));
        assert_eq!(cell["pinned_by"].as_array().unwrap().len(), usize::from(number == 4), "{cell}");
    }
    let (_, some) = bench.json(&["cache", "ls", "--limit", "3"]);
    assert_eq!((some["cells"].as_array().unwrap().len(), &some["more"]), (3, &true.into()));
    let text = bench.run(&["cache", "ls", "--namespace", &TWO.to_string()]).out;
    assert!(text.lines().count() == 3 && text.contains(&key(10).to_string()), "{text}");
    assert!(bench.run(&["cache", "ls", "--state", "damaged"]).out.contains("nothing to list"));
    drop(pin);
}

#[test]
fn get_copies_a_block_out_and_says_hit_or_miss() {
    let (bench, _member) = in_use();
    let path = bench.directory.path().join("block");
    let (code, told) = bench.json(&["cache", "get", &key(3).to_string(), "-o", path.to_str().unwrap()]);
    assert_eq!((code, &told["hit"], &told["len_bytes"]), (0, &true.into(), &2500.into()), "{told}");
    assert!(std::fs::read(&path).unwrap() == block(3));
    assert_eq!(told["namespace"], ONE.to_string());
    assert_eq!(told["xxh3"], format!("{:016x}", cxl_pool::copy::checksum_of(&block(3))));
    // To standard output nothing but the bytes.
    let output = bench.command(bench.machine).args(["cache", "get", &key(10).to_string(), "-o", "-"]).output().unwrap();
    assert!(output.status.success() && output.stdout == block(11));
    // A key of two namespaces has to be told apart.
    let both = bench.run(&["cache", "get", &key(9).to_string()]);
    assert!(both.code == 2 && both.err.contains(&ONE.to_string()) && both.err.contains(&TWO.to_string()), "{}", both.err);
    let (code, told) = bench.json(&["cache", "get", &key(9).to_string(), "--namespace", &TWO.to_string()]);
    assert_eq!((code, &told["len_bytes"]), (0, &(block(10).len()).into()));
    for args in [&["cache", "get", &key(77).to_string()][..], &["cache", "get", &key(1).to_string(), "--namespace", &TWO.to_string()]] {
        let (code, told) = bench.json(args);
        assert_eq!((code, &told["hit"], &told["reason"]), (1, &false.into(), &"absent".into()));
    }
    let output = bench.command(bench.machine).args(["cache", "get", &key(77).to_string(), "-o", "-"]).output().unwrap();
    assert!(output.status.code() == Some(1) && output.stdout.is_empty());
    assert_eq!(bench.run(&["--json", "cache", "get", &key(3).to_string(), "-o", "-"]).code, 2);
}

#[test]
fn why_tells_of_hits_misses_and_other_namespaces() {
    let (bench, _member) = in_use();
    let (code, told) = bench.json(&["why", &key(3).to_string()]);
    assert_eq!((code, &told["hit"], &told["verdict"]), (0, &true.into(), &"hit".into()));
    let text = bench.run(&["why", &key(3).to_string(), "--no-scan"]);
    assert!(text.code == 0 && text.out.starts_with("hit\n") && text.out.contains("2500 bytes"), "{}", text.out);
    let (code, told) = bench.json(&["why", &key(10).to_string(), "--namespace", &ONE.to_string()]);
    assert_eq!((code, &told["hit"], &told["elsewhere"][0]), (1, &false.into(), &TWO.to_string().into()));
    assert!(bench.run(&["why", &key(10).to_string(), "--namespace", &ONE.to_string()]).out.contains("was that one meant?"));
    assert_eq!(bench.json(&["why", &key(99).to_string()]).1["verdict"], "nowhere");

    // A descriptor that is damaged while hosts use it.
    let (pool, told) = (bench.open(), bench.json(&["why", &key(3).to_string()]).1);
    let cell = told["seen"][0]["cell"].as_u64().unwrap();
    let offset = pool.layout().line_offset(Region::Descriptor, cell).unwrap();
    let good = pool.lines().fetch::<Descriptor>(cell).unwrap();
    let mut line = pool.lines().fetch_raw(offset).unwrap();
    line.0[30] ^= 1;
    pool.lines().memory().write_line(offset, &line).unwrap();
    pool.lines().memory().fence_stores();
    let args = ["why", &key(3).to_string(), "--namespace", &ONE.to_string()];
    assert_eq!(bench.json(&args).1["verdict"], "damaged");
    assert_eq!(bench.json(&["cache", "get", args[1], args[2], args[3]]).0, 1);
    pool.lines().publish(cell, good).unwrap();
    assert_eq!(bench.json(&args).1["verdict"], "hit");
}

#[test]
fn evict_and_clear_wait_for_the_owner_and_say_what_stays() {
    let (bench, member) = in_use();
    let pin = member.cache.pin(ONE, key(4)).unwrap().unwrap();
    let (code, told) = bench.json(&["cache", "evict", &key(3).to_string()]);
    assert_eq!((code, &told["found"], &told["gone"]), (0, &1.into(), &1.into()), "{told}");
    assert_eq!(member.cache.lookup(ONE, key(3)).unwrap(), None);
    let (code, told) = bench.json(&["cache", "evict", &key(3).to_string()]);
    assert_eq!((code, &told["found"]), (0, &0.into()));

    let (code, told) = bench.json(&["cache", "evict", &key(4).to_string(), "--timeout-ms", "700"]);
    assert_eq!((code, &told["gone"]), (1, &0.into()));
    let reason = told["stay"][0]["reason"].as_str().unwrap();
    assert!(reason.contains("pinned") && reason.contains(&member.host.slot().to_string()), "{reason}");

    let cleared = bench.run(&["cache", "clear", "--namespace", &ONE.to_string(), "--timeout-ms", "700"]);
    assert!(cleared.code == 1 && cleared.out.contains("8 of 9 blocks are gone") && cleared.out.contains("pinned"), "{}", cleared.out);
    assert!(member.cache.lookup(TWO, key(9)).unwrap().is_some(), "another namespace was cleared");
    assert!(pin.is_unchanged().unwrap());
    drop(pin);
    let (code, told) = bench.json(&["cache", "clear", "--all"]);
    assert_eq!((code, &told["found"], &told["gone"]), (0, &3.into(), &3.into()), "{told}");
    assert_eq!(bench.json(&["cache", "stat"]).1["served"], 0);
    assert_eq!(bench.json(&["cache", "clear", "--all"]).1["found"], 0);
}

#[test]
fn blocks_of_a_host_that_left_are_evicted_by_the_host_that_takes_them_over() {
    let (mut bench, member) = in_use();
    let Member { _upkeep, _service, cache, host } = member;
    drop(_upkeep);
    cache.close().unwrap();
    drop(_service);
    host.leave().unwrap();
    assert_eq!(bench.json(&["cache", "stat"]).1["owners"][0]["standing"], "left");
    assert_eq!(bench.json(&["why", &key(3).to_string()]).0, 0);
    bench.machine = "machine-a";
    let (code, told) = bench.json(&["cache", "clear", "--all", "--timeout-ms", "20000"]);
    assert_eq!((code, &told["gone"]), (0, &12.into()), "{told}");
}
