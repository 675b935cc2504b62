// SPDX-License-Identifier: Apache-2.0

use super::*;
use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt, chown, symlink};

const STRANGER: u32 = 65_533;

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

#[test]
fn a_way_that_others_can_change_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let open = root.path().join("open");
    let state = open.join("a/state");
    std::fs::create_dir_all(&state).unwrap();
    check_directory(&state).unwrap();
    set_mode(&open, 0o777);
    assert!(check_directory(&state).unwrap_err().contains("chmod +t"));
    set_mode(&open, 0o1777);
    check_directory(&state).unwrap();

    let link = root.path().join("link");
    symlink(&open, &link).unwrap();
    check_directory(&link.join("a/state")).unwrap();
    assert!(check_directory(&link).unwrap_err().contains("symbolic link"));
    symlink(&link, root.path().join("loop")).unwrap();
    std::fs::remove_file(&link).unwrap();
    symlink(root.path().join("loop"), &link).unwrap();
    assert!(check_way(&link.join("x")).is_err(), "links in a circle end");
}

/// The parts that need another user's files; only root can make those.
#[test]
fn what_strangers_own_is_refused_for_root_too() {
    if user() != 0 {
        eprintln!("skipped: only root can give files to another user");
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let theirs = root.path().join("theirs");
    std::fs::create_dir_all(theirs.join("state")).unwrap();
    chown(&theirs, Some(STRANGER), None).unwrap();
    assert!(check_directory(&theirs).unwrap_err().contains("user 65533 owns it"));
    assert!(check_directory(&theirs.join("state")).unwrap_err().contains("owner 65533"), "its owner can rename its entries");

    let shared = root.path().join("shared");
    std::fs::create_dir(&shared).unwrap();
    set_mode(&shared, 0o1777);
    let path = shared.join("pool");
    let check = |access| check_pool_file(&path, &File::open(&path).unwrap(), access);
    std::fs::write(&path, "x").unwrap();
    check(Access::Write).unwrap();
    chown(&path, Some(STRANGER), Some(STRANGER)).unwrap();
    assert!(check(Access::Write).unwrap_err().contains("user 65533 put it there"));
    check(Access::Read).unwrap();
    chown(&path, Some(STRANGER), Some(0)).unwrap();
    set_mode(&path, 0o660);
    check(Access::Write).unwrap();
    set_mode(&path, 0o666);
    assert!(check(Access::Write).unwrap_err().contains("chmod o-w"));
    std::fs::rename(&path, shared.join("real")).unwrap();
    set_mode(&shared.join("real"), 0o660);
    symlink("real", &path).unwrap();
    check(Access::Write).unwrap();
    std::os::unix::fs::lchown(&path, Some(STRANGER), None).unwrap();
    assert!(check(Access::Write).unwrap_err().contains("another user made"));
    // Where only root can write, a file of the user who serves the pool is that user's own affair.
    set_mode(&shared, 0o755);
    check(Access::Write).unwrap();
}
