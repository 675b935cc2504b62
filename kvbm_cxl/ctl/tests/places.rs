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
         $CTL --pool {0} demo-host --blocks 4 --block 4096 </dev/null; echo rc $?",
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
