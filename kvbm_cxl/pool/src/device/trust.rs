// SPDX-License-Identifier: Apache-2.0
//! Who could put something else in the place of a file: owners, modes and the directories on the way to it.
//!
//! Trusted are root and the user of this process. In a user namespace the owners that have no number there, root of the host among them,
//! appear as one overflow user; directories of that user are accepted on the way to a file, never as the file's own owner.

use super::Access;
use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// Symbolic links followed on the way to a file, as the kernel does.
const MAX_LINKS: usize = 40;
/// Mode bits: other users may write; only owners may rename or remove the entries of a directory.
const OTHERS_WRITE: u32 = 0o002;
const STICKY: u32 = 0o1000;

/// Why something is not trusted, and what to do; `Err` of this module.
pub(crate) type Distrust = String;

pub(crate) fn user() -> u32 {
    // SAFETY: geteuid has no requirements and cannot fail.
    unsafe { libc::geteuid() }
}

fn is_trusted(owner: u32) -> bool {
    owner == 0 || owner == user()
}

/// Whether `owner` is how this user namespace shows owners that have no number in it. Outside of one, that number is a user like others.
fn is_unmapped(owner: u32) -> bool {
    let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let maps_all = text("/proc/self/uid_map").split_ascii_whitespace().collect::<Vec<_>>() == ["0", "0", "4294967295"];
    !maps_all && text("/proc/sys/kernel/overflowuid").trim().parse() == Ok(owner)
}

/// Refuses a path when a user other than root and this one could rename a component of it, and put something else there.
///
/// The last component is not looked at; what does not exist yet is not either.
pub(crate) fn check_way(path: &Path) -> Result<(), Distrust> {
    let Some(parent) = path.parent() else { return Ok(()) };
    let mut ahead: Vec<PathBuf> = parent.components().rev().map(|part| PathBuf::from(part.as_os_str())).collect();
    let mut at = PathBuf::new();
    let mut links = 0;
    while let Some(part) = ahead.pop() {
        match part.components().next() {
            Some(Component::ParentDir) => {
                at.pop();
                continue;
            }
            Some(Component::CurDir) | None => continue,
            Some(_) => {}
        }
        // An absolute part starts over at the root.
        let next = at.join(&part);
        let Ok(found) = std::fs::symlink_metadata(&next) else { return Ok(()) };
        let is_owner_trusted = is_trusted(found.uid()) || is_unmapped(found.uid());
        if found.is_symlink() {
            links += 1;
            let target = std::fs::read_link(&next).map_err(|error| format!("the link {} cannot be read: {error}", next.display()))?;
            if links > MAX_LINKS || !is_owner_trusted {
                return Err(format!("it is reached through the link {}, which another user made", next.display()));
            }
            ahead.extend(target.components().rev().map(|part| PathBuf::from(part.as_os_str())));
            continue;
        }
        if !is_owner_trusted || found.mode() & OTHERS_WRITE != 0 && found.mode() & STICKY == 0 {
            return Err(format!(
                "it lies in {}, where another user can put something else in its place (owner {}, mode {:o}): use a directory of root or \
                 of this user that others cannot write, or make that one sticky (chmod +t)",
                next.display(),
                found.uid(),
                found.mode() & 0o7777
            ));
        }
        at = next;
    }
    Ok(())
}

/// Refuses a directory that is not this user's alone to write, or a link to one.
pub(crate) fn check_directory(path: &Path) -> Result<(), Distrust> {
    let found = std::fs::symlink_metadata(path).map_err(|error| error.to_string())?;
    if found.is_symlink() {
        return Err("it is a symbolic link: name the directory itself".into());
    }
    if !found.is_dir() {
        return Err("it is not a directory".into());
    }
    check_own(&found)?;
    check_way(path)
}

/// Refuses a file or directory whose owner is not this user (root included), or that others may write.
pub(crate) fn check_own(found: &Metadata) -> Result<(), Distrust> {
    if found.uid() != user() {
        return Err(format!(
            "user {} owns it, this process runs as user {}: run as that user, or use one of this user's own",
            found.uid(),
            user()
        ));
    }
    match found.mode() & 0o022 {
        0 => Ok(()),
        _ => Err(format!("others may write it (mode {:o}): take that away (chmod go-w)", found.mode() & 0o7777)),
    }
}

/// Refuses a pool file that a stranger may have put there, or that all users may write. Looking at a pool is always allowed.
///
/// In a directory that all users may write (such as /dev/shm) a predictable name can be taken by any of them. There the file's owner has
/// to be root, this user, or a user who gave the file to a group that this process is in.
pub(super) fn check_pool_file(path: &Path, file: &File, access: Access) -> Result<(), Distrust> {
    let found = file.metadata().map_err(|error| error.to_string())?;
    if access == Access::Read || !found.is_file() {
        return Ok(());
    }
    if found.mode() & OTHERS_WRITE != 0 {
        return Err(format!(
            "every user may write it (mode {:o}), and so read and change all blocks in it: take that away (chmod o-w), and give it to a \
             group when several users share the pool",
            found.mode() & 0o7777
        ));
    }
    let directory = path.parent().and_then(|parent| std::fs::metadata(parent).ok());
    if directory.is_none_or(|directory| directory.mode() & OTHERS_WRITE == 0) {
        return Ok(());
    }
    let link_owner = std::fs::symlink_metadata(path).ok().filter(Metadata::is_symlink).map(|link| link.uid());
    if link_owner.is_some_and(|owner| !is_trusted(owner)) {
        return Err("this name is a symbolic link that another user made: name the file itself".into());
    }
    if is_trusted(found.uid()) || groups().contains(&found.gid()) && found.mode() & 0o020 != 0 {
        return Ok(());
    }
    Err(format!(
        "user {} put it there, in a directory that all users may write: that may be a pool of a stranger. Use a file of root, of this user \
         (chown), or of a group that this process is in",
        found.uid()
    ))
}

fn groups() -> Vec<u32> {
    // SAFETY: asks for the number alone.
    let count = unsafe { libc::getgroups(0, std::ptr::null_mut()) };
    let mut groups = vec![0; usize::try_from(count).unwrap_or(0)];
    // SAFETY: there is room for as many as the length says.
    let got = unsafe { libc::getgroups(groups.len() as libc::c_int, groups.as_mut_ptr()) };
    groups.truncate(usize::try_from(got).unwrap_or(0));
    // SAFETY: getegid has no requirements and cannot fail.
    groups.push(unsafe { libc::getegid() });
    groups
}

#[cfg(test)]
mod tests;
