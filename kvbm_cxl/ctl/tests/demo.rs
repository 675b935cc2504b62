// SPDX-License-Identifier: Apache-2.0
//! `cxlctl demo`: one round, many rounds, a signal, a killed host; and nothing left behind.

mod common;

use common::{Bench, EXE};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A small demo whose temporary files lie in the test's own directory.
fn demo(bench: &Bench, args: &[&str]) -> Command {
    let mut command = Command::new(EXE);
    let temporary = bench.directory.path().join("tmp");
    std::fs::create_dir_all(&temporary).unwrap();
    command.args(["demo", "--blocks", "6", "--block", "64K", "--turns", "20"]).args(args).env_remove("CXL_POOL").env("TMPDIR", temporary);
    command
}

fn leftovers(bench: &Bench, pid: u32) -> Vec<String> {
    let names = |directory: &str| {
        let entries = std::fs::read_dir(directory).unwrap().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect::<Vec<_>>()
    };
    let mut left = names(bench.directory.path().join("tmp").to_str().unwrap());
    left.extend(names("/dev/shm").into_iter().filter(|name| name.starts_with(&format!("cxlctl-demo-{pid}-"))));
    left
}

fn is_running(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with('Z'))
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(180);
    while !done() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Process ids of the two hosts, from the first lines of the output, and the reader behind them.
fn hosts_of(child: &mut Child) -> ([u32; 2], impl Iterator<Item = String> + use<>) {
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.next().unwrap().starts_with("pool "));
    let mut pid = || {
        let line = lines.next().unwrap();
        line.split_whitespace().nth(2).unwrap().parse().unwrap_or_else(|_| panic!("{line}"))
    };
    ([pid(), pid()], lines)
}

#[test]
fn one_round_is_verified_and_leaves_nothing() {
    for coherence in ["native", "emulated:seed=5"] {
        let bench = Bench::new();
        let mut child = demo(&bench, &["--once", "--json"]);
        child.env("CXL_COHERENCE", coherence);
        let child = child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let pid = child.id();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{coherence}: {}", String::from_utf8_lossy(&output.stderr));
        let round: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&round["blocks"], &round["bytes"]), (&6.into(), &(6 * 65536).into()));
        assert!(round["publish_gb_per_s"].as_f64().unwrap() > 0.0 && round["memcpy_gb_per_s"].as_f64().unwrap() > 0.0);
        assert_eq!(leftovers(&bench, pid), [""; 0], "{coherence}");
    }
}

#[test]
fn rounds_go_on_until_ctrl_c() {
    let bench = Bench::new();
    let mut child = demo(&bench, &[]).stdout(Stdio::piped()).spawn().unwrap();
    let (hosts, mut lines) = hosts_of(&mut child);
    assert!(lines.next().unwrap().starts_with("round 1:"));
    assert!(lines.next().unwrap().starts_with("round 2:"));
    // SAFETY: a plain system call on a process of this test that has not been waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGINT) }, 0);
    let rest: Vec<String> = lines.collect();
    assert!(rest.last().unwrap().contains("every byte verified"), "{rest:?}");
    assert!(child.wait().unwrap().success());
    assert!(!hosts.into_iter().any(is_running));
    assert_eq!(leftovers(&bench, child.id()), [""; 0]);
}

#[test]
fn a_killed_host_is_reported_and_the_other_one_ends() {
    let bench = Bench::new();
    let mut child = demo(&bench, &[]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (hosts, mut lines) = hosts_of(&mut child);
    assert!(lines.next().unwrap().starts_with("round 1:"));
    // SAFETY: as above; the demo has not waited for its host, because it is still running rounds.
    assert_eq!(unsafe { libc::kill(hosts[1] as i32, libc::SIGKILL) }, 0);
    drop(lines);
    let output = child.wait_with_output().unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(err.contains(&hosts[1].to_string()) && !err.contains("panicked"), "{err}");
    assert!(!hosts.into_iter().any(is_running));
}

#[test]
fn a_killed_demo_leaves_no_process_and_no_memory() {
    let bench = Bench::new();
    let mut child = demo(&bench, &[]).stdout(Stdio::piped()).spawn().unwrap();
    let (hosts, mut lines) = hosts_of(&mut child);
    assert!(lines.next().unwrap().starts_with("round 1:"));
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("the hosts end once their parent is gone", || !hosts.into_iter().any(is_running));
    let segments = leftovers(&bench, child.id()).into_iter().filter(|name| name.contains(&child.id().to_string()));
    assert_eq!(segments.count(), 0);
}

#[test]
fn a_pool_of_the_users_own_is_used_and_left_clean() {
    let bench = Bench::new();
    let spec = format!("{},size=64M", bench.spec());
    let ran = common::ran(demo(&bench, &["--once", "--pool", &spec]).output().unwrap());
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert!(bench.file().exists());
    let (code, report) = bench.json(&["fsck", "--notes"]);
    assert_eq!((code, &report["findings"]), (0, &serde_json::json!([])), "{report:#}");
    assert_eq!(bench.json(&["inspect", "objects"]).1, serde_json::json!([]));
    assert_eq!(bench.json(&["info"]).1["usage"]["kept_blocks"], 0);
    // It is not formatted a second time unless that is forced.
    let again = common::ran(demo(&bench, &["--once", "--pool", &spec]).output().unwrap());
    assert_eq!(again.code, 4, "{}", again.err);
    assert_eq!(common::ran(demo(&bench, &["--once", "--force", "--pool", &spec]).output().unwrap()).code, 0);
}
