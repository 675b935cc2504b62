// SPDX-License-Identifier: Apache-2.0
//! `cxlctl exporter` and `cxlctl top` beside a host that runs: what they show, and clients that mean harm.

mod common;
#[path = "../../pool/src/metrics/tests/strict.rs"]
mod strict;

use common::{Bench, HostProcess};
use cxl_pool::media::{COUNTERS_PER_STATS, CellClaim, Descriptor, FenceLine, PinLine, Region, STATS_LINES, StatsLine};
use cxl_pool::metrics::stats::Stat;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use strict::{Family, parse};

const PATIENCE: Duration = Duration::from_secs(180);

/// An exporter that runs; ended with the test.
struct Exporter {
    process: Child,
    address: SocketAddr,
}

impl Exporter {
    fn start(bench: &Bench, args: &[&str]) -> Exporter {
        let mut command = bench.command("machine-x");
        let mut process = command.args(["exporter", "--port", "0"]).args(args).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on http://").and_then(|rest| rest.strip_suffix("/metrics"));
        Exporter { address: address.unwrap_or_else(|| panic!("{line}")).parse().unwrap(), process }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Sends bytes and reads to the end: the head's first line, its other lines, the body.
    fn ask(&self, request: &[u8]) -> (String, String, String) {
        let mut stream = self.connect();
        stream.write_all(request).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").expect("a head");
        let (status, rest) = head.split_once("\r\n").unwrap();
        (status.to_owned(), rest.to_owned(), body.to_owned())
    }

    fn metrics(&self) -> BTreeMap<String, Family> {
        let (status, head, body) = self.ask(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n");
        assert_eq!(status, "HTTP/1.1 200 OK", "{body}");
        assert!(head.contains("Content-Type: text/plain; version=0.0.4; charset=utf-8"), "{head}");
        assert!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
        let mut families = parse(&body);
        let uuid = families["cxl_pool_info"].samples[0].1[1].1.clone();
        // Each sample names its pool first. Its other labels are compared.
        for (_, labels, _) in families.values_mut().flat_map(|family| &mut family.samples) {
            assert_eq!(labels.remove(0), ("pool".to_owned(), uuid.clone()), "{body}");
        }
        families
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What the cache of the host in `slot` publishes: counter number p is `base + p`.
fn publish(bench: &Bench, slot: u64, incarnation: u32, base: u64) {
    let pool = bench.open();
    for line in 0..STATS_LINES as u64 {
        let counters = std::array::from_fn(|place| base + line * COUNTERS_PER_STATS as u64 + place as u64);
        pool.lines().publish(slot * STATS_LINES as u64 + line, StatsLine { crc: 0, incarnation, counters }).unwrap();
    }
}

fn two_hosts(bench: &Bench) -> [HostProcess; 2] {
    [bench.host("machine-a"), bench.host("machine-b")]
}

#[test]
fn the_exporter_shows_every_host_and_its_counters() {
    let bench = Bench::formatted();
    let _hosts = two_hosts(&bench);
    publish(&bench, 0, 1, 1_000_000_000);
    // Of an earlier life of the slot's host: not this one's.
    publish(&bench, 1, 0, 5);
    let exporter = Exporter::start(&bench, &["--max-age-ms", "0"]);
    let metrics = exporter.metrics();
    let value = |name: &str, labels: &[(&str, &str)]| metrics[name].value(labels);
    assert_eq!(value("cxl_pool_slots", &[("state", "live")]), Some(2.0));
    assert_eq!(value("cxl_pool_slots", &[("state", "free")]), Some(2.0));
    assert_eq!(value("cxl_pool_host_incarnation", &[("slot", "1")]), Some(1.0));
    assert_eq!(value("cxl_pool_host_fenced", &[("slot", "0")]), Some(0.0));
    assert_eq!(metrics["cxl_pool_host_info"].samples.len(), 2);
    assert_eq!(value("cxl_pool_size_bytes", &[]), Some(f64::from(16 << 20)));
    for stat in Stat::ALL {
        let family = metrics.iter().find(|(name, _)| {
            let name = name.trim_start_matches("cxl_pool_host_").trim_end_matches("_total");
            name == stat.name() || (stat.name() == "lock_wait_ns" && name == "lock_wait_seconds")
        });
        let (name, family) = family.unwrap_or_else(|| panic!("{stat:?} is not exported"));
        let counted = 1e9 + stat.place() as f64;
        let expected = if *stat == Stat::LockWaitNs { counted / 1e9 } else { counted };
        assert_eq!(family.value(&[("slot", "0")]), Some(expected), "{name}");
        assert_eq!(family.value(&[("slot", "1")]), None, "{name} of an incarnation that has published nothing");
    }
    publish(&bench, 0, 1, 2_000_000_000);
    let beats = |metrics: &BTreeMap<String, Family>| metrics["cxl_pool_host_heartbeats_total"].value(&[("slot", "0")]).unwrap();
    let deadline = Instant::now() + PATIENCE;
    loop {
        let later = exporter.metrics();
        assert_eq!(later["cxl_pool_host_published_blocks_total"].value(&[("slot", "0")]), Some(2e9));
        if beats(&later) > beats(&metrics) {
            break;
        }
        assert!(Instant::now() < deadline, "the heartbeat of a live host moves");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whatever fence or death there is, it is of an incarnation, and which one the host has is what cannot be read.
#[test]
fn a_host_whose_binding_is_damaged_is_not_called_dead() {
    let bench = Bench::formatted();
    // A manager that lives would write its bindings again.
    two_hosts(&bench).iter_mut().for_each(|host| host.kill());
    bench.damage_bindings(0);
    for command in [&["hosts"][..], &["nixl"], &["top", "--once", "--interval-ms", "50"]] {
        let (code, shown) = bench.json(command);
        let host = &shown[if command[0] == "hosts" { "slots" } else { "hosts" }][0];
        assert_eq!((code, &host["state"], &host["standing"]), (0, &"unreadable".into(), &"unknown".into()), "{command:?}: {shown:#}");
    }
    let text = bench.run(&["hosts"]).out;
    assert!(text.lines().nth(1).is_some_and(|line| line.contains("unreadable  unknown")), "{text}");
    let metrics = Exporter::start(&bench, &[]).metrics();
    let fenced = |slot| metrics["cxl_pool_host_fenced"].value(&[("slot", slot)]);
    assert_eq!((fenced("0"), fenced("1")), (None, Some(0.0)));
    let incarnation = |slot| metrics["cxl_pool_host_incarnation"].value(&[("slot", slot)]);
    assert_eq!((incarnation("0"), incarnation("1")), (None, Some(1.0)));
    let standing: Vec<&String> = metrics["cxl_pool_host_info"].samples.iter().map(|sample| &sample.1[4].1).collect();
    assert_eq!(standing, ["unknown", "not fenced"]);
}

/// What the manager says of a host is known, whatever stands in the line of the host itself.
#[test]
fn a_host_whose_own_line_is_damaged_stands_as_the_others_say() {
    let bench = Bench::formatted();
    let mut hosts = two_hosts(&bench);
    hosts[1].kill();
    bench.wait_for_hosts("the dead host is fenced", |hosts| hosts["slots"][1]["fenced"] == 1);
    bench.damage(Region::Identity, 1);
    let (_, shown) = bench.json(&["hosts"]);
    let host = &shown["slots"][1];
    // A witness of its machine may have told of its death as well.
    let stands = |standing: &str| host["standing"] == standing;
    assert!(host["state"] == "unreadable" && (stands("fenced") || stands("declared dead")), "{host:#}");
}

#[test]
fn the_exporter_shows_what_is_in_the_cells() {
    let bench = Bench::formatted();
    let _a = bench.host("machine-a");
    let pool = bench.open();
    let mut claim = CellClaim { incarnation: 1, ..bytemuck::Zeroable::zeroed() };
    claim.set(0, true);
    pool.lines().publish(0, claim).unwrap();
    let block = Descriptor { state: Descriptor::READY, incarnation: 1, len_bytes: 9, key: [4; 16], ..Descriptor::default() };
    (0..3).for_each(|cell| pool.lines().publish(cell, Descriptor { seq: cell, ..block }).unwrap());
    pool.lines().publish(3, Descriptor { state: Descriptor::WRITING, ..block }).unwrap();
    pool.lines().publish(0, PinLine { incarnation: 1, nibbles: [8, 0, 0, 0, 0, 0, 0], ..PinLine::default() }).unwrap();
    let exporter = Exporter::start(&bench, &["--max-age-ms", "0"]);
    let metrics = exporter.metrics();
    let value = |name: &str, labels: &[(&str, &str)]| metrics[name].value(labels);
    assert_eq!((value("cxl_pool_cells", &[("state", "ready")]), value("cxl_pool_cells", &[("state", "writing")])), (Some(3.0), Some(1.0)));
    assert_eq!(value("cxl_pool_owned_cells", &[("slot", "0"), ("standing", "live"), ("state", "ready")]), Some(3.0));
    assert_eq!((value("cxl_pool_cell_chunks", &[("state", "claimed")]), value("cxl_pool_blocks", &[])), (Some(1.0), Some(3.0)));
    assert_eq!((value("cxl_pool_pinned_cells", &[]), metrics["cxl_pool_awaited_bytes"].samples.len()), (Some(1.0), 0));
    // Fenced and not proven to have ended: what it is writing may still be written.
    let mut fence = pool.lines().fetch::<FenceLine>(0).unwrap();
    fence.fenced[0] = 1;
    pool.lines().publish(0, fence).unwrap();
    let later = Exporter::start(&bench, &["--max-age-ms", "0"]).metrics();
    assert_eq!(later["cxl_pool_blocks"].value(&[]), Some(0.0));
}

#[test]
fn an_answer_is_not_taken_anew_for_every_reader() {
    let bench = Bench::formatted();
    let _a = bench.host("machine-a");
    publish(&bench, 0, 1, 7);
    let exporter = Exporter::start(&bench, &["--max-age-ms", "600000"]);
    let published = |metrics: &BTreeMap<String, Family>| metrics["cxl_pool_host_published_blocks_total"].value(&[("slot", "0")]);
    assert_eq!(published(&exporter.metrics()), Some(7.0));
    publish(&bench, 0, 1, 8);
    assert_eq!(published(&exporter.metrics()), Some(7.0));
}

#[test]
fn other_requests_are_answered_for_what_they_are() {
    let bench = Bench::formatted();
    let exporter = Exporter::start(&bench, &[]);
    let status = |request: &[u8]| exporter.ask(request).0;
    assert_eq!(status(b"GET / HTTP/1.1\r\n\r\n"), "HTTP/1.1 404 Not Found");
    assert_eq!(status(b"POST /metrics HTTP/1.1\r\n\r\n"), "HTTP/1.1 405 Method Not Allowed");
    assert_eq!(status(b"\x16\x03\x01\x02\x00\r\n\r\n"), "HTTP/1.1 400 Bad Request");
    assert_eq!(
        status(&[b"GET /metrics HTTP/1.1\r\nCookie: ".as_slice(), &[b'a'; 20_000]].concat()),
        "HTTP/1.1 431 Request Header Fields Too Large"
    );
    let (head_status, head, body) = exporter.ask(b"HEAD /metrics?x=1 HTTP/1.0\r\n\r\n");
    assert_eq!((head_status.as_str(), body.as_str()), ("HTTP/1.1 200 OK", ""));
    assert!(head.contains("Content-Length: ") && !head.contains("Content-Length: 0"), "{head}");
}

/// Clients that drip hold every place there is: others are told so at once, and served again when the time of those is up.
#[test]
fn silent_clients_do_not_keep_others_out_for_long() {
    let bench = Bench::formatted();
    let exporter = Exporter::start(&bench, &[]);
    let silent: Vec<TcpStream> = (0..16).map(|_| exporter.connect()).collect();
    silent.iter().for_each(|mut stream| stream.write_all(b"GET /met").unwrap());
    let mut refused = String::new();
    exporter.connect().read_to_string(&mut refused).unwrap();
    assert!(refused.starts_with("HTTP/1.1 503 Service Unavailable") && refused.ends_with("too many connections\n"), "{refused}");
    let deadline = Instant::now() + PATIENCE;
    loop {
        let (mut stream, mut text) = (exporter.connect(), String::new());
        // Where it is refused unread, the answer may be lost to the reset.
        let asked = stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").and_then(|()| stream.read_to_string(&mut text));
        if asked.is_ok() && text.starts_with("HTTP/1.1 200 OK") {
            break;
        }
        assert!(Instant::now() < deadline, "{asked:?} {text}");
        silent.iter().for_each(|mut stream| drop(stream.write_all(b"r")));
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_pool_that_is_made_anew_is_found_again() {
    let bench = Bench::formatted();
    let exporter = Exporter::start(&bench, &["--max-age-ms", "0"]);
    let uuid = |metrics: &BTreeMap<String, Family>| metrics["cxl_pool_info"].samples[0].1[0].1.clone();
    let first = uuid(&exporter.metrics());
    assert_eq!(bench.run(&["format", "--force"]).code, 0);
    let (status, _, body) = exporter.ask(b"GET /metrics HTTP/1.1\r\n\r\n");
    assert_eq!(status, "HTTP/1.1 503 Service Unavailable");
    assert!(body.contains("replaced"), "{body}");
    assert_ne!(uuid(&exporter.metrics()), first);
}

#[test]
fn an_exporter_that_cannot_serve_says_why() {
    let bench = Bench::new();
    assert_eq!(bench.run(&["exporter", "--port", "0"]).code, 3, "no pool");
    let bench = Bench::formatted();
    let other = Exporter::start(&bench, &[]);
    let taken = bench.run(&["exporter", "--port", &other.address.port().to_string()]);
    assert_eq!(taken.code, 1);
    assert!(taken.err.contains("listening on 127.0.0.1:") && taken.err.contains("--port"), "{}", taken.err);
}

#[test]
fn top_shows_rates_between_its_looks() {
    let bench = Bench::formatted();
    let _hosts = two_hosts(&bench);
    publish(&bench, 0, 1, 1000);
    let mut command = bench.command("machine-x");
    let mut top = command.args(["--json", "top", "--interval-ms", "300"]).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(top.stdout.take().unwrap()).lines();
    let (mut rose, mut ratios, mut moved, deadline) = (0.0, Vec::new(), false, Instant::now() + PATIENCE);
    for (index, line) in lines.enumerate() {
        let shown: serde_json::Value = serde_json::from_str(&line.unwrap()).unwrap();
        let (first, second) = (&shown["hosts"][0], &shown["hosts"][1]);
        assert_eq!((&second["stats"], &second["state"]), (&serde_json::json!({}), &"live".into()), "it has published nothing");
        assert_eq!(first["per_second"].get("pins"), None, "a gauge has no rate");
        rose += first["per_second"]["hits"].as_f64().unwrap() * shown["seconds"].as_f64().unwrap();
        ratios.extend(first["hit_ratio"].as_f64());
        moved |= first["moving"] == true;
        if first["stats"]["published_blocks"] == 4000 + Stat::PublishedBlocks.place() && moved {
            break;
        }
        assert!(Instant::now() < deadline, "{shown:#}");
        if index == 0 {
            publish(&bench, 0, 1, 4000);
        }
    }
    top.kill().unwrap();
    top.wait().unwrap();
    // Every counter rose by 3000, hits as well as misses.
    assert!((rose - 3000.0).abs() < 0.01, "{rose}");
    assert!(!ratios.is_empty() && ratios.iter().all(|ratio| *ratio == 0.5), "{ratios:?}");

    let once = bench.run(&["top", "--once", "--interval-ms", "50"]).out;
    assert!(once.starts_with("slot") && once.contains("2 of 4 slots were ever used") && !once.contains('\x1b'), "{once}");
    let (code, once) = bench.json(&["top", "--once", "--interval-ms", "50"]);
    assert_eq!((code, &once["hosts"][0]["stats"]["published_blocks"]), (0, &4000.into()));
}

#[test]
fn nixl_shows_what_agents_transferred() {
    let bench = Bench::formatted();
    let _hosts = two_hosts(&bench);
    assert_eq!(bench.run(&["nixl"]).out, "no host has told of any NIXL agent\n");
    publish(&bench, 0, 1, 1 << 20);
    publish(&bench, 1, 1, 7);
    let (code, shown) = bench.json(&["nixl"]);
    assert_eq!((code, &shown["lacks_counters"]), (0, &false.into()));
    let mut shows = 0;
    for stat in Stat::ALL.iter().filter(|stat| stat.is_given()) {
        let name = stat.name().strip_prefix("nixl_").expect("what is given is of NIXL agents");
        let values = [(1 << 20) + stat.place(), 7 + stat.place()];
        assert_eq!([&shown["hosts"][0]["counters"][name], &shown["hosts"][1]["counters"][name]], values, "{name}");
        assert_eq!(shown["all"][name], values[0] + values[1], "{name}");
        shows += 1;
    }
    assert_eq!(shown["all"].as_object().unwrap().len(), shows);
    let text = bench.run(&["nixl"]).out;
    assert!(text.lines().next().unwrap().contains("slot 1, live") && text.lines().count() == 1 + shows, "{text}");
    assert!(text.lines().any(|line| line.starts_with("staged read bytes") && line.contains("1.0 MiB") && line.contains("40 B")), "{text}");
    let top = bench.run(&["top", "--once", "--interval-ms", "50"]).out;
    assert!(top.contains("\nNIXL\nslot  agents "), "{top}");
}

/// A pool of an earlier format has fewer lines: what it has no place for is neither shown nor taken for zero.
#[test]
fn a_pool_without_room_for_counters_says_so() {
    let bench = Bench::formatted_before_wide_stats();
    let _host = bench.host("machine-a");
    let pool = bench.open();
    let line = StatsLine { crc: 0, incarnation: 1, counters: std::array::from_fn(|place| 50 + place as u64) };
    pool.lines().publish(3, line).unwrap();
    let (code, shown) = bench.json(&["nixl"]);
    let counters = shown["hosts"][0]["counters"].as_object().unwrap();
    assert_eq!((code, &shown["lacks_counters"]), (0, &true.into()));
    let names: Vec<&String> = counters.keys().collect();
    assert_eq!((counters["posted"].as_u64(), counters["failed"].as_u64(), names.len()), (Some(53), Some(56), 4), "{names:?}");
    assert!(bench.run(&["nixl"]).out.contains("formatted by an older version"));
    let metrics = Exporter::start(&bench, &["--max-age-ms", "0"]).metrics();
    assert_eq!(metrics["cxl_pool_host_nixl_posted_total"].value(&[("slot", "0")]), Some(53.0));
    assert_eq!(metrics["cxl_pool_host_nixl_links"].value(&[("slot", "0")]), None);
    let fsck = bench.run(&["fsck"]);
    assert_eq!(fsck.code, 0, "{}", fsck.out);
}

/// It goes on until its reader is gone.
#[test]
fn top_prints_again_and_again() {
    let bench = Bench::formatted();
    let mut command = bench.command("machine-x");
    let mut top = command.args(["--json", "top", "--interval-ms", "50"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(top.stdout.take().unwrap()).lines();
    for _ in 0..3 {
        let line: serde_json::Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        assert_eq!(line["hosts"], serde_json::json!([]));
    }
    drop(lines);
    let deadline = Instant::now() + PATIENCE;
    while top.try_wait().unwrap().is_none() {
        assert!(Instant::now() < deadline, "it goes on without a reader");
        std::thread::sleep(Duration::from_millis(20));
    }
}
