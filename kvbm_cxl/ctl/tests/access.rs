// SPDX-License-Identifier: Apache-2.0
//! FAULTS row 36: what cannot be opened, mapped or written is told in one clear line, with its exit code.

mod common;

use common::{Bench, EXE, Ran, ran};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// User id without rights, as systems reserve one.
const UNPRIVILEGED: u32 = 65534;

/// Runs the program as a user without privileges.
fn as_unprivileged(bench: &Bench, args: &[&str]) -> Ran {
    // SAFETY: geteuid has no requirements.
    let is_root = unsafe { libc::geteuid() } == 0;
    let copy = bench.directory.path().join("cxlctl");
    // By another process: a descriptor open for writing here would be inherited by whatever another test starts, and keep the file busy.
    assert!(Command::new("cp").arg(EXE).arg(&copy).status().unwrap().success());
    std::fs::set_permissions(&copy, PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::set_permissions(bench.directory.path(), PermissionsExt::from_mode(0o1777)).unwrap();
    let mut command = Command::new(copy);
    command
        .env("CXL_POOL", bench.spec())
        .env("CXL_MACHINE_ID", "unprivileged")
        .env("CXL_STATE_DIR", bench.directory.path().join("state-of-unprivileged"));
    if is_root {
        command.uid(UNPRIVILEGED).gid(UNPRIVILEGED);
    }
    ran(command.args(args).output().unwrap())
}

fn set_mode(bench: &Bench, mode: u32) {
    std::fs::set_permissions(bench.file(), PermissionsExt::from_mode(mode)).unwrap();
}

#[test]
fn a_missing_device_is_named() {
    let bench = Bench::new();
    for args in [&["info"][..], &["hosts"], &["fsck"], &["fsck", "--repair"], &["inspect", "seat"], &["format"]] {
        let ran = bench.run(args);
        assert_eq!(ran.code, 3, "{args:?}: {}", ran.err);
        assert!(ran.err.contains(&bench.spec()) && ran.err.contains("no such device"), "{}", ran.err);
    }
    assert!(!bench.file().exists(), "nothing is created without a size");
}

#[test]
fn a_directory_is_no_device() {
    let bench = Bench::new();
    std::fs::create_dir(bench.file()).unwrap();
    let ran = bench.run(&["info"]);
    assert_eq!(ran.code, 3);
    assert!(ran.err.contains("neither devdax nor a file"), "{}", ran.err);
}

#[test]
fn what_is_no_pool_is_refused_with_the_reason() {
    for (content, reason) in [(vec![0; 8 << 20], "empty"), (vec![9; 8 << 20], "foreign"), (vec![], "empty"), (b"short".to_vec(), "")] {
        let bench = Bench::new();
        std::fs::write(bench.file(), content).unwrap();
        let ran = bench.run(&["info"]);
        assert_eq!(ran.code, 3, "{}", ran.err);
        assert!(ran.err.contains(&bench.spec()) && ran.err.contains(reason), "{reason}: {}", ran.err);
    }
}

#[test]
fn a_truncated_or_damaged_pool_is_refused() {
    let bench = Bench::formatted();
    let whole = std::fs::read(bench.file()).unwrap();
    std::fs::write(bench.file(), &whole[..whole.len() / 2]).unwrap();
    let ran = bench.run(&["fsck"]);
    assert_eq!(ran.code, 3);
    assert!(ran.err.contains("truncated"), "{}", ran.err);
    let mut damaged = whole.clone();
    damaged[200] ^= 1;
    std::fs::write(bench.file(), &damaged).unwrap();
    let ran = bench.run(&["info"]);
    assert_eq!(ran.code, 3);
    assert!(ran.err.contains("damaged"), "{}", ran.err);
}

#[test]
fn one_of_two_devices_missing_is_named() {
    let bench = Bench::new();
    let (one, other) = (bench.directory.path().join("one"), bench.directory.path().join("two"));
    let both = format!("{},{}", one.display(), other.display());
    assert_eq!(bench.run(&["--pool", &format!("{both},size=16M"), "format"]).code, 0);
    assert_eq!(bench.run(&["--pool", &both, "fsck"]).code, 0);
    let swapped = format!("{},{}", other.display(), one.display());
    assert_eq!(bench.run(&["--pool", &swapped, "fsck"]).code, 0);
    let alone = bench.run(&["--pool", one.to_str().unwrap(), "info"]);
    assert_eq!(alone.code, 3);
    assert!(alone.err.contains("missing") && alone.err.contains("two"), "{}", alone.err);
}

#[test]
fn without_permission_nothing_opens() {
    let bench = Bench::formatted();
    set_mode(&bench, 0o000);
    let ran = as_unprivileged(&bench, &["info"]);
    assert_eq!(ran.code, 3);
    assert!(ran.err.contains("no permission"), "{}", ran.err);
}

#[test]
fn a_pool_that_may_only_be_read_can_be_looked_at_and_not_changed() {
    let bench = Bench::formatted();
    set_mode(&bench, 0o444);
    for args in [
        &["info"][..],
        &["hosts"],
        &["fsck"],
        &["inspect", "record", "all"],
        &["inspect", "blocks"],
        &["cache", "stat", "--hints"],
        &["cache", "ls"],
    ] {
        let ran = as_unprivileged(&bench, args);
        assert_eq!(ran.code, 0, "{args:?}: {}", ran.err);
    }
    for args in [
        &["fsck", "--repair"][..],
        &["format", "--force"],
        &["cache", "clear", "--all"],
        &["hosts", "declare-dead", "0", "--incarnation", "1", "--i-know-it-is-gone"],
    ] {
        let ran = as_unprivileged(&bench, args);
        assert_eq!(ran.code, 3, "{args:?}: {}", ran.err);
        assert!(ran.err.contains("read-only") || ran.err.contains("permission"), "{args:?}: {}", ran.err);
    }
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let bench = Bench::new();
    let ran = bench.run(&["format", "--size", "1M"]);
    assert_ne!(ran.code, 0);
    assert!(!ran.err.is_empty());
    let odd = Bench::new();
    let ran = odd.run(&["format", "--size", "1000001"]);
    assert!(matches!(ran.code, 2 | 3), "{}", ran.err);
    let huge = Bench::new();
    let ran = huge.run(&["format", "--size", "60T"]);
    assert!(matches!(ran.code, 2 | 3), "{}", ran.err);
    assert!(std::fs::metadata(huge.file()).map_or(0, |meta| meta.len()) == 0, "a failed format leaves no giant file");
}
