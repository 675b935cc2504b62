// SPDX-License-Identifier: Apache-2.0
//! `cxlctl doctor` as a process: what it says, that its tests can fail, and that it leaves pools alone.

use cxl_pool::device::{Access, Device, Sysfs};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn doctor(arguments: &[&str], coherence: Option<&str>) -> Output {
    let mut command = command(arguments);
    if let Some(text) = coherence {
        command.env("CXL_COHERENCE", text);
    }
    command.output().unwrap()
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cxlctl"));
    command.args(["--json", "doctor", "--rounds", "128", "--scratch-bytes", "8M"]).args(arguments);
    command.env_remove("CXL_POOL").env_remove("CXL_COHERENCE").env_remove("CXL_CPUS");
    command
}

fn report(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)))
}

fn findings(report: &Value) -> String {
    report["findings"].to_string()
}

/// Violations by test.
fn violations(report: &Value) -> Vec<(String, u64)> {
    let trials = report["devices"][0]["litmus"]["trials"].as_array().unwrap();
    trials.iter().map(|trial| (trial["test"].as_str().unwrap().to_string(), trial["violations"].as_u64().unwrap())).collect()
}

#[test]
fn ordinary_memory_passes_with_every_instruction() {
    let output = doctor(&[], None);
    let report = report(&output);
    assert!(output.status.success(), "{}", findings(&report));
    assert_ne!(report["verdict"], "not-usable");
    let device = &report["devices"][0];
    let trials = device["litmus"]["trials"].as_array().unwrap();
    assert!(trials.len() > 4, "one choice of instructions alone was tried");
    for trial in trials {
        assert!(trial["checks"].as_u64().unwrap() > 0 && trial["violations"] == 0, "{trial}");
    }
    for test in ["order", "payload", "buffering", "buffering-read-back"] {
        assert!(
            trials.iter().any(|trial| trial["test"] == test && trial["is_chosen"] == true),
            "{test} was not run with the choice in force"
        );
    }
    let costs = device["costs"].as_array().unwrap();
    assert!(costs.len() >= 4 && costs.iter().all(|cost| cost["ns"].as_f64().unwrap() > 0.0), "{costs:?}");
    assert!(report["cannot_tell"].to_string().contains("--peer-role a"), "it does not say how to test two hosts");
}

#[test]
fn emulated_hosts_pass() {
    let output = doctor(&["--timeout-ms", "30000"], Some("emulated:seed=1"));
    let report = report(&output);
    assert!(output.status.success(), "{}", findings(&report));
    assert!(violations(&report).len() == 4 && violations(&report).iter().all(|(_, count)| *count == 0), "{report}");
}

/// Makes a pool; its bytes.
fn pool(path: &Path) -> Vec<u8> {
    let spec = format!("{},size=32M", path.display());
    let made = Command::new(env!("CARGO_BIN_EXE_cxlctl")).args(["--pool", &spec, "format"]).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    std::fs::read(path).unwrap()
}

#[test]
fn an_existing_pool_keeps_every_byte() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = directory.path().join("pool");
    let before = pool(&path);
    let name = path.to_str().unwrap();
    let output = doctor(&["--pool", name, "--force"], None);
    let found = report(&output);
    assert!(output.status.success(), "{}", findings(&found));
    assert_ne!(found["devices"][0]["scratch"][0], name);
    assert!(found["devices"][0]["holds"].as_str().unwrap().starts_with("a pool"));
    for offset in ["0", "2M"] {
        let output = doctor(&["--pool", name, "--scratch-offset", offset], None);
        assert_eq!(output.status.code(), Some(1), "{offset}");
        assert!(findings(&report(&output)).contains("metadata"), "{offset}");
    }
    assert!(std::fs::read(&path).unwrap() == before, "the doctor wrote into a pool");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "a scratch file was left behind");
}

#[test]
fn two_roles_meet_on_a_stated_region_and_nothing_else_changes() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = directory.path().join("pool");
    let before = pool(&path);
    let side = |role: &'static str| {
        let shared = ["--scratch-offset", "16M", "--timeout-ms", "30000"];
        let mut command = command(&[&["--pool", path.to_str().unwrap(), "--peer-role", role], &shared[..]].concat());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    // Twice on the same bytes: what the first pair left there must not be taken for the second one's.
    for _ in 0..2 {
        let (a, b) = (side("a"), side("b"));
        for side in [a, b] {
            let output = side.wait_with_output().unwrap();
            let report = report(&output);
            assert!(output.status.success(), "{}", findings(&report));
            assert!(violations(&report).len() >= 4);
        }
    }
    let after = std::fs::read(&path).unwrap();
    let (from, to) = (16 << 20, 24 << 20);
    assert!(before[..from] == after[..from] && before[to..] == after[to..], "bytes outside of the region changed");
    assert!(before[from..to] != after[from..to]);
}

