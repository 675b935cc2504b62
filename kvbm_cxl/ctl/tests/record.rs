// SPDX-License-Identifier: Apache-2.0
//! Records of several hosts, merged by `cxlctl record`, read by `cxl-plan`: the hit rate is that of the run.

use cxl_pool::cache::trace::{TraceConfig, TraceRecorder};
use cxl_pool::cache::{BlockKey, Namespace};
use serde_json::Value;
use std::collections::HashSet;
use std::path::Path;
use std::process::{Command, Output};

const NAMESPACE: Namespace = Namespace([7; 16]);
const CTL: &str = env!("CARGO_BIN_EXE_cxlctl");
const PLAN: &str = env!("CARGO_BIN_EXE_cxl-plan");

fn run(program: &str, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).env_remove("CXL_POOL").env_remove("CXL_COHERENCE").output().unwrap()
}

fn answered(program: &str, arguments: &[&str]) -> Value {
    let output = run(program, arguments);
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn refused(arguments: &[&str]) -> String {
    let output = run(CTL, arguments);
    assert!(!output.status.success(), "{arguments:?}");
    String::from_utf8(output.stderr).unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_recorded_run_has_the_hit_rate_of_the_run() {
    let directory = tempfile::tempdir().unwrap();
    let (records, merged) = (directory.path().join("records"), directory.path().join("merged.jsonl"));
    let config = TraceConfig { directory: records.clone(), salt: "a salt".into(), block_tokens: 16, most_bytes: u64::MAX };
    let recorders = [0, 1, 2].map(|_| TraceRecorder::start(&config).unwrap());
    // 9 contexts in turn, each with an end of its own, over 3 hosts whose cache has room for all.
    let (mut there, mut asked_tokens, mut found_tokens, mut published) = (HashSet::new(), 0, 0, 0);
    for number in 0..60u64 {
        let ids = (0..6).map(|index| number % 9 * 10 + index).chain([1000 + number]);
        let keys: Vec<BlockKey> = ids.map(|id| BlockKey(u128::from(id).to_be_bytes())).collect();
        let tokens = 7 * 16 - number % 3;
        let found = keys.iter().take_while(|key| there.contains(*key)).count();
        let new = &keys[found..];
        let recorder = &recorders[number as usize % 3];
        recorder.asked(NAMESPACE, &keys, tokens, (found as u64 * 16).min(tokens - 1));
        recorder.published(NAMESPACE, new);
        (asked_tokens, found_tokens) = (asked_tokens + tokens, found_tokens + (found as u64 * 16).min(tokens - 1));
        published += new.len() as u64;
        there.extend(keys);
        // Entries of several recorders are merged by their times, in microseconds.
        std::thread::sleep(std::time::Duration::from_micros(50));
    }
    drop(recorders);
    let found = found_tokens as f64 / asked_tokens as f64;
    assert!((0.5..0.9).contains(&found));
    assert_eq!(std::fs::read_dir(&records).unwrap().count(), 3, "a file for each host");
    let said = answered(CTL, &["record", text(&records), "--write", text(&merged), "--json"]);
    assert_eq!((said["files"].as_u64(), said["requests"].as_u64(), said["block_tokens"].as_u64()), (Some(3), Some(60), Some(16)));
    assert_eq!((said["dropped"].as_u64(), said["failed"].as_u64(), said["without_end"].as_u64()), (Some(0), Some(0), Some(0)));
    assert!((said["found"].as_f64().unwrap() - found).abs() < 1e-12);
    assert_eq!(said["published"].as_u64(), Some(published));
    // As the planner has it, when each request is done before the next one comes.
    let slow = ["--faster", "0.000001", "--set", "rack.hbm_gib=0", "--set", "rack.instances=3", "--pool-gib", "1000"];
    let planned = answered(PLAN, &[&["run", text(&merged), "--json", "--system", "pool", "--routing", "round-robin"], &slow[..]].concat());
    assert!((planned["rows"][0]["hit_rate"].as_f64().unwrap() - found).abs() < 1e-12, "{found}: {}", planned["rows"][0]);
    assert!(!std::fs::read_to_string(&merged).unwrap().contains("a salt"), "no salt");
}

#[test]
fn files_that_do_not_belong_together_are_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, content: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, content).unwrap();
        path.display().to_string()
    };
    let head = |salt: &str, tokens: u64| {
        format!("{{\"recorder\": 1, \"salt\": \"{salt}\", \"block_tokens\": {tokens}, \"host\": \"a\", \"process\": 1}}\n")
    };
    let asked = "{\"at_us\": 5000, \"input_length\": 20, \"found\": 0, \"hash_ids\": [7]}\n";
    let good = write("good.trace.jsonl", &(head("aa", 16) + asked));
    let merged = directory.path().join("merged").display().to_string();
    for (name, content, what) in [
        ("salt", head("bb", 16) + asked, "another salt"),
        ("tokens", head("aa", 32) + asked, "blocks of 32 tokens"),
        ("none", String::new(), "no first line"),
        ("other", asked.to_string(), "first line is not that of a recorder"),
        ("json", head("aa", 16) + "{\"at_us\": \n", "json:2: not JSON"),
        ("time", head("aa", 16) + "{\"input_length\": 20}\n", "time:2: no at_us"),
        ("what", head("aa", 16) + "{\"at_us\": 5000}\n", "what:2: neither a request nor a publish"),
    ] {
        let file = write(name, &content);
        let said = refused(&["record", &good, &file, "--write", &merged]);
        assert!(said.contains(what) && said.contains(&file) && said.lines().count() == 1, "{said}");
    }
    let empty = directory.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    assert!(refused(&["record", text(&empty), "--write", &merged]).contains("*.trace.jsonl"));
    // A process that was killed in the middle of a line: what is whole counts.
    let torn = write("torn", &(head("aa", 16) + &asked.replace("5000", "2000") + &asked[..20]));
    let said = answered(CTL, &["record", &good, &torn, "--write", &merged, "--json"]);
    assert_eq!((said["requests"].as_u64(), said["torn"].as_u64(), said["without_end"].as_u64()), (Some(2), Some(1), Some(2)));
    let lines: Vec<Value> = std::fs::read_to_string(&merged).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(
        lines.iter().map(|line| line["timestamp"].as_f64().unwrap()).collect::<Vec<_>>(),
        [0.0, 3.0],
        "by time, from the first one on"
    );
}
