// SPDX-License-Identifier: Apache-2.0

use super::super::{Access, Sysfs};
use super::*;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

const TIMEOUT_MS: u64 = 60_000;

/// Why a file on tmpfs cannot have huge pages here; None where it has to get them.
fn impossible() -> Option<String> {
    let version = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let numbers: Vec<u32> = version.split(['.', '-']).map_while(|part| part.trim().parse().ok()).take(2).collect();
    let denied = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default().contains("[deny]");
    match (page_of_the_system(), numbers.as_slice()) {
        (Some(PAGE_BYTES), &[major, minor]) if (major, minor) >= (6, 1) && !denied => None,
        (page, _) => Some(format!("kernel {}, huge pages of {page:?} bytes, denied: {denied}", version.trim())),
    }
}

#[test]
fn a_new_file_in_memory_has_huge_pages_but_for_its_end() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let len_bytes = 5 * PAGE_BYTES + 12 * 1024;
    let path = folder.path().join("pool");
    let (device, _) = Device::open_or_create(&path, len_bytes, &Sysfs::default()).unwrap();
    let mut file = File::open(&path).unwrap();
    let facts = file.metadata().unwrap();
    assert_eq!((facts.len(), facts.blocks() * 512), (len_bytes, len_bytes), "all of it is reserved");
    let mut content = Vec::new();
    file.read_to_end(&mut content).unwrap();
    assert!(content.iter().all(|&byte| byte == 0));
    match impossible() {
        Some(reason) => println!("skipped: {reason}"),
        None => assert_eq!(bytes_in_huge_pages(&device), Some(5 * PAGE_BYTES)),
    }
}

#[test]
fn pages_of_a_file_made_otherwise_are_told() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let [small, holes] = ["small", "holes"].map(|name| folder.path().join(name));
    std::fs::write(&small, vec![1; 2 * PAGE_BYTES as usize]).unwrap();
    File::create(&holes).unwrap().set_len(2 * PAGE_BYTES).unwrap();
    let told = |path: &Path| bytes_in_huge_pages(&Device::open(path, Access::Read, &Sysfs::default()).unwrap());
    let unasked = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default();
    match ["[never]", "[deny]", "[advise]"].iter().any(|state| unasked.contains(state)) {
        true => assert_eq!(told(&small), Some(0)),
        false => println!("skipped: the system gives such files huge pages unasked"),
    }
    assert_eq!((told(&holes), holes.metadata().unwrap().blocks()), (None, 0));
}

#[test]
fn a_file_that_gets_none_is_left_as_it_was() {
    let built_in = std::env::current_exe().unwrap();
    let [memory, disk] = [Path::new("/dev/shm"), built_in.parent().unwrap()].map(|folder| tempfile::tempfile_in(folder).unwrap());
    for file in [&memory, &disk] {
        file.set_len(4 * PAGE_BYTES).unwrap();
    }
    match is_tmpfs(&disk) {
        true => println!("skipped: {} is in memory", built_in.display()),
        false => assert_eq!(collapse(&disk, 0, 4 * PAGE_BYTES, TIMEOUT_MS), 0),
    }
    // Smaller than a huge page; out of time; all holes, which no caller asked to fill.
    for (len_bytes, timeout_ms) in [(PAGE_BYTES - 4096, TIMEOUT_MS), (4 * PAGE_BYTES, 0), (4 * PAGE_BYTES, TIMEOUT_MS)] {
        assert_eq!(collapse(&memory, 0, len_bytes, timeout_ms), 0);
        assert_eq!((memory.metadata().unwrap().len(), memory.metadata().unwrap().blocks()), (4 * PAGE_BYTES, 0));
    }
}
