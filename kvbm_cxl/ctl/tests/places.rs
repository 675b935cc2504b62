// SPDX-License-Identifier: Apache-2.0
//! Files: what a format makes and leaves, file systems that are full, names that garble a terminal, directories of other users.

mod common;

use common::{Bench, EXE, Ran, ran};
use std::os::unix::fs::{PermissionsExt, chown};
use std::process::Command;

fn is_root() -> bool {
    // SAFETY: geteuid has no requirements.
    unsafe { libc::geteuid() == 0 }
}

/// Runs a shell script with a small tmpfs of its own at `$W`, as root of a namespace; `None`, with the reason, where that cannot be.
fn in_small_tmpfs(size: &str, script: &str) -> Option<Ran> {
    let folder = tempfile::tempdir().unwrap();
    let all =
        format!("mount -t tmpfs -o size={size},mode=700 none $W && mkdir -m 700 $W/state && export CXL_STATE_DIR=$W/state && {script}");
    let mut command = Command::new("unshare");
    command.arg("-m");
    if !is_root() {
        command.arg("-r");
    }
    let found =
        ran(command.args(["sh", "-c", &all]).env("W", folder.path()).env("CTL", EXE).env("CXL_MACHINE_ID", "small").output().unwrap());
    let is_refused = found.err.contains("unshare") || found.err.contains("mount:");
    if is_refused {
        eprintln!("skipped: no file system of its own can be mounted here ({})", found.err.trim());
    }
    (!is_refused).then_some(found)
}

#[test]
fn a_format_that_is_refused_is_forgotten() {
    let bench = Bench::new();
    let failed = bench.run(&["format", "--size", "1M"]);
    assert_ne!(failed.code, 0);
    assert!(!bench.file().exists(), "{}", failed.err);
    assert_eq!(bench.run(&["format", "--size", "8M"]).code, 0);
}

#[test]
fn a_file_with_holes_gets_its_memory_or_is_refused() {
    let script = "truncate -s 32M $W/pool; $CTL --pool $W/pool format; echo rc $?
                  truncate -s 12M $W/pool; $CTL --pool $W/pool format && du -k $W/pool";
    let Some(found) = in_small_tmpfs("24M", script) else { return };
    assert!(found.out.contains("rc 3") && found.err.contains("it is a file with holes"), "{} {}", found.out, found.err);
    assert!(found.out.lines().any(|line| line.starts_with("12288")), "all of it has memory: {}", found.out);
}

#[test]
fn memory_of_a_machine_that_does_not_fit_is_an_error_that_says_what_to_do() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let pool = folder.path().join("pool");
    let script = format!(
        "$CTL --pool {0},size=16M format; dd if=/dev/zero of=$W/filler bs=4k 2>/dev/null
         $CTL --pool {0} host; echo rc $?",
        pool.display()
    );
    let Some(found) = in_small_tmpfs("1M", &script) else { return };
    let text = format!("{} {}", found.out, found.err);
    assert!(text.contains("has no room for it") && text.contains("--shm-size"), "{text}");
    assert!(!text.contains("rc 0"), "{text}");
}

#[test]
fn names_are_printed_so_that_they_cannot_garble_a_terminal() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let name = folder.path().join("kv\u{202e}txt\u{1b}[2J");
    let run = |args: &[&str]| {
        let state = folder.path().join("state");
        ran(Command::new(EXE).arg("--pool").arg(&name).args(args).env("CXL_STATE_DIR", state).output().unwrap())
    };
    for args in [&["info"][..], &["format", "--size", "8M"], &["format"], &["info"], &["hosts"], &["fsck"], &["--json", "info"]] {
        let found = run(args);
        let text = found.out + &found.err;
        assert!(!text.contains(['\u{202e}', '\u{1b}']), "{args:?}: {text:?}");
    }
    assert!(run(&["info"]).out.contains(r"\u{202e}"), "the name is there, as an escape");
}

/// The one that root was made to accept: a directory in a world-writable place that another user made first.
#[test]
fn a_state_directory_of_another_user_is_refused_for_root_too() {
    if !is_root() {
        eprintln!("skipped: only root can give a directory to another user");
        return;
    }
    let bench = Bench::formatted();
    let theirs = bench.directory.path().join("taken");
    std::fs::create_dir(&theirs).unwrap();
    std::fs::set_permissions(&theirs, PermissionsExt::from_mode(0o755)).unwrap();
    chown(&theirs, Some(65_534), Some(65_534)).unwrap();
    let fsck =
        ran(Command::new(EXE).args(["fsck", "--repair"]).env("CXL_POOL", bench.spec()).env("CXL_STATE_DIR", &theirs).output().unwrap());
    assert_ne!(fsck.code, 0);
    assert!(fsck.err.contains("user 65534 owns it"), "{}", fsck.err);
}

