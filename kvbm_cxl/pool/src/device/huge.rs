// SPDX-License-Identifier: Apache-2.0
//! Huge pages under a pool that is a file in memory, as a device has them: devdax is mapped in units of 2 MiB or more.
//!
//! With pages of 4 KiB a processor looks one up for every 64 lines of a block, in a virtual machine through two sets of tables. The system
//! gives a file on tmpfs huge pages of its own accord only where an administrator has said so (`shmem_enabled`). Asked for them with
//! `MADV_COLLAPSE` (Linux 6.1, madvise(2)) it gives them unless they are denied, and who maps the file at a multiple of the huge page has
//! them as well.

use super::map::{Range, is_in_memory, map_ahead};
use super::{Device, DeviceKind, is_tmpfs};
use crate::limits::DEVICE_HEADER_BYTES;
use std::fs::File;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

/// The huge page. Pools are mapped at multiples of the header's length, so it is the largest that every mapping can use.
const PAGE_BYTES: u64 = DEVICE_HEADER_BYTES;
/// The deadline is looked at after so many bytes.
const STEP_BYTES: u64 = 32 * PAGE_BYTES;

/// Puts a fully allocated range of a file on tmpfs into huge pages until the system refuses or `timeout_ms` have passed
/// (other memory that is in pieces may have to be put together first, and that takes long). Returns how many bytes from `offset` lie in
/// them; the rest stays as it was. Its content is the same throughout.
pub fn collapse(file: &File, offset: u64, len_bytes: u64, timeout_ms: u64) -> u64 {
    if len_bytes < PAGE_BYTES || !is_tmpfs(file) || page_of_the_system() != Some(PAGE_BYTES) {
        return 0;
    }
    let deadline = Instant::now() + Duration::from_millis(timeout_ms);
    let mut done = 0;
    while Instant::now() < deadline {
        let step = STEP_BYTES.min((len_bytes - done) / PAGE_BYTES * PAGE_BYTES);
        if step == 0 || !collapse_range(file, offset + done, step) {
            break;
        }
        done += step;
    }
    done
}

/// How much of a device that is a file in memory lies in huge pages, in bytes. None of another kind of device, of a file with holes, and
/// where the system does not tell. The file is mapped for that, which takes no more memory than it has.
pub fn bytes_in_huge_pages(device: &Device) -> Option<u64> {
    const TIMEOUT_MS: u64 = 10_000;
    let info = device.info();
    if info.kind != DeviceKind::File || !is_in_memory(info) {
        return None;
    }
    let range = Range::reserve(info.len_bytes, PAGE_BYTES).ok()?;
    let start = range.place_file(0, info.len_bytes, &device.file, device.in_file(0), libc::PROT_READ).ok()?;
    map_ahead(NonNull::new(start.cast())?, info.len_bytes, TIMEOUT_MS);
    let maps = std::fs::read_to_string("/proc/self/smaps").ok()?;
    let head = format!("{:x}-", start.addr());
    let ours = maps.lines().skip_while(|line| !line.starts_with(&head));
    let pages = ours.skip(1).find_map(|line| line.strip_prefix("ShmemPmdMapped:"))?;
    Some(pages.trim().trim_end_matches(" kB").parse::<u64>().ok()? << 10)
}

/// The huge page of this processor and kernel, in bytes; None where there is none.
fn page_of_the_system() -> Option<u64> {
    std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").ok()?.trim().parse().ok()
}

/// The same for a range of the file; false where the system did not do it for all of it.
fn collapse_range(file: &File, offset: u64, len_bytes: u64) -> bool {
    let Ok(range) = Range::reserve(len_bytes, PAGE_BYTES) else { return false };
    let Ok(address) = range.place_file(0, len_bytes, file, offset, libc::PROT_READ | libc::PROT_WRITE) else { return false };
    // SAFETY: exactly the pages mapped just now; what they hold stays as it is.
    unsafe { libc::madvise(address, len_bytes as usize, libc::MADV_COLLAPSE) == 0 }
}

#[cfg(test)]
mod tests {
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
}
