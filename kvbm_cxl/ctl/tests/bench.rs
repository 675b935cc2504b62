// SPDX-License-Identifier: Apache-2.0
//! `cxl-bench` as a process, with few batches: each program ends well and gives the ratios that perf/README.md names.

use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

fn bench(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cxl-bench"));
    command.args(arguments).env_remove("CXL_POOL").env_remove("CXL_COHERENCE");
    command.output().unwrap()
}

fn json(what: &str) -> Value {
    let output = bench(&[what, "--json", "--batches", "8"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn figure(report: &Value, name: &str) -> f64 {
    let figures = report["figures"].as_array().unwrap();
    let found = figures.iter().find(|figure| figure["name"].as_str().unwrap().starts_with(name));
    found.unwrap_or_else(|| panic!("no figure {name} in {figures:?}"))["value"].as_f64().unwrap()
}

fn ratios(report: &Value) -> Vec<&str> {
    report["ratios"].as_array().unwrap().iter().map(|ratio| ratio["name"].as_str().unwrap()).collect()
}

#[test]
fn each_program_measures_its_ratios() {
    let programs: [(&str, &str, &[&str]); 6] = [
        ("line", "fetch", &["publish_over_nt_store", "publish_over_same_write", "fetch_over_bare", "fetch_many_over_bare"]),
        (
            "copy",
            "gather",
            &[
                "publish_64k_over_nt_copy",
                "pull_64k_over_best_safe_loop",
                "publish_1m_over_nt_copy",
                "pull_1m_over_best_safe_loop",
                "publish_4m_over_nt_copy",
                "pull_4m_over_best_safe_loop",
                "pull_behind_page_over_page",
                "gather_over_memcpy_per_piece",
                "gather_over_safe_copy_per_piece",
                "sparse_read_over_memcpy_per_piece",
                "sparse_read_over_safe_copy_per_piece",
            ],
        ),
        ("lock", "increments under the lock", &["sticky_over_mutex"]),
        (
            "publish",
            "publish, 1024 KiB, speed",
            &[
                "publish_64k_vs_bare",
                "publish_64k_vs_accesses",
                "publish_64k_vs_arrived",
                "publish_1m_vs_bare",
                "publish_1m_vs_accesses",
                "publish_1m_vs_arrived",
                "publish_4m_vs_bare",
                "publish_4m_vs_accesses",
                "publish_4m_vs_arrived",
                "publish_together_over_one_by_one",
                "publish_64k_together_vs_bare",
            ],
        ),
        (
            "pull",
            "pull, 1024 KiB, speed",
            &[
                "pull_64k_vs_bare", "pull_64k_vs_accesses", "pull_1m_vs_bare", "pull_1m_vs_accesses", "pull_4m_vs_bare",
                "pull_4m_vs_accesses",
            ],
        ),
        (
            "lookup",
            "lookup of a new key",
            &["lookup1_vs_fetch", "lookup1_known_vs_fetch", "lookup64_vs_fetch", "lookup64_known_vs_fetch", "lookup10000_vs_fetch"],
        ),
    ];
    for (what, one, names) in programs {
        let report = json(what);
        assert_eq!(ratios(&report), names, "{what}");
        assert!(figure(&report, one) > 0.0, "{what}");
    }
}

/// A program that is asked for calls and answers with this text, without any.
fn ucx_that_says(folder: &Path, text: &str) -> String {
    let program = folder.join("ucx");
    let script = format!("#!/bin/sh\necho \"ready by $1\"\nwhile read -r what rest && [ \"$what\" = calls ]; do echo '{text}'; done\n");
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    program.display().to_string()
}

#[test]
fn calls_are_measured_beside_those_of_ucx_and_its_errors_end_the_bench() {
    let folder = tempfile::tempdir().unwrap();
    let run = |text| bench(&["rpc", "--json", "--batches", "9", "--ucx", &ucx_that_says(folder.path(), text)]);
    let output = run("ns 4000000000 2000000000 2000000000 2000000000");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    for way in ["shm", "tcp"] {
        assert_eq!(figure(&report, &format!("round trip of an active message of UCX and its answer, {way}")), 2e9);
        assert_eq!(figure(&report, &format!("such calls per second, 128 under way, {way}")), 0.25);
        assert!(report["notes"].as_array().unwrap().iter().any(|note| note == &format!("Compared with UCX by {way}.")), "{report}");
    }
    let ratios = report["ratios"].as_array().unwrap();
    for name in ["rpc_rtt_vs_ucx", "rpc_rate_128_vs_ucx", "rpc_rtt_vs_ucx_tcp", "rpc_rate_128_vs_ucx_tcp"] {
        let ratio = ratios.iter().find(|ratio| ratio["name"] == name).unwrap_or_else(|| panic!("no {name} in {ratios:?}"));
        assert!(ratio["median"].as_f64().unwrap() > 100.0, "{ratio}");
    }
    let output = run("error a response is not that of its request");
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("a response is not that of its request"));
}

#[test]
fn ratios_are_the_last_line() {
    let output = bench(&["line", "--ratios", "--batches", "8"]);
    let text = String::from_utf8(output.stdout).unwrap();
    let ratios: Value = serde_json::from_str(text.lines().last().unwrap().strip_prefix("RATIOS ").unwrap()).unwrap();
    assert!(output.status.success() && ratios.as_object().unwrap().values().all(|ratio| ratio.as_f64().unwrap() > 0.0));
}

#[test]
fn emulated_hosts_are_refused() {
    for what in ["line", "copy", "publish", "rpc"] {
        let emulated = Command::new(env!("CARGO_BIN_EXE_cxl-bench")).arg(what).env("CXL_COHERENCE", "emulated").output().unwrap();
        assert_eq!(emulated.status.code(), Some(1), "{what}");
    }
    assert_eq!(bench(&["line", "--batches", "0"]).status.code(), Some(2));
}

#[test]
fn requests_are_replayed_by_hosts_and_compared_with_the_planner() {
    let directory = tempfile::tempdir().unwrap();
    // Contexts that come back, with an end of its own each time; the second trace is of twice as many.
    let line = |contexts: u64, number: u64| {
        let ids: Vec<u64> = (0..6).map(|index| number * number % contexts * 10 + index).chain([1000 + number]).collect();
        serde_json::json!({"timestamp": number * 1000, "input_length": 7 * 16, "hash_ids": ids}).to_string() + "\n"
    };
    for contexts in [7, 14] {
        let lines: String = (0..60).map(|number| line(contexts, number)).collect();
        std::fs::write(directory.path().join(format!("{contexts}.jsonl")), lines).unwrap();
    }
    let folder = directory.path().to_str().unwrap();
    let output = bench(&["trace", folder, "--json", "--hosts", "2", "--pool-percent", "40", "--eviction", "lru", "--own"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let results: Value = serde_json::from_slice(&output.stdout).unwrap();
    let results = results.as_array().unwrap();
    assert_eq!(results.len(), 2 * 3, "each trace in a pool, and in own caches by two routings");
    for result in results {
        let (planned, replayed) = (result["planned"].as_f64().unwrap(), result["replayed"].as_f64().unwrap());
        // Two hosts and few cells, of which some are kept free; the recorded traces are held to more (perf/TRACES.md).
        assert!((planned - replayed).abs() < 0.15, "{result}");
        let all = &result["all"];
        assert_eq!(all["found"], all["pulled"], "{result}");
        assert!(all["stored"].as_u64().unwrap() > 0 && all["lookups"].as_u64().unwrap() == 60);
    }
    assert!(results.iter().any(|result| result["all"]["evicted"].as_u64().unwrap() > 0 && result["replayed"].as_f64().unwrap() > 0.0));
    let again = bench(&["trace", folder, "--json", "--hosts", "2", "--pool-percent", "40", "--eviction", "lru", "--own"]);
    assert!(again.stdout == output.stdout, "a replay gives other counts the second time");
    assert_eq!(bench(&["trace"]).status.code(), Some(2), "without a trace there is nothing to replay");
}
