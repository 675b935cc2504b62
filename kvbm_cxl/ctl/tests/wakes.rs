// SPDX-License-Identifier: Apache-2.0
//! What a host costs that does nothing: how often its threads wake. Locks stay with a host for some seconds after their last use, and are
//! looked after meanwhile.

mod common;

use common::{Bench, HostProcess};
use std::time::{Duration, Instant};

/// Wakes a second of a host at rest: two looks in each heartbeat of 50 ms, the heartbeat's locks, and a look for ended hosts now and then.
/// With a lock it is 500.
const AT_REST: f64 = 100.0;
/// How long wakes are counted.
const SPAN: Duration = Duration::from_secs(2);
/// Locks are given back after ten seconds; the rest is for a loaded machine.
const PATIENCE: Duration = Duration::from_secs(180);

/// How often the threads of a process gave up their CPU by themselves so far.
fn wakes(pid: u32) -> u64 {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let of_thread = |thread: std::io::Result<std::fs::DirEntry>| {
        let status = std::fs::read_to_string(thread.ok()?.path().join("status")).ok()?;
        status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?.trim().parse::<u64>().ok()
    };
    threads.filter_map(of_thread).sum()
}

/// Wakes of a host in a second.
fn rate(host: &HostProcess) -> f64 {
    let (before, start) = (wakes(host.pid()), Instant::now());
    std::thread::sleep(SPAN);
    (wakes(host.pid()) - before) as f64 / start.elapsed().as_secs_f64()
}

fn await_rest(host: &HostProcess, what: &str) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let rate = rate(host);
        if rate <= AT_REST {
            return;
        }
        assert!(Instant::now() < deadline, "{what}: {rate:.0} wakes a second");
    }
}

#[test]
fn hosts_that_do_nothing_rest_and_serve_again_when_asked() {
    let bench = Bench::formatted();
    // The first one manages.
    let (mut first, mut second) = (bench.host("machine-a"), bench.host("machine-b"));
    for _ in 0..2 {
        await_rest(&first, "the manager's host");
        await_rest(&second, "another host");
        first.order(r#""Prepare""#);
        let prepared = first.reply();
        let lock: u32 = serde_json::from_str::<serde_json::Value>(&prepared).unwrap()["Prepared"]["lock"].as_u64().unwrap() as u32;
        // The lock goes to and fro, although each of the two was at rest before.
        for round in 0..4 {
            let host = if round % 2 == 0 { &mut second } else { &mut first };
            host.order(&format!(r#"{{"Count":{{"lock":{lock},"turns":3}}}}"#));
            let counted = host.reply();
            assert!(counted.contains(&format!(r#""total":{}"#, 3 * (round + 1))), "{counted}");
        }
    }
}