#[test]
fn a_format_under_hosts_is_refused_or_evicts_them_and_leaves_a_whole_pool() {
    let bench = Bench::formatted();
    let before = bench.json(&["info"]).1;
    let host = bench.host("machine-a");
    let refused = bench.run(&["format", "--force"]);
    assert_eq!(refused.code, 4, "{}", refused.err);
    assert!(refused.err.contains("hosts use this pool") && refused.err.contains("--evict-hosts"), "{}", refused.err);
    assert_eq!(bench.json(&["info"]).1["uuid"], before["uuid"]);
    let evicted = bench.run(&["format", "--evict-hosts"]);
    assert_eq!((evicted.code, evicted.err.as_str()), (0, ""));
    drop(host);
    assert_ne!(bench.json(&["info"]).1["uuid"], before["uuid"]);
    let fsck = bench.run(&["fsck"]);
    assert_eq!(fsck.code, 0, "{}", fsck.out);
    drop(bench.host("machine-a"));
}

#[test]
fn several_pools_lie_side_by_side_on_one_file() {
    let bench = Bench::new();
    let path = bench.spec();
    let at = |part: &str, args: &[&str]| bench.run(&[&["--pool", &format!("{path}{part}")], args].concat());
    std::fs::File::create(&path).unwrap().set_len(48 << 20).unwrap();
    let wrong = at(",offset=3M,size=16M", &["format"]);
    assert_eq!(wrong.code, 2, "{}", wrong.err);
    assert!(wrong.err.contains("the next that is one is offset=4194304"), "{}", wrong.err);
    for (part, code, reason) in
        [(",offset=48M", 3, "lies behind its end"), (",offset=32M,size=17M", 3, "were asked for at offset=33554432")]
    {
        let refused = at(part, &["format"]);
        assert_eq!(refused.code, code, "{part}: {}", refused.err);
        assert!(refused.err.contains(reason), "{part}: {}", refused.err);
    }
    for part in [",offset=16M,size=16M", ",offset=32M"] {
        let made = at(part, &["format"]);
        assert_eq!(made.code, 0, "{}", made.err);
        assert!(made.out.contains(&format!("formatted {path},offset=")), "{}", made.out);
    }
    // An option carries the size as well, and loses no offset.
    assert_eq!(at(",offset=32M", &["format", "--force", "--size", "16M"]).code, 0);
    let uuid = |part: &str| {
        let ran = at(part, &["--json", "info"]);
        let info: serde_json::Value = serde_json::from_str(&ran.out).unwrap_or_else(|error| panic!("{error}: {}", ran.err));
        (info["uuid"].as_str().unwrap().to_owned(), info["devices"][0]["offset_bytes"].as_u64().unwrap())
    };
    let (first, second) = (uuid(",offset=16M"), uuid(",offset=32M"));
    assert!(first.0 != second.0 && (first.1, second.1) == (16 << 20, 32 << 20));
    for force in [&["format"][..], &["format", "--force"]] {
        let refused = at("", force);
        assert_eq!(refused.code, 4, "{}", refused.err);
        assert!(refused.err.contains(&first.0) && refused.err.contains("overlap the pool"), "{}", refused.err);
    }
    for part in [",offset=16M", ",offset=32M"] {
        assert_eq!(at(part, &["fsck"]).code, 0, "{part}");
        let ran = at(part, &["--json", "doctor", "--look"]);
        let report: serde_json::Value = serde_json::from_str(&ran.out).unwrap();
        let pools = report["devices"][0]["pools"].as_array().unwrap();
        assert_eq!(pools.iter().map(|pool| pool["uuid"].as_str().unwrap()).collect::<Vec<_>>(), [&*first.0, &*second.0]);
    }
    let within = at(",offset=20M", &["doctor", "--look"]);
    assert!(within.code == 1 && within.out.contains("a format is refused there"), "{}", within.out);
    // Tests of the device keep out of the neighbours.
    let scratch = at(",offset=16M", &["doctor", "--scratch-offset", "16M", "--scratch-bytes", "8M", "--rounds", "8"]);
    assert!(scratch.code == 1 && scratch.out.contains(&second.0), "{}", scratch.out);

    let kept = at(",offset=16M", &["erase"]);
    assert!(kept.code == 4 && kept.err.contains("erase overwrites it only with --force"), "{}", kept.err);
    assert_eq!(at(",offset=16M", &["erase", "--force"]).code, 0);
    assert_eq!(at(",offset=16M", &["info"]).code, 3);
    assert_eq!(uuid(",offset=32M"), second);
    assert_eq!(at(",size=32M", &["format", "--force"]).code, 0);
}