#[test]
fn a_role_alone_gives_up_at_its_deadline() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = directory.path().join("file");
    std::fs::write(&path, vec![0; 16 << 20]).unwrap();
    let output = doctor(&["--pool", path.to_str().unwrap(), "--peer-role", "a", "--scratch-offset", "4M", "--timeout-ms", "200"], None);
    assert_eq!(output.status.code(), Some(1));
    assert!(findings(&report(&output)).contains("no answer within 200 ms"));
}

#[test]
fn what_cannot_be_used_is_named_with_advice() {
    let directory = tempfile::tempdir().unwrap();
    let bus = directory.path().join("bus/dax/devices/dax7.0");
    std::fs::create_dir_all(&bus).unwrap();
    std::os::unix::fs::symlink("../../drivers/kmem", bus.join("driver")).unwrap();
    let output = doctor(&["--pool", "/dev/dax7.0", "--sysfs", directory.path().to_str().unwrap()], None);
    let found = report(&output);
    assert_eq!((output.status.code(), found["verdict"].as_str()), (Some(1), Some("not-usable")));
    assert!(findings(&found).contains("daxctl reconfigure-device"), "{}", findings(&found));
    let looked = doctor(&["--look"], None);
    assert!(looked.status.success() && report(&looked)["devices"][0]["scratch"].is_null());
    assert_eq!(doctor(&["--scratch-offset", "1G"], None).status.code(), Some(2));
    assert_eq!(doctor(&["--peer-role", "a"], None).status.code(), Some(2));
}

#[test]
fn the_node_of_a_device_and_where_threads_run_are_told() {
    let root = tempfile::tempdir().unwrap();
    let here = cxl_pool::cpus::CpuSet::of_current_thread().unwrap();
    let write = |name: &str, text: &str| {
        let path = root.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, format!("{text}\n")).unwrap();
    };
    // Character device 1:5, /dev/zero, as a devdax device near a node that has memory alone.
    for (name, text) in [("size", "67108864"), ("align", "2097152"), ("numa_node", "1")] {
        write(&format!("dev/char/1:5/{name}"), text);
    }
    for (node, cpus, distance) in [(0, here.to_string(), "10 20"), (1, String::new(), "20 10")] {
        write(&format!("devices/system/node/node{node}/cpulist"), &cpus);
        write(&format!("devices/system/node/node{node}/distance"), distance);
    }
    let looked = |cpus: Option<&str>| {
        let mut command = command(&["--look", "--pool", "/dev/zero", "--sysfs", root.path().to_str().unwrap()]);
        command.envs(cpus.map(|cpus| ("CXL_CPUS", cpus))).output().unwrap()
    };
    let told = report(&looked(Some("copy=device;upkeep=any")));
    let device = &told["devices"][0];
    assert_eq!((&device["numa_node"], &device["node_cpus"], &device["cpu_node"]), (&1.into(), &"".into(), &0.into()));
    assert_eq!(device["threads"], format!("copy={here};upkeep=any;workers=any"));
    assert_eq!(report(&looked(None))["devices"][0]["threads"], "copy=any;upkeep=any;workers=any");
    for (wrong, reason) in
        [("node:1", "has memory but no CPUs"), ("node:5", "NUMA node 5 not found"), ("65000", "CPUs 65000"), ("x", "names no CPUs")]
    {
        let refused = looked(Some(wrong));
        assert_eq!(refused.status.code(), Some(1), "{wrong}");
        assert!(findings(&report(&refused)).contains(reason), "{wrong}: {}", findings(&report(&refused)));
    }
}

#[test]
fn small_pages_under_a_file_in_memory_are_named() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let (given, made) = (directory.path().join("given"), directory.path().join("made"));
    std::fs::write(&given, vec![0; 16 << 20]).unwrap();
    let looked = |path: &Path| findings(&report(&doctor(&["--look", "--pool", path.to_str().unwrap()], None)));
    let unasked = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default();
    match ["[never]", "[deny]", "[advise]"].iter().any(|state| unasked.contains(state)) {
        true => assert!(looked(&given).contains("0 B of 16 MiB lie in huge pages"), "{}", looked(&given)),
        false => println!("skipped: the system gives such files huge pages unasked"),
    }
    let spec = format!("{},size=16M", made.display());
    let formatted = Command::new(env!("CARGO_BIN_EXE_cxlctl")).args(["--pool", &spec, "format"]).env_remove("CXL_POOL").output().unwrap();
    assert!(formatted.status.success(), "{}", String::from_utf8_lossy(&formatted.stderr));
    // Where the system gives none, it has to be named here as well.
    let has_them = cxl_pool::device::bytes_in_huge_pages(&Device::open(&made, Access::Read, &Sysfs::default()).unwrap());
    assert_eq!(looked(&made).contains("huge pages"), has_them == Some(0), "{has_them:?}: {}", looked(&made));
}
