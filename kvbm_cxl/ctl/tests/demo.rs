// SPDX-License-Identifier: Apache-2.0
//! `cxlctl demo`: every byte is verified, and nothing is left behind.

mod common;

use common::{Bench, EXE, ran};
use std::process::Command;

/// A demo whose temporary files lie in the test's own directory.
fn demo(bench: &Bench, coherence: &str, args: &[&str]) -> common::Ran {
    let temporary = bench.directory.path().join("tmp");
    std::fs::create_dir_all(&temporary).unwrap();
    let mut command = Command::new(EXE);
    command.args(["--json", "demo"]).args(args).env_remove("CXL_POOL").env("TMPDIR", &temporary).env("CXL_COHERENCE", coherence);
    let ended = ran(command.output().unwrap());
    assert_eq!(std::fs::read_dir(temporary).unwrap().count(), 0, "left behind");
    ended
}

#[test]
fn every_byte_is_verified_and_nothing_is_left() {
    for coherence in ["native", "emulated:seed=5"] {
        let bench = Bench::new();
        let ended = demo(&bench, coherence, &[]);
        assert_eq!(ended.code, 0, "{coherence}: {}", ended.err);
        let told: serde_json::Value = serde_json::from_str(&ended.out).unwrap();
        assert_eq!((&told["blocks"], &told["bytes"]), (&128.into(), &(128 * 65536).into()));
        assert!(told["publish_gb_per_s"].as_f64().unwrap() > 0.0 && told["pull_gb_per_s"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn a_pool_of_the_users_own_is_used_and_left_in_order() {
    let bench = Bench::new();
    let spec = format!("{},size=64M", bench.spec());
    let ended = demo(&bench, "native", &["--pool", &spec]);
    assert_eq!(ended.code, 0, "{}", ended.err);
    let (code, report) = bench.json(&["fsck"]);
    assert_eq!((code, &report["findings"]), (0, &serde_json::json!([])), "{report:#}");
    // A pool is not formatted a second time.
    let again = demo(&bench, "native", &["--pool", &spec]);
    assert!(again.code == 4 && again.err.contains("cxlctl erase --force"), "{}", again.err);
}
